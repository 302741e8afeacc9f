"""The only round loop: sample, probe, broadcast, train, screen, aggregate, evaluate, record."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddpc.data.batches import Plan, Planner
from feddpc.engine import waves
from feddpc.engine.base import Engine, placed
from feddpc.engine.memory import Memory
from feddpc.engine.meter import Meter, numbers
from feddpc.engine.placement import ON_DEVICE, Placement
from feddpc.engine.sampler import Draw, Sampler
from feddpc.errors import BadInputError
from feddpc.methods.algebra import exact_sum
from feddpc.methods.base import Cohort, Method, State
from feddpc.robust.defence import Defence
from feddpc.robust.faults import Faults
from feddpc.task import Task

Ints = NDArray[np.int64]
Evaluate = Callable[[Tensor], tuple[float, float]]

#: How many clients of a survey are asked in one go.
SURVEYED_AT_ONCE = 16


@dataclass(frozen=True)
class Federation:
    """Everything that all methods of a comparison share: the task, who holds what, who comes when, and the rates."""

    task: Task
    planner: Planner
    sampler: Sampler
    client_lr: float
    server_lr: float
    lr_decay: float = 1.0
    weighting: str = "uniform"
    evaluate: Evaluate | None = None
    validate: Evaluate | None = None  #: on samples held out of training
    faults: Faults | None = None  #: which clients misbehave, in simulations of that
    defence: Defence | None = None  #: how the server protects itself, beyond turning away what is not finite
    kit: State = field(default_factory=dict)  #: what every client was given once, before its first round
    once: tuple[float, float] = (0, 0)  #: how many numbers each client received and sent then
    _ahead: dict[int, tuple[Draw, Plan]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def population(self) -> int:
        """Number of clients."""
        return len(self.planner.partition)

    def look_ahead(self, round: int) -> None:
        """Draw the participants of a round and plan their batches, while the host has nothing else to do."""
        if round in self._ahead:
            return
        try:
            draw = self._draw(round)
        except BadInputError:  # a fixed schedule has an end
            return
        self._ahead.clear()
        self._ahead[round] = draw, self.planner.plan(round, draw.answered)

    def draw(self, round: int) -> Draw:
        """Return who takes part in a round."""
        return self._ahead[round][0] if round in self._ahead else self._draw(round)

    def _draw(self, round: int) -> Draw:
        draw = self.sampler.draw(round)
        if self.faults is None:
            return draw
        return Draw(draw.invited, draw.answered[~self.faults.late(round, draw.answered)])

    def plan(self, round: int, ids: Ints) -> Plan:
        """Return the batches of clients ``ids`` in a round."""
        draw, plan = self._ahead.get(round, (None, None))
        if plan is not None and draw is not None and np.array_equal(draw.answered, ids):
            return plan
        return self.planner.plan(round, ids)

    def weights(self, sizes: Ints) -> NDArray[np.float64]:
        """Return the weights of a cohort's clients with ``sizes`` samples; they add up to one."""
        return sizes / sizes.sum() if self.weighting == "samples" else np.full(len(sizes), 1 / len(sizes))

    def shares(self, sizes: Ints) -> Tensor | None:
        """Return the shares that clients with ``sizes`` samples have in a mean over all, None for 1/N each."""
        if self.weighting == "uniform":
            return None
        return torch.from_numpy(sizes / len(self.planner.partition.order))

    def rates(self, round: int) -> tuple[float, float]:
        """Return the local and the server rate of a round; they decay together, so that their ratio stays."""
        decay = self.lr_decay ** (round - 1)
        return self.client_lr * decay, self.server_lr * decay


@dataclass
class Progress:
    """Where a run stands: the model, all memories, and the last finished round."""

    w: Tensor
    server: State
    slots: Memory
    clients: Memory
    round: int = 0
    meter: Meter = field(default_factory=Meter)
    watched: State = field(default_factory=dict)  #: what screening, and attackers, remember of earlier rounds

    @classmethod
    def begin(cls, method: Method, w: Tensor, population: int, placement: Placement = ON_DEVICE) -> Progress:
        """Return the state before round 1; ``w`` itself is left as it is."""
        return cls(
            w=w.clone(),
            server=method.init_server(w, population),
            slots=Memory(
                lambda: method.init_slot(w),
                f"{method.name}: the server's memory of a client",
                population,
                placement,
                "slots",
            ),
            clients=Memory(
                lambda: method.init_client(w), f"{method.name}: a client's memory", population, placement, "clients"
            ),
        )


@dataclass(frozen=True)
class Record:
    """What is known about one finished round."""

    round: int
    test_accuracy: float
    test_loss: float
    train_loss: float
    seconds: float
    participants: list[int]
    dropped: list[int]
    rejected: list[int]
    notes: dict[str, float] = field(default_factory=dict)
    diverged: str | None = None
    validation: tuple[float, float] | None = None  #: accuracy and loss on samples held out of training
    faults: dict[str, list[int]] = field(default_factory=dict)  #: who misbehaved, by what it did


