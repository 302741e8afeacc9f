"""How the model does at each client: on samples held out of the client's training, before and after local steps.

The mean over clients hides who is served badly, so a record also has the deviation and the mean of the worst tenth.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from feddpc.data.partition import Partition
from feddpc.engines.base import Engine
from feddpc.errors import BadInputError
from feddpc.experiment import Experiment
from feddpc.methods.fedavg import FedAvg
from feddpc.rng import generator
from feddpc.tasks.metrics import LOSS, Metric
from feddpc.tasks.network import NetworkTask

#: How many clients are fine-tuned at a time.
AT_ONCE = 16


@dataclass(frozen=True)
class ClientMetrics:
    """A metric at every client, and what a record says of it."""

    values: dict[str, list[float]]  #: by metric; ``finetuned_...`` after local steps
    summary: dict[str, float]  #: mean, deviation and worst tenth of each


def split_clients(partition: Partition, share: float, seed: int) -> tuple[Partition, Partition]:
    """Hold out a share of every client's samples; return what is trained on, and what is held out."""
    kept, held = [], []
    for client, mine in enumerate(partition):
        if len(mine) < 2:
            raise BadInputError(
                f"client_test = {share} leaves client {client}, which has {len(mine)} sample, without test samples: "
                "leave such clients out, or evaluate_clients"
            )
        order = generator(seed, "client test", client).permutation(len(mine))
        count = min(len(mine) - 1, max(1, round(share * len(mine))))
        held.append(np.sort(mine[order[:count]]))
        kept.append(np.sort(mine[order[count:]]))
    return Partition.from_lists(kept), Partition.from_lists(held)


@torch.no_grad()
def evaluate_clients(experiment: Experiment, engine: Engine, w: Tensor, t: int) -> ClientMetrics:
    """Return how model ``w`` does at every client after round ``t``."""
    assert experiment.client_tests is not None
    task, held = experiment.task, experiment.client_tests
    measured = list(dict.fromkeys([task.metrics[0], LOSS]))
    everything = _samples(task, held.order)
    task.module.eval()
    outputs = torch.cat([task.outputs(w, x) for x in torch.split(everything[0], 500)])
    task.module.train()
    values = _by_client(task, outputs, everything[1], held, measured)
    if experiment.config.finetune_steps:
        tuned = _finetuned_outputs(experiment, engine, w, t)
        after = _by_client(task, tuned, everything[1], held, measured)
        values |= {f"finetuned_{name}": found for name, found in after.items()}
    directions = {metric.name: metric for metric in measured}
    summary: dict[str, float] = {}
    for name, found in values.items():
        metric = directions[name.removeprefix("finetuned_")]
        summary |= {f"{name}_{what}": value for what, value in _spread(metric, found).items()}
    return ClientMetrics(values, summary)


def _samples(task: NetworkTask, ids: np.ndarray) -> tuple[Tensor, Tensor]:
    index = torch.tensor(ids, device=task.device)
    return task.inputs(task.x[index]), task.y[index]


def _by_client(
    task: NetworkTask, outputs: Tensor, targets: Tensor, held: Partition, measured: list[Metric]
) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {metric.name: [] for metric in measured}
    for first, last in zip(held.starts[:-1].tolist(), held.starts[1:].tolist(), strict=True):
        values = task.metrics_of(outputs[first:last], targets[first:last])
        for name, column in found.items():
            column.append(values[name])
    return found


def _finetuned_outputs(experiment: Experiment, engine: Engine, w: Tensor, t: int) -> Tensor:
    """Return the outputs of every client's own model, after local steps, on the client's held-out samples."""
    steps, task, held = experiment.config.finetune_steps, experiment.task, experiment.client_tests
    assert held is not None
    client_lr, _ = experiment.population.rates(t)
    planner = replace(experiment.planner, epochs=steps)  # enough batches, even for a client with a single one
    parts = []
    for first in range(0, len(held), AT_ONCE):
        ids = np.arange(first, min(first + AT_ONCE, len(held)))
        plan = planner.plan(t, ids).first(steps)
        trained = engine.train(experiment.local(FedAvg()), task, w, {}, {}, plan, client_lr)
        task.module.eval()
        for client, update in zip(ids.tolist(), trained.up["delta"], strict=True):
            x, _ = _samples(task, held[client])
            parts.append(task.outputs(w - update, x))
        task.module.train()
    return torch.cat(parts)


def _spread(metric: Metric, values: list[float]) -> dict[str, float]:
    array = np.array(values)
    ordered = np.sort(array)[:: metric.sign]  # the worst first
    worst = ordered[: max(1, len(array) // 10)]
    return {"mean": float(array.mean()), "std": float(array.std()), "worst_tenth": float(worst.mean())}
