"""The machine and the versions that a run was made with."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from feddpc._version import __version__
from feddpc.tasks.metrics import CLASSIFICATION, Metric


def versions() -> dict[str, str]:
    """Return the versions that decide what a run computes."""
    return {
        "feddpc": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def environment(
    engine: str,
    device: str,
    fingerprint: dict[str, str] | None = None,
    metrics: Sequence[Metric] = CLASSIFICATION,
    ranks: int = 1,
) -> dict[str, Any]:
    """Describe the machine and the versions a run was made with, what it was made from, and what it measures."""
    return {
        **versions(),
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
        "engine": engine,
        **({"ranks": ranks} if ranks > 1 else {}),
        "command": sys.argv,
        "fingerprint": fingerprint or {},
        "metrics": [metric.as_dict() for metric in metrics],
    }
