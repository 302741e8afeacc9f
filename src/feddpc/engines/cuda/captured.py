"""Whole rounds replayed from CUDA graphs: local training, server rule and evaluation, without waiting for the host.

A round is three kinds of graphs. ``start`` broadcasts and sets the clients off, ``step`` makes one local step of the
clients that still have some, ``end`` lets the server aggregate and evaluates. They work on buffers that stay where they
are; before a round the host copies the batch plan into them, and after it reads one short report. Clients are sorted by
their number of steps, so that those still training are the first rows; a graph for a step exists for a few numbers of
rows, and a mask keeps the finished ones as they are. Nothing depends on the number of steps, so nothing is captured
again for a cohort of the same size.

A client with a non-finite number makes the whole round void on the device, and the host repeats it with an engine that
screens clients one by one.
"""

from __future__ import annotations

import gc
import warnings
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from feddpc.data.batches import BatchPlan
from feddpc.engines.base import Engine, Trained
from feddpc.engines.cuda.buffers import capturing
from feddpc.engines.cuda.probing import Probing
from feddpc.engines.cuda.session import Done, Session
from feddpc.engines.stacked import Stacked
from feddpc.methods.base import Cohort, Method, State
from feddpc.round.exchange import Exchange, count
from feddpc.tasks.base import Task

if TYPE_CHECKING:
    from feddpc.experiment import Experiment
    from feddpc.round.state import RunState

#: From so many parameters on, clients run on streams of their own instead of in one stack.
LARGE_MODEL = 1 << 20
#: Cohort sizes that are captured; a round with yet another one is run by the fallback.
MOST_SIZES = 4


#: Shapes of a probe that are captured: numbers of clients asked, and of batches of the largest of them.
MOST_PROBES = 24


class Cuda(Engine):
    """Whole rounds on a GPU, captured in CUDA graphs.

    Args:
        compile: compile the steps first: seconds to minutes before round 1, then faster rounds.
        streams: run every client on a stream of its own, instead of all clients in one stack through ``vmap``. By
            default that is decided by the size of the model.
        anywhere: also run without a GPU, where a graph is just the code that it was made of; for tests.
    """

    name: ClassVar[str] = "cuda"

    def __init__(self, *, compile: bool = False, streams: bool | None = None, anywhere: bool = False) -> None:
        self.compile, self.streams, self.anywhere = compile, streams, anywhere
        self.fallback = Stacked()
        self.captures = 0  #: graphs captured so far
        self.void = 0  #: rounds repeated because of a non-finite number
        self._sessions: dict[int, Session] = {}
        self._too_large: set[int] = set()
        self._about: tuple[object, ...] = ()
        self._probes: dict[tuple[int, ...], Probing] = {}
        self._asking: tuple[object, ...] = ()

    def refuses(self, task: Task) -> str | None:
        """Modules that draw for themselves cannot be replayed, and graphs need a GPU."""
        if task.device.type != "cuda" and not self.anywhere:
            return "graphs need a GPU"
        if self.compile and task.host is not None:
            return "compile = true takes samples for constants, but data_memory = 'host' changes them: leave one out"
        return self.fallback.refuses(task)

    @torch.no_grad()
    def probe(self, method: Method, task: Task, w: Tensor, plan: BatchPlan) -> State:
        """Ask all clients at once: from a graph if plans of this shape were captured or may still be."""
        asking = (task, method, _generation(task))
        if asking != self._asking:
            self._forget(self._probes)
            self._asking = asking
        shape = plan.index.shape
        if shape not in self._probes:
            if len(self._probes) >= MOST_PROBES:
                return self.fallback.probe(method, task, w, plan)
            with capturing():
                self._probes[shape] = Probing(method, task, w, plan)
            self.captures += 1
        return self._probes[shape](w, plan)

    def train(
        self, method: Method, task: Task, w: Tensor, broadcast: State, memory: State, plan: BatchPlan, lr: float
    ) -> Trained:
        """Train all clients at once, uncaptured."""
        return self.fallback.train(method, task, w, broadcast, memory, plan, lr)

    def exchange(
        self, experiment: Experiment, method: Method, state: RunState, plan: BatchPlan, cohort: Cohort, probes: State
    ) -> Exchange:
        """Replay training, server step and evaluation from graphs; where that is not possible, run them one by one."""
        # Noise is drawn, faults are made and rules are applied between training and the step.
        whole = not experiment.policies
        done = self.replay(experiment, method, state, probes, plan, cohort) if whole else None
        if done is None:
            return super().exchange(experiment, method, state, plan, cohort, probes)
        state.slots.write(done.clients, done.slots, plan.clients)
        state.clients.write(done.clients, done.own, plan.clients)
        count(experiment, state, plan.clients, *done.sent, len(state.slots))
        return Exchange(plan.clients, done.loss, done.notes, score=done.scored, validation=done.validated)

    @torch.no_grad()
    def replay(
        self, experiment: Experiment, method: Method, state: RunState, probed: State, plan: BatchPlan, cohort: Cohort
    ) -> Done | None:
        """Replay a round; None if it cannot be captured, or was void."""
        config = experiment.config
        evaluation = experiment.evaluates, experiment.validate, _generation(experiment.task)
        rules = experiment.local(method), experiment.policies.optimizer, experiment.population.rates_change
        about = (experiment.task, method, *rules, config.lr, config.server_lr, evaluation)
        if about != self._about:
            self._forget(self._sessions)
            self._about = about
        m = len(plan.clients)
        session = self._sessions.get(m)
        if session is None:
            if len(self._sessions) >= MOST_SIZES:
                return None
            if m in self._too_large:
                return None
            session = self._session(experiment, method, state, probed, cohort)
            if session is None:
                self._too_large.add(m)
                warnings.warn(f"no device memory to capture rounds of {m} clients: going on without", stacklevel=2)
                return None
            self._sessions[m] = session
            self.captures += session.graphs
        done = session.replay(state, probed, plan, cohort)
        self.void += done is None
        return done

    def release(self) -> None:
        """Free all graphs."""
        self._forget(self._sessions)
        self._forget(self._probes)

    def _forget(self, graphs: dict[Any, Any]) -> None:
        """Free graphs now: their parts refer to each other, and many gigabytes would wait for the garbage collector.

        Not while another run captures, which that would break.
        """
        if not graphs:
            return
        with capturing():
            while graphs:
                graphs.popitem()[1].release()

    def _session(self, experiment: Experiment, *about: Any) -> Session | None:
        """Capture; if memory does not suffice, once more after all garbage was cleared away, then None."""
        streams = experiment.task.d >= LARGE_MODEL if self.streams is None else self.streams
        for _ in range(2):
            try:
                with capturing():
                    return Session(experiment, *about, streams=streams, compiles=self.compile)
            except torch.OutOfMemoryError:
                pass
            # Outside the handler, which would keep the failed attempt alive.
            with capturing():
                gc.collect()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
        return None


def _generation(task: Task) -> int:
    """Return how often the tensors with the samples of a task were replaced, which graphs read."""
    return 0 if task.host is None else task.host.generation
