"""What callers bring along: data, modules, methods and partitions of their own, checked and converted."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from feddpc.data import Dataset, schemes
from feddpc.data.array_checks import Target
from feddpc.data.loading import check_options, load_as
from feddpc.data.partition import Partition
from feddpc.data.readers import from_torch
from feddpc.data.tables import from_hugging_face
from feddpc.errors import BadInputError, wrong_type
from feddpc.method_changes import make_method
from feddpc.methods.base import Method
from feddpc.report.display import make_reading
from feddpc.task_parts import TaskParts, targets_of


@dataclass(frozen=True)
class UserObjects:
    """What a caller brought along, and what that says in a configuration."""

    values: dict[str, Any]
    method: Method | None
    parts: dict[str, Any]  #: what `feddpc.build.build` takes in place of what a configuration names

    @classmethod
    def of(
        cls, *, data: Any, model: Any, method: Any, partition: Any, more: dict[str, Any], progress: bool = False
    ) -> UserObjects:
        """Take each thing as it is, by its name, or not at all (None); what of ``more`` is an object is taken out.

        With ``progress``, torch data sets are shown to be read.
        """
        task_parts, task_values = TaskParts.take(more)
        client_ids, options = more.pop("client_ids", None), more.get("data_options", {})
        named = {"data": str(data) if isinstance(data, Path) else data}
        named |= {"model": model, "method": method, "partition": partition}
        values: dict[str, Any] = {key: value for key, value in named.items() if isinstance(value, str)}
        parts: dict[str, Any] = {} if task_parts == TaskParts() else {"own": task_parts}
        own_method = None
        if data is not None:
            targets = targets_of(more.get("task"), task_parts)
            parts["data"] = _dataset(data, client_ids, targets, options, progress)
            values.setdefault("data", parts["data"].name)
        elif client_ids is not None:
            raise BadInputError("client_ids says who holds each training sample of data: give data too")
        if client_ids is not None:
            _refuse_unused_ids(partition)
        if model is not None and not isinstance(model, str):
            parts["module"] = _module(model)
            values["model"] = type(model).__name__
        if method is not None and not isinstance(method, str):
            own_method = make_method(method)
            values |= {"method": own_method.name, "hyper": own_method.hyper()}
        if partition is not None and not isinstance(partition, str):
            parts["partition"] = _partition(partition)
            values |= {"partition": "given", "clients": len(parts["partition"])}
        return cls(values | task_values, own_method, parts)


def refuse_none(**things: Any) -> None:
    """Raise if one of the arguments is None, which would silently stand for the default."""
    for name, value in things.items():
        if value is None:
            raise BadInputError(f"{name} is None: leave it out to have the default")


def _refuse_unused_ids(partition: Any) -> None:
    """Raise if clients are others than those that ``client_ids`` names."""
    if isinstance(partition, str):
        if partition == "auto" or schemes.uses_client_ids(partition):
            return
        given = f"partition = {partition!r}"
    elif partition is None:
        return
    else:
        given = "a partition of your own"
    raise BadInputError(f"client_ids and {given} both say who holds each training sample: give one of them")


def _dataset(data: Any, client_ids: Any, targets: Target | None, options: Mapping[str, Any], progress: bool) -> Dataset:
    read = _read(data, targets, options, progress)
    if client_ids is None:
        return read
    fields = {name: getattr(read, name) for name in ("name", "classes", "class_names", "target")}
    return Dataset.from_arrays(read.x_train, read.y_train, read.x_test, read.y_test, client_ids=client_ids, **fields)


def _read(data: Any, targets: Target | None, options: Mapping[str, Any], progress: bool) -> Dataset:
    """Return a data set by its name, or made of arrays, of torch data sets or of one of Hugging Face.

    ``targets`` is the kind of targets to read, unless ``options`` name one.
    """
    if isinstance(data, Dataset):
        if options:
            raise BadInputError(f"data_options = {dict(options)}: a Dataset is read already: leave them out")
        return data
    if isinstance(data, str | Path):
        return load_as(targets, data, options)
    if hasattr(data, "column_names"):
        check_options("a data set of Hugging Face", from_hugging_face, options)
        return from_hugging_face(data, **{"kind": targets, **options})
    if not isinstance(data, Sequence):
        raise wrong_type("data", data, "a name, a path, a Dataset, (x_train, y_train, x_test, y_test) or (train, test)")
    check_options("data", Dataset.from_arrays, options)
    options = {"target": targets, **options}
    if len(data) == 2:
        reading = make_reading(progress, sum(len(part) for part in data if hasattr(part, "__len__")))
        with reading or nullcontext():
            return from_torch(*data, progress=reading, **options)
    if len(data) != 4:
        raise BadInputError(
            f"data has {len(data)} parts: give (x_train, y_train, x_test, y_test), or (train, test) of torch data sets"
        )
    return Dataset.from_arrays(*data, **options)


def _module(model: Any) -> nn.Module:
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise BadInputError(f"model is the class {model.__name__}: give an instance, such as {model.__name__}(...)")
    if not isinstance(model, nn.Module):
        raise wrong_type("model", model, "a torch.nn.Module or a name")
    return copy.deepcopy(model)


def _partition(partition: Any) -> Partition:
    if isinstance(partition, Partition):
        return partition
    wanted = "a name, a Partition, or one sequence of sample indices per client"
    if not isinstance(partition, Iterable):
        raise wrong_type("partition", partition, wanted)
    lists = list(partition)
    if lists and all(np.ndim(entry) == 0 for entry in lists):
        raise BadInputError(f"partition is an array of {len(lists)} numbers: give {wanted}")
    return Partition.from_lists(lists)
