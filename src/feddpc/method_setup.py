"""What a method changes before round 1: its network, its clients' data, its first model."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable

import torch
from torch import nn

from feddpc import models
from feddpc.config import Config
from feddpc.errors import BadInputError
from feddpc.experiment import Setting
from feddpc.methods.base import DATA_HOOKS, Method, State, overrides
from feddpc.methods.federated_data import FederatedData
from feddpc.validation import judge


def with_reserve(config: Config, methods: Iterable[Method]) -> Config:
    """Return a configuration in which the server keeps as many samples as the most demanding method needs."""
    needed = max((m.reserve for m in methods), default=0.0)
    if config.reserve is None:
        return dataclasses.replace(config, reserve=needed)
    if config.reserve < needed:
        raise BadInputError(f"reserve = {config.reserve}, but a method needs {needed}: raise it, or leave it out")
    return config


def apply_method(setting: Setting, method: Method, learned: State | None = None) -> Setting:
    """Return ``setting`` as ``method`` changes it; ``learned`` is what an earlier call with the same method found out.

    A method that changes nothing gets the very same setting, so that a comparison builds it once.
    """
    if not any(overrides(method, hook) for hook in DATA_HOOKS):
        return setting
    config, federation = setting.config, setting.federation
    assert config.batch_size is not None
    world = FederatedData(
        data=setting.data,
        partition=setting.partition,
        seed=config.seed,
        client_lr=config.lr,
        batch_size=config.batch_size,
        device=setting.w0.device,
        reserve=setting.reserve,
    )
    if learned is None:
        learned = {k: v.detach().cpu().contiguous() for k, v in method.learn(world).items()}
    world = method.extend_data(world, learned)
    module = adapt_module(method, setting.task.module, config.seed)
    task = setting.task.changed(module=module, data=None if world.data is setting.data else world.data)
    world.partition.check(len(world.data.y_train))
    w0 = method.initial(task, setting.w0 if module is None else task.initial(), world)
    return dataclasses.replace(
        setting,
        task=task,
        w0=w0,
        learned=learned,
        world=world,
        federation=dataclasses.replace(
            federation,
            task=task,
            planner=dataclasses.replace(federation.planner, partition=world.partition),
            evaluate=task.evaluate,
            validate=judge(task, setting.data, setting.held_out),
            kit={k: placed(v, w0) for k, v in world.kit.items()},
            once=(world.down_once + sum(v.numel() for v in world.kit.values()), world.up_once),
        ),
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


def placed(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return ``value`` on the device, and in the precision, of the model."""
    return value.to(like.device, like.dtype if value.is_floating_point() else value.dtype)
