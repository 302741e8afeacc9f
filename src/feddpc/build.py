"""From a configuration to an experiment: data, partition, network, participants, and what a method changes."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import nn

from feddpc import models
from feddpc.config import Config
from feddpc.data import Dataset, schemes
from feddpc.data.batches import Planner
from feddpc.data.loading import load_as
from feddpc.data.partition import Partition
from feddpc.data.scaling import Scaler, default_scaling, make_scaler
from feddpc.errors import BadInputError
from feddpc.experiment import Experiment
from feddpc.methods.base import Method
from feddpc.methods.federated_data import reserved
from feddpc.policies import Policies
from feddpc.population import make_sampler
from feddpc.resolve import resolve, resolve_device
from feddpc.round.client_evaluation import split_clients, try_metrics
from feddpc.task_parts import TaskParts, named_loss, named_metrics, targets_of, task_class
from feddpc.tasks.augmentation import TRANSFORMS, uniforms_of
from feddpc.tasks.host_samples import is_mapped
from feddpc.tasks.network import NetworkTask
from feddpc.torch_globals import choose_threads, set_precision
from feddpc.validation import held_out, held_out_evaluator


def build(
    config: Config,
    *,
    method: Method | None = None,
    data: Dataset | None = None,
    module: nn.Module | None = None,
    partition: Partition | None = None,
    own: TaskParts | None = None,
) -> Experiment:
    """Return the experiment that ``config`` asks for; the other arguments replace what it names."""
    data = data or load_as(targets_of(config.task, own), config.data, config.data_options)
    config = resolve(config, data, method=method, module=module, partition=partition, own=own)
    return construct(config, data, module=module, partition=partition, own=own)


def construct(
    config: Config,
    data: Dataset,
    *,
    module: nn.Module | None = None,
    partition: Partition | None = None,
    own: TaskParts | None = None,
) -> Experiment:
    """Return the experiment of a resolved configuration: partition, network, task, sampler and policies."""
    own = own or TaskParts()
    assert config.reserve is not None
    assert config.batch_size is not None
    if partition is None and config.partition == "natural":
        partition = data.natural_partition()[0]
    reserve = reserved(config.reserve, data, config.seed)
    held = held_out(config.validation, data, reserve, config.seed)
    kept = np.concatenate([reserve, held])
    if partition is None:
        rest = np.setdiff1d(np.arange(len(data.y_train)), kept)
        ids = None if data.client_ids is None else data.client_ids[rest]
        options = config.partition_options
        drawn = schemes.make(
            config.partition, data.y_train[rest], config.clients, seed=config.seed, client_ids=ids, **options
        )
        partition = Partition(rest[drawn.order], drawn.starts)
    elif len(kept):
        partition = Partition.from_lists([mine[~np.isin(mine, kept)] for mine in partition])
        if not partition.sizes.all():
            raise BadInputError(
                f"reserve = {config.reserve} and validation = {config.validation} take all samples of client "
                f"{partition.sizes.argmin()}: lower them, or give that client more"
            )
    partition.check(len(data.y_train))
    client_tests = None
    if config.evaluate_clients:
        partition, client_tests = split_clients(partition, config.client_test, config.seed)
    if module is None:
        module = models.make_for(data, config.model, config.model_options, config.seed)
    models.check_supported(module)
    set_precision(config.precision)
    capacity = int(np.sort(partition.sizes)[-config.cohort :].sum())
    device, on_host = resolve_device(config.device), stays_on_host(config, data)
    task = make_task(config, own, module, data, device=device, on_host=on_host, capacity=capacity)
    experiment = Experiment(
        config=config,
        data=data,
        partition=partition,
        task=task,
        planner=make_planner(config, task, partition),
        sampler=make_sampler(config, partition.sizes),
        w0=task.initial(),
        policies=Policies.of(config),
        reserved_ids=reserve,
        held_out=held,
        client_tests=client_tests,
        validate=held_out_evaluator(task, data, held),
    )
    try_metrics(experiment)
    return dataclasses.replace(experiment, threads=choose_threads(config.threads, experiment.step_work))


def stays_on_host(config: Config, data: Dataset) -> bool:
    """Return whether training samples stay in host memory: as asked, or where they are files or too large."""
    if config.data_memory != "auto":
        return config.data_memory == "host"
    device = torch.device(resolve_device(config.device))
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return data.x_train.nbytes > free // 2
    return is_mapped(data.x_train)


def make_task(
    config: Config,
    own: TaskParts,
    module: nn.Module,
    data: Dataset,
    scaler: Scaler | None = None,
    *,
    device: str = "cpu",
    on_host: bool = False,
    capacity: int = 0,
) -> NetworkTask:
    """Build what ``config`` says is learned, by ``module`` from ``data``; ``scaler`` where it depends on other data."""
    if scaler is None:
        scaler = make_scaler(default_scaling(data) if config.scaling == "auto" else config.scaling, data)
    transform = own.transform or (TRANSFORMS.get(config.transform) if config.transform else None)
    if transform is not None and config.augment:
        raise BadInputError("augment and transform cannot be used together: let the transform do both")
    return task_class(config.task, own)(
        module,
        data,
        scaler,
        device=device,
        dtype=dtype_of(config.precision),
        half=config.precision == "bf16",
        shift=largest_shift(data) if config.augment else 0,
        loss=own.loss or named_loss(config.loss),
        transform=transform,
        metrics=own.metrics or named_metrics(config.metrics),
        on_host=on_host,
        capacity=capacity,
    )


def make_planner(config: Config, task: NetworkTask, partition: Partition) -> Planner:
    """Return what plans the clients' batches, none of them smaller than the network can be trained on."""
    smallest = task.traits.smallest_batch
    assert config.batch_size is not None
    if smallest > 1 and min(config.batch_size, int(partition.sizes.min())) < smallest:
        client = int(partition.sizes.argmin())
        field, remedy = f"client {client} has one sample", "have fewer clients, or set partition.min_size"
        if config.batch_size < smallest:
            field, remedy = "batch_size = 1", "raise batch_size"
        raise BadInputError(
            f"{field}, but the model has a BatchNorm that needs two samples per batch: {remedy}, or convert the "
            "model with feddpc.models.to_groupnorm"
        )
    uniforms = uniforms_of(task.transform)
    return Planner(partition, config.batch_size, config.epochs, config.seed, task.shift, uniforms, smallest)


def dtype_of(precision: str) -> torch.dtype:
    """Return the type of the model's numbers."""
    return torch.float64 if precision == "float64" else torch.float32


def largest_shift(data: Dataset) -> int:
    """Return by how many pixels augmentation may shift the images of ``data``: an eighth, and at least two."""
    return max(2, data.sample_shape[0] // 8)


# What a method changes before round 1.
