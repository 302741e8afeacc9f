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
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from flwr.serverapp.strategy.strategy_utils import sample_nodes
from torch import Tensor

from feddpc import methods
from feddpc.checks import check_int, check_positive
from feddpc.config import Config
from feddpc.errors import BadInputError
from feddpc.flower.base import NEVER, Ints, MethodStrategy
from feddpc.flower.buffers import POLICIES, BufferMean, Numbers, find_buffers, read_buffers
from feddpc.flower.plain import cohort_of, knows_clients, sends_plain_updates, streams
from feddpc.flower.screening import Bounds, Refusal, alike, sift, too_few
from feddpc.flower.wire import Layout, RefusedError, only_record
from feddpc.flower.wrappers import refuse_privacy_wrappers
from feddpc.methods.base import Cohort, Method, State
from feddpc.methods.feddpc import Stream
from feddpc.robust.config import complete_policies, defense_of
from feddpc.round.server_step import StepOutcome, apply_step, server_step

MANY = 1 << 31  #: a population nobody counts


class PlainStrategy(MethodStrategy):
    """A method in the place of Flower's ``FedAvg``; clients answer with weights, as they did before.

    Args of Flower's ``FedAvg`` come first and keep their names and order; further:
        server_lr: the server's rate over the clients', eta_g / eta_l; 1 applies the method's step as it is.
        weighting: ``uniform``, as in the papers, or ``samples``, by the count that replies carry, as in Flower.
        population: how many clients there are; for methods that remember every client.
        min_replies, max_void_rounds, max_norm, max_examples, folder: see ``docs/flower.md``.
        rule, rule_options: a robust rule in the place of the mean, see ``docs/attacks.md``.
        screen: ``{"norm": 5}`` turns away updates longer than five median norms of late.
        buffers: what happens to arrays that are not trained, such as BatchNorm's statistics: ``average`` takes their
            mean over clients (of whole numbers the largest), ``local`` leaves them to the clients, ``refuse`` refuses
            models that have some.
        buffer_names: which float arrays are buffers, besides running means and variances: names or patterns, see
            :func:`feddpc.flower.buffer_names`.
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
        max_void_rounds: int = 3,
        max_norm: float | None = None,
        max_examples: int = 10**9,
        folder: str | Path | None = None,
        rule: str = "mean",
        rule_options: Mapping[str, Any] | None = None,
        screen: Mapping[str, Any] | None = None,
        buffers: Literal["average", "local", "refuse"] = "average",
        buffer_names: Iterable[str] = (),
        **hyper: Any,
    ) -> None:
        given = locals()
        flower = {name: given[name] for name in inspect.signature(FedAvg).parameters}
        if "form" in get_type_hints(self.made_from) and streams(self.made_from):
            hyper.setdefault("form", "streaming")
        method = methods.create(self.made_from.name, **hyper)
        bounds = Bounds(max_norm, max_examples)
        super().__init__(
            method,
            bounds=bounds,
            min_replies=min_replies,
            max_void_rounds=max_void_rounds,
            folder=folder,
            flower=flower,
        )
        self.server_lr, self.weighting = check_positive("server_lr", server_lr), weighting
        self._population = None if population is None else check_int("population", population, 1)
        self._wary = complete_policies(
            Config(rule=rule, rule_options=dict(rule_options or {}), screen=dict(screen or {}))
        )
        self.defense = defense_of(self._wary)
        self.buffers = buffers
        self.buffer_names = [buffer_names] if isinstance(buffer_names, str) else list(buffer_names)
        self._clients: dict[int, int] = {}
        self._sampled = False  # whether a round has been sampled since the run began
        self._check()

    def _check(self) -> None:
        method = self.method
        if not sends_plain_updates(method):
            raise BadInputError(
                f"{method.name} with {method.hyper()} has a client half of its own: use feddpc.flower.strategy and "
                "client_app"
            )
        if self.buffers not in POLICIES:
            raise BadInputError(f"buffers = {self.buffers!r}: must be one of {', '.join(map(repr, POLICIES))}")
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

    def make_layout(self, arrays: ArrayRecord) -> Layout:
        """Return which arrays are parameters and how they lie in a vector; the others are buffers."""
        names = find_buffers(arrays, self.buffer_names)
        if names:
            self._check_buffers(names)
        if len(names) == len(arrays):
            raise BadInputError("the model has no parameters, only buffers: give the arrays of a whole state dict")
        return Layout(arrays, names, optional=self.buffers == "local")

    def _check_buffers(self, names: list[str]) -> None:
        """Refuse buffers where they are not wanted, and where their mean would get round a defense."""
        groups = "convert the model with feddpc.models.to_groupnorm"
        if self.buffers == "refuse":
            raise BadInputError(f"buffers = 'refuse', and array {names[0]!r} of the model is one: {groups}")
        bounds = {"rule": self._wary.rule != "mean", "screen": self._wary.screen, "max_norm": self.bounds.max_norm}
        if self.buffers == "average" and (given := [name for name, value in bounds.items() if value]):
            raise BadInputError(
                f"buffers = 'average' with {' and '.join(given)}: these judge updates and do not see buffers such as "
                f"{names[0]!r}, so that one client could set them at will. Use buffers = 'local', or {groups}"
            )

    def begin(self, arrays: ArrayRecord, rounds: int) -> None:
        """Set the first model, or take the state from ``folder`` if a run is there; buffers are a part of both."""
        self._sampled = False
        super().begin(arrays, rounds)
        if self.buffers == "average":
            stored = {n: self.now.watched.get(_key(n)) for n in self.layout.buffers}
            self._buffers |= {n: Array(values.numpy()) for n, values in stored.items() if values is not None}

    def read_model(self, arrays: ArrayRecord) -> Tensor:
        """Return the parameters of a model as a vector, and take its buffers over."""
        w = super().read_model(arrays)
        if self.buffers == "average":
            try:
                read_buffers(self.layout, arrays)
            except RefusedError as error:
                raise BadInputError(
                    f"buffer of the model: {error}; give a finite model, or buffers = 'local'"
                ) from None
        self._buffers = {name: arrays[name] for name in self.layout.buffers}
        return w

    def _keep_buffers(self, mean: BufferMean) -> None:
        """Take new buffers; a checkpoint keeps them with what else a server remembers."""
        self._buffers |= mean.arrays(self.layout)
        kept = {_key(n): torch.from_numpy(np.array(self._buffers[n].numpy())) for n in mean.values}
        self.now.watched = {**self.now.watched, **kept}

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
        refuse_privacy_wrappers(self)
        if self.progress is None:
            self.begin(arrays, server_round)
        elif arrays is not self._arrays:  # somebody else changed the model
            self.now.w, self._arrays = self.read_model(arrays), arrays
        if self.fraction_train:
            sample_nodes(grid, self.min_available_nodes, 0)  # wait for the nodes before a fraction is taken of them
        here = list(grid.get_node_ids())
        self._name(here)
        self._refuse_strangers(grid)
        self._sent = list(super().configure_train(self._offset + server_round, arrays, config, grid))
        if not self._sampled and self.fraction_train:
            self._refuse_small_sample(len(here))
        self._sampled = True
        return self._sent

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Form the updates, let the method's server rule move the model, and average the metrics."""
        t = self._offset + server_round
        sampled = [message.metadata.dst_node_id for message in self._sent]
        self._name(sampled)
        nodes = {node: self._clients[node] for node in sampled}
        one_by_one = getattr(self.method, "form", None) == "streaming" and self.defense is None
        # Flower hands over a list. A grid that brings replies one by one lets the server forget each of them at once.
        arriving = one_by_one and not isinstance(replies, list)
        stream = Stream(self.method, self.now.server["delta"]) if arriving else None  # type: ignore[arg-type]
        mean = BufferMean()
        good, refused = sift(replies, self._sent, nodes, t, partial(self._read, stream, mean))
        ids = np.array(list(good), dtype=np.int64)
        silent = set(nodes.values()) - set(good) - {r.client for r in refused}
        if len(good) < self.min_replies:
            refused += too_few(t, ids, {client: node for node, client in nodes.items()}.get, self.min_replies)
            return self._close_void_round(t, silent, refused, self.no_quorum() if self.fraction_train else None)
        again = partial(self._gathered, t, {client: reply.examples for client, reply in good.items()})
        if stream is not None:
            served: StepOutcome | None = StepOutcome(
                torch.ones(len(ids), dtype=torch.bool), again(ids), stream.step(self.server_lr)
            )
        else:
            arrays = [reply.arrays for reply in good.values()]
            updates = Updates(self.now.w, self.layout, arrays, self._buffer if one_by_one else None)
            up: State = {"delta": updates if one_by_one else torch.stack(list(updates))}  # type: ignore[dict-item]
            served = server_step(self.method, self.now, up, again(ids), again, self.defense, least=self.min_replies)
        named = {client: node for node, client in nodes.items()}
        ids, turned_away = self.chosen(t, ids, served, named)
        refused += turned_away
        if served is None:
            return self._close_void_round(t, silent, refused, self.no_quorum_within_bound())
        if stream is None:
            for client, weight in zip(ids.tolist(), served.cohort.weights.tolist(), strict=True):
                mean.add(self._read_buffers(good[client].arrays), weight)
        self._keep_buffers(mean)
        usable = alike([good[client].content for client in ids.tolist()])
        metrics = self.train_metrics_aggr_fn(usable, self.weighted_by_key) if usable else MetricRecord()
        notes = apply_step(self.now, ids, served.step)
        self.accept(t, ids, named)
        record = self.keep(t, ids, silent, refused, notes=notes)
        metrics.update({"replies": len(ids), **record.notes})
        return self.arrays(), metrics

    def _close_void_round(
        self, t: int, silent: set[int], refused: list[Refusal], void: str | None
    ) -> tuple[None, None]:
        """Close a round in which no reply counts."""
        self.now.server = self.method.on_empty_round(self.now.server)
        self.keep(t, np.zeros(0, np.int64), silent, refused, void=void)
        return None, None

    def _refuse_small_sample(self, nodes: int) -> None:
        """Say at once if fewer nodes are sampled than must answer."""
        sampled, least = len(self._sent), self.min_replies
        if sampled >= least:
            return
        raised = f"fraction_train to at least {least / nodes:.3g} or min_train_nodes to {least}"
        more = raised if least <= nodes else f"the number of nodes to {least}"
        raise BadInputError(
            f"min_replies = {least}, but {sampled} of {nodes} nodes are sampled per round (fraction_train = "
            f"{self.fraction_train}, min_train_nodes = {self.min_train_nodes}), so no round could count: lower "
            f"min_replies to at most {sampled}, or raise {more}"
        )

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

    def _read_buffers(self, arrays: ArrayRecord) -> dict[str, Numbers]:
        return read_buffers(self.layout, arrays) if self.buffers == "average" else {}

    def _read(self, stream: Stream | None, mean: BufferMean, client: int, content: RecordDict) -> Reply:
        """Check a reply; with a stream, its update and its buffers go there and the arrays are forgotten."""
        if self._population is not None and client >= self._population:
            raise RefusedError(f"there are {self._population} clients already: begin again with a larger population")
        arrays = only_record(content, ArrayRecord)
        self.bounds.check("the update", self.layout.update(self.now.w, arrays, self._buffer))
        examples = self.bounds.examples(only_record(content, MetricRecord).get(self.weighted_by_key))
        buffers = self._read_buffers(arrays)
        self.log_cast(arrays, self.layout.dtypes)
        if stream is None:
            return Reply(content, arrays, examples)
        weight = float(examples) if self.weighting == "samples" else 1.0
        stream.add(self._buffer, weight)
        mean.add(buffers, weight)
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


def _key(name: str) -> str:
    """Return under what name a checkpoint keeps a buffer."""
    return f"buffers/{name}"


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
