"""Data sets of the user's own: functions that are registered, or named as ``FILE.py:FUNCTION``."""

from __future__ import annotations

import inspect
from typing import Any

from feddpc.data.dataset import Dataset
from feddpc.errors import DataError
from feddpc.registry import Registry, is_code, short_name

DATA: Registry[Any] = Registry("data set", {}, accepts=inspect.isfunction)


def is_own(name: str) -> bool:
    """Say whether ``name`` is a registered data set or one in a Python file."""
    return name in DATA.entries or is_code(name)


def load_own(name: str) -> Dataset:
    """Call the user's function, which returns a :class:`Dataset` or (x_train, y_train, x_test, y_test)."""
    made = DATA.build(name, {}, {})
    if isinstance(made, Dataset):
        return made
    if not isinstance(made, tuple | list) or len(made) != 4:
        raise DataError(f"data set {name!r} must return a Dataset or (x_train, y_train, x_test, y_test)")
    return Dataset.from_arrays(*made, name=short_name(name))
