"""The methods by name: one file each, one battery of tests for all."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import sys
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from feddpc.checks import coerce
from feddpc.errors import BadInputError, unknown
from feddpc.methods.base import ClientContext, Cohort, Costs, Method, State, Step
from feddpc.methods.clusterfedvarp import ClusterFedVARP
from feddpc.methods.datasharing import DataSharing
from feddpc.methods.faug import FAug
from feddpc.methods.fedalign import FedAlign
from feddpc.methods.fedamd import FedAMD
from feddpc.methods.fedavg import FedAvg
from feddpc.methods.fedbr import FedBR
from feddpc.methods.fedcm import FedCM
from feddpc.methods.feddc import FedDC
from feddpc.methods.feddpc import FedDPC
from feddpc.methods.feddyn import FedDyn
from feddpc.methods.federated_data import FederatedData
from feddpc.methods.fedexp import FedExP
from feddpc.methods.fedga import FedGA
from feddpc.methods.fedprox import FedProx
from feddpc.methods.fedspeed import FedSpeed
from feddpc.methods.fedvarp import FedVARP
from feddpc.methods.gmm import GMM
from feddpc.methods.mifa import MIFA
from feddpc.methods.moon import MOON
from feddpc.methods.scaffold import Scaffold

__all__ = [
    "ClientContext",
    "Cohort",
    "Costs",
    "FederatedData",
    "Method",
    "State",
    "Step",
    "create",
    "get",
    "names",
    "register",
]

M = TypeVar("M", bound=type[Method])

_REGISTRY: dict[str, type[Method]] = {
    cls.name: cls
    for cls in (
        *(FedDPC, FedAvg, FedProx, FedExP, FedGA, FedCM, FedVARP, ClusterFedVARP),
        *(Scaffold, FedDyn, FedSpeed, FedAlign, MOON, FedAMD, FedDC, MIFA, FedBR, DataSharing, GMM, FAug),
    )
}


def names() -> list[str]:
    """Return the registered names, FedDPC first."""
    return list(_REGISTRY)


def register(cls: M) -> M:
    """Class decorator: make a method known by its ``name`` to the command line, the comparison and the test battery."""
    if not cls.name:
        raise BadInputError(f"{cls.__name__} has no name: set `name: ClassVar[str] = ...`")
    if _REGISTRY.get(cls.name, cls).__qualname__ != cls.__qualname__:
        raise BadInputError(f"method name {cls.name!r} is taken by {_REGISTRY[cls.name].__qualname__}: choose another")
    _REGISTRY[cls.name] = cls
    return cls


def get(name: str) -> type[Method]:
    """Return the class of a registered method, or of ``FILE.py:CLASS``."""
    if name in _REGISTRY:
        return _REGISTRY[name]
    if is_code(name):
        return _from_file(name)
    raise unknown("method", name, _REGISTRY)


def is_code(name: str) -> bool:
    """Say whether ``name`` is no registered method but a class in a file, which runs when it is looked up."""
    return name not in _REGISTRY and ".py" in name


def refuse_code(folder: Path, names: Iterable[str], asked: Iterable[str]) -> None:
    """Raise if a folder, which may be anybody's, names code to be run, and the user does not."""
    for name in names:
        if is_code(name) and name not in asked:
            raise BadInputError(
                f"{folder} names code, {name}, which would be run: look at it, and name it yourself with --method or "
                "--methods if it is what you want"
            )


def create(name: str, **hyper: Any) -> Method:
    """Build a method from its name and hyper-parameters.

    >>> create("feddpc", lam=2).lam
    2.0
    >>> create("feddpc", lamda=2)
    Traceback (most recent call last):
    feddpc.errors.BadInputError: unknown hyper-parameter of feddpc 'lamda': did you mean 'lam'? Valid: form, guard, \
lam, max_scale, normalize_by_steps, projection, scaling, tau
    """
    cls = get(name)
    hints = {k: v for k, v in typing.get_type_hints(cls).items() if typing.get_origin(v) is not typing.ClassVar}
    for key in hyper:
        if not hints:
            raise BadInputError(f"{cls.name} has no hyper-parameters, but {key!r} was given: leave it out")
        if key not in hints:
            raise unknown(f"hyper-parameter of {cls.name}", key, hints)
    return cls(**{k: coerce(f"{cls.name}: {k}", v, hints[k]) for k, v in hyper.items()})


@functools.cache
def _load(path: Path) -> types.ModuleType:
    """Import a file once, under a name of its own; annotations and dataclasses look themselves up there."""
    name = f"feddpc_method_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise BadInputError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise BadInputError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
    return module


def _from_file(name: str) -> type[Method]:
    """Load a user's own method from ``FILE.py:CLASS`` (or ``FILE.py`` when it defines just one)."""
    file, _, wanted = name.partition(":")
    path = Path(file)
    if not path.is_file():
        raise BadInputError(f"method {name!r}: there is no file {file}")
    module = _load(path.resolve())
    found = {
        n: c
        for n, c in inspect.getmembers(module, inspect.isclass)
        if issubclass(c, Method) and c.__module__ == module.__name__
    }
    if wanted and wanted not in found:
        raise unknown(f"class in {file}", wanted, found)
    if not wanted and len(found) != 1:
        raise BadInputError(
            f"method {name!r}: {file} defines {len(found)} methods ({', '.join(found)}): name one, FILE.py:CLASS"
        )
    cls = found[wanted] if wanted else next(iter(found.values()))
    if not cls.name:
        cls.name = cls.__name__.lower()
    return cls
