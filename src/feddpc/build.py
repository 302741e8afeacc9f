"""From a configuration to an experiment: data, partition, network, participants, and what a method changes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from feddpc import methods, models, sampling
from feddpc.config import Config
from feddpc.data import Dataset, load, schemes
from feddpc.data.batches import Planner
from feddpc.data.partition import Partition
from feddpc.data.scaling import default_scaling, make_scaler
from feddpc.errors import BadInputError
from feddpc.experiment import Experiment
from feddpc.methods.base import DATA_HOOKS, Method, State, overrides
from feddpc.methods.federated_data import FederatedData, reserved
from feddpc.methods.fedopt import FedOpt
from feddpc.methods.local_steps import check_local_steps
from feddpc.policies import Policies, client_optimizer, resolve_policies
from feddpc.registry import is_code
from feddpc.round.client_evaluation import split_clients
from feddpc.tasks.host_samples import is_mapped
from feddpc.tasks.kinds import BY_TARGET, TASKS
from feddpc.tasks.losses import LOSSES, TARGETS
from feddpc.tasks.measures import FUNCTIONS
from feddpc.tasks.network import TRANSFORMS, NetworkTask, Transform, uniforms_of
from feddpc.torch_globals import set_precision, set_threads
from feddpc.validation import held_counts, held_out, judge


def build(
    config: Config,
    *,
    data: Dataset | None = None,
    module: nn.Module | None = None,
    partition: Partition | None = None,
    own: TaskParts | None = None,
) -> Experiment:
    """Build everything that does not depend on the method; ``data``, ``module`` and ``partition`` may be one's own."""
    own = own or TaskParts()
    data = data or load(config.data, **config.data_options)
    if partition is None and partition_name(config, data) == "natural":
        partition = data.natural_partition()[0]
        config = dataclasses.replace(config, partition="natural")
    config = resolve(config, data, module, partition, own)
    assert config.reserve is not None
    reserve = reserved(config.reserve, data, config.seed)
    held = held_out(config.validation, data, reserve, config.seed)
    kept = np.concatenate([reserve, held])
    if partition is None:
        rest = np.setdiff1d(np.arange(len(data.y_train)), kept)
        dealt = schemes.make(
            config.partition, data.y_train[rest], config.clients, seed=config.seed, **config.partition_options
        )
        partition = Partition(rest[dealt.order], dealt.starts)
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
    shift = largest_shift(data) if config.augment else 0
    transform = own.transform or (TRANSFORMS.get(config.transform) if config.transform else None)
    if transform is not None and config.augment:
        raise BadInputError("augment and transform cannot be used together: let the transform do both")
    config = dataclasses.replace(config, data_memory="host" if stays_on_host(config, data) else "device")
    task = (own.task or TASKS.get(config.task))(
        module,
        data,
        make_scaler(config.scaling, data),
        device=config.device,
        dtype=torch.float64 if config.precision == "float64" else torch.float32,
        half=config.precision == "bf16",
        shift=shift,
        loss=own.loss or named_loss(config.loss),
        transform=transform,
        metrics=own.metrics or named_metrics(config.metrics),
        on_host=config.data_memory == "host",
        capacity=int(np.sort(partition.sizes)[-config.cohort :].sum()),
    )
    positions = data.y_train.shape[1] if data.target == "tokens" else 1
    config = set_threads(config, task.d * positions)
    return Experiment(
        config=config,
        data=data,
        partition=partition,
        task=task,
        planner=make_planner(config, partition, task, shift),
        sampler=sampling.make(
            config.participation,
            population=len(partition),
            cohort=config.cohort,
            seed=config.seed,
            dropout=config.dropout,
            sizes=partition.sizes,
            **config.participation_options,
        ),
        w0=task.initial(),
        policies=Policies.of(config),
        reserve=reserve,
        held_out=held,
        client_tests=client_tests,
        validate=judge(task, data, held),
    )


def stays_on_host(config: Config, data: Dataset) -> bool:
    """Return whether training samples stay in host memory: as asked, or where they are files or too large."""
    if config.data_memory != "auto":
        return config.data_memory == "host"
    if torch.device(config.device).type == "cuda":
        free, _ = torch.cuda.mem_get_info(torch.device(config.device))
        return data.x_train.nbytes > free // 2
    return is_mapped(data.x_train)


