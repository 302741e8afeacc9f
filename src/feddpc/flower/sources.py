"""An experiment of the simulator as the two halves of a federation: the same data, clients, model and seeds."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from torch import nn

from feddpc.experiment import Setting
from feddpc.flower.holdings import Reserve


@dataclass(frozen=True)
class Dealt:
    """What ``server_app`` and ``client_app`` need for one experiment."""

    setting: Setting

    def model(self) -> nn.Module:
        """Return a copy of the network."""
        return copy.deepcopy(self.setting.task.module)

    def data(self, client: int, clients: int) -> tuple[Any, Any]:
        """Return the samples and labels of one client."""
        mine, data = self.setting.partition[client], self.setting.data
        return data.x_train[mine], data.y_train[mine]

    def server(self) -> dict[str, Any]:
        """Return what ``strategy`` and ``server_app`` are given beside the method."""
        setting = self.setting
        data, config = setting.data, setting.config
        skip = ("method", "hyper", "engine", "device", "threads", "client_memory", "rounds")
        return {
            **{k: v for k, v in config.asdict().items() if k not in skip},
            "model": self.model(),
            "test": (data.x_test, data.y_test),
            "classes": data.classes,
            "reserve": Reserve.of(data.x_train, data.y_train, setting.reserve) if len(setting.reserve) else None,
            "scaler": setting.task.scaler if config.scaling == "channel" else None,
            "samples": len(data.y_train),
        }

    def client(self) -> dict[str, Any]:
        """Return what ``client_app`` is given."""
        return {"model": self.model, "data": self.data}


def dealt(setting: Setting) -> Dealt:
    """Return a setting of the simulator (from ``feddpc.experiment.prepare``) as the halves of a federation."""
    return Dealt(setting)
