"""The strategy for clients that run ``feddpc.flower.client_app``: any method, with its client half at the clients."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from feddpc.build import make_task
from feddpc.config import Config
from feddpc.data import Dataset
from feddpc.flower.assets import ServerAssets
from feddpc.flower.client_app_setup import check_quorum, check_rounds, learn_by_asking
from feddpc.flower.client_registry import ClientRegistry, Ints, NodeClient, Record
from feddpc.flower.messages import (
    ExperimentSpec,
    RefusedError,
    ReplyTensors,
    arrays_of,
    model_tag,
    only_record,
    pack,
    read_arrays,
    tensor,
)
from feddpc.flower.method_strategy import MethodStrategy
from feddpc.flower.method_traits import upload_template
from feddpc.flower.received import Received
from feddpc.flower.screening import Refusal, average_evaluations, check_number, read_evaluation
from feddpc.flower.simulated_faults import replace_uploads, tamper
from feddpc.methods.base import Cohort, State, overrides
from feddpc.methods.federated_data import FederatedData
from feddpc.policies import Policies
from feddpc.population import Population, make_sampler
from feddpc.resolve import default_batch_size
from feddpc.rng import generator
from feddpc.round.probes import ask_cohort, survey
from feddpc.round.server_step import StepOutcome
from feddpc.runs.record import COUNTED, is_run, load_config, read_json
from feddpc.tasks.metrics import named
from feddpc.tasks.network import NetworkTask
from feddpc.validation import HeldOutEvaluator, held_out_evaluator


class ClientAppStrategy(MethodStrategy):
    """Enrollment, preparation and rounds of any method; every reply is screened on its own.

    Args:
        assets: what the server has: method, configuration, model, test set, reserve.
        wait: seconds to wait for clients before round 1.
        secret: the seed of what clients must not predict, with differential privacy.
        more: arguments of :class:`MethodStrategy`.
    """

    sees_uploads = True  #: whether the server sees what single clients upload

    def __init__(self, assets: ServerAssets, *, wait: float, secret: int | None, **more: Any) -> None:
        super().__init__(assets.method, **more)
        self.assets, self.config, self.wait, self.secret = assets, assets.config, wait, secret
        self.population, self.run_log.metrics = self.config.clients, assets.metrics
        self.best_round_on = "test" if assets.validation is None else "validation"
        self.registry = ClientRegistry(self.config.clients)
        self.nodes = NodeClient(self.registry, self.bounds, self.spec())
        self.samples = 0  #: of all clients and the server together, known after enrollment
        self.learned: State = {}
        self.policies = Policies.of(self.config)
        if self.policies.privacy is not None and secret is not None:
            privacy = dataclasses.replace(self.policies.privacy, reproducible=False)
            self.policies = dataclasses.replace(self.policies, privacy=privacy)
        self._invited: Ints = np.zeros(0, np.int64)
        self._templates: State = {}  # what one client uploads
        self._clients: Population | None = None
        check_quorum(self.config, self.min_replies, self.quorum(self.config.cohort))

    def quorum(self, invited: int) -> int:
        """Return how many of the invited clients must answer for a round to count."""
        return self.min_replies

    # Before the first round.

    def describe(self, rounds: int) -> Config:
        """Return the complete configuration."""
        hyper = self.method.hyper()
        return dataclasses.replace(self.config, method=self.method.name, hyper=hyper, rounds=rounds, engine="flower")

    def initial_arrays(self) -> ArrayRecord:
        """Return the first model, by parameter, in the order of its vector."""
        flat = self.assets.flat
        return pack(flat.parameters(flat.vector()))

    def run_notes(self) -> dict[str, dict[str, Any]]:
        """Return what leaves a client and what hides it, and how many samples there were when the run began."""
        notes = super().run_notes() | {COUNTED: {"samples": self.samples}}
        if self.policies.privacy is not None:
            notes["privacy"]["note"] += f" {self.policies.privacy.describe()}"
        return notes

    def enroll(self, grid: Grid, timeout: float) -> None:
        """Enroll clients; what follows from their numbers of samples is decided once and kept by a resumed run."""
        self.nodes.timeout = timeout
        self.nodes.enroll(grid, self.wait, self.min_available_nodes)
        resumed = self.folder if self.folder is not None and is_run(self.folder) else None
        counted = self.assets.samples or int(self.registry.sample_counts().sum()) + self.assets.reserved
        self.samples = counted if resumed is None else int(read_json(resumed / f"{COUNTED}.json")["samples"])
        if self.config.batch_size is None:
            usual = default_batch_size(self.samples, self.config.clients)
            size = usual if resumed is None else load_config(resumed).batch_size
            self.config = dataclasses.replace(self.config, batch_size=size)
            self.nodes.spec = self.spec()

    def whole_model(self, w: Tensor) -> State:
        """Return the state dict of the network, frozen parameters included."""
        return self.assets.flat.state_dict(w)

    def check_rounds(self, rounds: int) -> None:
        """Raise if the privacy budget or the schedule was made for another number of rounds."""
        check_rounds(self.config, rounds)

    def prepare(self, grid: Grid) -> None:
        """Let the method learn what it needs before round 1, and send clients their one-time payload."""
        if overrides(self.method, "learn"):
            self.learned = self.learn(grid)
        self.send_payloads(grid)
        if self.now.round == 0:
            if overrides(self.method, "initial") and self.task is not None:
                self.reset(self.method.initial(self.task, self.now.w, self._server_data()))
            if self.method.surveys:
                ask = self.nodes.prober(grid, self.method, self.now.w, "survey", 0)
                survey(self.method, self.now, self.clients, ask, lambda ids, _: self.mark_accepted(0, ids))
        self.run_log.pending += self.nodes.refused

    def learn(self, grid: Grid) -> State:
        """Return what the method learns before round 1; a run that is continued has it in its folder."""
        ask, sizes = partial(self.nodes.question, grid), self.registry.sample_counts()
        return learn_by_asking(self.method, ask, self._server_data(), sizes, self.folder)

    def send_payloads(self, grid: Grid) -> None:
        """Send every client that does not have it yet what it needs before its first round."""
        new = [client for node, client in self.registry.nodes.items() if node not in self.registry.ready]
        if not new:
            return
        shares = self.method.extend_data(self._server_data(), self.learned) if self.method.reserve else None
        self.nodes.send_payloads(grid, {c: self.assets.payload(c, shares, self.learned) for c in new})

    # Every round.

    def invite(self, t: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> list[Message]:
        """Invite the clients of the round, send the method's probe first, and then model and broadcast."""
        self.nodes.refused = []
        connected = set(grid.get_node_ids())
        self.nodes.enroll(grid, 0.0, 0)
        self.send_payloads(grid)
        drawn = self.clients.draw(t).answered
        ids = self.registry.connected_clients(drawn, connected & self.registry.ready)
        out = self._left_out(t, ids)
        self._invited = np.array([c for c in drawn.tolist() if c not in out], dtype=np.int64)
        return self._train_messages(grid, t, np.array([c for c in ids.tolist() if c not in out], dtype=np.int64))

    def _left_out(self, t: int, ids: Ints) -> set[int]:
        """Return the clients in quarantine that are not asked in round ``t``; ``ids`` are those that could be."""
        if self.quarantine is None:
            return set()
        node_of = self.registry.node_of()
        chosen = self.quarantine.choose([node_of[c] for c in ids.tolist()], t, self.quorum(len(ids)))
        return {self.registry.nodes[node] for node in self.quarantined(t) - set(chosen) if node in self.registry.nodes}

    def receive(self, t: int, replies: Iterable[Message]) -> Received:
        """Screen the replies, each on its own; simulated faults change some of them first."""
        replies = list(replies)
        faults = self._tamper(t, replies)
        good = self.nodes.screen(replies, self.sent, t, self._read)
        received = self.received(t, list(good), self.nodes.refused)
        # Under privacy, noise hides whether replies came, so the run goes on without them.
        received.expected &= self.policies.privacy is None
        received.uploads, received.faults = list(good.values()), faults
        return received

    def received(self, t: int, ids: list[int], refused: list[Refusal]) -> Received:
        """Return which of the invited clients answered."""
        silent = set(self._invited.tolist()) - set(ids) - {r.client for r in refused}
        return Received(
            ids=np.array(ids, dtype=np.int64),
            nodes=self.registry.node_of(),
            refused=refused,
            dropped=silent | set(self.clients.draw(t).dropped.tolist()),
            uploads=[],
            expected=len(self._invited) > 0,
        )

    def cohort(self, t: int, ids: Ints) -> Cohort:
        """Return what the server knows about clients ``ids`` in round ``t``."""
        assert self.config.batch_size is not None
        steps = -(-self.clients.sizes[ids] // self.config.batch_size) * self.config.epochs
        return self.clients.cohort(self.method, t, ids, steps, self.now.slots.read(ids), self.now.w.device)[0]

    def rows(self, received: Received) -> Mapping[str, ReplyTensors]:
        """Return the tensors that clients uploaded."""
        return {
            key: ReplyTensors(received.uploads, partial(_read_tensor, key, like))
            for key, like in self._templates.items()
        }

    def summarize(self, received: Received, ids: Ints, outcome: StepOutcome) -> tuple[float, Mapping[str, Any]]:
        """Return the mean training loss of the clients that count; NaN when none of them trained."""
        losses = [only_record(content, MetricRecord)["loss"] for content in received.uploads]
        counted = torch.tensor(losses, dtype=self.now.w.dtype)[outcome.kept]
        loss = float(counted[outcome.cohort.steps > 0].mean())
        return loss, {"train-loss": loss}

    def evaluate(self, t: int, w: Tensor) -> dict[str, float | None]:
        """Return the metrics on the server's test and validation samples; None for those that were not measured."""
        task, assets, due = self.task, self.assets, self._evaluates_in(t)
        tested = task.evaluate(w) if task is not None and assets.test is not None and due else {}
        metrics = named("test", self.metrics, tested)
        if self._validate is None:
            return metrics
        return metrics | named("validation", self.metrics, self._validate(w) if due else {})

    def _evaluates_in(self, t: int) -> bool:
        return t % self.config.evaluate_every == 0 or t == self.last_round

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask some of the connected clients to evaluate the model on their own test samples, when that is due."""
        t, share, self.sent = self.offset + server_round, self.fraction_evaluate, []
        if share and self._evaluates_in(t):
            connected = sorted(set(grid.get_node_ids()) & self.registry.ready & self.registry.nodes.keys())
            order = generator(self.config.seed, "who evaluates", t).permutation(connected).tolist()
            chosen = [node for node in order if node not in self.quarantined(t)]
            nodes = sorted(chosen[: max(int(len(connected) * share), self.min_evaluate_nodes)])
            model = pack({"w": self.method.evaluated(self.now.w, self.now.server)})
            parts = {self.registry.nodes[node]: {"arrays": model} for node in nodes}
            self.sent = self.nodes.messages(MessageType.EVALUATE, parts, t)
        return self.sent

    def read_evaluations(self, t: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average every metric over the clients that have it, by their numbers of test samples."""
        self.nodes.refused = []
        good = self.nodes.screen(replies, self.sent, t, lambda _, c: read_evaluation(c, self.bounds, self.metrics))
        self.run_log.pending += self.nodes.refused
        means = average_evaluations(good.values(), self.metrics)
        return MetricRecord({**means}) if means else None

    # The experiment.

    @property
    def clients(self) -> Population:
        """What the server knows about the clients; made again when the registry has new ones."""
        sizes = self.registry.sample_counts()
        if self._clients is None or not np.array_equal(self._clients.sizes, sizes):
            hidden = self.secret if self.policies.privacy is not None else None
            sampler = make_sampler(self.config, sizes, hidden)
            self._clients = Population(self.config, sizes, sampler, self.policies.faults)
        return self._clients

    def spec(self) -> ExperimentSpec:
        """Return what every message says about the experiment."""
        config, assets = self.config, self.assets
        if not self.fraction_evaluate:  # then clients measure nothing, and need no metrics
            config = dataclasses.replace(config, metrics="")
        return ExperimentSpec.of(config, self.model_tag(), assets.target, assets.classes)

    def model_tag(self) -> str:
        """Return a short name for the model, frozen parameters included."""
        return model_tag(self.assets.flat)

    @cached_property
    def task(self) -> NetworkTask | None:
        """The network on the server's own samples, None if it has none."""
        assets, data = self.assets, self.assets.data(0)
        return None if data is None else make_task(self.config, assets.own, assets.network, data, assets.scaler)

    @cached_property
    def _validate(self) -> HeldOutEvaluator | None:
        if self.task is None or self.assets.validation is None:
            return None
        x, y = self.assets.validation
        data = Dataset("validation", x, y, x, y, self.assets.classes, target=self.assets.target)
        return held_out_evaluator(self.task, data, np.arange(len(y)))

    def _server_data(self) -> FederatedData:
        return self.assets.federated_data(self.config, self.samples)

    # Messages.

    def _train_messages(self, grid: Grid, t: int, ids: Ints) -> list[Message]:
        method, state, probed = self.method, self.now, dict[str, Tensor]()
        if len(ids) and method.probes and method.reports:
            ask = self.nodes.prober(grid, method, state.w, "probe", t)
            finite, probed = ask_cohort(method, state.w, self.cohort(t, ids), ids, ask)
            ids = ids if finite is None else ids[finite.numpy()]
        if not len(ids):
            return []
        cohort = self.cohort(t, ids)
        down = method.broadcast(state.w, state.server, probed, cohort)
        if not self._templates:
            extends = overrides(method, "extend_data")
            payload = method.extend_data(self._server_data(), self.learned).one_time_payload if extends else {}
            self._templates = upload_template(method, state.w, down | dict(payload))
        asked, trains = method.probe_mask(cohort), method.train_mask(cohort)
        accepted = state.clients.read(ids)["accepted"].tolist()
        model, broadcast = pack({"w": state.w}), pack(down)
        parts: dict[int, Mapping[str, Record]] = {}
        for i, client in enumerate(ids.tolist()):
            order = {"round": t, "lr": cohort.client_lr, "accepted": accepted[i]}
            order |= {"rest": trains is not None and not trains[i], "asked": asked is None or bool(asked[i])}
            parts[client] = {"arrays": model, "down": broadcast, "round": ConfigRecord(order)}
        return self.nodes.messages(MessageType.TRAIN, parts, t)

    def _read(self, client: int, content: RecordDict) -> RecordDict:
        metrics = only_record(content, MetricRecord)
        examples = self.bounds.examples(metrics.get("num-examples"))
        if examples != self.registry.sizes[client]:
            raise RefusedError(f"it counts {examples} examples, but {self.registry.sizes[client]} when it enrolled")
        check_number("loss", metrics.get("loss"), self.now.w.dtype)
        self.bounds.checked(self._read_upload(content))
        dtypes = {key: str(like.numpy().dtype) for key, like in self._templates.items()}
        self.log_cast(arrays_of(content, "up"), dtypes)
        return content

    def _read_upload(self, content: RecordDict) -> State:
        return read_arrays(content, "up", self._templates)

    def _tamper(self, t: int, replies: list[Message]) -> dict[str, list[int]]:
        """Change the replies of clients that shall misbehave; return the faults and the clients that had them."""
        if (injected := self.policies.faults) is None:
            return {}
        watched, who = tamper(
            injected, t, replies, self.registry.nodes, self.now.watched, self._read_upload, replace_uploads
        )
        self.now.watched = watched
        return self.clients.stragglers(t, self.clients.draw(t)) | who


def _read_tensor(key: str, like: Tensor, content: RecordDict) -> Tensor:
    return tensor(arrays_of(content, "up")[key], key, like)
