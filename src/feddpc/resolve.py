"""From the configuration that was asked for to one with nothing left open. Nothing else fills in a configuration."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import numpy as np
import torch
from torch import nn

from feddpc import methods, models, sampling
from feddpc.config import Config
from feddpc.config.domains import check_cohort
from feddpc.data import Dataset, names, schemes
from feddpc.data.array_checks import Target
from feddpc.data.partition import Partition
from feddpc.data.scaling import default_scaling
from feddpc.errors import BadInputError
from feddpc.methods.base import Method
from feddpc.methods.federated_data import reserved
from feddpc.methods.local_steps import check_local_steps
from feddpc.policies import client_optimizer, resolve_policies
from feddpc.ranks import place
from feddpc.task_parts import TaskParts, task_class
from feddpc.tasks.kinds import BY_TARGET
from feddpc.tasks.losses import TARGETS
from feddpc.validation import held_counts


def partition_name(config: Config, data: Dataset) -> str:
    """Return how the data are split: as asked, or by what they are."""
    if config.partition != "auto":
        return config.partition
    if data.client_ids is not None:
        return "natural"
    return "dirichlet" if data.target == "classes" else "iid"


def resolve(
    config: Config,
    data: Dataset,
    *,
    method: Method | None = None,
    module: nn.Module | None = None,
    partition: Partition | None = None,
    own: TaskParts | None = None,
) -> Config:
    """Fill in everything that decides the numbers; the result says exactly what will be computed.

    ``method``, ``module``, ``partition`` and ``own`` replace what the configuration names. Where and how fast it is
    computed is left as asked: the machine that runs it decides (`feddpc.runs.runner.execute`).
    """
    changes = resolve_task(config, own or TaskParts(), data.target, data.name)
    if method is None:
        method = methods.create(config.method, **config.hyper)
    else:
        changes["method"] = method.name
    check_local_steps(method, client_optimizer(config))
    reserve = _resolve_reserve(config, method)
    changes |= {"hyper": method.hyper(), "reserve": reserve, "partition": partition_name(config, data)}
    if config.buffers == "auto":
        changes["buffers"] = "local" if method.keeps_statistics else "average"
    if changes["partition"] == "natural" and partition is None:
        partition = data.natural_partition()[0]
    if partition is not None:
        _refuse_options(config.partition_options, "partition_options", "a partition that is given")
        name = "natural" if changes["partition"] == "natural" else "given"
        changes |= {"partition": name, "clients": len(partition), "partition_options": {}}
        if config.cohort > len(partition):
            raise BadInputError(f"cohort = {config.cohort}, but the partition has {len(partition)} clients: lower it")
    else:
        check_cohort(config.cohort, config.clients)
        kept = reserved(reserve, data, config.seed)
        rest = len(data.y_train) - len(kept) - int(held_counts(config.validation, data, kept).sum())
        changes["partition_options"] = partition_options(config, changes["partition"], rest)
    if module is not None:
        _refuse_options(config.model_options, "model_options", "a module that is given")
        changes |= {"model": type(module).__name__, "model_options": {}}
    else:
        name = models.default_name(data) if config.model == "auto" else config.model
        changes |= {"model": name, "model_options": models.options(name) | config.model_options}
    if config.batch_size is None:
        changes["batch_size"] = default_batch_size(len(data.y_train), changes.get("clients", config.clients))
    if config.scaling == "auto":
        changes["scaling"] = default_scaling(data)
    if config.augment and not data.is_image:
        raise BadInputError(f"augment = true is for images, but {data.name} holds {data.x_train.dtype}: leave it out")
    resolve_device(config.device)  # raises if there is no such device
    options = sampling.options(config.participation) | config.participation_options
    changes["participation_options"] = {k: v for k, v in options.items() if v is not None}
    return resolve_policies(dataclasses.replace(config, **changes), method.usual_server_lr)


def _resolve_reserve(config: Config, method: Method) -> float:
    """Return the share of the training set that the server keeps: what was asked for, else what the method needs."""
    if config.reserve is None:
        return method.reserve
    if config.reserve < method.reserve:
        raise BadInputError(
            f"reserve = {config.reserve}, but {method.name} needs {method.reserve}: raise it, or leave it out"
        )
    return config.reserve


def _refuse_options(options: dict[str, Any], name: str, what: str) -> None:
    """Raise if there are options for something that is not built from them."""
    if options:
        raise BadInputError(f"{name} = {options}: {what} has no options: leave them out")


def resolve_task(config: Config, own: TaskParts, target: str, data: str) -> dict[str, Any]:
    """Return the names of task, loss and metrics for targets of kind ``target``; ``data`` is what has them."""
    name = config.task
    if own.task is None and name == "auto":
        name = BY_TARGET[target]
    task = task_class(name, own)
    if task.target and task.target != target:
        raise BadInputError(
            f"task = {name!r} needs targets of kind {task.target}, but those of {data} are {target}: leave task out, "
            f"or {_target_remedy(config, task.target)}"
        )
    loss = task.usual_loss or "auto" if config.loss == "auto" and own.loss is None else config.loss
    if target not in TARGETS.get(loss, (target,)):
        able = [known for known, targets in TARGETS.items() if target in targets]
        raise BadInputError(
            f"loss = {loss!r} is not defined for targets of kind {target}: use {' or '.join(able)}, or a function"
        )
    metrics = config.metrics or ",".join(task.measured)
    return {"task": name, "loss": loss, "metrics": metrics}


def _target_remedy(config: Config, wanted: str) -> str:
    """Say how the data of a configuration are given with targets of another kind."""
    for option in ("kind", "target"):  # of tables, and of arrays
        if config.data_options.get(option) in get_args(Target):
            return f"leave {option} out of data_options"
    if config.data in names():
        return "choose other data"
    return f"make the data set with Dataset.from_arrays(..., target={wanted!r})"


def default_batch_size(samples: int, clients: int) -> int:
    """Return the paper's 256 where clients have that many samples, else about half a client: two steps, as there.

    >>> default_batch_size(50_000, 100), default_batch_size(1437, 100)
    (256, 8)
    """
    average = samples / clients
    return 256 if average >= 256 else 2 ** max(0, round(np.log2(average / 2)))


def partition_options(config: Config, name: str, samples: int) -> dict[str, Any]:
    """Return all options of the partition ``name``."""
    options = schemes.options(name) | config.partition_options
    if "alpha" in options and "alpha" not in config.partition_options:
        options["alpha"] = config.alpha
    if "min_size" in options:
        given = config.partition_options.get("min_size")
        options["min_size"] = schemes.resolve_min_size(samples, min(config.clients, samples), given)
    return {key: value for key, value in options.items() if value is not None}


def resolve_device(name: str) -> str:
    """Return the device that ``name`` stands for, or say why it cannot be used."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    where = place()
    if name == "cuda" and where is not None and torch.cuda.device_count() > 1:  # each rank of a machine has its own
        name = f"cuda:{where.local_rank % torch.cuda.device_count()}"
        torch.cuda.set_device(name)
    try:
        device = torch.device(name)
        if device.type == "meta":
            raise RuntimeError("it computes nothing")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise BadInputError(f"device = {name!r} cannot be used: {str(error).splitlines()[0]}") from None
    return str(device)
