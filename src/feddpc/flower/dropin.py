"""Stand-ins for Flower's FedAvg: methods whose clients run plain local SGD, with client apps as they are."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, get_type_hints

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from torch import Tensor

from feddpc import methods
from feddpc.engine.serving import Served, serve, settle
from feddpc.errors import BadInputError
from feddpc.flower.base import NEVER, Ints, MethodStrategy
from feddpc.flower.plain import cohort_of, knows_clients, sends_plain_updates, streams
from feddpc.flower.screening import Bounds, alike, sift, too_few
from feddpc.flower.wire import Layout, RefusedError, only_record
from feddpc.methods.base import Cohort, Method, State
from feddpc.methods.feddpc import Stream
from feddpc.options import positive, whole
from feddpc.run import wary
from feddpc.run.config import Config

MANY = 1 << 31  #: a population nobody counts


class PlainStrategy(MethodStrategy):
    """A method in the place of Flower's ``FedAvg``; clients answer with weights, as they did before.

    Args of Flower's ``FedAvg`` come first and keep their names and order; further:
        server_lr: the server's rate over the clients', eta_g / eta_l; 1 applies the method's step as it is.
        weighting: ``uniform``, as in the papers, or ``samples``, by the count that replies carry, as in Flower.
        population: how many clients there are; for methods that remember every client.
        min_replies, max_norm, max_examples, folder: see ``docs/flower.md``.
        rule, rule_options: a robust rule in the place of the mean, see ``docs/attacks.md``.
        screen: ``{"norm": 5}`` turns away updates longer than five median norms of late.
        hyper: the method's hyper-parameters.
    """

    made_from: ClassVar[type[Method]]

    def __init__(
        self,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: Any = None,
        evaluate_metrics_aggr_fn: Any = None,
        *,
        server_lr: float = 1.0,
        weighting: Literal["uniform", "samples"] = "uniform",
        population: int | None = None,
        min_replies: int = 1,
        max_norm: float | None = None,
        max_examples: int = 10**9,
        folder: str | Path | None = None,
        rule: str = "mean",
        rule_options: Mapping[str, Any] | None = None,
        screen: Mapping[str, Any] | None = None,
        **hyper: Any,
    ) -> None:
        given = locals()
        flower = {name: given[name] for name in inspect.signature(FedAvg).parameters}
        if "form" in get_type_hints(self.made_from) and streams(self.made_from):
            hyper.setdefault("form", "streaming")
        method = methods.create(self.made_from.name, **hyper)
        bounds = Bounds(max_norm, max_examples)
        super().__init__(method, bounds=bounds, min_replies=min_replies, folder=folder, flower=flower)
        self.server_lr, self.weighting = positive("server_lr", server_lr), weighting
        self._population = None if population is None else whole("population", population, 1)
        self._wary = wary.complete(Config(rule=rule, rule_options=dict(rule_options or {}), screen=dict(screen or {})))
        self.defence = wary.defence_of(self._wary)
        self._clients: dict[int, int] = {}
        self._check()

    def _check(self) -> None:
        method = self.method
        if not sends_plain_updates(method):
            raise BadInputError(
                f"{method.name} with {method.hyper()} has a client half of its own: use feddpc.flower.strategy and "
                "client_app"
            )
        known = knows_clients(method)
        if known and self._population is None:
            raise BadInputError(f"{method.name} remembers every client: say how many there are, population=...")
        if self.weighting not in ("uniform", "samples"):
            raise BadInputError(f"weighting = {self.weighting!r}: must be 'uniform' or 'samples'")
        if self.weighting == "samples" and method.init_slot(torch.zeros(1)):
            raise BadInputError(
                f"{method.name} with weighting='samples' needs the sizes of clients that never came: use 'uniform'"
            )
        w, n = torch.ones(2), self._population or 2
        step = method.aggregate(w, method.init_server(w, n), {"delta": torch.eye(2)[:1]}, cohort_of(1, n, method, w))
        if not bool(step.update.isfinite().all()):
            raise BadInputError(
                f"{method.name} with {method.hyper()} needs every client's number of local steps, which a client app "
                "of Flower does not tell: use feddpc.flower.strategy and client_app"
            )

    def describe(self, rounds: int) -> Config:
        """Say what is known; the clients' own settings are not."""
        known = {"method": self.method.name, "hyper": self.method.hyper(), "weighting": self.weighting}
        rates = {"lr": 1.0, "server_lr": self.server_lr}  # updates are taken as they come
        clients = {"clients": self._population or 1, "cohort": 1}
        guards = {key: getattr(self._wary, key) for key in ("rule", "rule_options", "screen")}
        names = dict.fromkeys(("engine", "data", "model"), "flower")
        return Config.read({**known, **rates, **clients, **guards, **names, "rounds": rounds})

    @functools.cached_property
    def _buffer(self) -> Tensor:
        """Room for one update, used for all: fresh memory costs as much as the arithmetic."""
        return torch.empty_like(self.now.w)

    def population(self) -> int:
        """How many clients there are, or more than there will ever be."""
        return self._population or MANY

    def prepare(self, grid: Grid) -> None:
        """Remember which node was which client."""
        ids, table = self.now.clients.export()
        nodes = table["node"].tolist() if len(ids) else []
        self._clients = {int(n) % (1 << 64): int(c) for c, n in zip(ids.tolist(), nodes, strict=True)}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample nodes as Flower does and send them the model."""
        self._began = time.perf_counter()
        if self.progress is None:
            self.begin(arrays, server_round)
        if arrays is not self._arrays:  # somebody else changed the model
            self.now.w, self._arrays = self.layout.vector(arrays), arrays
        self._name(grid.get_node_ids())
        self._refuse_strangers(grid)
        self._sent = list(super().configure_train(self._offset + server_round, arrays, config, grid))
        return self._sent

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Form the updates, let the method's server rule move the model, and average the metrics."""
        t = self._offset + server_round
        sampled = [message.metadata.dst_node_id for message in self._sent]
        self._name(sampled)
        nodes = {node: self._clients[node] for node in sampled}
        one_by_one = getattr(self.method, "form", None) == "streaming" and self.defence is None
        # Flower hands over a list. A grid that brings replies one by one lets the server forget each of them at once.
        arriving = one_by_one and not isinstance(replies, list)
        stream = Stream(self.method, self.now.server["delta"]) if arriving else None  # type: ignore[arg-type]
        good, refused = sift(replies, self._sent, nodes, t, partial(self._read, stream))
        ids = np.array(list(good), dtype=np.int64)
        silent = set(nodes.values()) - set(good) - {r.client for r in refused}
        if len(good) < self.min_replies:
            refused += too_few(t, ids, {client: node for node, client in nodes.items()}.get, self.min_replies)
            self.keep(t, ids[:0], silent, refused)
            return None, None
        again = partial(self._gathered, t, {client: reply.examples for client, reply in good.items()})
        if stream is not None:
            served: Served | None = Served(
                torch.ones(len(ids), dtype=torch.bool), again(ids), stream.step(self.server_lr)
            )
        else:
            arrays = [reply.arrays for reply in good.values()]
            updates = Updates(self.now.w, self.layout, arrays, self._buffer if one_by_one else None)
            up: State = {"delta": updates if one_by_one else torch.stack(list(updates))}  # type: ignore[dict-item]
            served = serve(self.method, self.now, up, again(ids), again, self.defence, least=self.min_replies)
        named = {client: node for node, client in nodes.items()}
        ids, turned_away = self.chosen(t, ids, served, named)
        refused += turned_away
        if served is None:
            self.keep(t, ids, silent, refused)
            return None, None
        usable = alike([good[client].content for client in ids.tolist()])
        metrics = self.train_metrics_aggr_fn(usable, self.weighted_by_key) if usable else MetricRecord()
        notes = settle(self.now, ids, served.step)
        self.accept(t, ids, named)
        record = self.keep(t, ids, silent, refused, notes=notes)
        metrics.update({"replies": len(ids), **record.notes})
        return self.arrays(), metrics

    def _refuse_strangers(self, grid: Grid) -> None:
        """Say at once if nobody of those connected can be one of the clients that this run remembers."""
        here, n = {self._clients[node] for node in grid.get_node_ids()}, self._population
        if n is not None and here and min(here) >= n:
            raise BadInputError(
                f"this run knows {n} clients by the ids of their nodes, and all that are here have other ids: start "
                "nodes with keys of their own and the SuperLink with --database, so that ids stay, or begin a new run"
            )

    def _name(self, nodes: Iterable[int]) -> None:
        """Number nodes that are new; a checkpoint keeps the numbers."""
        new = sorted(set(nodes) - self._clients.keys())
        ids = np.arange(len(self._clients), len(self._clients) + len(new))
        self._clients |= dict(zip(new, ids.tolist(), strict=True))
        self.accept(NEVER, ids, dict(zip(ids.tolist(), new, strict=True)))

    def _read(self, stream: Stream | None, client: int, content: RecordDict) -> Reply:
        """Check a reply; with a stream, its update goes there and the arrays are forgotten."""
        if self._population is not None and client >= self._population:
            raise RefusedError(f"there are {self._population} clients already: begin again with a larger population")
        arrays = only_record(content, ArrayRecord)
        self.bounds.check("the update", self.layout.update(self.now.w, arrays, self._buffer))
        examples = self.bounds.examples(only_record(content, MetricRecord).get(self.weighted_by_key))
        if stream is None:
            return Reply(content, arrays, examples)
        stream.add(self._buffer, float(examples) if self.weighting == "samples" else 1.0)
        light = RecordDict({key: record for key, record in content.items() if isinstance(record, MetricRecord)})
        return Reply(light, ArrayRecord(), examples)

    def _gathered(self, t: int, examples: Mapping[int, int], ids: Ints) -> Cohort:
        counts = np.array([examples[client] for client in ids.tolist()], dtype=np.float64)
        weights = counts / counts.sum() if self.weighting == "samples" else np.full(len(ids), 1 / len(ids))
        return Cohort(
            round=t,
            clients=torch.from_numpy(ids),
            population=self._population or len(ids),
            weights=torch.from_numpy(weights),
            steps=torch.full((len(ids),), torch.nan, dtype=torch.float64),  # nobody tells
            client_lr=1.0,
            server_lr=self.server_lr,
            slots=self.now.slots.read(ids),
        )


