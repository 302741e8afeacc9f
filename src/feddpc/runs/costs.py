"""What methods cost, measured: every method runs one round of a small federation under counters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from feddpc.build import build
from feddpc.config import Config
from feddpc.data import Dataset
from feddpc.engines.loop import Loop
from feddpc.method_changes import for_method
from feddpc.methods.base import Method
from feddpc.round.round import run_round
from feddpc.round.state import RunState

#: Clients of the small federation; all of them take part.
POPULATION = 10
_VIEWS = (
    "view",
    "expand",
    "detach",
    "select",
    "slice",
    "unbind",
    "split",
    "alias",
    "unsqueeze",
    "squeeze",
    "t.",
    "as_s",
)


@dataclass(frozen=True)
class MeasuredCosts:
    """Costs per participant and round, in multiples of d; work as vector operations, gradients apart."""

    down: float
    up: float
    client_state: float
    server_state: float
    down_once: float
    up_once: float
    gradients_once: float  #: of every client before round 1, in batches
    gradients: float  #: a local step of FedAvg
    passes: float  #: through the network or a part of it, a local step
    client_work: float  #: operations on vectors a local step, in d
    server_work: float  #: operations on vectors per participant, in d


def count_costs(method: Method) -> MeasuredCosts:
    """Run ``method`` for one round of a small federation and return what was counted."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # work this small only waits for a second one
    try:
        return _measured(method)
    finally:
        torch.set_num_threads(threads)


def _measured(method: Method) -> MeasuredCosts:
    config = Config(
        model="cnn",
        clients=POPULATION,
        cohort=POPULATION,
        partition="iid",
        batch_size=4,
        model_options={"width": 4},
        device="cpu",
    )
    experiment = for_method(build(config, method=method, data=_images()), method)
    counter = _Counter(experiment.task.d)
    spied = _spied(method, counter)
    task = experiment.task
    task.differentiate = counter.apart(task.differentiate)
    state = RunState.of(experiment, spied)
    run_round(replace(experiment, evaluates=False), spied, Loop(), state)
    meter = state.meter
    work = {
        "client_work": counter.seen["client"] / (meter.d * meter.steps),
        "server_work": counter.seen["server"] / (meter.d * meter.clients),
    }
    return MeasuredCosts(**meter.summary(), **{k: round(v, 6) for k, v in work.items()})


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the numbers that operations on vectors of length d touch, by whose work it is."""

    def __init__(self, d: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.d, self.whose = d, ""
        self.seen = {"client": 0, "server": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.__name__
        if self.whose and not name.startswith(_VIEWS):
            sizes = [t.numel() for t in (*args, out) if isinstance(t, torch.Tensor) and t.shape[-1:] == (self.d,)]
            self.seen[self.whose] += max(sizes, default=0)
        return out

    @contextmanager
    def counting(self, whose: str) -> Iterator[None]:
        """Count what happens inside as the work of ``whose``; not at all if that is empty."""
        before, self.whose = self.whose, whose
        try:
            with self:
                yield
        finally:
            self.whose = before

    def apart(self, f: Any) -> Any:
        """Return ``f`` so that its inside is not counted."""

        def quiet(*args: Any) -> Any:
            with self.counting(""):
                return f(*args)

        return quiet


def _spied(method: Method, counter: _Counter) -> Method:
    """Return a twin of ``method`` whose hooks are counted."""

    def counted(hook: str, whose: str) -> Any:
        plain = getattr(type(method), hook)

        def run(self: Method, *args: Any) -> Any:
            with counter.counting(whose):
                return plain(self, *args)

        return run

    hooks = {h: counted(h, "client") for h in ("start", "step", "finish")} | {
        "aggregate": counted("aggregate", "server")
    }
    twin: Method = object.__new__(type(type(method).__name__, (type(method),), hooks))
    twin.__dict__.update(method.__dict__)
    return twin


def _images() -> Dataset:
    """Eighty grey images of four classes, alike on every machine."""
    rng = np.random.default_rng(0)
    y = np.arange(80) % 4
    x = rng.integers(0, 256, size=(80, 8, 8, 1)).astype(np.uint8)
    return Dataset.from_arrays(x, y, x[:8], y[:8], name="noise", classes=4)