def make_planner(config: Config, partition: Partition, task: NetworkTask, shift: int) -> Planner:
    """Return what plans the clients' batches, none of them smaller than the network can be trained on."""
    smallest = task.traits.smallest_batch
    assert config.batch_size is not None
    if smallest > 1 and min(config.batch_size, int(partition.sizes.min())) < smallest:
        client = int(partition.sizes.argmin())
        field = "batch_size = 1" if config.batch_size < smallest else f"client {client} has one sample"
        raise BadInputError(
            f"{field}, but the model has a BatchNorm that needs two samples per batch: raise batch_size, leave such "
            "clients out, or convert the model with feddpc.models.to_groupnorm"
        )
    uniforms = uniforms_of(task.transform)
    return Planner(partition, config.batch_size, config.epochs, config.seed, shift, uniforms, smallest)


@dataclass(frozen=True)
class TaskParts:
    """What a caller gives as objects: task class, loss, transform, metrics; the configuration holds their names."""

    task: type[NetworkTask] | None = None
    loss: Callable[[Tensor, Tensor], Tensor] | None = None
    transform: Transform | None = None
    metrics: tuple[Any, ...] = ()


def partition_name(config: Config, data: Dataset) -> str:
    """Return how the data are split: as asked, or by what they are."""
    if config.partition != "auto":
        return config.partition
    if data.client_ids is not None:
        return "natural"
    return "dirichlet" if data.target == "classes" else "iid"


def named_loss(name: str) -> Callable[[Tensor, Tensor], Tensor] | None:
    """Return a loss by its name, None for the task's own."""
    return None if name == "auto" else LOSSES.get(name)


def named_metrics(names: str) -> tuple[Any, ...]:
    """Return metrics by their names, which commas separate: known, registered, or in files."""
    listed = [name.strip() for name in names.split(",") if name.strip()]
    return tuple(FUNCTIONS.get(n) if n in FUNCTIONS.entries or is_code(n) else n for n in listed)


def make_method(config: Config) -> tuple[Method, Config]:
    """Build the method of a configuration, and write all its hyper-parameters into the latter."""
    method = methods.create(config.method, **config.hyper)
    check_local_steps(method, client_optimizer(config))
    return method, dataclasses.replace(config, hyper=method.hyper())


def resolve(
    config: Config,
    data: Dataset,
    module: nn.Module | None = None,
    partition: Partition | None = None,
    own: TaskParts | None = None,
) -> Config:
    """Fill in what was left open; the result says exactly what will be computed."""
    config = dataclasses.replace(config, partition=partition_name(config, data))
    changes = _resolve_task(config, data, own or TaskParts())
    if config.partition == "natural" and partition is None:
        partition = data.natural_partition()[0]
    if partition is not None:
        _refuse_options(config.partition_options, "partition_options", "a partition that is given")
        name = "natural" if config.partition == "natural" else "given"
        changes |= {"partition": name, "clients": len(partition), "partition_options": {}}
        if config.cohort > len(partition):
            raise BadInputError(f"cohort = {config.cohort}, but the partition has {len(partition)} clients: lower it")
    else:
        reserve = reserved(config.reserve or 0.0, data, config.seed)
        kept = len(reserve) + int(held_counts(config.validation, data, reserve).sum())
        changes["partition_options"] = partition_options(config, len(data.y_train) - kept)
    if module is not None:
        _refuse_options(config.model_options, "model_options", "a module that is given")
        changes |= {"model": type(module).__name__, "model_options": {}}
    else:
        name = models.default_name(data) if config.model == "auto" else config.model
        changes |= {"model": name, "model_options": models.options(name) | config.model_options}
    if config.batch_size is None:
        changes["batch_size"] = default_batch_size(len(data.y_train), changes.get("clients", config.clients))
    changes["reserve"] = config.reserve or 0.0
    if config.scaling == "auto":
        changes["scaling"] = default_scaling(data)
    if config.augment and not data.is_image:
        raise BadInputError(f"augment = true is for images, but {data.name} holds {data.x_train.dtype}: leave it out")
    changes["device"] = resolve_device(config.device)
    changes["participation_options"] = sampling.options(config.participation) | config.participation_options
    changes["participation_options"] = {k: v for k, v in changes["participation_options"].items() if v is not None}
    return resolve_policies(dataclasses.replace(config, **changes))


def _refuse_options(options: dict[str, Any], name: str, what: str) -> None:
    """Raise if there are options for something that is not built from them."""
    if options:
        raise BadInputError(f"{name} = {options}: {what} has no options: leave them out")