class Exchanged(NamedTuple):
    """Whose updates counted, their loss, the method's notes, and how the model does if the engine found out."""

    kept: Ints
    loss: float = math.nan
    notes: dict[str, float] = {}  # noqa: RUF012
    scored: tuple[float, float] | None = None
    faults: dict[str, list[int]] = {}  # noqa: RUF012


def advance(federation: Federation, method: Method, engine: Engine, progress: Progress) -> Record:
    """Run the next round: ``progress`` is moved on, and what happened is returned."""
    began = time.perf_counter()
    t = progress.round + 1
    if t == 1:
        progress.meter.down_once, progress.meter.up_once = federation.once
        if method.surveys:
            _survey(federation, method, engine, progress)
    draw = federation.draw(t)
    before = replace(federation.task.tally)
    kept, loss, notes, scored, faults = _exchange(federation, method, engine, progress, t, draw.answered)
    progress.meter.gradients += federation.task.tally.gradients - before.gradients
    progress.meter.passes += federation.task.tally.passes - before.passes
    if not len(kept):
        progress.server = method.idle(progress.server)
    progress.round = t
    rejected = np.setdiff1d(draw.answered, kept)
    wary = federation.faults or federation.defence  # then a round of bad updates only is no sign of divergence
    evaluate = federation.evaluate or (lambda _: (math.nan, 0.0))
    accuracy, test_loss = scored or evaluate(method.evaluated(progress.w, progress.server))
    validate = federation.validate
    validation = None if validate is None else validate(method.evaluated(progress.w, progress.server))
    return Record(
        round=t,
        test_accuracy=accuracy,
        test_loss=test_loss,
        train_loss=loss,
        seconds=time.perf_counter() - began,
        participants=kept.tolist(),
        dropped=draw.dropped.tolist(),
        rejected=rejected.tolist(),
        notes=notes,
        diverged=_diverged(None if scored else progress.w, test_loss, len(kept), 0 if wary else len(rejected)),
        validation=validation,
        faults=_late(federation, t, draw) | faults,
    )


def _exchange(
    federation: Federation, method: Method, engine: Engine, progress: Progress, t: int, ids: Ints
) -> Exchanged:
    """Let clients ``ids`` train and the server aggregate."""
    if not len(ids):
        return Exchanged(ids)
    task, w = federation.task, progress.w
    client_lr, _ = federation.rates(t)
    plan, cohort = _cohort(federation, method, progress, t, ids)
    probed: State = {}
    if method.probes:
        invited, probed = ids, _probe(federation, method, engine, w, cohort, ids)
        ids, (probed,) = screen(ids, probed)
        if not len(ids):
            return Exchanged(ids)
        if len(ids) < len(invited):
            plan, cohort = _cohort(federation, method, progress, t, ids)
    faults, defence = federation.faults, federation.defence
    plain = faults is None and defence is None
    if plain and (done := engine.round(federation, method, progress, probed, plan, cohort)):
        progress.slots.write(ids, done.slots)
        progress.clients.write(ids, done.own)
        _count(federation, progress, plan, done.sent)
        return Exchanged(ids, done.loss, done.notes, done.scored)
    w = progress.w
    down = method.broadcast(w, progress.server, probed if method.reports else {}, cohort)
    own = progress.clients.read(ids)
    trained = waves.train(engine, method, task, w, down | federation.kit, own | probed, plan, client_lr)
    up, who = trained.up, dict[str, list[int]]()
    if faults is not None:
        up, progress.watched, who = faults.tamper(t, ids, up, progress.watched)
    kept, (up, own, losses) = screen(ids, up, trained.own, {"loss": trained.loss})
    if defence is not None and len(kept):
        training = placed(plan.steps[np.isin(ids, kept)] > 0, w.device)
        good, progress.watched = defence.screen(up, training, progress.watched)
        kept, (up, own, losses) = _only(good, kept, up, own, losses)
    if not len(kept):
        return Exchanged(kept, faults=who)
    if len(kept) < len(ids):
        _, cohort = _cohort(federation, method, progress, t, kept)
    if defence is not None and defence.rule is not None:
        good, rows = defence.judge(method.rows(progress.server, up, cohort), cohort.steps > 0)
        if not bool(good.all()):
            kept, (own, losses) = _only(good, kept, own, losses)
            _, cohort = _cohort(federation, method, progress, t, kept)
        step = method.combine(w, progress.server, rows, cohort)
    else:
        step = method.aggregate(w, progress.server, up, cohort)
    if faults is not None:
        progress.watched = faults.saw(step.update, progress.watched)
    step.apply_(progress.w)
    progress.server = step.server
    progress.slots.write(kept, step.slots)
    progress.clients.write(kept, own)
    sent = [*trained.up.values(), *(probed.values() if method.reports else ())]
    _count(federation, progress, plan, (numbers(down.values()), numbers(sent)))
    loss = losses["loss"][cohort.steps > 0].mean()  # NaN when nobody trained
    return Exchanged(kept, float(loss), {k: float(v) for k, v in step.notes.items()}, faults=who)


