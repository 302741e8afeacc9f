"""The graphs of one method for one size of the cohort, and the buffers they work on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap

from feddpc.data.batches import BatchPlan
from feddpc.engines.cuda.buffers import HostTransfer, Inputs, graph_of, kept
from feddpc.engines.cuda.compiling import Compiled
from feddpc.engines.cuda.training import Lanes, Stack, Training
from feddpc.methods.base import ClientContext, Cohort, Method, State
from feddpc.population import placed
from feddpc.round.server_step import apply_step_, check_step, optimized
from feddpc.round.state import numbers
from feddpc.tasks.base import BatchIndices

if TYPE_CHECKING:
    from feddpc.experiment import Experiment
    from feddpc.round.state import RunState

#: Test images in one pass of a captured evaluation; and of a large network whose convolutions are in true float32.
TEST_BATCH, SLOW_TEST_BATCH = 2500, 1000
#: From how many parameters on a network is large.
LARGE = 1 << 20


class Done(NamedTuple):
    """A captured round: the model is moved already, memories are still to be written."""

    clients: NDArray[np.int64]  #: in the order of the memories
    own: State
    slots: State
    loss: float
    notes: dict[str, float]
    scored: dict[str, float] | None  #: metrics on the test set; none if it was not evaluated
    sent: tuple[int, int]  #: how many numbers went to each client besides the model, and came from all
    validated: dict[str, float] | None = None  #: metrics on samples held out of training


class Session:
    """The graphs of one method for one size of the cohort."""

    def __init__(
        self,
        experiment: Experiment,
        method: Method,
        state: RunState,
        probed: State,
        cohort: Cohort,
        *,
        streams: bool,
        compiles: bool,
    ) -> None:
        self.experiment, self.method = experiment, method
        self.streams, self.compiles = streams, compiles
        self.graphs = 0  #: captured so far
        self.task = experiment.task.transformable(stacked=not streams, together=True)
        w = state.w
        self.device, m = w.device, len(cohort.clients)
        self.w, self.server = w.clone(), {k: v.clone() for k, v in state.server.items()}
        self.local = experiment.local(method)
        self.changing = experiment.population.rates_change
        self.inputs = self._buffers(cohort, state, probed)
        self.one_time_payload = experiment.one_time_payload
        self.down: State = {}
        self.y, self.total = torch.empty(0), torch.zeros(m, dtype=w.dtype, device=self.device)
        self.new_own: State = {}
        self.new_slots: State = {}
        self.note_names: list[str] = []
        self.report = torch.zeros(0)
        fast = torch.backends.cudnn.allow_tf32 or getattr(experiment.task, "half", False) or w.numel() < LARGE
        self.test_batch = TEST_BATCH if fast else SLOW_TEST_BATCH
        self._scores = self._test(experiment.task) if experiment.evaluates else None
        held = getattr(experiment.validate, "task", None)
        self._held = None if held is None else self._test(held)
        self.training: Training = (Lanes if streams else Stack)(self, compiles=compiles)
        self.pool: Any = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        was = replace(experiment.task.work)
        try:
            self._warm()
            self._start = self.captured(self._do_start)
            self.training.capture()
            self._end = self.captured(self._do_end)
        finally:  # it may be tried again
            experiment.task.work.reset_to(was)

    # Buffers.

    def _buffers(self, cohort: Cohort, state: RunState, probed: State) -> Inputs:
        planner, m = self.experiment.planner, len(cohort.clients)
        most = int(planner.steps(planner.partition.sizes).max())
        width = min(planner.batch_size, int(planner.partition.sizes.max()))
        ints = {"index": (most, m, width), "count": (most, m), "clients": (m,)}
        self.ints = HostTransfer(ints, torch.int64, self.device)
        floats = {"weights": (m,), "counts": (m,), "rates": (2,)}
        self.floats = HostTransfer(floats, torch.float64, self.device)
        shape, kind = (most, m, width, planner.draw_width), torch.float32 if planner.uniforms else torch.int16
        self.draws = HostTransfer({"draws": shape}, kind, self.device) if planner.draw_width else None
        own = {**state.clients.read(np.zeros(m, np.int64)), **probed}
        inputs_on_device = self.ints.there | self.floats.there
        inputs_on_device["weights"].copy_(cohort.weights)
        inputs_on_device["clients"].copy_(cohort.clients)
        inputs_on_device["count"].fill_(width)
        inputs_on_device["rates"].copy_(torch.tensor([cohort.client_lr, cohort.server_lr], dtype=torch.float64))
        return Inputs(
            draws=self.draws.there["draws"] if self.draws else None,
            steps=torch.zeros(m, dtype=self.w.dtype, device=self.device),
            own={k: v.clone() for k, v in own.items()},
            slots={k: v.clone() for k, v in cohort.slots.items()},
            **inputs_on_device,
        )

    def _load(self, state: RunState, probed: State, plan: BatchPlan, cohort: Cohort) -> NDArray[np.int64]:
        """Send a round's plan and memories to the buffers, clients with many steps first; return that order."""
        order = np.argsort(-plan.steps, kind="stable")
        K, B = int(plan.steps.max()), plan.index.shape[2]
        ints, floats = self.ints.open(), self.floats.open()
        ints["index"][:K, :, :B] = plan.index[order, :K].swapaxes(0, 1)
        ints["count"][:K] = plan.count[order, :K].swapaxes(0, 1)
        ints["clients"][:] = plan.clients[order]
        floats["counts"][:] = plan.steps[order]
        floats["weights"][:] = self.experiment.population.weights(plan.sizes)[order]
        floats["rates"][:] = cohort.client_lr, cohort.server_lr
        self.ints.send()
        self.floats.send()
        if self.draws and plan.draws is not None:
            self.draws.open()["draws"][:K, :, :B] = plan.draws[order, :K].swapaxes(0, 1)
            self.draws.send()
        i = self.inputs
        if not (i.own or i.slots):
            return order
        device_order = placed(order, self.device)
        # Straight into the buffers: a row may have as many numbers as the model.
        state.clients.read(plan.clients[order], {k: v for k, v in i.own.items() if state.clients.keeps(k)})
        for rows, buffers in ((probed, i.own), (cohort.slots, i.slots)):
            for key, value in rows.items():
                torch.index_select(value, 0, device_order, out=buffers[key])
        return order

    # What the graphs do.

    def rate(self, i: int) -> Any:
        """The rate as a number where it is constant, else as a tensor that the graph reads."""
        if self.changing:
            return self.inputs.rates[i]
        return self.experiment.population.rates(1)[i]

    @property
    def step_rate(self) -> Any:
        """The clients' rate for a local step: what is compiled reads it, and so serves all rates."""
        return self.inputs.rates[0] if self.compiles else self.rate(0)

    def _cohort(self) -> Cohort:
        i = self.inputs
        return Cohort(
            round=0,
            clients=i.clients,
            population=len(self.experiment.population),
            weights=i.weights,
            steps=i.counts,
            client_lr=self.rate(0),
            server_lr=self.rate(1),
            slots=i.slots,
            sizes=self.experiment.population.sizes_on(self.device),
            momentum=self.experiment.population.momentum,
        )

    def _test(self, task: Any) -> Callable[[Tensor], Tensor] | None:
        """Return what scores a model on the test samples of ``task``; None if that is done after the round."""
        if not getattr(task, "sums_suffice", False) or self.experiment.config.evaluate_every > 1:
            return None
        evaluated = task.transformable(stacked=False, together=True)
        if not self.compiles:
            scoring = evaluated if self.streams else task
            return lambda w: scoring.score(w, self.test_batch)
        traces = task.traces_of("test_totals", evaluated.test_scaled, given=("x_test", "y_test"))
        test_totals = Compiled(evaluated.test_totals, traces=traces)
        return lambda w: evaluated.score(w, self.test_batch, test_totals)

    def _do_start(self) -> None:
        probed = {k: self.inputs.own[k] for k in self.inputs.own if k not in self.memory_keys}
        down = self.method.broadcast(self.w, self.server, probed if self.method.reports else {}, self._cohort())
        self.down = kept(self.down, down)
        i = self.inputs

        def start(own: State, steps: Tensor) -> Tensor:
            return self.local.start(ClientContext(self.w, self.down | self.one_time_payload, own, self.rate(0), steps))

        i.steps.copy_(i.counts)
        y = vmap(start)(i.own, i.steps)
        self.y = kept({"y": self.y}, {"y": y})["y"]
        self.total.zero_()
        self.training.restart()

    def _do_end(self) -> None:
        i, lr = self.inputs, self.rate(0)

        def finish(y: Tensor, own: State, steps: Tensor) -> tuple[State, State]:
            return self.local.finish(y, ClientContext(self.w, self.down | self.one_time_payload, own, lr, steps))

        up, new_own = vmap(finish)(self.y, i.own, i.steps)
        losses = self.total / i.steps.clamp(min=1)
        good = torch.stack([t.isfinite().all() for t in (*up.values(), *new_own.values(), losses)]).all()
        step = check_step(self.method, self.method.aggregate(self.w, self.server, up, self._cohort()), self.w)
        if (optimizer := self.experiment.policies.optimizer) is not None:
            step = optimized(step, optimizer, self.server, self._cohort())
        w = apply_step_(self.w.clone(), step)
        good = good & w.isfinite().all()
        self.w.copy_(torch.where(good, w, self.w))
        for key, value in step.server.items():
            self.server[key].copy_(torch.where(good, value, self.server[key]))
        self.sent = numbers(self.down.values()), numbers(up.values())
        self.new_own, self.new_slots = kept(self.new_own, new_own), kept(self.new_slots, step.slots)
        trained = (i.steps > 0).to(losses.dtype)
        loss = (losses * trained).sum() / trained.sum()
        final = self.method.evaluated(self.w, self.server)
        scores = [score for test in (self._scores, self._held) if test for score in test(final)]
        self.note_names = list(step.notes)
        notes = [torch.as_tensor(v, device=self.device) for v in step.notes.values()]
        values = [x.double().reshape(()) for x in (good, loss, *scores, *notes)]
        self.report = kept({"r": self.report}, {"r": torch.stack(values)})["r"]

    # Capturing and replaying.

    def _warm(self) -> None:
        """Run everything once, so that compilers and allocators are done, and put the state back."""
        self.memory_keys = set(self.method.init_client(self.w))
        before = self.w.clone(), {k: v.clone() for k, v in self.server.items()}
        self._do_start()
        self._count()
        self.training.warm()
        self._do_end()
        self.w.copy_(before[0])
        for key, value in before[1].items():
            self.server[key].copy_(value)

    def _count(self) -> None:
        """Find out what one local step costs: what is compiled or replayed cannot be counted as it happens."""
        work, i = self.experiment.task.work, self.inputs
        was = replace(work)
        full = torch.ones_like(i.index[0, 0], dtype=torch.bool)
        rows = [i.index[0, 0], full] if i.draws is None else [i.index[0, 0], full, i.draws[0, 0]]
        ctx = ClientContext(
            self.w, self.down | self.one_time_payload, {k: v[0] for k, v in i.own.items()}, self.rate(0), i.steps[0]
        )
        self.local.step(self.task, self.y[0], self.task.fetch(BatchIndices(*rows)), ctx)
        self.gradients, self.passes = work.gradients - was.gradients, work.passes - was.passes

    def _read(self) -> list[float]:
        """Return the report: the one moment in a round at which the host waits."""
        if self.device.type != "cuda":
            return self.report.tolist()
        pinned = torch.empty(self.report.shape, dtype=self.report.dtype, pin_memory=True)
        pinned.copy_(self.report, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        event.synchronize()
        return pinned.tolist()

    def release(self) -> None:
        """Let go of all buffers and graphs; what others still hold stays, the model for one."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # an interrupted round may still be under way
        vars(self.training).clear()
        vars(self).clear()

    def captured(self, do: Callable[[], None], pool: Any = None) -> Callable[[], None]:
        """Return ``do`` as a graph, with a ``pool`` of memory of its own if it may run beside others."""
        self.graphs += 1
        if self.device.type != "cuda":
            return do
        graph = graph_of(do, self.device, pool or self.pool)
        replay: Callable[[], None] = graph.replay
        return replay

    def replay(self, state: RunState, probed: State, plan: BatchPlan, cohort: Cohort) -> Done | None:
        """Run a round on the buffers; None, and nothing changed, if a client sent a non-finite number."""
        if state.w is not self.w:
            self.w.copy_(state.w)
            for key, value in state.server.items():
                self.server[key].copy_(value)
        work = self.experiment.task.work
        was = replace(work)
        order = self._load(state, probed, plan, cohort)
        self._start()
        self.training.replay(plan, order)
        self._end()
        self.experiment.look_ahead(state.round + 2)  # the next round, while this one is computed
        good, loss, *rest = self._read()
        work.reset_to(was)
        if not good:
            if state.w is self.w:
                state.w, state.server = self.w.clone(), {k: v.clone() for k, v in self.server.items()}
            return None
        state.w, state.server = self.w, dict(self.server)
        steps = int(plan.steps.sum())
        work.gradients += self.gradients * steps
        work.passes += self.passes * steps
        scored = _means(rest, self.experiment.task) if self._scores else None
        validated = _means(rest, self.experiment.validate.task) if self._held else None  # type: ignore[union-attr]
        return Done(
            clients=plan.clients[order],
            own=self.new_own,
            slots=self.new_slots,
            loss=loss,
            notes=dict(zip(self.note_names, rest, strict=True)),
            scored=scored,
            validated=validated,
            sent=(self.sent[0], self.sent[1] + (numbers(probed.values()) if self.method.reports else 0)),
        )


def _means(numbers: list[float], task: Any) -> dict[str, float]:
    """Take the totals of the test samples of ``task`` off the front of ``numbers``; return the metrics."""
    totals, numbers[:] = numbers[: task.totals], numbers[task.totals :]
    means: dict[str, float] = task.means(totals)
    return means
