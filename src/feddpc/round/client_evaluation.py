"""How the model does at each client: on samples held out of the client's training, before and after local steps.

The mean over clients hides who is served badly, so a record also has the deviation and the mean of the worst tenth.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from feddpc.data.partition import Partition
from feddpc.engines.base import Engine
from feddpc.errors import BadInputError
from feddpc.experiment import Experiment
from feddpc.methods.base import Method, State, overrides
from feddpc.methods.fedavg import FedAvg
from feddpc.methods.statistics import STATISTICS
from feddpc.rng import generator
from feddpc.round.state import RunState
from feddpc.tasks.measures import FINETUNED
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
def evaluate_clients(experiment: Experiment, method: Method, engine: Engine, state: RunState) -> ClientMetrics:
    """Return how the model does at every client after the last round.

    A client that keeps a part of the model, or BatchNorm's statistics, is evaluated with its own; one that has not
    taken part yet, with the global ones.
    """
    assert experiment.client_tests is not None
    measured = list(dict.fromkeys([experiment.task.metrics[0], LOSS]))
    clients = engine.clients_here(state, len(experiment.client_tests))
    values = engine.of_all_clients(clients, _measure(experiment, method, engine, state, clients, measured))
    directions = {metric.name: metric for metric in measured}
    summary: dict[str, float] = {}
    for name, found in values.items():
        metric = directions[name.removeprefix(FINETUNED)]
        summary |= {f"{name}_{what}": value for what, value in _spread(metric, found).items()}
    return ClientMetrics(values, summary)


def _measure(
    experiment: Experiment, method: Method, engine: Engine, state: RunState, clients: np.ndarray, measured: list[Metric]
) -> dict[str, list[float]]:
    """Return metrics at some clients, in their order."""
    task, held = experiment.task, experiment.client_tests
    assert held is not None
    stages = ("", FINETUNED) if experiment.config.finetune_steps else ("",)
    if not len(clients):
        return {stage + metric.name: [] for stage in stages for metric in measured}
    if len(clients) < len(held):
        held = Partition.from_lists([held[client] for client in clients])
    values = _by_client(task, _outputs(experiment, method, state, held, clients), held, clients, measured)
    if experiment.config.finetune_steps:
        tuned = _finetuned_outputs(experiment, method, engine, state, held, clients)
        after = _by_client(task, tuned, held, clients, measured)
        values |= {FINETUNED + name: found for name, found in after.items()}
    return values


def _outputs(experiment: Experiment, method: Method, state: RunState, held: Partition, clients: np.ndarray) -> Tensor:
    """Return what the models of some clients make of the samples ``held`` out of their training."""
    task, w = experiment.task, state.model(method)
    if not (overrides(method, "personal") or experiment.buffers(method) == "local"):
        with _evaluating(task):
            return torch.cat([task.outputs(w, x) for x in torch.split(task.samples(held.order).x, 500)])
    parts = []
    for client, samples in zip(clients, held, strict=True):
        memory = {key: rows[0] for key, rows in _memories(method, state, np.array([client])).items()}
        mine = _whole(method.personal(task, w[: task.d], memory), memory.get(STATISTICS, state.statistics))
        with _evaluating(task):
            parts.append(task.outputs(mine, task.samples(samples).x))
    return torch.cat(parts)


def _memories(method: Method, state: RunState, ids: np.ndarray) -> State:
    """Return what clients remember; those that have not taken part yet, what the global model has."""
    rows, new = state.clients.read(ids), ~state.clients.seen(ids)
    if rows and new.any():
        joined = method.init_client(method.evaluated(state.w, state.server))
        if STATISTICS in rows and state.statistics is not None:
            joined |= {STATISTICS: state.statistics}
        for key, value in joined.items():
            rows[key][torch.from_numpy(np.flatnonzero(new)).to(value.device)] = value
    return rows


def _whole(w: Tensor, statistics: Tensor | None) -> Tensor:
    return w if statistics is None else torch.cat([w, statistics])


@contextmanager
def _evaluating(task: NetworkTask) -> Iterator[None]:
    task.module.eval()
    try:
        yield
    finally:
        task.module.train()


def _by_client(
    task: NetworkTask, outputs: Tensor, held: Partition, clients: np.ndarray, measured: list[Metric]
) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {metric.name: [] for metric in measured}
    targets = task.samples(held.order).y
    for client, (first, last) in zip(clients, itertools.pairwise(held.starts.tolist()), strict=True):
        try:
            values = task.metrics_of(outputs[first:last], targets[first:last], found)
        except BadInputError as error:
            raise BadInputError(
                f"evaluate_clients: client {client} has {last - first} test samples, and {error}, or raise client_test"
            ) from error
        for name, column in found.items():
            column.append(values[name])
    return found


@torch.no_grad()
def try_metrics(experiment: Experiment) -> None:
    """Measure the first model: a metric that fails is refused before round 1, one without a value at a client named."""
    task, held = experiment.task, experiment.client_tests
    w = _whole(experiment.w0, task.first_statistics if task.traits.statistics else None)
    if any(measure.own and measure.whole for measure in task.measures):
        task.evaluate(w)
        if experiment.validate is not None:
            experiment.validate(w)
    primary = next(iter(task.measures), None)
    if held is None or primary is None or not (primary.own or primary.may_lack):
        return
    samples = task.samples(held.order)
    with _evaluating(task):
        outputs = torch.cat([task.outputs(w, x) for x in torch.split(samples.x, 500)])
    name = primary.metric.name
    values = _by_client(task, outputs, held, np.arange(len(held)), [primary.metric])[name]
    lacking = np.flatnonzero(~np.isfinite(values))
    if len(lacking):
        mine = samples.y[held.starts[lacking[0]] : held.starts[lacking[0] + 1]]
        warnings.warn(
            f"clients_{name}_mean and its kin are null: {name} has no value at {len(lacking)} of {len(held)} clients, "
            f"such as client {lacking[0]} with {len(mine)} test samples of "
            f"{len(torch.unique(mine, dim=0))} different targets: "
            "raise client_test, leave out such clients, or put another metric first",
            stacklevel=2,
        )


def _finetuned_outputs(
    experiment: Experiment, method: Method, engine: Engine, state: RunState, held: Partition, clients: np.ndarray
) -> Tensor:
    """Return the outputs of every client's own model, after local steps, on the client's held-out samples.

    The steps are those of FedAvg, or of a method whose clients keep a part of the model.
    """
    steps, task = experiment.config.finetune_steps, experiment.task
    tuner = method if overrides(method, "personal") else FedAvg()
    client_lr, _ = experiment.population.rates(state.round)
    planner = replace(experiment.planner, epochs=steps)  # enough batches, even for a client with a single one
    w, parts = method.evaluated(state.w, state.server), []
    down = {} if state.statistics is None else {STATISTICS: state.statistics}
    for first in range(0, len(held), AT_ONCE):
        ids = clients[first : first + AT_ONCE]
        plan = experiment.staged(planner.plan(state.round, ids).first(steps))
        own = _memories(method, state, ids)
        kept = own if tuner is method else {key: own[key] for key in (STATISTICS,) if key in own}
        trained = engine.train(experiment.local(tuner, state.statistics), task, w, down, kept, plan, client_lr)
        for i in range(len(ids)):
            memory = {key: rows[i] for key, rows in trained.memory.items()}
            mine = tuner.personal(task, w - trained.uploads["delta"][i], memory)
            measured = trained.uploads[STATISTICS][i] if STATISTICS in trained.uploads else None
            with _evaluating(task):
                parts.append(task.outputs(_whole(mine, measured), task.samples(held[first + i]).x))
    return torch.cat(parts)


def _spread(metric: Metric, values: list[float]) -> dict[str, float]:
    array = np.array(values)
    ordered = np.sort(array)[:: metric.sign]  # the worst first
    worst = ordered[: max(1, len(array) // 10)]
    return {"mean": float(array.mean()), "std": float(array.std()), "worst_tenth": float(worst.mean())}
