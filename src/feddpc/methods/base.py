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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from feddpc.errors import BadInputError
from feddpc.methods._algebra import exact_sum, weighted_sum
from feddpc.methods.federated_data import FederatedData
from feddpc.optimizers import ServerOptimizer
from feddpc.rng import generator
from feddpc.tasks.base import Batch, BatchIndices, Task

State = dict[str, Tensor]
#: Rows per client by name: a stack, or something that can be iterated row by row and averaged, as FedDPC's residuals.
Transformed = Mapping[str, Any]
#: What a method may change before there is a federation.
DATA_HOOKS = ("reserve", "adapt", "learn", "extend_data", "initial")
Mask = NDArray[np.bool_]


class ClientContext(NamedTuple):
    """What one client knows during one round."""

    w: Tensor  #: the global model it received, ``w_{t-1}``
    broadcast: State  #: what else the server sent, in this round or once before round 1 (the one-time payload)
    state: State  #: what the client remembers, and in this round what it answered to the probe
    lr: float  #: the local learning rate ``eta_l``
    steps: Tensor  #: ``K_j``, how many local steps it makes in this round


@dataclass(frozen=True)
class Cohort:
    """What the server knows about the clients whose answers it aggregates."""

    round: int
    clients: Tensor  #: ids, ``[m]``
    population: int  #: ``N``
    weights: Tensor  #: float64, sums to 1, ``[m]``
    steps: Tensor  #: ``K_j``, ``[m]``
    client_lr: float  #: ``eta_l``
    server_lr: float  #: ``eta_g``
    slots: State = field(default_factory=dict)  #: what the server remembers of these clients
    sizes: Tensor | None = None  #: samples per client of the population, where clients count by samples, ``[N]``
    seed: int = 0  #: of the experiment
    samples: Tensor | None = None  #: samples per client of the cohort, where clients count by samples, ``[m]``
    momentum: float = 0.0  #: of the clients' local steps

    def select(self, mask: Tensor) -> Cohort:
        """Return the cohort of the clients that ``mask`` marks; their weights add up to one again."""
        clients, samples = self.clients[mask], None if self.samples is None else self.samples[mask]
        if samples is None:
            m = len(clients)
            weights = torch.full((m,), 1 / max(m, 1), dtype=torch.float64, device=clients.device)
        else:
            weights = samples.double() / samples.sum()
        return replace(
            self,
            clients=clients,
            weights=weights,
            steps=self.steps[mask],
            slots={key: rows[mask] for key, rows in self.slots.items()},
            samples=samples,
        )

    def mean(self, x_md: Tensor) -> Tensor:
        """Average a stack over the cohort (uniformly, unless the experiment weights by samples)."""
        return weighted_sum(self.weights, x_md)

    def total(self, x_md: Tensor) -> Tensor:
        """Return these clients' part of the mean over ALL clients, ``1/N sum_S x_j``, in float64."""
        if self.sizes is None:
            return exact_sum(x_md) / self.population
        return exact_sum(x_md, self.sizes[self.clients].double() / self.sizes.sum())

    def group_shares(self, group_n: Tensor, count: int) -> Tensor:
        """Return the share of each of ``count`` groups in the population; ``group_n`` is the group of every client.

        Sizes are whole numbers, so the sums are exact and do not depend on the order of a GPU's additions.
        """
        sizes = torch.ones_like(group_n) if self.sizes is None else self.sizes
        held = torch.zeros(count, dtype=torch.int64, device=sizes.device).index_add_(0, group_n, sizes)
        return held.double() / sizes.sum()

    def uniforms(self, purpose: str) -> NDArray[np.float64]:
        """Return a uniform number in [0, 1) for each client, ``[m]``, the same for any other participants."""
        return np.array([generator(self.seed, purpose, self.round, int(c)).random() for c in self.clients])


@dataclass(frozen=True)
class Step:
    """What the server rule returns: where to go, ``w_t = w_{t-1} - rate * update``, and what to remember and report.

    Every rule is such a step, and leaving the subtraction to the engine lets it keep one model in one place.
    """

    update: Tensor
    rate: float | Tensor
    server: State = field(default_factory=dict)
    slots: State = field(default_factory=dict)
    notes: Mapping[str, Tensor | float] = field(default_factory=dict)

    def apply_(self, w: Tensor) -> Tensor:
        """Move ``w``, in place."""
        if isinstance(self.rate, Tensor):
            return w.addcmul_(self.update, -self.rate.to(w.dtype))
        return w.add_(self.update, alpha=-self.rate)

    def optimized(self, optimizer: ServerOptimizer, state: State, cohort: Cohort) -> tuple[Step, State]:
        """Return the step that a server optimizer makes of this one, and the optimizer's new ``state``."""
        delta = self.update * (self.rate / cohort.server_lr)
        direction, state = optimizer.direction(delta, state, cohort.client_lr)
        return replace(self, update=direction, rate=cohort.server_lr), state


@dataclass(frozen=True)
class Costs:
    """Costs per participant and round in multiples of ``d``; states do not include the model itself."""

    down: str = "1"
    up: str = "1"
    client_state: str = "0"
    server_state: str = "0"
    client_work: str = "-"
    server_work: str = "-"


@dataclass(frozen=True, kw_only=True)
class Method:
    """FedAvg; subclasses override what they do otherwise. Hyper-parameters are the dataclass's fields."""

    name: ClassVar[str] = ""
    title: ClassVar[str] = ""
    reference: ClassVar[str] = ""
    costs: ClassVar[Costs] = Costs()
    #: Parts of a model that it needs, e.g. ``features``; a model without them is refused.
    parts: ClassVar[tuple[str, ...]] = ()
    #: Kinds of targets that it can learn, e.g. ``classes``; none: all.
    targets: ClassVar[tuple[str, ...]] = ()
    #: What leaves a client besides its update.
    privacy: ClassVar[str] = "Nothing but the update leaves a client."
    #: Whether :meth:`combine` uses its rows only in weighted sums over clients, which several machines can add up.
    needs_only_sums: ClassVar[bool] = False
    #: Whether statistics of the network, such as BatchNorm's, stay with each client.
    keeps_statistics: ClassVar[bool] = False
    #: The server's learning rate where none is set; None: that of the clients.
    usual_server_lr: ClassVar[float | None] = None

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
        return y - ctx.lr * g, value

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

    # What is known about a method.

    def hyper(self) -> dict[str, Any]:
        """Return the hyper-parameters by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def light(cls) -> Method:
        """Return an instance for measurements of cost: the default, unless it computes long before round 1."""
        return cls()

    @classmethod
    def describe(cls) -> str:
        """Return the docstring: what the method does, its equations, symbols, departures and reference."""
        return inspect.cleandoc(cls.__doc__ or "")

    def require(self, holds: bool, name: str, domain: str) -> None:
        """Refuse a hyper-parameter outside its domain."""
        if not holds:
            raise BadInputError(f"{self.name}: {name} = {getattr(self, name)!r} is outside its domain: {domain}")


def overrides(method: Method, hook: str) -> bool:
    """Say whether ``method`` does something of its own at ``hook``."""
    return getattr(type(method), hook) is not getattr(Method, hook)
