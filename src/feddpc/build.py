"""From a configuration to an experiment: data, partition, network, participants, and what a method changes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor, nn

from feddpc import methods, models, sampling
from feddpc.config import Config
from feddpc.data import Dataset, names, schemes
from feddpc.data.array_checks import Target
from feddpc.data.batches import Planner
from feddpc.data.loading import load_as
from feddpc.data.partition import Partition
from feddpc.data.scaling import Scaler, default_scaling, make_scaler
from feddpc.errors import BadInputError, wrong_type
from feddpc.experiment import Experiment
from feddpc.methods.base import DATA_HOOKS, Method, State, overrides
from feddpc.methods.federated_data import FederatedData, Ids, reserved
from feddpc.methods.fedopt import FedOpt
from feddpc.methods.local_steps import check_local_steps
from feddpc.own_functions import describe
from feddpc.policies import Policies, client_optimizer, resolve_policies
from feddpc.population import make_sampler
from feddpc.privacy.mechanism import check as check_privacy
from feddpc.registry import is_code
from feddpc.round.client_evaluation import split_clients
from feddpc.tasks.augmentation import TRANSFORMS, Transform, uniforms_of
from feddpc.tasks.host_samples import is_mapped
from feddpc.tasks.kinds import BY_TARGET, TASKS, is_task
from feddpc.tasks.losses import LOSSES, TARGETS
from feddpc.tasks.measures import FUNCTIONS, Measure, measure_of
from feddpc.tasks.network import NetworkTask
from feddpc.torch_globals import choose_threads, set_precision
from feddpc.validation import held_counts, held_out, held_out_evaluator


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
        reserve=reserve,
        held_out=held,
        client_tests=client_tests,
        validate=held_out_evaluator(task, data, held),
    )
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


@dataclass(frozen=True)
class TaskParts:
    """What a caller gives as objects: task class, loss, transform, metrics; the configuration holds their names."""

    task: type[NetworkTask] | None = None
    loss: Callable[[Tensor, Tensor], Tensor] | None = None
    transform: Transform | None = None
    metrics: tuple[Any, ...] = ()

    @classmethod
    def take(cls, values: dict[str, Any]) -> tuple[TaskParts, dict[str, str]]:
        """Take out of ``values`` the parts that are objects; return them, and what the configuration calls them."""
        parts: dict[str, Any] = {}
        words: dict[str, str] = {}
        for name in ("task", "loss", "transform"):
            if name in values and not isinstance(values[name], str):
                part = parts[name] = values.pop(name)
                if name == "task" and not is_task(part):
                    raise _not_a_task(part)
                if not callable(part):
                    raise wrong_type(name, part, "a function, or a name")
                words[name] = describe(part)
        metrics = values.get("metrics")
        if metrics is not None and not isinstance(metrics, str):
            wanted = list(values.pop("metrics")) if isinstance(metrics, Sequence) else [values.pop("metrics")]
            parts["metrics"] = tuple(measure_of(one) for one in wanted)
            words["metrics"] = ",".join(map(_metric_name, wanted, parts["metrics"]))
        return cls(**parts), words


def _not_a_task(part: Any) -> BadInputError:
    kind = type(part)
    if is_task(kind):
        return BadInputError(f"task is an instance of {kind.__name__}: give the class, task={kind.__name__}")
    return wrong_type("task", part, "a subclass of feddpc.tasks.NetworkTask, or a name")


def _metric_name(wanted: Any, measure: Measure) -> str:
    if isinstance(wanted, str):
        return wanted
    return describe(wanted).replace(",", ";") if callable(wanted) else measure.metric.name


def load_code(values: dict[str, Any]) -> None:
    """Replace names of code in files, ``FILE.py:NAME``, by what they name: task, loss, transform and metrics."""
    for name, known in {"task": TASKS, "loss": LOSSES, "transform": TRANSFORMS}.items():
        if isinstance(values.get(name), str) and is_code(values[name]):
            values[name] = known.get(values[name])
    if isinstance(values.get("metrics"), str) and any(map(is_code, _listed(values["metrics"]))):
        values["metrics"] = [FUNCTIONS.get(n) if is_code(n) else n for n in _listed(values["metrics"])]


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


def task_class(name: str, own: TaskParts) -> type[NetworkTask]:
    """Return the class of a task: the user's own, or the one that ``name`` names."""
    found: type[NetworkTask] = own.task or TASKS.get(name)  # type: ignore[assignment]
    return found


def targets_of(task: Any, own: TaskParts | None = None) -> Any:
    """Return the kind of targets that a task learns; None where that follows from the data.

    >>> targets_of("regression"), targets_of("auto")
    ('floats', None)
    """
    if own is not None and own.task is not None:
        return own.task.target or None
    known = isinstance(task, str) and (task in TASKS.entries or is_code(task))
    return task_class(task, TaskParts()).target or None if known else None


def dtype_of(precision: str) -> torch.dtype:
    """Return the type of the model's numbers."""
    return torch.float64 if precision == "float64" else torch.float32


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
    return tuple(FUNCTIONS.get(n) if is_code(n) else n for n in _listed(names))


def _listed(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


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
    world = federated_data(config, data, experiment.partition, experiment.reserve, experiment.w0.device)
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
        reserve=reserve,
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
