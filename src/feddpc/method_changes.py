"""What a method changes before round 1: data, network, first model. And what it cannot do."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from feddpc import models
from feddpc.config import Config
from feddpc.data import Dataset
from feddpc.data.partition import Partition
from feddpc.errors import BadInputError, wrong_type
from feddpc.experiment import Experiment
from feddpc.methods.base import DATA_HOOKS, Method, State, overrides
from feddpc.methods.federated_data import FederatedData, Ids
from feddpc.methods.fedopt import FedOpt
from feddpc.methods.local_steps import check_local_steps
from feddpc.policies import client_optimizer
from feddpc.privacy.mechanism import check as check_privacy


def make_method(method: Any) -> Method:
    """Return a method that was given as an object or as a class; one without a name gets that of its class."""
    instance = method() if isinstance(method, type) and issubclass(method, Method) else method
    if not isinstance(instance, Method):
        raise wrong_type("method", method, "a Method, its class or its name")
    if not instance.name:
        type(instance).name = type(instance).__name__.lower()
    return instance


def check_method(method: Method, config: Config, target: str, data: str) -> None:
    """Raise if ``method`` cannot do what a resolved configuration says, or learn the targets of ``data``."""
    if method.targets and target not in method.targets:
        raise BadInputError(
            f"{method.name} learns targets of kind {' or '.join(method.targets)}, but those of {data} are {target}: "
            "choose another method"
        )
    if isinstance(method, FedOpt) and config.server_optimizer != "sgd":
        raise BadInputError(
            f"server_optimizer = {config.server_optimizer!r}: {method.name} is FedAvg with a server optimizer already: "
            "leave it out, or use fedavg"
        )
    check_local_steps(method, client_optimizer(config))
    if config.privacy:
        check_privacy(method)
    if config.rule != "mean":
        method.check_rule()


def for_method(experiment: Experiment, method: Method, learned: State | None = None) -> Experiment:
    """Return ``experiment`` as ``method`` changes it; ``learned`` is what an earlier call with this method found out.

    A method that changes nothing gets the very same experiment, so that a comparison builds it once.
    """
    check_method(method, experiment.config, experiment.data.target, experiment.data.name)
    if not any(overrides(method, hook) for hook in DATA_HOOKS):
        return experiment
    config, data = experiment.config, experiment.data
    world = federated_data(config, data, experiment.partition, experiment.reserved_ids, experiment.w0.device)
    if learned is None:
        learned = {k: v.detach().cpu().contiguous() for k, v in method.learn(world).items()}
    world = method.extend_data(world, learned)
    module = adapt_module(method, experiment.task.module, config.seed)
    task = experiment.task.changed(module=module, data=None if world.data is data else world.data)
    world.partition.check(len(world.data.y_train))
    w0 = method.initial(task, experiment.w0 if module is None else task.initial(), world)
    return experiment.with_task(
        task,
        w0=w0,
        learned=learned,
        world=world,
        planner=dataclasses.replace(experiment.planner, partition=world.partition),
        one_time_payload={k: cast_like(v, w0) for k, v in world.one_time_payload.items()},
        once=(world.down_once + sum(v.numel() for v in world.one_time_payload.values()), world.up_once),
    )


def federated_data(
    config: Config, data: Dataset, partition: Partition, reserve: Ids, device: torch.device | None = None
) -> FederatedData:
    """Return what a method may change before round 1, as far as one party knows it."""
    assert config.batch_size is not None
    return FederatedData(
        data=data,
        partition=partition,
        seed=config.seed,
        client_lr=config.lr,
        batch_size=config.batch_size,
        device=device or torch.device("cpu"),
        reserved_ids=reserve,
    )


def adapt_module(method: Method, module: nn.Module, seed: int) -> nn.Module | None:
    """Return the network that ``method`` trains in place of ``module``, None if it is that one."""
    if not overrides(method, "adapt"):
        return None
    start = copy.deepcopy(module).cpu()
    # A stream of its own: with that of the network, new layers would start as copies of its first ones.
    network = models.seeded(lambda: method.adapt(start), seed, "adapted model")
    models.check_supported(network)
    return network


def cast_like(value: Tensor, like: Tensor) -> Tensor:
    """Return ``value`` on the device, and in the precision, of the model."""
    return value.to(like.device, like.dtype if value.is_floating_point() else value.dtype)
