"""The methods by name: one file each, one battery of tests for all."""

from __future__ import annotations

import typing
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
from feddpc.methods.fedbn import FedBN
from feddpc.methods.fedbr import FedBR
from feddpc.methods.fedcm import FedCM
from feddpc.methods.feddc import FedDC
from feddpc.methods.feddpc import FedDPC
from feddpc.methods.feddyn import FedDyn
from feddpc.methods.federated_data import FederatedData
from feddpc.methods.fedexp import FedExP
from feddpc.methods.fedga import FedGA
from feddpc.methods.fednova import FedNova
from feddpc.methods.fedopt import FedAdagrad, FedAdam, FedAvgM, FedYogi
from feddpc.methods.fedprox import FedProx
from feddpc.methods.fedspeed import FedSpeed
from feddpc.methods.fedvarp import FedVARP
from feddpc.methods.gmm import GMM
from feddpc.methods.mifa import MIFA
from feddpc.methods.moon import MOON
from feddpc.methods.scaffold import Scaffold
from feddpc.registry import Registry, refuse_code

__all__ = [
    "METHODS",
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
    "refuse_code",
    "register",
]

M = TypeVar("M", bound=type[Method])


def _is_method(thing: object) -> bool:
    return isinstance(thing, type) and issubclass(thing, Method)


METHODS: Registry[Method] = Registry(
    "method",
    {
        cls.name: cls
        for cls in (
            *(FedDPC, FedAvg, FedProx, FedExP, FedGA, FedCM, FedVARP, ClusterFedVARP),
            *(Scaffold, FedDyn, FedSpeed, FedAlign, MOON, FedAMD, FedDC, MIFA, FedBR, DataSharing, GMM, FAug),
            *(FedNova, FedAvgM, FedAdam, FedYogi, FedAdagrad, FedBN),
        )
    },
    accepts=_is_method,
)


def names() -> list[str]:
    """Return the registered names, FedDPC first."""
    return METHODS.names()


def register(cls: M) -> M:
    """Class decorator: make a method known by its ``name`` to the command line, the comparison and the test battery."""
    if not cls.name:
        raise BadInputError(f"{cls.__name__} has no name: set `name: ClassVar[str] = ...`")
    METHODS.register(cls.name, cls)
    return cls


def get(name: str) -> type[Method]:
    """Return the class of a registered method, or of ``FILE.py:CLASS``."""
    cls = typing.cast(type[Method], METHODS.get(name))
    if not cls.name:
        cls.name = cls.__name__.lower()
    return cls


def create(name: str, **hyper: Any) -> Method:
    """Build a method from its name and hyper-parameters.

    >>> create("feddpc", lam=2).lam
    2.0
    >>> create("feddpc", lamda=2)
    Traceback (most recent call last):
    feddpc.errors.BadInputError: unknown hyper-parameter of feddpc 'lamda': did you mean 'lam'? Valid: form, guard, \
lam, max_scale, momentum, normalize_by_steps, projection, scaling, tau
    """
    cls = get(name)
    hints = {k: v for k, v in typing.get_type_hints(cls).items() if typing.get_origin(v) is not typing.ClassVar}
    for key in hyper:
        if not hints:
            raise BadInputError(f"{cls.name} has no hyper-parameters, but {key!r} was given: leave it out")
        if key not in hints:
            raise unknown(f"hyper-parameter of {cls.name}", key, hints)
    return cls(**{k: coerce(f"{cls.name}: {k}", v, hints[k]) for k, v in hyper.items()})
