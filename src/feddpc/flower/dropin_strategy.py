"""The strategy of drop-in replacements for Flower's FedAvg: clients run plain local SGD in unchanged client apps."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, get_type_hints

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from torch import Tensor

from feddpc import methods
from feddpc.checks import check_int, check_positive
from feddpc.config import Config
from feddpc.errors import BadInputError
from feddpc.flower.client_registry import Ints
from feddpc.flower.dropin_settings import DropInPrivacy, check_buffers, check_method, read_screen, refuse_other_settings
from feddpc.flower.layout import (
    POLICIES,
    BufferMean,
    Layout,
    Numbers,
    find_buffers,
    read_buffers,
    restore_buffers,
    store_buffers,
)
from feddpc.flower.messages import RefusedError, ReplyTensors, TooManyClientsError, only_record
from feddpc.flower.method_traits import knows_clients, streams
from feddpc.flower.node_strategy import NodeStrategy
from feddpc.flower.prometheus import address_of
from feddpc.flower.quarantine import USUAL, usual_quarantine
from feddpc.flower.received import Received
from feddpc.flower.screening import Bounds, averageable, screen_replies
from feddpc.methods._feddpc_stream import Stream
from feddpc.methods.base import Cohort, Method
from feddpc.policies import Policies, resolve_policies
from feddpc.robust.defense import FEDERATION
from feddpc.round.server_step import StepOutcome

#: What clients call their training loss.
LOSSES = ("train_loss", "train-loss", "loss")
#: A population that is not counted.
MANY = 1 << 31


class DropInStrategy(NodeStrategy):
    """A method in the place of Flower's ``FedAvg``; clients answer with weights, as they did before.

    Args of Flower's ``FedAvg`` come first and keep their names and order; further:
        server_lr: the server's rate over the clients', eta_g / eta_l; 1, the default of most methods, applies the
            method's step unchanged. Adaptive methods have 0.01.
        weighting: ``uniform``, as in the papers, or ``samples``, by the count that replies carry, as in Flower.
        population: how many clients there are; for methods that remember every client.
        min_replies, max_void_rounds, max_norm, max_examples: see ``docs/flower.md``.
        folder, check_initial_arrays: where the run is stored, and whether the run that is stored there is continued
            only with the weights that it began with.
        rule, rule_options: a robust rule in the place of the mean, see ``docs/attacks.md``.
        screen: ``{"norm": 5}`` refuses updates longer than five times the recent median norm; None switches it off.
        quarantine: after how many refused replies in a row a node is not asked, and for how many rounds; None: never.
        privacy: client-level differential privacy, for FedDPC and FedAvg: ``clip`` with ``epsilon`` or ``noise``, and
            ``delta``, see ``docs/privacy.md``. Needs ``population``; nodes then take part by independent coins.
        buffers: what happens to arrays that are not trained, such as BatchNorm's statistics: ``average`` takes their
            mean over clients (of whole numbers the largest), ``local`` leaves them to the clients, ``refuse`` refuses
            models that have some.
        buffer_names: which float arrays are buffers, besides running means and variances: names or patterns, see
            :func:`feddpc.flower.buffer_names`.
        prometheus: where a metrics endpoint listens: a port on loopback, or HOST:PORT; by default there is none.
        hyper: the method's hyper-parameters.
    """

    made_from: ClassVar[type[Method]]
    reports_training = True

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
        server_lr: float | None = None,
        weighting: Literal["uniform", "samples"] = "uniform",
        population: int | None = None,
        min_replies: int = 1,
        max_void_rounds: int = 3,
        max_norm: float | None = None,
        max_examples: int | None = None,
        folder: str | Path | None = None,
        check_initial_arrays: bool = True,
        rule: str = "mean",
        rule_options: Mapping[str, Any] | None = None,
        screen: Mapping[str, Any] | bool | None = FEDERATION,
        quarantine: Mapping[str, int] | bool | None = USUAL,
        privacy: Mapping[str, Any] | None = None,
        buffers: Literal["average", "local", "refuse"] = "average",
        buffer_names: Iterable[str] = (),
        prometheus: str | int | None = None,
        **hyper: Any,
    ) -> None:
        given = locals()
        if "form" in get_type_hints(self.made_from) and streams(self.made_from):
            hyper.setdefault("form", "streaming")
        super().__init__(
            methods.create(self.made_from.name, **hyper),
            bounds=Bounds(max_norm, max_examples),
            min_replies=min_replies,
            max_void_rounds=max_void_rounds,
            folder=folder,
            check_initial_arrays=check_initial_arrays,
            quarantine=usual_quarantine(quarantine, private=bool(privacy)),
            **{name: given[name] for name in inspect.signature(FedAvg).parameters},
        )
        rate = (self.made_from.usual_server_lr or 1.0) if server_lr is None else server_lr
        self.server_lr, self.weighting = check_positive("server_lr", rate), weighting
        self.clients = None if population is None else check_int("population", population, 1)
        self.population = self.clients or MANY
        screen = FEDERATION if screen is True else screen
        self.screens_by_default = screen is FEDERATION
        bound = {} if self.screens_by_default and privacy else read_screen(screen)
        robust = Config(rule=rule, rule_options=dict(rule_options or {}), screen=bound)
        self.robust = resolve_policies(robust)
        self.policies = Policies.of(self.robust)
        self.buffer_policy, self.prometheus = buffers, prometheus
        address_of(prometheus)
        self.buffer_names = [buffer_names] if isinstance(buffer_names, str) else list(buffer_names)
        self._buffer_mean = BufferMean()
        self._stream: Stream | None = None
        self._weights: dict[int, float] = {}
        self._norms: dict[int, float] = {}
        check_method(self.method, self.weighting, self.clients, robust=self.robust.rule != "mean")
        if buffers not in POLICIES:
            raise BadInputError(f"buffers = {buffers!r}: must be one of {', '.join(map(repr, POLICIES))}")
        self.privacy = self._make_privacy(privacy) if privacy else None
        # Under privacy a round without clients has to add its noise, or it could be recognized.
        self.reports_empty_rounds = self.privacy is not None

    def _make_privacy(self, table: Mapping[str, Any]) -> DropInPrivacy:
        privacy = DropInPrivacy(table, clients=self.clients, fraction=self.fraction_train)
        config = dataclasses.replace(self.robust, weighting=self.weighting, participation="poisson")
        privacy.check(self.method, config, min_replies=self.min_replies, min_train_nodes=self.min_train_nodes)
        self.min_train_nodes = 0
        return privacy

    # Before the first round.

    def describe(self, rounds: int) -> Config:
        """Return what is known; the clients' own settings are not."""
        known = {"method": self.method.name, "hyper": self.method.hyper(), "weighting": self.weighting}
        rates = {"lr": 1.0, "server_lr": self.server_lr}  # updates are taken as they come
        clients = dict(zip(("clients", "cohort"), self.sizes, strict=True))
        if self.clients is not None and knows_clients(self.method):  # then their number changes the result
            clients["clients"] = self.clients
        robust = {key: getattr(self.robust, key) for key in ("rule", "rule_options", "screen")}
        names = dict.fromkeys(("engine", "data", "model"), "flower")
        private = {} if self.privacy is None else self.privacy.describe()
        return Config.read({**known, **rates, **clients, **robust, **names, **private, "rounds": rounds})

    def check_rounds(self, rounds: int) -> None:
        """Find the noise for a private run of so many rounds; raise if the budget does not cover them."""
        if self.privacy is not None:
            mechanism = self.privacy.mechanism(rounds, self.folder)
            self.policies = dataclasses.replace(self.policies, privacy=mechanism)

    def fingerprint(self, arrays: ArrayRecord) -> dict[str, str]:
        """Return what makes this experiment, with the settings that decide which replies count, and how."""
        buffers = self.layout.buffers
        settings = {
            "fraction_train": self.fraction_train,
            "max_norm": self.bounds.max_norm,
            "max_examples": self.bounds.max_examples,
            "buffers": self.buffer_policy if buffers else "average",
            "buffer_names": ", ".join(buffers) or "none",
        }
        if self.privacy is None:  # else it does not apply
            settings["min_train_nodes"] = self.min_train_nodes
        if self.weighting == "samples":
            settings["weighted_by_key"] = self.weighted_by_key
        about = {name: str(value) for name, value in settings.items()}
        refuse_other_settings(self.folder, self.run_log.fingerprint(), about)
        return super().fingerprint(arrays) | about

    def run_notes(self) -> dict[str, dict[str, Any]]:
        """Return what leaves a client, and what hides it."""
        notes = super().run_notes()
        if self.policies.privacy is not None:
            notes["privacy"]["note"] += f" {self.policies.privacy.describe()}"
        return notes

    def make_layout(self, arrays: ArrayRecord) -> Layout:
        """Return which arrays are parameters and how they map to a vector; the others are buffers."""
        self._sampled = False
        names = find_buffers(arrays, self.buffer_names)
        if names:
            screen = self.robust.screen and not self.screens_by_default
            judges = {"rule": self.robust.rule != "mean", "screen": screen, "max_norm": self.bounds.max_norm}
            check_buffers(names[0], self.buffer_policy, judges, private=self.privacy is not None)
        if len(names) == len(arrays):
            raise BadInputError("the model has no parameters, only buffers: give the arrays of a whole state dict")
        return Layout(arrays, names, optional=self.buffer_policy == "local")

    def read_model(self, arrays: ArrayRecord) -> Tensor:
        """Return a whole model as a vector, and take its buffers."""
        w = super().read_model(arrays)
        if self.buffer_policy == "average":
            try:
                read_buffers(self.layout, arrays)
            except RefusedError as error:
                raise BadInputError(
                    f"buffer of the model: {error}; give a finite model, or buffers = 'local'"
                ) from None
        self.buffers = {name: arrays[name] for name in self.layout.buffers}
        return w

    def begin(self, arrays: ArrayRecord, num_rounds: int) -> None:
        """Set the first model; a checkpoint also says which node is which client, and has the buffers."""
        super().begin(arrays, num_rounds)
        ids, table = self.now.clients.export()
        nodes = table["node"].tolist() if len(ids) else []
        self.client_of = {int(n) % (1 << 64): int(c) for c, n in zip(ids.tolist(), nodes, strict=True)}
        if self.buffer_policy == "average":
            self.buffers |= restore_buffers(self.layout, self.now.watched)

    # Every round.

    def receive(self, t: int, replies: Iterable[Message]) -> Received:
        """Screen the replies. If they arrive one by one, a streaming method takes each at once and forgets it."""
        sent = self.sent
        sampled = [message.metadata.dst_node_id for message in sent]
        self._number(sampled)
        clients = {node: self.client_of[node] for node in sampled}
        # Flower hands over a list; a grid may hand over an iterator.
        arriving = self.streams and self.policies.defense is None and not isinstance(replies, list)
        self._stream = Stream(self.method, self.now.server["delta"]) if arriving else None  # type: ignore[arg-type]
        self._buffer_mean, self._weights, self._norms = BufferMean(), {}, {}
        good, refused = screen_replies(replies, sent, clients, t, self._read)
        return Received(
            ids=np.array(list(good), dtype=np.int64),
            nodes={client: node for node, client in clients.items()},
            refused=refused,
            dropped=set(clients.values()) - set(good) - {r.client for r in refused},
            uploads=list(good.values()),
            expected=bool(self.fraction_train) and self.privacy is None,
        )

    def cohort(self, t: int, ids: Ints) -> Cohort:
        """Return what replies say about clients ``ids``; the numbers of their local steps are unknown."""
        counts = np.array([self._weights[client] for client in ids.tolist()], dtype=np.float64)
        weights = counts / counts.sum() if self.weighting == "samples" else np.full(len(ids), 1 / max(len(ids), 1))
        return Cohort(
            round=t,
            clients=torch.from_numpy(ids),
            population=self.clients or len(ids),
            weights=torch.from_numpy(weights),
            steps=torch.full((len(ids),), torch.nan, dtype=torch.float64),
            client_lr=1.0,
            server_lr=self.server_lr,
            slots=self.now.slots.read(ids),
            samples=torch.from_numpy(counts) if self.weighting == "samples" else None,
        )

    def rows(self, received: Received) -> Mapping[str, ReplyTensors]:
        """Return the updates; in a stream, each in the memory of the one before."""
        w, layout, into = self.now.w, self.layout, self._workspace if self.streams else None
        norms = torch.tensor([self._norms[client] for client in received.ids.tolist()], dtype=w.dtype)
        return {
            "delta": ReplyTensors(
                received.uploads, lambda reply: layout.update(w, only_record(reply, ArrayRecord), into), norms
            )
        }

    def step(self, t: int, received: Received) -> StepOutcome:
        """Return the server's step, for a stream from the updates that it has already taken."""
        if self._stream is None or not len(received.ids):
            return super().step(t, received)
        good = torch.ones(len(received.ids), dtype=torch.bool)
        step = self._stream.step(self.server_lr)
        return StepOutcome(good, self.cohort(t, received.ids), step, self.now.watched)

    def summarize(self, received: Received, ids: Ints, outcome: StepOutcome) -> tuple[float, Mapping[str, Any]]:
        """Average the buffers and the metrics of the clients that count."""
        replies = dict(zip(received.ids.tolist(), received.uploads, strict=True))
        if self._stream is None:
            for client, weight in zip(ids.tolist(), outcome.cohort.weights.tolist(), strict=True):
                self._buffer_mean.add(self._read_buffers(replies[client]), weight)
        self.buffers |= self._buffer_mean.arrays(self.layout)
        self.now.watched = store_buffers(self.now.watched, self.buffers, self._buffer_mean)
        self._stream, self._buffer_mean = None, BufferMean()  # free their memory until the next round
        usable = averageable([replies[client] for client in ids.tolist()], self.weighted_by_key)
        found = self.train_metrics_aggr_fn(usable, self.weighted_by_key) if usable else None
        metrics = dict(self.metric_values.convert(found))
        losses = (value for name in LOSSES if isinstance(value := metrics.get(name), int | float))
        return float(next(losses, float("nan"))), metrics

    @functools.cached_property
    def _workspace(self) -> Tensor:
        """Memory for one update, used for all: new memory costs as much time as the arithmetic."""
        return torch.empty_like(self.now.w)

    def _read_buffers(self, reply: RecordDict) -> dict[str, Numbers]:
        averaged = self.buffer_policy == "average"
        return read_buffers(self.layout, only_record(reply, ArrayRecord)) if averaged else {}

    def _read(self, client: int, content: RecordDict) -> RecordDict:
        """Check a reply; with a stream, the update and the buffers go there, and the arrays are forgotten."""
        if self.clients is not None and client >= self.clients and self.privacy is None:
            raise TooManyClientsError(f"there are {self.clients} clients already: begin again with a larger population")
        arrays, metrics = only_record(content, ArrayRecord), only_record(content, MetricRecord)
        norm = self.bounds.check("the update", self.layout.update(self.now.w, arrays, self._workspace))
        weight = 1.0
        if self.weighting == "samples" or self.bounds.max_examples is not None:
            stated = self.bounds.weight(self.weighted_by_key, metrics.get(self.weighted_by_key))
            weight = stated if self.weighting == "samples" else 1.0
        buffers = self._read_buffers(content)
        self.log_cast(arrays, self.layout.dtypes)
        self._weights[client], self._norms[client] = weight, norm
        if self._stream is None:
            return content
        self._stream.add(self._workspace, weight)
        self._buffer_mean.add(buffers, weight)
        return RecordDict({key: record for key, record in content.items() if isinstance(record, MetricRecord)})
