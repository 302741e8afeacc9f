"""The graphs of one method for one size of the cohort, and the buffers they work on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap

from feddpc.data.batches import Plan
from feddpc.engine.base import Done, placed
from feddpc.engine.buffers import Inputs, kept, no_collection, row_classes
from feddpc.engine.meter import numbers
from feddpc.methods.base import Cohort, Local, Method, State
from feddpc.task import Rows

if TYPE_CHECKING:
    from feddpc.engine.rounds import Federation, Progress

#: Test images in one pass of a captured evaluation.
TEST_BATCH = 2500


class Session:
    """The graphs of one method for one size of the cohort."""

    def __init__(
        self,
        federation: Federation,
        method: Method,
        progress: Progress,
        probed: State,
        cohort: Cohort,
        *,
        streams: bool,
        compiles: bool,
    ) -> None:
        self.federation, self.method, self.streams = federation, method, streams
        self.graphs = 0  #: captured so far
        self.task = federation.task.transformable(stacked=not streams)
        w = progress.w
        self.device, m = w.device, len(cohort.clients)
        self.w, self.server = w.clone(), {k: v.clone() for k, v in progress.server.items()}
        planner = federation.planner
        most = int(planner.steps(planner.partition.sizes).max())
        width = min(planner.batch_size, int(planner.partition.sizes.max()))
        self.decays = federation.lr_decay != 1
        self.inputs = self._buffers(most, m, width, cohort, progress, probed)
        self.kit = federation.kit
        self.k = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.down: State = {}
        self.y, self.total = torch.empty(0), torch.zeros(m, dtype=w.dtype, device=self.device)
        self.up: State = {}
        self.new_own: State = {}
        self.new_slots: State = {}
        self.note_names: list[str] = []
        self.report = torch.zeros(0)
        self._one = torch.compile(self._vectorised(), dynamic=False) if compiles else self._vectorised()
        score = getattr(federation.task, "score", None) if federation.evaluate is not None else None
        self._score = torch.compile(score, dynamic=False) if compiles and score else score
        self.sizes = row_classes(m, every=streams or not compiles)
        self.lanes: list[Any] = []
        if streams and w.is_cuda:
            self.lanes = [torch.cuda.Stream() for _ in range(m)]  # type: ignore[no-untyped-call]
        self.pool: Any = None
        was = replace(federation.task.tally)
        self._warm()
        self._start = self._captured(self._do_start)
        self._steps = {n: self._captured(partial(self._do_step, n)) for n in self.sizes}
        self._end = self._captured(self._do_end)
        federation.task.tally.gradients, federation.task.tally.passes = was.gradients, was.passes

    # Buffers.

    def _buffers(self, most: int, m: int, width: int, cohort: Cohort, progress: Progress, probed: State) -> Inputs:
        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        shift = self.federation.planner.shift
        own = {**progress.clients.read(np.zeros(m, np.int64)), **probed}
        return Inputs(
            index=empty(most, m, width, dtype=torch.int64),
            mask=empty(most, m, width, dtype=torch.bool),
            draws=empty(most, m, width, 3, dtype=torch.int16) if shift else None,
            clients=cohort.clients.clone(),
            weights=cohort.weights.clone(),
            shares=None if cohort.shares is None else cohort.shares.clone(),
            counts=cohort.steps.clone(),
            steps=empty(m, dtype=self.w.dtype),
            rates=torch.tensor([cohort.client_lr, cohort.server_lr], dtype=torch.float64, device=self.device),
            own={k: v.clone() for k, v in own.items()},
            slots={k: v.clone() for k, v in cohort.slots.items()},
        )

    def _load(self, progress: Progress, probed: State, plan: Plan, cohort: Cohort) -> NDArray[np.int64]:
        """Copy a round's plan and memories into the buffers, clients with many steps first; return that order."""
        order = np.argsort(-plan.steps, kind="stable")
        i, K, B = self.inputs, int(plan.steps.max()), plan.index.shape[2]
        self._put(i.index[:K, :, :B], plan.index[order, :K].swapaxes(0, 1))
        mask = np.arange(B) < plan.count[order, :K, None].swapaxes(0, 1)
        self._put(i.mask[:K, :, :B], mask)
        if i.mask.shape[2] > B:
            i.mask[:K, :, B:] = False
        if i.draws is not None and plan.draws is not None:
            self._put(i.draws[:K, :, :B], plan.draws[order, :K].swapaxes(0, 1))
        self._put(i.clients, plan.clients[order])
        self._put(i.counts, plan.steps[order].astype(np.float64))
        self._put(i.steps, plan.steps[order].astype(np.float64))
        there = placed(order, self.device)
        torch.index_select(cohort.weights, 0, there, out=i.weights)
        if i.shares is not None and cohort.shares is not None:
            torch.index_select(cohort.shares, 0, there, out=i.shares)
        if self.decays:
            self._put(i.rates, np.array([cohort.client_lr, cohort.server_lr]))
        if i.own:
            state = {**progress.clients.read(plan.clients[order]), **{k: v[there] for k, v in probed.items()}}
            for key, value in state.items():
                i.own[key].copy_(value)
        for key, value in cohort.slots.items():
            i.slots[key].copy_(value[there])
        return order

    def _put(self, place: Tensor, values: NDArray[Any]) -> None:
        """Copy from the host without waiting."""
        place.copy_(placed(values, self.device), non_blocking=True)

    # What the graphs do.

    def _vectorised(self) -> Callable[..., tuple[Tensor, Tensor]]:
        method, task = self.method, self.task

        def one(
            y: Tensor, w: Tensor, down: State, own: State, lr: Any, steps: Tensor, live: Tensor, *rows: Tensor
        ) -> tuple[Tensor, Tensor]:
            new, loss = method.step(task, y, task.fetch(Rows(*rows)), Local(w, down, own, lr, steps))
            return torch.where(live, new, y), torch.where(live, loss, 0.0)

        if self.streams:
            return one
        rows = 3 if self.federation.planner.shift else 2
        return vmap(one, in_dims=(0, None, None, 0, None, 0, 0, *(0 for _ in range(rows))))

    def _rate(self, i: int) -> Any:
        """The rate as a number where it is constant, else as a tensor that the graph reads."""
        if self.decays:
            return self.inputs.rates[i]
        return (self.federation.client_lr, self.federation.server_lr)[i]

    def _cohort(self) -> Cohort:
        i = self.inputs
        return Cohort(
            round=0,
            clients=i.clients,
            population=self.federation.population,
            weights=i.weights,
            steps=i.counts,
            client_lr=self._rate(0),
            server_lr=self._rate(1),
            slots=i.slots,
            shares=i.shares,
        )

    def _do_start(self) -> None:
        probed = {k: self.inputs.own[k] for k in self.inputs.own if k not in self.memory_keys}
        down = self.method.broadcast(self.w, self.server, probed if self.method.reports else {}, self._cohort())
        self.down = kept(self.down, down)
        i = self.inputs

        def start(own: State, steps: Tensor) -> Tensor:
            return self.method.start(Local(self.w, self.down | self.kit, own, self._rate(0), steps))

        y = vmap(start)(i.own, i.steps)
        self.y = kept({"y": self.y}, {"y": y})["y"]
        self.total.zero_()
        self.k.zero_()

    def _do_step(self, n: int) -> None:
        i = self.inputs
        rows = [t.index_select(0, self.k)[0, :n] for t in (i.index, i.mask, i.draws) if t is not None]
        live = i.steps[:n] > self.k
        own = {k: v[:n] for k, v in i.own.items()}
        down, lr = self.down | self.kit, self._rate(0)
        if self.streams:
            self._on_lanes(n, own, down, lr, live, rows)
        else:
            new, loss = self._one(self.y[:n], self.w, down, own, lr, i.steps[:n], live, *rows)
            self.y[:n].copy_(new)
            self.total[:n] += loss
        self.k += 1

    def _on_lanes(self, n: int, own: State, down: State, lr: Any, live: Tensor, rows: list[Tensor]) -> None:
        main = torch.cuda.current_stream() if self.lanes else None
        for j in range(n):
            args = (self.w, down, {k: v[j] for k, v in own.items()}, lr, self.inputs.steps[j], live[j])
            if main is None:
                self._set(j, *self._one(self.y[j], *args, *(r[j] for r in rows)))
                continue
            lane = self.lanes[j]
            lane.wait_stream(main)
            with torch.cuda.stream(lane):
                self._set(j, *self._one(self.y[j], *args, *(r[j] for r in rows)))
        if main is not None:
            for j in range(n):
                main.wait_stream(self.lanes[j])

    def _set(self, j: int, new: Tensor, loss: Tensor) -> None:
        self.y[j].copy_(new)
        self.total[j] += loss

    def _do_end(self) -> None:
        i, lr = self.inputs, self._rate(0)

        def finish(y: Tensor, own: State, steps: Tensor) -> tuple[State, State]:
            return self.method.finish(y, Local(self.w, self.down | self.kit, own, lr, steps))

        up, new_own = vmap(finish)(self.y, i.own, i.steps)
        losses = self.total / i.steps.clamp(min=1)
        good = torch.stack([t.isfinite().all() for t in (*up.values(), *new_own.values(), losses)]).all()
        step = self.method.aggregate(self.w, self.server, up, self._cohort())
        w = step.apply_(self.w.clone())
        good = good & w.isfinite().all()
        self.w.copy_(torch.where(good, w, self.w))
        for key, value in step.server.items():
            self.server[key].copy_(torch.where(good, value, self.server[key]))
        self.sent = numbers(self.down.values()), numbers(up.values())
        self.new_own, self.new_slots = kept(self.new_own, new_own), kept(self.new_slots, step.slots)
        trained = (i.steps > 0).to(losses.dtype)
        loss = (losses * trained).sum() / trained.sum()
        nothing = torch.zeros((), dtype=torch.float64, device=self.device)
        correct, test_loss = (
            self._score(self.method.evaluated(self.w, self.server), TEST_BATCH) if self._score else (nothing, nothing)
        )
        self.note_names = list(step.notes)
        notes = [torch.as_tensor(v, device=self.device) for v in step.notes.values()]
        values = [x.double().reshape(()) for x in (good, loss, correct, test_loss, *notes)]
        self.report = kept({"r": self.report}, {"r": torch.stack(values)})["r"]

    # Capturing and replaying.

    def _warm(self) -> None:
        """Run everything once, so that compilers and allocators are done, and put the state back."""
        self.memory_keys = set(self.method.init_client(self.w))
        before = self.w.clone(), {k: v.clone() for k, v in self.server.items()}
        self._do_start()
        self._count()
        for n in self.sizes:
            self.k.zero_()
            self._do_step(n)
        self._do_end()
        self.w.copy_(before[0])
        for key, value in before[1].items():
            self.server[key].copy_(value)

    def _count(self) -> None:
        """Find out what one local step costs: what is compiled or replayed cannot be counted as it happens."""
        tally, i = self.federation.task.tally, self.inputs
        was = replace(tally)
        rows = [t[0, 0] for t in (i.index, i.mask, i.draws) if t is not None]
        here = Local(self.w, self.down | self.kit, {k: v[0] for k, v in i.own.items()}, self._rate(0), i.steps[0])
        self.method.step(self.task, self.y[0], self.task.fetch(Rows(*rows)), here)
        self.gradients, self.passes = tally.gradients - was.gradients, tally.passes - was.passes

    def _read(self) -> list[float]:
        """Return the report: the one moment in a round at which the host waits."""
        if self.device.type != "cuda":
            return self.report.tolist()
        here = torch.empty(self.report.shape, dtype=self.report.dtype, pin_memory=True)
        here.copy_(self.report, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        event.synchronize()
        return here.tolist()

    def _captured(self, do: Callable[[], None]) -> Callable[[], None]:
        self.graphs += 1
        if self.device.type != "cuda":
            return do
        graph = torch.cuda.CUDAGraph()
        with no_collection(), torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            do()
        self.pool = self.pool or graph.pool()
        return graph.replay

    def replay(self, progress: Progress, probed: State, plan: Plan, cohort: Cohort) -> Done | None:
        """Run a round on the buffers; None, and nothing changed, if a client sent a non-finite number."""
        if progress.w is not self.w:
            self.w.copy_(progress.w)
            for key, value in progress.server.items():
                self.server[key].copy_(value)
        tally, steps = self.federation.task.tally, int(plan.steps.sum())
        was = replace(tally)
        order = self._load(progress, probed, plan, cohort)
        self._start()
        for k in range(int(plan.steps.max())):
            live = int((plan.steps > k).sum())
            self._steps[min(n for n in self.sizes if n >= live)]()
        self._end()
        self.federation.look_ahead(progress.round + 2)  # the next round, while this one is computed
        good, loss, correct, test_loss, *notes = self._read()
        tally.gradients, tally.passes = was.gradients + self.gradients * steps, was.passes + self.passes * steps
        if not good:
            if progress.w is self.w:
                progress.w, progress.server = self.w.clone(), {k: v.clone() for k, v in self.server.items()}
            return None
        progress.w, progress.server = self.w, dict(self.server)
        back = placed(np.argsort(order), self.device)
        size = len(self.federation.task.y_test) if self._score else 1  # type: ignore[attr-defined]
        scored = (correct / size, test_loss / size) if self._score else (math.nan, 0.0)
        return Done(
            own={k: v[back] for k, v in self.new_own.items()},
            slots={k: v[back] for k, v in self.new_slots.items()},
            loss=loss,
            notes=dict(zip(self.note_names, notes, strict=True)),
            scored=scored,
            sent=(self.sent[0], self.sent[1] + (numbers(probed.values()) if self.method.reports else 0)),
        )
