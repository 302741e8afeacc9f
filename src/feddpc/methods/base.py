"""A method is a list of departures from FedAvg.

The client half is written for one client, on vectors ``[d]``; the server half for the stack of the cohort, ``[m, d]``.
Nothing in a method knows which engine runs it. Hooks are pure and do not branch on the values of tensors, so that they
can be vectorised, compiled and captured, and so that the client half can run on another machine.

One sign everywhere: ``delta = w_before - w_after``, always subtracted. ``D = delta / client_lr`` is the accumulated
gradient.
"""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from feddpc.methods._algebra import descended
from feddpc.methods.description import Costs as Costs
from feddpc.methods.description import Described
from feddpc.methods.federated_data import FederatedData
from feddpc.methods.values import ClientContext as ClientContext
from feddpc.methods.values import Cohort as Cohort
from feddpc.methods.values import State as State
from feddpc.methods.values import Step as Step
from feddpc.methods.values import Transformed as Transformed
from feddpc.tasks.base import LARGE, Batch, BatchIndices, Task, by_autograd

#: What a method may change before there is a federation.
DATA_HOOKS = ("reserve", "adapt", "learn", "extend_data", "initial")
Mask = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Method(Described):
    """FedAvg; subclasses override what they do otherwise. Hyper-parameters are the dataclass's fields."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Warn of a function that looks like a misspelt hook: it would never be called."""
        super().__init_subclass__(**options)
        hooks = [name for name in dir(Method) if not name.startswith("_")] if cls.__bases__ != (object,) else []
        for name, value in vars(cls).items():
            if inspect.isfunction(value) and name not in hooks and not name.startswith("_"):
                for hook in difflib.get_close_matches(name, hooks, n=1, cutoff=0.9):
                    warnings.warn(f"{cls.__name__}.{name} is never called: did you mean {hook}?", stacklevel=2)

    # Once, before there is a federation.

    @property
    def reserve(self) -> float:
        """The share of the training set that the server must keep from the clients, before the data are partitioned."""
        return 0.0

    def adapt(self, module: nn.Module) -> nn.Module:
        """The network that is trained; ``module`` is a copy that may be changed."""
        return module

    def learn(self, world: FederatedData) -> State:
        """What is computed once from the clients' data before round 1; it is stored with the run."""
        return {}

    def extend_data(self, world: FederatedData, learned: State) -> FederatedData:
        """The data that clients train on, e.g. with more samples; a pure function of its arguments."""
        return world

    def initial(self, task: Task, w: Tensor, world: FederatedData) -> Tensor:
        """The model before round 1."""
        return w

    # Once, before round 1.

    def init_server(self, w: Tensor, population: int) -> State:
        """What the server remembers between rounds, at the start."""
        return {}

    def init_slot(self, w: Tensor) -> State:
        """What the server remembers about one client, when that client is first seen."""
        return {}

    def init_client(self, w: Tensor) -> State:
        """What a client remembers between its participations, when it is first seen."""
        return {}

    # Each round, server to clients.

    @property
    def probes(self) -> bool:
        """Whether a round starts with an extra exchange, :meth:`probe`."""
        return False

    @property
    def reports(self) -> bool:
        """Whether the answers to the probe travel to the server; if not, clients keep them to themselves."""
        return self.probes

    @property
    def surveys(self) -> bool:
        """Whether all clients of the population answer the probe once, before round 1."""
        return False

    def probe(self, task: Task, w: Tensor, data: Iterable[BatchIndices]) -> State:
        """What ONE client answers before training; it also finds it in ``own`` during this round."""
        return {}

    def default_probe(self, w: Tensor) -> State:
        """What stands for the answer of a client that was not asked, where :meth:`probe_mask` leaves some out."""
        return {}

    def client_state_from_probe(self, answers: State) -> State:
        """The memories of clients, stacked, after they answered the survey."""
        return {}

    def server_state_from_probe(self, server: State, mean: State) -> State:
        """The server's memory after the survey; ``mean`` is that of all answers."""
        return server

    def probe_mask(self, cohort: Cohort) -> Mask | None:
        """Which clients of the cohort answer the probe, ``[m]``; None means all."""
        return None

    def train_mask(self, cohort: Cohort) -> Mask | None:
        """Which clients of the cohort train, ``[m]``; the others make no local step. None means all."""
        return None

    def broadcast(self, w: Tensor, server: State, probed: State, cohort: Cohort) -> State:
        """What travels to every client of the cohort besides ``w``."""
        return {}

    # Each round, ONE client; y is its local model.

    def start(self, ctx: ClientContext) -> Tensor:
        """Where local training starts: a vector, or a stack of vectors where a step needs more than the local model."""
        return ctx.w

    def objective(self, task: Task, y: Tensor, batch: Batch, ctx: ClientContext) -> Tensor:
        """What a local step differentiates."""
        return task.loss(y, batch)

    def correct(self, g: Tensor, y: Tensor, ctx: ClientContext) -> Tensor:
        """The direction that is followed instead of the gradient ``g``."""
        return g

    def local_direction(self, task: Task, y: Tensor, batch: Batch, ctx: ClientContext) -> tuple[Tensor, Tensor]:
        """What a local step follows, downhill, and the value of the objective; a client optimizer steps along it."""
        value, g = task.value_and_grad(lambda at: self.objective(task, at, batch, ctx), y)
        return self.correct(g, y, ctx), value

    def step(self, task: Task, y: Tensor, batch: Batch, ctx: ClientContext) -> tuple[Tensor, Tensor]:
        """One local step: the new ``y`` and the value of the objective before it."""
        g, value = self.local_direction(task, y, batch, ctx)
        if y.numel() >= LARGE and y.ndim == 1 and task.differentiate is by_autograd and self._follows_the_gradient:
            return descended(y, ctx.lr, g), value  # nothing else uses this gradient
        return y - ctx.lr * g, value

    @property
    def _follows_the_gradient(self) -> bool:
        return not (overrides(self, "correct") or overrides(self, "local_direction"))

    @property
    def needs_plain_steps(self) -> tuple[str, ...]:
        """What the clients' optimizer must not have, because the method reads gradients off what clients moved.

        Among ``momentum``, ``nesterov``, ``adam`` and ``clip_norm``.
        """
        return ()

    def finish(self, y: Tensor, ctx: ClientContext) -> tuple[State, State]:
        """What the client sends, and its new memory (exactly the keys of :meth:`init_client`)."""
        return {"delta": ctx.w - y}, {}

    # Each round, server; ``up`` stacks what the cohort sent.

    def transform(self, server: State, up: State, cohort: Cohort) -> tuple[Transformed, State]:
        """What the server makes of each upload, one row per client, and what is reported of it.

        These rows are what a robust rule judges, what privacy clips, and what :meth:`combine` averages. The default is
        the uploads as they are.
        """
        return up, {}

    def combine(self, w: Tensor, server: State, rows: Transformed, cohort: Cohort) -> Step:
        """The server's step from transformed rows; default ``w_t = w_{t-1} - eta_g mean(D)``."""
        return Step(cohort.mean(rows["delta"]), rate=cohort.server_lr / cohort.client_lr)

    def aggregate(self, w: Tensor, server: State, up: State, cohort: Cohort) -> Step:
        """The whole server rule: :meth:`combine` after :meth:`transform`. Nothing handed in is changed."""
        rows, notes = self.transform(server, up, cohort)
        step = self.combine(w, server, rows, cohort)
        return replace(step, notes={**step.notes, **notes}) if notes else step

    def check_rule(self) -> None:
        """Raise if the method cannot be run with a robust rule."""
        return

    def on_empty_round(self, server: State) -> State:
        """The server's memory after a round without uploads; the model stays as it is."""
        return server

    def evaluated(self, w: Tensor, server: State) -> Tensor:
        """The model that is evaluated after a round; ``w`` itself, unless the authors look at another point."""
        return w

    def personal(self, task: Task, w: Tensor, state: State) -> Tensor:
        """The model that ONE client with memory ``state`` uses where the global one is ``w``; usually that one."""
        return w


def overrides(method: Method, hook: str) -> bool:
    """Say whether ``method`` does something of its own at ``hook``."""
    return getattr(type(method), hook) is not getattr(Method, hook)
