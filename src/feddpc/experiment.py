"""From a configuration to something that can run: data, partition, model, federation, method."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from feddpc import methods, models
from feddpc.config import Config
from feddpc.data import Dataset, load
from feddpc.data import partition as partitions
from feddpc.data.batches import Planner
from feddpc.data.partition import Partition
from feddpc.data.scaling import make_scaler
from feddpc.errors import BadInputError
from feddpc.methods.base import Method, State
from feddpc.methods.federated_data import FederatedData, Ids, reserved
from feddpc.models.flat import Flat
from feddpc.privacy import Mechanism
from feddpc.privacy.config import complete_privacy, make_mechanism
from feddpc.robust.config import complete_policies, defense_of, faults_of
from feddpc.round import sampling
from feddpc.round.federation import Federation
from feddpc.tasks.classification import Classification
from feddpc.torch_globals import set_precision, set_threads
from feddpc.validation import held_counts, held_out, judge

#: Clients times classes up to which a run folder says who holds what.
MOST_HOLDINGS = 250_000


@dataclass(frozen=True)
class Setting:
    """What all methods of a comparison share for one seed; ``config`` is complete but for method and engine."""

    config: Config
    data: Dataset
    partition: Partition
    federation: Federation
    task: Classification
    w0: Tensor
    reserve: Ids  #: training samples that the server keeps
    held_out: Ids  #: training samples that no client trains on
    learned: State = field(default_factory=dict)  #: what the method found out before round 1
    world: FederatedData | None = None  #: what the method made of data and partition, if it changed any

    def privacy(self, method: Method) -> dict[str, Any]:
        """Return what leaves a client beside its updates, in words and numbers."""
        note = method.privacy if self.mechanism is None else f"{method.privacy} {self.mechanism.describe()}"
        return {"note": note, "disclosed": dict(self.world.disclosed) if self.world else {}}

    @property
    def mechanism(self) -> Mechanism | None:
        """What makes the models differentially private, if anything does."""
        return self.federation.privacy

    def holdings(self) -> dict[str, Any]:
        """Return how many samples of which class each client holds; nothing where that is too much to be looked at."""
        if len(self.partition) * self.data.classes > MOST_HOLDINGS:
            return {}
        counts = self.partition.counts(self.data.y_train, self.data.classes)
        names = self.data.class_names or [str(c) for c in range(self.data.classes)]
        return {"classes": list(names), "counts": counts.tolist()}

    @property
    def flat(self) -> Flat:
        """The map between the model and its vector."""
        return self.task.flat

    def fingerprint(self) -> dict[str, str]:
        """Return a hash of each thing that a configuration only names: data, partition, model.

        ``data`` is what runs before 0.2 noted, of a sample; ``all data`` of everything.
        """
        dealt = self.federation.planner.partition
        layout = [f"{n} {tuple(s)}" for n, s in zip(self.flat.names, self.flat.shapes, strict=True)]
        return {
            "data": data_hash(self.data),
            "all data": self.data.digest,
            "partition": _hash(dealt.order, dealt.starts),
            "initial model": _hash(layout, self.w0.cpu().numpy()),
        }


def data_hash(data: Dataset) -> str:
    """Return a hash of all labels and a few samples."""
    some = np.linspace(0, len(data.x_train) - 1, 64).astype(np.int64)
    return _hash(data.x_train[some], data.y_train, data.x_test.shape, data.y_test)


def _hash(*things: object) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for thing in things:
        digest.update(np.ascontiguousarray(thing).tobytes() if isinstance(thing, np.ndarray) else repr(thing).encode())
    return digest.hexdigest()


def prepare(
    config: Config, *, data: Dataset | None = None, module: nn.Module | None = None, partition: Partition | None = None
) -> Setting:
    """Build everything that does not depend on the method; ``data``, ``module`` and ``partition`` may be one's own."""
    data = data or load(config.data)
    config = complete(config, data, module, partition)
    assert config.reserve is not None
    reserve = reserved(config.reserve, data, config.seed)
    held = held_out(config.validation, data, reserve, config.seed)
    kept = np.concatenate([reserve, held])
    if partition is None:
        rest = np.setdiff1d(np.arange(len(data.y_train)), kept)
        dealt = partitions.make(
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
    if module is None:
        module = models.make_for(data, config.model, config.model_options, config.seed)
    models.check_supported(module)
    set_precision(config.precision)
    shift = largest_shift(data) if config.augment else 0
    task = Classification(
        module,
        data,
        make_scaler(config.scaling, data),
        device=config.device,
        dtype=torch.float64 if config.precision == "float64" else torch.float32,
        half=config.precision == "bf16",
        shift=shift,
    )
    config = set_threads(config, task.d)
    assert config.batch_size is not None
    assert config.server_lr is not None
    federation = Federation(
        task=task,
        planner=Planner(partition, config.batch_size, config.epochs, config.seed, shift),
        sampler=sampling.make(
            config.participation,
            population=len(partition),
            cohort=config.cohort,
            seed=config.seed,
            dropout=config.dropout,
            sizes=partition.sizes,
            **config.participation_options,
        ),
        client_lr=config.lr,
        server_lr=config.server_lr,
        lr_decay=config.lr_decay,
        weighting=config.weighting,
        evaluate=task.evaluate,
        validate=judge(task, data, held),
        privacy=make_mechanism(config),
        faults=faults_of(config, len(partition)),
        defense=defense_of(config),
    )
    return Setting(config, data, partition, federation, task, task.initial(), reserve, held)


def make_method(config: Config) -> tuple[Method, Config]:
    """Build the method of a configuration, and write all its hyper-parameters into the latter."""
    method = methods.create(config.method, **config.hyper)
    return method, dataclasses.replace(config, hyper=method.hyper())


def complete(
    config: Config, data: Dataset, module: nn.Module | None = None, partition: Partition | None = None
) -> Config:
    """Fill in what was left open; the result says exactly what will be computed."""
    changes: dict[str, Any] = {}
    if partition is not None:
        changes |= {"partition": "given", "clients": len(partition), "partition_options": {}}
        if config.cohort > len(partition):
            raise BadInputError(f"cohort = {config.cohort}, but the partition has {len(partition)} clients")
    else:
        reserve = reserved(config.reserve or 0.0, data, config.seed)
        kept = len(reserve) + int(held_counts(config.validation, data, reserve).sum())
        changes["partition_options"] = partition_options(config, len(data.y_train) - kept)
    if module is not None:
        changes |= {"model": type(module).__name__, "model_options": {}}
    else:
        name = models.default_name(data) if config.model == "auto" else config.model
        changes |= {"model": name, "model_options": models.options(name) | config.model_options}
    if config.batch_size is None:
        changes["batch_size"] = default_batch_size(len(data.y_train), changes.get("clients", config.clients))
    if config.server_lr is None:
        changes["server_lr"] = config.lr
    changes["reserve"] = config.reserve or 0.0
    if config.scaling == "auto":
        changes["scaling"] = "half" if data.x_train.dtype == np.uint8 else "none"
    if config.augment and data.x_train.dtype != np.uint8:
        raise BadInputError(f"augment = true is for images, but {data.name} holds {data.x_train.dtype}: leave it out")
    changes["device"] = resolve_device(config.device)
    changes["participation_options"] = sampling.options(config.participation) | config.participation_options
    changes["participation_options"] = {k: v for k, v in changes["participation_options"].items() if v is not None}
    config = complete_policies(dataclasses.replace(config, **changes))
    return dataclasses.replace(config, privacy=complete_privacy(config))


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
    options = partitions.options(config.partition) | config.partition_options
    if "alpha" in options and "alpha" not in config.partition_options:
        options["alpha"] = config.alpha
    if "min_size" in options:
        given = config.partition_options.get("min_size")
        options["min_size"] = partitions.resolve_min_size(samples, min(config.clients, samples), given)
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