def _count(federation: Federation, progress: Progress, plan: Plan, moved: tuple[int, int]) -> None:
    """Write down what the round moved (beside the model to each client, and from all), and what is remembered now."""
    meter, m = progress.meter, len(plan.clients)
    meter.d = progress.w.numel()
    meter.clients += m
    meter.steps += int(federation.planner.steps(plan.sizes).sum())
    meter.down += m * (meter.d + moved[0])
    meter.up += moved[1]
    meter.client_state = progress.clients.width
    meter.server_state = numbers(progress.server.values()) + len(progress.slots) * progress.slots.width


def _probe(federation: Federation, method: Method, engine: Engine, w: Tensor, cohort: Cohort, ids: Ints) -> State:
    """Ask the clients that the method wants to ask; the others are given an empty answer."""
    asked = method.asked(cohort)
    if asked is None:
        return engine.probe(method, federation.task, w, federation.planner.sweep(ids))
    probed = {k: v.expand(len(ids), *v.shape).clone() for k, v in method.unasked(w).items()}
    if asked.any():
        answers = engine.probe(method, federation.task, w, federation.planner.sweep(ids[asked]))
        rows = placed(np.flatnonzero(asked), w.device)
        for key, stack in answers.items():
            probed[key][rows] = stack
    return probed


def _survey(federation: Federation, method: Method, engine: Engine, progress: Progress) -> None:
    """Let every client of the population answer the probe, some at a time, and remember what came of it."""
    total: State = {}
    meter, population, before = progress.meter, federation.population, federation.task.tally.gradients
    for first in range(0, population, SURVEYED_AT_ONCE):
        ids = np.arange(first, min(first + SURVEYED_AT_ONCE, population))
        answers = engine.probe(method, federation.task, progress.w, federation.planner.sweep(ids))
        ids, (answers,) = screen(ids, answers)
        progress.clients.write(ids, method.surveyed(answers))
        shares = federation.shares(federation.planner.partition.sizes[ids])
        shares = torch.full((len(ids),), 1 / population, dtype=torch.float64) if shares is None else shares
        for key, stack in answers.items():
            part = exact_sum(stack, shares.to(stack.device))
            total[key] = total[key] + part if key in total else part
        meter.up_once += numbers(answers.values()) / population
    meter.down_once += progress.w.numel()
    meter.gradients_once += (federation.task.tally.gradients - before) / population
    progress.server = method.enrolled(progress.server, total)


def _cohort(federation: Federation, method: Method, progress: Progress, t: int, ids: Ints) -> tuple[Plan, Cohort]:
    """Return the batches of clients ``ids`` in round ``t``, and what the server knows about them."""
    client_lr, server_lr = federation.rates(t)
    device = progress.w.device
    plan = federation.plan(t, ids)
    shares = federation.shares(plan.sizes)
    cohort = Cohort(
        round=t,
        clients=placed(ids, device),
        population=federation.population,
        weights=placed(federation.weights(plan.sizes), device),
        shares=None if shares is None else shares.to(device),
        steps=placed(plan.steps.astype(np.float64), device),
        client_lr=client_lr,
        server_lr=server_lr,
        slots=progress.slots.read(ids),
        seed=federation.planner.seed,
    )
    training = method.trains(cohort)
    if training is None:
        return plan, cohort
    plan = plan.resting(~training)
    return plan, replace(cohort, steps=placed(plan.steps.astype(np.float64), device))


def screen(ids: Ints, *states: State) -> tuple[Ints, tuple[State, ...]]:
    """Drop every client with a non-finite number in what it sent or would remember, before any arithmetic sees it."""
    tensors = [v.reshape(len(ids), -1) for state in states for v in state.values()]
    # A sum is finite only if all its terms are, and it is one fast pass; the exact look is for the rare other case.
    if all(bool(t.sum().isfinite()) for t in tensors):
        return ids, states
    return _only(torch.stack([t.isfinite().all(1) for t in tensors]).all(0), ids, *states)


def _only(good: Tensor, ids: Ints, *states: State) -> tuple[Ints, tuple[State, ...]]:
    return ids[good.cpu().numpy()], tuple({k: v[good] for k, v in state.items()} for state in states)


def _late(federation: Federation, t: int, draw: Draw) -> dict[str, list[int]]:
    """Return who of those that dropped out came too late, as faults are listed."""
    if federation.faults is None:
        return {}
    late = draw.dropped[federation.faults.late(t, draw.dropped)].tolist()
    return {"straggler": late} if late else {}


def _diverged(w: Tensor | None, test_loss: float, kept: int, rejected: int) -> str | None:
    """Say why a run must stop, or return None; ``w`` is None where it is known to be finite."""
    if rejected and not kept:
        return f"all {rejected} updates were non-finite"
    if w is not None and not bool(w.sum().isfinite() or w.isfinite().all()):
        return "the model has non-finite parameters"
    if not math.isfinite(test_loss):
        return f"the test loss is {test_loss}"
    return None