def _resolve_task(config: Config, data: Dataset, own: TaskParts) -> dict[str, Any]:
    """Return task, loss and metrics by name."""
    name = config.task
    if own.task is None and name == "auto":
        name = BY_TARGET[data.target]
    task: type[NetworkTask] = own.task or TASKS.get(name)  # type: ignore[assignment]
    if task.target and task.target != data.target:
        raise BadInputError(
            f"task = {name!r} needs targets of kind {task.target}, but those of {data.name} are {data.target}: leave "
            f"task out, or give the data with target={task.target!r}"
        )
    loss = task.usual_loss or "auto" if config.loss == "auto" and own.loss is None else config.loss
    if data.target not in TARGETS.get(loss, (data.target,)):
        able = [known for known, targets in TARGETS.items() if data.target in targets]
        raise BadInputError(
            f"loss = {loss!r} is not defined for targets of kind {data.target}: use {' or '.join(able)}, or a function"
        )
    metrics = config.metrics or ",".join(task.measured)
    return {"task": name, "loss": loss, "metrics": metrics}


def largest_shift(data: Dataset) -> int:
    """Return by how many pixels augmentation may shift the images of ``data``: an eighth, and at least two."""
    return max(2, data.sample_shape[0] // 8)


def default_batch_size(samples: int, clients: int) -> int:
    """Return the paper's 256 where clients have that many samples, else about half a client: two steps, as there.

    >>> default_batch_size(50_000, 100), default_batch_size(1437, 100)
    (256, 8)
    """
    average = samples / clients
    return 256 if average >= 256 else 2 ** max(0, round(np.log2(average / 2)))


def partition_options(config: Config, samples: int) -> dict[str, Any]:
    """Return the options of the configuration's partition, complete."""
    options = schemes.options(config.partition) | config.partition_options
    if "alpha" in options and "alpha" not in config.partition_options:
        options["alpha"] = config.alpha
    if "min_size" in options:
        given = config.partition_options.get("min_size")
        options["min_size"] = schemes.resolve_min_size(samples, min(config.clients, samples), given)
    return {key: value for key, value in options.items() if value is not None}


def resolve_device(name: str) -> str:
    """Return the device that ``name`` stands for, or say why it cannot be used."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type == "meta":
            raise RuntimeError("it computes nothing")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise BadInputError(f"device = {name!r} cannot be used: {str(error).splitlines()[0]}") from None
    return str(device)


# What a method changes before round 1.


def with_reserve(config: Config, methods: Iterable[Method]) -> Config:
    """Return a configuration in which the server keeps as many samples as the most demanding method needs.

    A single method also says which server rate it is used with, where none is asked for.
    """
    methods = list(methods)
    needed = max((m.reserve for m in methods), default=0.0)
    if len(methods) == 1 and config.server_lr is None and config.server_optimizer == "sgd":
        config = dataclasses.replace(config, server_lr=methods[0].usual_server_lr)
    if config.reserve is None:
        return dataclasses.replace(config, reserve=needed)
    if config.reserve < needed:
        raise BadInputError(f"reserve = {config.reserve}, but a method needs {needed}: raise it, or leave it out")
    return config


def for_method(experiment: Experiment, method: Method, learned: State | None = None) -> Experiment:
    """Return ``experiment`` as ``method`` changes it; ``learned`` is what an earlier call with this method found out.

    A method that changes nothing gets the very same experiment, so that a comparison builds it once.
    """
    if method.targets and experiment.data.target not in method.targets:
        raise BadInputError(
            f"{method.name} learns targets of kind {' or '.join(method.targets)}, but those of {experiment.data.name} "
            f"are {experiment.data.target}: choose another method"
        )
    if isinstance(method, FedOpt) and experiment.policies.optimizer is not None:
        raise BadInputError(
            f"server_optimizer = {experiment.config.server_optimizer!r}: {method.name} is FedAvg with a server "
            "optimizer already: leave it out, or use fedavg"
        )
    if not any(overrides(method, hook) for hook in DATA_HOOKS):
        return experiment
    config, data = experiment.config, experiment.data
    world = FederatedData(
        data=data,
        partition=experiment.partition,
        seed=config.seed,
        client_lr=config.lr,
        batch_size=experiment.planner.batch_size,
        device=experiment.w0.device,
        reserve=experiment.reserve,
    )
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
        kit={k: cast_like(v, w0) for k, v in world.kit.items()},
        once=(world.down_once + sum(v.numel() for v in world.kit.values()), world.up_once),
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
