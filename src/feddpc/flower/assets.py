"""What the server of an experiment has itself: method, settings, network, test samples, and samples for clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from feddpc.build import dtype_of
from feddpc.config import Config
from feddpc.data import Dataset
from feddpc.data.array_checks import Target
from feddpc.data.partition import Partition
from feddpc.data.scaling import Scaler
from feddpc.errors import BadInputError
from feddpc.method_changes import adapt_module, federated_data
from feddpc.methods.base import Method, State
from feddpc.methods.federated_data import FederatedData
from feddpc.models import check_supported
from feddpc.models.flat import Flat
from feddpc.task_parts import TaskParts, named_metrics, task_class
from feddpc.tasks import Metric
from feddpc.tasks.measures import choose_measures, listed_metrics

Array = NDArray[Any]


@dataclass(frozen=True)
class Reserve:
    """Samples that no client holds, by rising number, and the order in which the server drew them."""

    x: Array
    y: Array
    order: Array

    @classmethod
    def of(cls, x: Array, y: Array, drawn: Array) -> Reserve:
        """Return those of the samples ``x``, ``y`` whose numbers are ``drawn``."""
        rising = np.sort(drawn)
        return cls(x[rising], y[rising], np.searchsorted(rising, drawn))


@dataclass(frozen=True)
class ServerAssets:
    """What the server itself has; ``samples`` counts the samples of all clients and of the reserve."""

    config: Config
    method: Method
    module: nn.Module
    classes: int
    target: Target
    own: TaskParts = field(default_factory=TaskParts)  #: code of the user's own
    test: tuple[Array, Array] | None = None
    validation: tuple[Array, Array] | None = None
    reserve: Reserve | None = None
    scaler: Scaler | None = None
    samples: int | None = None

    def __post_init__(self) -> None:
        check_supported(self.module, statistics=False)
        if self.method.reserve and self.reserve is None:
            raise BadInputError(
                f"{self.method.name} hands samples of the server to the clients, but the server has none: give reserve="
            )
        if self.config.scaling == "channel" and self.scaler is None:
            raise BadInputError("scaling = 'channel' needs the mean of all clients' data: use 'half', 'unit' or 'none'")
        if self.config.augment and (self.own.transform or self.config.transform):
            raise BadInputError("augment and transform cannot be used together: let the transform do both")
        if self.config.keep == "best" and self.test is None and self.validation is None:
            raise BadInputError("keep = 'best' needs samples on which the server evaluates: give test= or validation=")
        self.metrics  # noqa: B018  # refuses those that these targets do not have

    @property
    def reserved(self) -> int:
        """How many samples the server has."""
        return 0 if self.reserve is None else len(self.reserve.y)

    @cached_property
    def metrics(self) -> tuple[Metric, ...]:
        """What an evaluation measures, the primary metric first."""
        wanted = self.own.metrics or named_metrics(self.config.metrics)
        return listed_metrics(choose_measures(wanted, task_class(self.config.task, self.own).target))

    @cached_property
    def network(self) -> nn.Module:
        """The network that is trained."""
        network = adapt_module(self.method, self.module, self.config.seed) or self.module
        return network.to(dtype_of(self.config.precision))

    @cached_property
    def flat(self) -> Flat:
        """The map between network and vector."""
        return Flat(self.network)

    def data(self, elsewhere: int) -> Dataset | None:
        """Return the server's samples as a data set, and placeholder labels for ``elsewhere`` samples of clients."""
        own = (self.reserve.x, self.reserve.y) if self.reserve is not None else self.test or self.validation
        if own is None:
            return None
        x, y = own
        x_test, y_test = self.test or (x[:0], y[:0])
        if self.reserve is None:
            x, y = x[:1], y[:1]  # a network is tried out on one sample, so there must be one
        y = np.concatenate([y, np.zeros((elsewhere, *y.shape[1:]), y.dtype)])
        return Dataset("server", x, y, x_test, y_test, self.classes, target=self.target)

    def federated_data(self, config: Config, samples: int) -> FederatedData:
        """Return a data set in which all ``samples`` except the server's are with the clients, only counted."""
        data = self.data(max(samples - max(self.reserved, 1), 0))
        if data is None:
            raise BadInputError(
                f"{self.method.name} must know what a sample looks like before round 1: give the server a test set"
            )
        with_clients = Partition(np.zeros(0, np.int64), np.zeros(config.clients + 1, np.int64))
        reserve = np.zeros(0, np.int64) if self.reserve is None else self.reserve.order
        return federated_data(config, data, with_clients, reserve)

    def payload(self, client: int, extended: FederatedData | None, learned: Mapping[str, Tensor]) -> State:
        """Return what client ``client`` is sent once, before its first round; ``extended`` has all samples."""
        given: State = {f"learned.{key}": value for key, value in learned.items()}
        if self.reserve is not None and extended is not None:
            mine = extended.partition[client]
            at = np.unique(mine[mine < len(self.reserve.y)])
            parts = {"x": self.reserve.x[at], "at": at, "y": self.reserve.y, "order": self.reserve.order}
            given["reserve.samples"] = torch.tensor(len(extended.data.y_train))
            given |= {f"reserve.{key}": torch.from_numpy(np.ascontiguousarray(part)) for key, part in parts.items()}
        if self.config.scaling == "channel" and self.scaler is not None and self.scaler.terms is not None:
            given |= dict(zip(("scaler.mean", "scaler.deviation"), self.scaler.terms, strict=True))
        return given
