"""A strategy for any method: enrolment, preparation, rounds, all by messages whose replies are screened one by one."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from feddpc.config import Config
from feddpc.errors import BadInputError
from feddpc.experiment import default_batch_size
from feddpc.flower import preparing
from feddpc.flower.base import MethodStrategy
from feddpc.flower.census import Served, expected, federation_of
from feddpc.flower.enrolment import Roll
from feddpc.flower.faulty import replace_uploads, tamper
from feddpc.flower.holdings import Holdings
from feddpc.flower.orders import Orders
from feddpc.flower.queries import Desk
from feddpc.flower.screening import Refusal, sift, too_few
from feddpc.flower.uploads import Rows, Upload
from feddpc.flower.wire import RefusedError, arrays_of, expect, only_record, pack, tensor
from feddpc.flower.wrappers import refuse_privacy_wrappers
from feddpc.methods.base import Method, State, overrides
from feddpc.methods.federated_data import FederatedData
from feddpc.privacy.config import make_mechanism
from feddpc.rng import generator
from feddpc.round.federation import Federation, gather, regather
from feddpc.round.probes import probe_cohort, probe_population
from feddpc.round.round import late
from feddpc.round.server_step import apply_step, drop_non_finite, empty_round, server_step
from feddpc.runs import checkpoint
from feddpc.runs.record import COUNTED, LEARNED, is_run, load_config, read_json

Ints = NDArray[np.int64]
#: Ways to take part in which a round never invites more than the cohort.
FIXED_SIZE = ("uniform", "cyclic", "markov", "weighted")


class FederatedStrategy(MethodStrategy):
    """Any method over Flower; made by :func:`feddpc.flower.strategy`."""

    def __init__(self, holdings: Holdings, *, wait: float, secret: int | None = None, **rest: Any) -> None:
        super().__init__(holdings.method, **rest)
        self.holdings, self.config, self.wait = holdings, holdings.config, wait
        self.secret = secret  #: the seed of what clients must not foresee
        self.roll = Roll(self.config.clients)
        self.desk = Desk(self.roll, self.bounds, self._orders(0))
        self.served: Method = Served(self.method)  # type: ignore[assignment]
        self.learned: State = {}
        self._samples = 0
        self._invited: Ints = np.zeros(0, np.int64)
        self._looks: State = {}
        self._federation: tuple[object, Federation] | None = None
        self._check_quorum()

    # What the base asks for.

    def describe(self, rounds: int) -> Config:
        """The configuration, complete."""
        hyper = self.method.hyper()
        return dataclasses.replace(self.config, method=self.method.name, hyper=hyper, rounds=rounds, engine="flower")

    def population(self) -> int:
        """How many clients there are."""
        return self.config.clients

    def scored(self) -> tuple[float, float]:
        """How the model does on the server's test set."""
        return self.holdings.evaluate(self.method.evaluated(self.now.w, self.now.server))

    def disclosure(self) -> str:
        """Say what leaves a client, and what hides it."""
        mechanism = make_mechanism(self.config)
        return self.method.privacy if mechanism is None else f"{self.method.privacy} {mechanism.describe()}"

    def initial_arrays(self) -> ArrayRecord:
        """Return the first model, for ``start``."""
        return pack(self.holdings.state_dict())

    def welcome(self, grid: Grid, timeout: float) -> None:
        """Enrol clients; what follows from how many samples they have is settled once, for a resumed run too."""
        self.desk.timeout = timeout
        self.desk.enrol(grid, self.wait, self.min_available_nodes)
        there = self.folder if self.folder is not None and is_run(self.folder) else None
        counted = self.holdings.samples or int(self.roll.counts().sum()) + self.holdings.reserved
        self._samples = counted if there is None else int(read_json(there / f"{COUNTED}.json")["samples"])
        if self.config.batch_size is None:
            usual = default_batch_size(self._samples, self.config.clients)
            size = usual if there is None else load_config(there).batch_size
            self.config = dataclasses.replace(self.config, batch_size=size)
        self.desk.orders = self._orders(self._samples)

    def about(self) -> dict[str, dict[str, Any]]:
        """Beside what all strategies note: how many samples there were in all when the run began."""
        return super().about() | {COUNTED: {"samples": self._samples}}

    def prepare(self, grid: Grid) -> None:
        """Let the method find out what it must, and hand out what belongs to the clients."""
        if overrides(self.method, "learn"):
            self.learned = self._learn(grid)
        self.hand_out(grid)
        if self.now.round == 0:
            if overrides(self.method, "initial") and self.holdings.task is not None:
                self.reset(self.method.initial(self.holdings.task, self.now.w, self._world()))
            if self.method.surveys:
                probe_population(self.federation, self.served, self.desk.prober(grid, "survey", 0), self.now)
        self.pending += self.desk.refused

    # Flower's interface.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Invite the clients of the round, ask what the method wants to know first, and send model and broadcast."""
        refuse_privacy_wrappers(self)
        self._began, self.desk.refused = time.perf_counter(), []
        t = self._offset + server_round
        connected = set(grid.get_node_ids())
        self.desk.enrol(grid, 0.0, 0)
        self.hand_out(grid)
        self._invited = self.federation.draw(t).answered
        ids = self.roll.present(self._invited, connected & self.roll.ready)
        self._sent = list(self._invitations(grid, t, ids)) if len(ids) else []
        return self._sent

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Let the server rule move the model with the replies that can be used."""
        t, federation, replies = self._offset + server_round, self.federation, list(replies)
        faults = self._tampered(t, replies)
        good, refused = sift(replies, self._sent, self.roll.nodes, t, partial(self._read, t))
        self.desk.lacking(refused)
        refused = self.desk.refused + refused
        ids = np.array(list(good), dtype=np.int64)
        silent = set(self._invited.tolist()) - set(good) - {r.client for r in refused}
        dropped = silent | set(federation.draw(t).dropped.tolist())
        if len(good) < self.min_replies:
            # A round may draw no client; and under privacy noise hides whether replies came, so the run goes on.
            void = self.no_quorum() if len(self._invited) and federation.privacy is None else None
            refused += too_few(t, ids, self.roll.node, self.min_replies) if void else []
            return self._close_void_round(t, dropped, refused, void, faults)
        _, cohort = gather(federation, self.served, self.now, t, ids)
        up, nodes = self._stacked(list(good.values())), {client: node for node, client in self.roll.nodes.items()}
        again = partial(regather, federation, self.served, self.now, t)
        served = server_step(
            self.method, self.now, up, cohort, again, federation.defense, federation.privacy, self.min_replies
        )
        ids, turned_away = self.chosen(t, ids, served, nodes)
        refused += turned_away
        if served is None:
            return self._close_void_round(t, dropped, refused, self.no_quorum_within_bound(), faults)
        if federation.faults is not None:
            self.now.watched = federation.faults.saw(served.step.update, self.now.watched)
        notes = apply_step(self.now, ids, served.step)
        losses = torch.tensor([upload.loss for upload in good.values()], dtype=self.now.w.dtype)
        self.accept(t, ids, nodes)
        loss = float(losses[served.good][served.cohort.steps > 0].mean())  # NaN when nobody trained
        record = self.keep(t, ids, dropped, refused, loss=loss, notes=notes, faults=faults)
        return self.arrays(), MetricRecord({"replies": len(ids), "train-loss": loss, **record.notes})

    def _close_void_round(
        self, t: int, dropped: set[int], refused: list[Refusal], void: str | None, faults: dict[str, list[int]]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Close a round in which no reply counts: the method has a rule for that, and so has privacy."""
        notes = empty_round(self.federation, self.method, self.now, t)
        record = self.keep(t, np.zeros(0, np.int64), dropped, refused, void=void, notes=notes, faults=faults)
        return (None, None) if void else (self.arrays(), MetricRecord({"replies": 0, **record.notes}))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Let some of the clients that are there evaluate the model on test samples of their own."""
        t = self._offset + server_round
        here = sorted(set(grid.get_node_ids()) & self.roll.ready & self.roll.nodes.keys())
        many = max(int(len(here) * self.fraction_evaluate), self.min_evaluate_nodes) if self.fraction_evaluate else 0
        chosen = generator(self.config.seed, "who evaluates", t).permutation(here)[:many]
        arrays = pack({"w": self.method.evaluated(self.now.w, self.now.server)})
        contents = {node: self.desk.content(self.roll.nodes[node], arrays=arrays) for node in sorted(chosen.tolist())}
        self._sent = [Message(content, n, MessageType.EVALUATE, group_id=str(t)) for n, content in contents.items()]
        return self._sent

    # The experiment.

    def quorum(self, invited: int) -> int:
        """Return how many of the invited clients must answer for a round to count."""
        return self.min_replies

    def _check_quorum(self) -> None:
        """Refuse a quorum that no round can reach."""
        cohort = self.config.cohort
        most = cohort if self.config.participation in FIXED_SIZE else self.config.clients
        if (least := self.quorum(cohort)) > most:
            raise BadInputError(
                f"min_replies = {self.min_replies} with cohort = {cohort}: {least} clients must answer, and at most "
                f"{most} are invited per round, so no round could count: lower min_replies or raise cohort"
            )

    @property
    def federation(self) -> Federation:
        """What the round loop knows of the clients; made anew when clients have come."""
        sizes = self.roll.counts()
        if self._federation is None or self._federation[0] != sizes.tobytes():
            self._federation = sizes.tobytes(), federation_of(self.config, sizes, self.layout.d, self.secret)
        return self._federation[1]

    def _orders(self, samples: int) -> Orders:
        return Orders.of(self.config, self.method, self.holdings.flat, self.holdings.classes, samples)

    def _world(self) -> FederatedData:
        return self.holdings.world(self.config.clients, self._samples)

    # Before the first round.

    def _learn(self, grid: Grid) -> State:
        """Return what the method finds out before round 1; a run that is continued has it in its folder."""
        path = None if self._run is None else self._run.path / LEARNED
        if path is not None and path.exists():
            return checkpoint.load_model(path)
        learned = preparing.learn(self.method, partial(self.desk.question, grid), self._world(), self.roll.counts())
        learned = {key: value.detach().cpu().contiguous() for key, value in learned.items()}
        if path is not None and learned:
            checkpoint.save_model(path, learned)
        return learned

    def hand_out(self, grid: Grid) -> None:
        """Give every client that has not got it yet what it is handed before its first round."""
        new = [node for node in self.roll.nodes if node not in self.roll.ready]
        if not new:
            return
        shares = self.method.extend_data(self._world(), self.learned) if self.method.reserve else None
        self.desk.hand(
            grid, {c: self.holdings.handed(c, shares, self.learned) for c in (self.roll.nodes[n] for n in new)}
        )

    # A round.

    def _invitations(self, grid: Grid, t: int, ids: Ints) -> Iterator[Message]:
        progress, federation = self.now, self.federation
        _, cohort = gather(federation, self.served, progress, t, ids)
        probed: State = {}
        if self.served.probes:
            prober = self.desk.prober(grid, "probe", t)
            ids, (probed,) = drop_non_finite(
                ids, probe_cohort(federation, self.served, prober, progress.w, cohort, ids)
            )
            if not len(ids):
                return
            _, cohort = gather(federation, self.served, progress, t, ids)
        down = self.method.broadcast(progress.w, progress.server, probed, cohort)
        if not self._looks:
            extends = overrides(self.method, "extend_data")
            kit = self.method.extend_data(self._world(), self.learned).kit if extends else {}
            self._looks = expected(self.method, progress.w, down | dict(kit))
        asked, trains = self.method.probe_mask(cohort), self.method.train_mask(cohort)
        accepted = progress.clients.read(ids)["accepted"].tolist()
        arrays, more = pack({"w": progress.w}), pack(down)
        nodes = {client: node for node, client in self.roll.nodes.items()}
        for i, client in enumerate(ids.tolist()):
            told = {"round": t, "lr": cohort.client_lr, "accepted": accepted[i]}
            told |= {"rest": trains is not None and not trains[i], "asked": asked is None or bool(asked[i])}
            content = self.desk.content(client, arrays=arrays, down=more, round=ConfigRecord(told))
            yield Message(content, nodes[client], MessageType.TRAIN, group_id=str(t))

    def _read(self, t: int, client: int, content: RecordDict) -> Upload:
        if self.desk.about(content, t).get("client") != client:
            raise RefusedError(f"it says it is another client than {client}")
        metrics = only_record(content, MetricRecord)
        examples = self.bounds.examples(metrics.get("num-examples"))
        if examples != self.roll.sizes[client]:
            raise RefusedError(f"it counts {examples} examples, but {self.roll.sizes[client]} when it enrolled")
        loss = metrics.get("loss")
        if not isinstance(loss, float) or not np.isfinite(loss):
            raise RefusedError(f"its loss is {loss!r}, not a finite number")
        arrays = arrays_of(content, "up")
        expect(arrays, self._looks, "the upload")
        for key, look in self._looks.items():
            self.bounds.check(key, tensor(arrays[key], key, look))
        self.log_cast(arrays, {key: str(look.numpy().dtype) for key, look in self._looks.items()})
        return Upload(arrays, loss)

    def _tampered(self, t: int, replies: list[Message]) -> dict[str, list[int]]:
        """Let clients misbehave that shall; return who did what, as faults are listed."""
        injected = self.federation.faults
        if injected is None:
            return {}

        def opened(content: RecordDict) -> State:
            arrays = arrays_of(content, "up")
            expect(arrays, self._looks, "the upload")
            return {key: tensor(arrays[key], key, look) for key, look in self._looks.items()}

        changed = tamper(injected, t, replies, self.roll.nodes, self.now.watched, opened, replace_uploads)
        self.now.watched = changed.memory
        return late(self.federation, t, self.federation.draw(t)) | changed.who

    def _stacked(self, uploads: list[Upload]) -> State:
        """Return the uploads as the server rule wants them: stacked, or one at a time where it can take them so."""
        rows = {key: Rows(uploads, key, look) for key, look in self._looks.items()}
        guarded = self.federation.privacy is not None or self.federation.defense is not None
        if getattr(self.method, "form", None) == "streaming" and not guarded:
            return rows  # type: ignore[return-value]
        return {key: torch.stack(list(row)) for key, row in rows.items()}
