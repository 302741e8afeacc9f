"""Scale laws, on counts that no other process disturbs: operations, numbers and Python's own memory."""

import dataclasses
import tracemalloc

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from feddpc.round.placement import Placement
from scale_laws import Size, measure


def python_memory(run):
    """Return the peak of what Python itself allocates during ``run``, in bytes."""
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


class Work(TorchDispatchMode):
    """Counts torch's operations and the numbers they give back, which no clock or other process disturbs."""

    def __init__(self):
        super().__init__()
        self.operations = self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.operations += 1
        self.numbers += out.numel() if isinstance(out, torch.Tensor) else 0
        return out


def work(size):
    run = size.start()
    run()
    with Work() as counted:
        run()
    return counted


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_a_round_does_not_depend_on_the_population(engine):
    few, many = (Size(population=n, cohort=5, d=20, engine=engine) for n in (100, 200_000))
    a, b = work(few), work(many)
    assert (a.operations, a.numbers) == (b.operations, b.numbers)
    runs = [size.start() for size in (few, many)]
    for run in runs:
        run()
    small, large = (min(python_memory(run) for _ in range(3)) for run in runs)
    assert large < 3 * small + 50_000  # an int64 for each of the many clients would be 1.6 MB


def test_time_does_not_depend_on_the_population():
    few, many = (measure(Size(population=n, cohort=5, d=20), 7)["seconds"] for n in (100, 200_000))
    assert many < 10 * few


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("grown", ["cohort", "d"])
def test_the_numbers_of_a_round_grow_with_cohort_and_parameters(engine, grown):
    base = Size(population=1000, cohort=10, d=1000, engine=engine)
    a, b = work(base), work(dataclasses.replace(base, **{grown: 10 * getattr(base, grown)}))
    assert 5 < b.numbers / a.numbers < 11
    if grown == "d":
        assert a.operations == b.operations


def test_vectorised_operations_do_not_grow_with_the_cohort():
    few, many = (work(Size(population=1000, cohort=m, d=20, engine="stacked")) for m in (10, 100))
    assert many.operations < 1.5 * few.operations


def test_states_of_clients_can_be_measured_wherever_they_lie(tmp_path):
    size = Size(population=20, cohort=5, d=50, method="scaffold")
    for kind in ("device", "host", "disk"):
        assert measure(size, 2, warm=4, placement=Placement(kind, tmp_path / kind))["seconds"] > 0
