"""A run of a federation at the server: the method, the model, what is remembered, and the folder that has it all."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping
from logging import WARNING
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Message
from flwr.common.logger import log
from flwr.serverapp.strategy import FedAvg
from torch import Tensor

from feddpc.checks import check_int
from feddpc.config import Config
from feddpc.errors import BadInputError
from feddpc.flower.client_registry import Ints
from feddpc.flower.layout import Layout
from feddpc.flower.messages import NEVER, cast_note, unpack
from feddpc.flower.quarantine import Quarantine
from feddpc.flower.received import VoidRounds
from feddpc.flower.run_log import INITIAL, MetricValues, RunLog, digest_arrays, digest_config
from feddpc.flower.screening import Bounds, Refusal, shorten
from feddpc.methods.base import Method, State
from feddpc.policies import Policies
from feddpc.round.client_table import ClientTable
from feddpc.round.round import RoundRecord
from feddpc.round.state import RunState
from feddpc.tasks.metrics import Metric


class FederatedRun(FedAvg):
    """The settings and the state of a Flower strategy with the server half of ``method``.

    Args:
        method: the method.
        bounds: what a reply may say.
        min_replies: number of usable replies that a round needs to count. With fewer the round is void: the model and
            the memories of clients stay, and the method's ``on_empty_round`` is called.
        max_void_rounds: number of void rounds in a row that ends a run.
        folder: where records and, after every round, a checkpoint go; a run that is there is continued.
        check_initial_arrays: whether that run must have begun with the weights that ``start`` is given. False is for
            apps that do not seed their model.
        quarantine: after how many refused replies in a row a node is not asked, and for how many rounds; None: never.
        flower: arguments of Flower's own ``FedAvg``: sampling, evaluation, names of records.
    """

    population: int  #: how many clients there are
    policies = Policies()
    reports_empty_rounds = True  #: whether a round without invited clients has metrics; in Flower's FedAvg it has none
    reports_training = False  #: whether records have what clients measured while they trained
    known_metrics: tuple[Metric, ...] = ()  #: what an evaluation measures; if unknown, the first evaluation tells
    prometheus: str | int | None = None  #: where the metrics endpoint listens, see `feddpc.flower.prometheus`
    best_round_on = "test"  #: the samples of the server that say which round is best: test or validation

    def __init__(
        self,
        method: Method,
        *,
        bounds: Bounds,
        min_replies: int,
        max_void_rounds: int,
        folder: str | Path | None,
        check_initial_arrays: bool = True,
        quarantine: Mapping[str, Any] | bool | None = None,
        **flower: Any,
    ) -> None:
        super().__init__(**flower)
        self.method, self.bounds = method, bounds
        self.min_replies = check_int("min_replies", min_replies, 1)
        self.max_void_rounds, self._void = max_void_rounds, VoidRounds(max_void_rounds)
        self.folder = Path(folder) if folder is not None else None
        self.check_initial_arrays = check_initial_arrays
        self.quarantine = Quarantine.make(quarantine)
        self.buffers: dict[str, Array] = {}  #: arrays of the model that are not trained
        self.state: RunState | None = None
        self._layout: Layout | None = None
        self.run_log = RunLog(self.folder, self.known_metrics, self.test_values)
        self.metric_values = MetricValues()
        self.offset = self.last_round = 0  #: rounds before this process, and the round with which the run ends
        self._arrays = ArrayRecord()
        self._cast_logged = False
        self.sent: list[Message] = []
        self._began, self._time = 0.0, ""
        self._train_config = digest_config(None)
        self.evaluates_itself = False  #: whether the server evaluates after every round, with a function of the user's
        self._tested: dict[int, dict[str, float]] = {}  # what this process measured on the server's test set

    # What subclasses say about the experiment.

    @abstractmethod
    def describe(self, rounds: int) -> Config:
        """Return the configuration that a run folder shows."""

    def initial_arrays(self) -> ArrayRecord:
        """Return the first model, if the strategy knows it."""
        raise BadInputError("this strategy does not know the model: give start() the arrays of the first one")

    def run_notes(self) -> dict[str, dict[str, Any]]:
        """Return what a run folder says once, by file name; ``privacy`` says what leaves a client."""
        return {"privacy": {"note": self.method.privacy, "disclosed": {}}}

    def make_layout(self, arrays: ArrayRecord) -> Layout:
        """Return how the first model's arrays map to its vector."""
        return Layout(arrays)

    def model_tag(self) -> str:
        """Return a short name for the model: a run is continued only with the same one."""
        return self.layout.tag

    def whole_model(self, w: Tensor) -> State:
        """Return all that the file of a model holds."""
        return unpack(self.layout.record(w, self.buffers))

    def test_values(self, server: Mapping[str, Any], clients: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what a record has as test metrics, of what server and clients measured with the user's functions."""
        return server

    # The model and the run.

    @property
    def records(self) -> list[RoundRecord]:
        """The rounds of this process."""
        return self.run_log.records

    @property
    def refusals(self) -> list[Refusal]:
        """Every reply that did not count, with its node and the reason."""
        return self.run_log.refusals

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """What an evaluation measures, the primary one first; empty while that is unknown."""
        return self.run_log.metrics

    @property
    def now(self) -> RunState:
        """The state of the run."""
        assert self.state is not None, "the strategy has not begun"
        return self.state

    @property
    def layout(self) -> Layout:
        """How the model's arrays map to its vector."""
        assert self._layout is not None, "the strategy has not begun"
        return self._layout

    def arrays(self) -> ArrayRecord:
        """Return the present model as Flower's arrays."""
        self._arrays = self.layout.record(self.now.w, self.buffers)
        return self._arrays

    def evaluated(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the model to evaluate, which for some methods is another than the one that is trained."""
        w = self.method.evaluated(self.now.w, self.now.server)
        return arrays if w is self.now.w else self.layout.record(w, self.buffers)

    def begin(self, arrays: ArrayRecord, num_rounds: int) -> None:
        """Set the first model, or take the state from ``folder`` if a run is there."""
        if self.policies.privacy is not None and self.folder is None and self.state is not None and self.state.round:
            raise BadInputError(
                f"this strategy has released {self.state.round} private models, and another start() would count its "
                "budget from zero: give it a folder=, which continues the count, or make a new strategy for new data"
            )
        self.last_round, self._cast_logged, self._tested = num_rounds, False, {}
        self._void.forget()
        self._layout = self.make_layout(arrays)
        self.reset(self.read_model(arrays))
        self._arrays = arrays
        about = self.fingerprint(arrays)
        if not self.check_initial_arrays:
            about[INITIAL] = self.run_log.fingerprint().get(INITIAL, about[INITIAL])
        self.run_log.open(self.describe(num_rounds), self.now, about, self.run_notes())
        if self.quarantine is not None:
            self.quarantine.restore(self.now.watched)
        self._count_lost_releases(num_rounds)

    def _count_lost_releases(self, num_rounds: int) -> None:
        """Let the budget count models that left the server in rounds that a crash has undone."""
        privacy, lost = self.policies.privacy, self.run_log.lost
        if privacy is None or not lost:
            return
        privacy = dataclasses.replace(privacy, lost=lost)
        self.policies = dataclasses.replace(self.policies, privacy=privacy)
        allowed = self.describe(num_rounds).privacy.get("epsilon")
        if allowed is not None and num_rounds > self.now.round and privacy.epsilon(num_rounds) > allowed:
            raise BadInputError(
                f"num_rounds = {num_rounds}: {lost} more were run, undone by a crash, and their models had left the "
                f"server, so that all together spend epsilon {privacy.epsilon(num_rounds):.4g}, more than "
                f"privacy.epsilon = {allowed:g}: end with num_rounds = {num_rounds - lost}"
            )

    def fingerprint(self, arrays: ArrayRecord) -> dict[str, str]:
        """Return what makes this experiment, beside its configuration: a run with other values is not continued."""
        types = sorted({array.dtype for array in arrays.values()})
        about = {"model": self.model_tag(), "types of arrays": ",".join(types), INITIAL: digest_arrays(arrays)}
        return about | {"train_config": self._train_config}

    def set_model(self, arrays: ArrayRecord) -> None:
        """Take a model from outside, if it is another one; the method's state stays."""
        if arrays is not self._arrays:
            self.now.w, self._arrays = self.read_model(arrays), arrays

    def quarantined(self, t: int) -> set[int]:
        """Return the nodes in quarantine in round ``t``."""
        return set() if self.quarantine is None else self.quarantine.excluded(t)

    def reset(self, w: Tensor) -> None:
        """Set the state before round 1, with the model ``w``. Per client: its node, and the last round that counted."""
        self.state = RunState.begin(self.method, w, self.population, optimizer=self.policies.optimizer)
        fresh = {"node": torch.zeros((), dtype=torch.int64), "accepted": torch.full((), NEVER)}
        self.state.clients = ClientTable(lambda: fresh, "the server's record of a client", self.population)
        self.run_log.state = self.state

    def read_model(self, arrays: ArrayRecord) -> Tensor:
        """Return a whole model, not an update, as a vector; refuse one that is not finite."""
        w = self.layout.vector(arrays)
        for name, (a, b) in self.layout.spans.items():
            if not bool(w[a:b].isfinite().all()):
                raise BadInputError(f"array {name!r} of the model is not finite: start from finite weights")
        return w

    def mark_accepted(self, t: int, ids: Ints, nodes: Mapping[int, int] | None = None) -> None:
        """Store that the replies of clients ``ids`` counted in round ``t``; clients learn it with the next message.

        ``nodes`` are those of the clients, where they are known.
        """
        of = np.zeros(len(ids), np.int64)
        if nodes is not None:  # torch stores signed numbers
            of = np.array([nodes[int(client)] for client in ids], np.uint64).view(np.int64)
        self.now.clients.write(ids, {"node": torch.from_numpy(of), "accepted": torch.full((len(ids),), t)})

    def log_cast(self, arrays: ArrayRecord, dtypes: Mapping[str, str]) -> None:
        """Log once per run that replies come in another floating type than the model's."""
        if not self._cast_logged and (note := cast_note(arrays, dtypes)) is not None:
            self._cast_logged = True
            cast = "%s. Every reply in another floating type is cast; this is logged once per run"
            log(WARNING, cast, shorten(note))  # the node states the type