@dataclass(frozen=True)
class Reply:
    """A reply that can be used."""

    content: RecordDict
    arrays: ArrayRecord
    examples: int


@dataclass(frozen=True)
class Updates:
    """The updates of a cohort, each made when it is asked for; with ``into``, in the place of the one before."""

    w: Tensor
    layout: Layout
    replies: list[ArrayRecord]
    into: Tensor | None = None

    def __iter__(self) -> Iterator[Tensor]:
        return (self.layout.update(self.w, reply, self.into) for reply in self.replies)


@functools.cache
def dropins() -> dict[str, type[PlainStrategy]]:
    """Return the strategies by class name, one for every registered method that an unchanged client app can serve.

    >>> sorted(dropins())
    ['ClusterFedVARP', 'FedAvg', 'FedDPC', 'FedExP', 'FedVARP', 'MIFA']
    """
    plain = [methods.get(name) for name in methods.names() if sends_plain_updates(methods.get(name)())]
    return {cls.__name__: _made(cls) for cls in plain}


def _made(cls: type[Method]) -> type[PlainStrategy]:
    own = [p for n, p in inspect.signature(PlainStrategy.__init__).parameters.items() if n not in ("self", "hyper")]
    kind = inspect.Parameter.KEYWORD_ONLY
    hyper = [inspect.Parameter(f.name, kind, default=f.default, annotation=f.type) for f in fields(cls)]
    doc = f"{cls.title} in the place of Flower's FedAvg.\n\n{inspect.cleandoc(PlainStrategy.__doc__ or '')}"
    about = {"made_from": cls, "__doc__": doc, "__module__": "feddpc.flower"}
    made = type(cls.__name__, (PlainStrategy,), about | {"__signature__": inspect.Signature([*own, *hyper])})
    return made
