"""The closed-form task: clients with quadratic objectives, for tests, golden values and the documentation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from feddpc import methods, sampling
from feddpc.checks import check_int
from feddpc.config import Config
from feddpc.data.batches import Planner
from feddpc.data.partition import Partition
from feddpc.engines.base import Engine
from feddpc.engines.loop import Loop
from feddpc.errors import BadInputError
from feddpc.experiment import Experiment
from feddpc.methods.base import DATA_HOOKS, Method, overrides
from feddpc.participants import Sampler
from feddpc.round.round import run_round
from feddpc.round.state import RunState
from feddpc.tasks.base import Batch, BatchIndices, Task


class Quadratic(Task):
    """Client j holds one sample, the pair (a_j, c_j), and the loss 1/2 sum_i a_ji (w_i - c_ji)^2."""

    def __init__(self, curvature: Tensor, centre: Tensor) -> None:
        super().__init__()
        self.curvature, self.centre = curvature, centre
        self.d = curvature.shape[1]

    def fetch(self, rows: BatchIndices) -> Batch:
        """Return curvature and centre of the client."""
        return Batch(self.curvature[rows.samples], self.centre[rows.samples], rows.mask)

    def loss(self, y: Tensor, batch: Batch) -> Tensor:
        """Return the quadratic."""
        return batch.mean(0.5 * (batch.x * (y - batch.y) ** 2).sum(-1))


def quadratic_experiment(
    task: Quadratic, partition: Partition, sampler: Sampler, w0: Tensor, *, config: Config
) -> Experiment:
    """Return an experiment without data set and evaluation; a client makes ``config.epochs`` passes."""
    return Experiment(
        config=config,
        data=cast(Any, None),
        partition=partition,
        task=cast(Any, task),
        planner=Planner(partition, batch_size=config.batch_size or 1, epochs=config.epochs, seed=config.seed),
        sampler=sampler,
        w0=w0,
        evaluates=False,
    )


def trajectory(
    method: Method | str,
    *,
    curvature: npt.ArrayLike,
    centre: npt.ArrayLike,
    w0: npt.ArrayLike,
    schedule: Sequence[Sequence[int]],
    client_lr: float,
    server_lr: float,
    steps: int,
    engine: Engine | None = None,
    **config: Any,
) -> npt.NDArray[np.float64]:
    """Return the global models ``[len(schedule) + 1, d]`` of ``method`` on quadratic clients, in float64.

    Client j minimises 1/2 sum_i curvature[j, i] (w_i - centre[j, i])^2 by ``steps`` full-batch gradient steps;
    ``schedule`` lists the participants of every round, and ``config`` other keys of the configuration, as
    ``server_optimizer="momentum"``.

    >>> path = trajectory(
    ...     "feddpc",
    ...     curvature=[[2.0]],
    ...     centre=[[0.0]],
    ...     w0=[1.0],
    ...     schedule=[[0]] * 4,
    ...     client_lr=0.1,
    ...     server_lr=0.1,
    ...     steps=1,
    ... )
    >>> path[:, 0].round(12).tolist()
    [1.0, 0.6, 0.6, 0.36, 0.36]
    """
    a, c = (torch.tensor(np.asarray(x), dtype=torch.float64) for x in (curvature, centre))
    w = torch.tensor(np.asarray(w0), dtype=torch.float64)
    if a.ndim != 2 or a.shape != c.shape or w.shape != a.shape[1:]:
        raise BadInputError(
            f"curvature {tuple(a.shape)} and centre {tuple(c.shape)} must both be [clients, d], "
            f"and w0 {tuple(w.shape)} must be [d]"
        )
    check_int("steps", steps, 1)
    population = len(a)
    sizes = {"clients": population, "cohort": population, "rounds": max(len(schedule), 1)}
    experiment = quadratic_experiment(
        Quadratic(a, c),
        Partition.from_lists([[j] for j in range(population)]),
        sampling.make("fixed", population=population, cohort=population, seed=0, schedule=schedule),
        w,
        config=Config.read({**config, "lr": client_lr, "server_lr": server_lr, **sizes, "epochs": steps}),
    )
    method = methods.create(method) if isinstance(method, str) else method
    if changes := [hook for hook in DATA_HOOKS if overrides(method, hook)]:
        raise BadInputError(
            f"{method.name} needs a network and samples ({', '.join(changes)}), but quadratic clients have neither: "
            "choose another method, or feddpc.simulate"
        )
    state = RunState.of(experiment, method)
    path = [w]
    for _ in schedule:
        run_round(experiment, method, engine or Loop(), state)
        path.append(state.w.clone())
    return torch.stack(path).numpy()
