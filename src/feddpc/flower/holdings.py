"""What a server holds itself: the network, a test set, and samples that it keeps back for methods that want some."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from feddpc.config import Config
from feddpc.data import Dataset
from feddpc.data.partition import Partition
from feddpc.data.scaling import Scaler, make_scaler
from feddpc.errors import BadInputError
from feddpc.method_setup import adapt_module
from feddpc.methods.base import Method, State
from feddpc.methods.federated_data import FederatedData
from feddpc.models import check_supported
from feddpc.models.flat import Flat
from feddpc.tasks.classification import Classification

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
class Holdings:
    """The server's side of an experiment; ``samples`` counts those of all clients and the reserve."""

    config: Config
    method: Method
    module: nn.Module
    classes: int
    test: tuple[Array, Array] | None = None
    reserve: Reserve | None = None
    scaler: Scaler | None = None
    samples: int | None = None

    def __post_init__(self) -> None:
        check_supported(self.module)
        if self.method.reserve and self.reserve is None:
            raise BadInputError(
                f"{self.method.name} hands samples of the server to the clients, but the server has none: give reserve="
            )
        if self.config.scaling == "channel" and self.scaler is None:
            raise BadInputError("scaling = 'channel' needs the mean of all clients' data: use 'half', 'unit' or 'none'")

    @property
    def dtype(self) -> torch.dtype:
        """The type of the model's numbers."""
        return torch.float64 if self.config.precision == "float64" else torch.float32

    @property
    def reserved(self) -> int:
        """How many samples the server keeps."""
        return 0 if self.reserve is None else len(self.reserve.y)

    @cached_property
    def network(self) -> nn.Module:
        """The network that is trained."""
        network = adapt_module(self.method, self.module, self.config.seed) or self.module
        return network.to(self.dtype)

    @cached_property
    def flat(self) -> Flat:
        """The map between network and vector."""
        return Flat(self.network)

    def state_dict(self) -> State:
        """Return the first model, parameter by parameter, in the order of its vector."""
        return self.flat.parameters(self.flat.vector())

    @cached_property
    def task(self) -> Classification | None:
        """The network on the server's own samples, None if it has none."""
        data = self.data(0)
        if data is None:
            return None
        auto = "half" if data.is_image else "none"
        scaling = auto if self.config.scaling == "auto" else self.config.scaling
        scaler = self.scaler or make_scaler(scaling, data)
        return Classification(self.network, data, scaler, dtype=self.dtype, half=self.config.precision == "bf16")

    def evaluate(self, w: Tensor) -> tuple[float, float]:
        """Return accuracy and loss of a model on the test set."""
        if self.task is None or self.test is None:
            return float("nan"), 0.0
        return self.task.evaluate(w)

    def data(self, elsewhere: int) -> Dataset | None:
        """Return the server's samples as a data set, with labels for those ``elsewhere`` that only count."""
        if self.reserve is None and self.test is None:
            return None
        x_test, y_test = self.test or (self.reserve.x[:0], self.reserve.y[:0])  # type: ignore[union-attr]
        # A network is tried out on one sample, so there must be one.
        x, y = (self.reserve.x, self.reserve.y) if self.reserve is not None else (x_test[:1], y_test[:1])
        y = np.concatenate([y, np.zeros(elsewhere, np.int64)])
        return Dataset("server", x, y, x_test, y_test, self.classes)

    def world(self, clients: int, samples: int) -> FederatedData:
        """Return a world in which all samples but the server's are elsewhere."""
        data = self.data(max(samples - max(self.reserved, 1), 0))
        if data is None:
            raise BadInputError(
                f"{self.method.name} must know what a sample looks like before round 1: give the server a test set"
            )
        return FederatedData(
            data=data,
            partition=Partition(np.zeros(0, np.int64), np.zeros(clients + 1, np.int64)),
            seed=self.config.seed,
            client_lr=self.config.lr,
            batch_size=self.config.batch_size or 1,
            device=torch.device("cpu"),
            reserve=self.reserve.order if self.reserve is not None else np.zeros(0, np.int64),
        )

    def handed(self, client: int, furnished: FederatedData | None, learned: Mapping[str, Tensor]) -> State:
        """Return what client ``client`` is handed before round 1."""
        given: State = {f"learned.{key}": value for key, value in learned.items()}
        if self.reserve is not None and furnished is not None:
            dealt = furnished.partition[client]
            at = np.unique(dealt[dealt < len(self.reserve.y)])
            parts = {"x": self.reserve.x[at], "at": at, "y": self.reserve.y, "order": self.reserve.order}
            given |= {f"reserve.{key}": torch.from_numpy(np.ascontiguousarray(part)) for key, part in parts.items()}
        if self.config.scaling == "channel" and self.scaler is not None and self.scaler.terms is not None:
            given |= dict(zip(("scaler.mean", "scaler.deviation"), self.scaler.terms, strict=True))
        return given
