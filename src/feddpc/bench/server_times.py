"""The server step against the time of reading the cohort's updates twice, which no rule like FedDPC's can beat."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from feddpc import methods
from feddpc.bench.clock import timed
from feddpc.methods.base import Cohort
from feddpc.round.server_step import apply_step_

RESNET18 = 11_227_812
METHODS = ("fedavg", "feddpc")


class ServerWorkload:
    """A model, the last global update and a cohort's updates, on a device, and server steps on them."""

    def __init__(self, d: int = RESNET18, m: int = 10, device: str = "cpu") -> None:
        gen = torch.Generator(device).manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=gen, device=device)

        self.d, self.m, self.device = d, m, device
        self.u, self.g, self.w = draw(m, d), draw(d), draw(d)
        share = torch.full((m,), 1 / m, dtype=torch.float64, device=device)
        steps = torch.ones(m, dtype=torch.float64, device=device)
        self.cohort = Cohort(2, torch.arange(m, device=device), m, share, steps, 0.1, 0.1)

    def of(self, name: str, **hyper: Any) -> Callable[[], object]:
        """Return the server step of a method that keeps the last global update or nothing."""
        method = methods.create(name, **hyper)
        server = {"delta": self.g} if name == "feddpc" else {}
        return lambda: apply_step_(self.w, method.aggregate(self.w, server, {"delta": self.u}, self.cohort))

    def reads(self) -> None:
        """Read all updates twice."""
        for _ in range(2):
            self.u.sum()

    def measure(self, work: Callable[[], object], repeats: int = 7) -> dict[str, float]:
        """Time ``work``, each time together with two reads; return medians of both and of their ratio."""
        for warm in (work, self.reads):
            warm()
        turns = [(timed(work, self.device)[0], timed(self.reads, self.device)[0]) for _ in range(repeats)]
        floor = statistics.median(f for _, f in turns)
        return {
            "seconds": statistics.median(s for s, _ in turns),
            "two_reads": floor,
            "over": statistics.median(s / f for s, f in turns),
            "gigabytes_a_second": 2 * self.u.nbytes / floor / 1e9,
        }


def time_server_steps(d: int = RESNET18, m: int = 10, device: str = "cpu") -> list[dict[str, Any]]:
    """Measure FedAvg's and FedDPC's server step; what cannot run is an error in its row."""
    rows: list[dict[str, Any]] = []
    step: ServerWorkload | None = None
    for name in METHODS:
        row: dict[str, Any] = {"way": methods.get(name).title, "parameters": d, "clients": m}
        try:
            step = step or ServerWorkload(d, m, device)
            rows.append(row | step.measure(step.of(name)))
        except Exception as error:  # too little memory, say: the other rows are still worth having
            rows.append(row | {"error": f"{type(error).__name__}: {error}".splitlines()[0]})
    return rows
