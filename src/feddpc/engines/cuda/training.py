"""Local training from graphs: all clients of a stack at once, or every client on a stream of its own."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap

from feddpc.data.batches import BatchPlan
from feddpc.engines.cuda.buffers import row_classes, width_classes
from feddpc.engines.cuda.compiling import Compiled
from feddpc.methods.base import ClientContext, Method, State, overrides
from feddpc.tasks.base import BatchIndices

if TYPE_CHECKING:
    from feddpc.engines.cuda.session import Session


class Training(ABC):
    """The local steps of a session: how they are captured, and which graphs make a round."""

    def __init__(self, session: Session, *, compiles: bool) -> None:
        self.session, self.compiles = session, compiles

    def _made(self, step: Callable[..., None]) -> Callable[..., None]:
        """Return ``step``, which wants a method first, as a function of its other arguments.

        The compiled step reads hyper-parameters as tensors, so that one program serves all their values. Methods of
        users are compiled for the values that they have.
        """
        method, task = self.session.local, self.session.task
        if not self.compiles:
            return partial(step, method)
        if (common := step_of(method)) is None:
            return Compiled(partial(step, method))
        kind, numbers = common
        tensors = {k: torch.tensor(v, dtype=torch.float64, device=self.session.device) for k, v in numbers.items()}
        program = Compiled(
            lambda hyper, *args: step(reading(method, hyper), *args),
            lambda _, *args: step(method, *args),
            traces=task.traces_of(type(self), kind),
        )
        return partial(program, tensors)

    @abstractmethod
    def restart(self) -> None:
        """Go back to the first step; captured with what sets the clients off."""

    @abstractmethod
    def warm(self) -> None:
        """Run everything that will be captured once, so that compilers and allocators are done."""

    @abstractmethod
    def capture(self) -> None:
        """Capture it."""

    @abstractmethod
    def replay(self, plan: BatchPlan, order: NDArray[np.int64]) -> None:
        """Make all steps of a round, clients in the given order."""

    def _rows(self, k: Tensor) -> list[Tensor]:
        """Return what :class:`BatchIndices` wants of the step that ``k`` counts."""
        i = self.session.inputs
        index, count = (t.index_select(0, k)[0] for t in (i.index, i.count))
        mask = torch.arange(index.shape[-1], device=index.device) < count[..., None]
        return [index, mask] if i.draws is None else [index, mask, i.draws.index_select(0, k)[0]]


class Stack(Training):
    """All clients that still train, as one stack; a mask keeps the finished ones among them as they are."""

    def __init__(self, session: Session, *, compiles: bool) -> None:
        super().__init__(session, compiles=compiles)
        task, extra = session.task, session.inputs.draws is not None
        dims = (0, None, None, 0, None, 0, 0, *(0 for _ in range(2 + extra)))

        def step(method: Method, y: Tensor, total: Tensor, *args: Any) -> None:
            def one(
                y: Tensor, w: Tensor, down: State, own: State, lr: Any, steps: Tensor, live: Tensor, *rows: Tensor
            ) -> tuple[Tensor, Tensor]:
                new, loss = method.step(
                    task, y, task.fetch(BatchIndices(*rows)), ClientContext(w, down, own, lr, steps)
                )
                return torch.where(live, new, y), torch.where(live, loss, 0.0)

            new, loss = vmap(one, in_dims=dims)(y, *args)
            y.copy_(new)
            total.add_(loss)

        self._step = self._made(step)
        self.sizes = row_classes(len(session.inputs.steps), every=not compiles)
        self.k = torch.zeros(1, dtype=torch.int64, device=session.device)

    def restart(self) -> None:
        """Count steps from zero."""
        self.k.zero_()

    def warm(self) -> None:
        """Make a step for every number of clients."""
        for n in self.sizes:
            self.restart()
            self._do(n)

    def capture(self) -> None:
        """Capture a step for every number of clients."""
        self._graphs = {n: self.session.captured(partial(self._do, n)) for n in self.sizes}

    def replay(self, plan: BatchPlan, order: NDArray[np.int64]) -> None:
        """Make one step after the other, with the least stack that holds those who still train."""
        for k in range(int(plan.steps.max())):
            live = int((plan.steps > k).sum())
            self._graphs[min(n for n in self.sizes if n >= live)]()

    def _do(self, n: int) -> None:
        session, i = self.session, self.session.inputs
        own = {k: v[:n] for k, v in i.own.items()}
        rows = [t[:n] for t in self._rows(self.k)]
        live = i.steps[:n] > self.k
        context = session.w, session.down | session.one_time_payload, own, session.step_rate, i.steps[:n]
        self._step(session.y[:n], session.total[:n], *context, live, *rows)
        self.k += 1


class Lanes(Training):
    """Every client on a stream of its own, at its own pace, with as many samples as its batch has or few more."""

    def __init__(self, session: Session, *, compiles: bool) -> None:
        super().__init__(session, compiles=compiles)
        task = session.task

        def step(
            method: Method,
            y: Tensor,
            total: Tensor,
            w: Tensor,
            down: State,
            own: State,
            lr: Any,
            steps: Tensor,
            *rows: Tensor,
        ) -> None:
            batch, ctx = task.fetch(BatchIndices(*rows)), ClientContext(w, down, own, lr, steps)
            if overrides(method, "step"):
                new, loss = method.step(task, y, batch, ctx)
                y.copy_(new)
            else:  # the plain step, in place: a model is read and written once
                g, loss = method.local_direction(task, y, batch, ctx)
                y.addcmul_(g, lr, value=-1) if isinstance(lr, Tensor) else y.sub_(g, alpha=lr)
            total.add_(loss)

        self._step = self._made(step)
        _, m, width = session.inputs.index.shape
        self.widths = width_classes(width, parts=2 if compiles else 4)
        self.k = torch.zeros(m, dtype=torch.int64, device=session.device)
        self.streams: list[Any] = [None] * m
        if session.device.type == "cuda":
            self.streams = [torch.cuda.Stream(session.device) for _ in range(m)]  # type: ignore[no-untyped-call]

    def restart(self) -> None:
        """Count steps from zero."""
        self.k.zero_()

    def warm(self) -> None:
        """Make a step for every number of samples."""
        for width in self.widths:
            self.restart()
            self._do(0, width)

    def capture(self) -> None:
        """Capture a step of every client for every number of samples; what a client needs for it is its own."""
        self._graphs = []
        for j, stream in enumerate(self.streams):
            pool = None if stream is None else torch.cuda.graph_pool_handle()
            do = [partial(self._do, j, width) for width in self.widths]
            self._graphs.append([self.session.captured(step, pool) for step in do])

    def replay(self, plan: BatchPlan, order: NDArray[np.int64]) -> None:
        """Let all clients go, and wait for them on the device."""
        counts, steps = plan.count[order], plan.steps[order]
        main: Any = torch.cuda.current_stream() if self.session.device.type == "cuda" else None
        for stream in self.streams if main else ():
            stream.wait_stream(main)
        for k in range(int(steps.max())):
            for j in np.flatnonzero(steps > k):
                fit = max(i for i, width in enumerate(self.widths) if width >= counts[j, k])
                if main is None:
                    self._graphs[j][fit]()
                    continue
                with torch.cuda.stream(self.streams[j]):
                    self._graphs[j][fit]()
        for stream in self.streams if main else ():
            main.wait_stream(stream)

    def _do(self, j: int, width: int) -> None:
        session, i, k = self.session, self.session.inputs, self.k[j : j + 1]
        own = {key: v[j] for key, v in i.own.items()}
        rows = [t[j, :width] for t in self._rows(k)]
        context = session.w, session.down | session.one_time_payload, own, session.step_rate, i.steps[j]
        self._step(session.y[j], session.total[j], *context, *rows)
        k += 1


def step_of(method: Method) -> tuple[object, dict[str, float]] | None:
    """Return what methods have in common that make the same local step, and the numbers in which it may differ.

    None for a method with a step of its own that is not one of this library's, which are what their fields say.

    >>> from feddpc import methods
    >>> step_of(methods.create("feddpc")) == step_of(methods.create("fedavg"))  # the plain step
    True
    >>> step_of(methods.create("fedprox", mu=0.5))
    ((<class 'feddpc.methods.fedprox.FedProx'>, '{}'), {'mu': 0.5})
    """
    if not any(overrides(method, hook) for hook in ("step", "local_direction", "objective", "correct")):
        return Method, {}
    if not type(method).__module__.startswith("feddpc.methods."):
        return None
    hyper = method.hyper()
    numbers = {k: v for k, v in hyper.items() if isinstance(v, float)}
    return (type(method), repr({k: v for k, v in hyper.items() if k not in numbers})), numbers


def reading(method: Method, values: State) -> Method:
    """Return a copy of ``method`` that has tensors for some of its hyper-parameters, which are not checked again."""
    other = copy.copy(method)
    for name, value in values.items():
        object.__setattr__(other, name, value)
    return other
