"""The round loop: screening, idle rounds, divergence, memory, and a population that costs nothing."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch

from feddpc import methods, sampling
from feddpc.config import Config
from feddpc.data.partition import Partition
from feddpc.engines.loop import Loop
from feddpc.engines.stacked import Stacked
from feddpc.errors import BadInputError
from feddpc.quadratic import Quadratic, quadratic_experiment
from feddpc.round.client_table import ClientTable
from feddpc.round.round import run_round
from feddpc.round.server_step import finite_rows
from feddpc.round.state import RunState
from support import on_quadratics, small_setting

ENGINES = pytest.mark.parametrize("engine", [Loop(), Stacked()], ids=["loop", "stacked"])


def federation(schedule, bad=(), n=5, d=3, value=math.nan):
    rng = np.random.default_rng(0)
    a, c = torch.tensor(rng.uniform(0.5, 2, (n, d))), torch.tensor(rng.standard_normal((n, d)))
    for j in bad:
        c[j] = value
    return quadratic_experiment(
        Quadratic(a, c),
        Partition.from_lists([[j] for j in range(n)]),
        sampling.make("fixed", population=n, cohort=n, seed=0, schedule=schedule),
        torch.zeros(d, dtype=torch.float64),
        config=Config(lr=0.1, server_lr=0.1, epochs=2),
    )


@ENGINES
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [n for n in methods.names() if on_quadratics(methods.create(n))])
def test_a_bad_client_costs_its_own_vote_only(name, value, engine):
    method = methods.create(name, **({"clusters": 2} if name == "clusterfedvarp" else {}))
    sick, well = federation([[0, 1, 2], [1, 3]], bad=[1], value=value), federation([[0, 2], [3]])
    a, b = (RunState.begin(method, torch.zeros(3, dtype=torch.float64), 5) for _ in range(2))
    for _ in range(2):
        record = run_round(sick, method, engine, a)
        run_round(well, method, engine, b)
        assert record.rejected == [1]
        assert 1 not in record.participants
        assert math.isfinite(record.train_loss)
    if method.surveys:  # the well client 1 had a say before round 1, the sick one had none
        assert bool(a.w.isfinite().all())
        assert float(a.w.norm()) > 0
    else:
        assert torch.equal(a.w, b.w)
    assert 1 not in a.clients.export()[0].tolist() + a.slots.export()[0].tolist()


@ENGINES
def test_a_bad_probe_is_screened_before_it_reaches_the_others(engine):
    method = methods.create("fedga", variant="fresh")
    sick, well = federation([[0, 1, 2]], bad=[1]), federation([[0, 2]])
    a, b = (RunState.begin(method, torch.zeros(3, dtype=torch.float64), 5) for _ in range(2))
    assert run_round(sick, method, engine, a).rejected == [1]
    run_round(well, method, engine, b)
    assert torch.equal(a.w, b.w)


def test_only_bad_updates_end_the_run_and_leave_the_model():
    method, sick = methods.create("feddpc"), federation([[1]], bad=[1])
    progress = RunState.begin(method, torch.ones(3, dtype=torch.float64), 5)
    record = run_round(sick, method, Loop(), progress)
    assert record.diverged == "all 1 updates were non-finite"
    assert progress.w.tolist() == [1, 1, 1]


def test_a_huge_but_finite_update_is_not_rejected():
    mask = finite_rows({"delta": torch.tensor([[3e38, 3e38], [1.0, 1.0]])})
    assert mask is None or mask.tolist() == [True, True]
    assert finite_rows({"delta": torch.tensor([[3e38, 3e38], [1.0, torch.nan]])}).tolist() == [True, False]


def test_nobody_answers():
    setting = small_setting(cohort=1, dropout=0.95)
    method = methods.create("feddpc")
    progress = RunState.begin(method, setting.w0, 8)
    records = [run_round(setting, method, Loop(), progress) for _ in range(6)]
    empty = [r for r in records if not r.participants]
    assert empty
    assert all(len(r.dropped) == 1 and math.isnan(r.train_loss) and r.diverged is None for r in empty)


def test_after_a_lost_round_feddpc_does_not_project():
    method = methods.create("feddpc", lam=0.0)
    whole = federation([[0], [1]])
    progress = RunState.begin(method, torch.zeros(3, dtype=torch.float64), 5)
    run_round(whole, method, Loop(), progress)
    progress.server = method.on_empty_round(progress.server)
    record = run_round(whole, method, Loop(), progress)
    assert record.notes["mean_scale"] == pytest.approx(1.0)
    assert record.notes["mean_cosine"] == 0


def test_an_exploding_model_is_reported():
    setting = small_setting(lr=1e200, server_lr=1e200)
    progress = RunState.begin(methods.create("fedavg"), setting.w0, 8)
    reasons = []
    for _ in range(5):
        record = run_round(setting, methods.create("fedavg"), Loop(), progress)
        reasons.append(record.diverged)
        if record.diverged:
            break
    assert reasons[-1]


def test_rates_decay_together():
    fed = federation([[0]])
    fed = replace(fed, config=replace(fed.config, lr_decay=0.5))
    assert fed.population.rates(1) == (0.1, 0.1)
    assert fed.population.rates(3) == (0.025, 0.025)


@dataclass(frozen=True, kw_only=True)
class Forgetful(methods.Method):
    name: ClassVar[str] = "forgetful"
    wrong: str = "keys"

    def init_client(self, w):
        return {"c": torch.zeros_like(w)}

    def finish(self, y, ctx):
        memory = {"keys": {}, "shape": {"c": y[:1]}, "dtype": {"c": y.float()}}[self.wrong]
        return {"delta": ctx.w - y}, memory


@ENGINES
@pytest.mark.parametrize("wrong", ["keys", "shape", "dtype"])
def test_client_memory_must_keep_its_form(engine, wrong):
    method = Forgetful(wrong=wrong)
    progress = RunState.begin(method, torch.zeros(3, dtype=torch.float64), 5)
    with pytest.raises(BadInputError, match="forgetful: a client's memory"):
        run_round(federation([[0, 1]]), method, engine, progress)


def test_memory_grows_with_who_came_and_survives_export():
    memory = ClientTable(lambda: {"y": torch.full((2,), 7.0)}, "memory", 10)
    assert memory.read(np.array([5, 999_999]))["y"].tolist() == [[7, 7], [7, 7]]
    for client in (10**12, 3, 8):
        memory.write(np.array([client]), {"y": torch.full((1, 2), float(client % 100))})
    assert len(memory) == 3
    again = ClientTable(lambda: {"y": torch.full((2,), 7.0)}, "memory", 10)
    again.restore(*memory.export())
    for table in (memory, again):
        assert table.read(np.array([8, 1, 3]))["y"].tolist() == [[8, 8], [7, 7], [3, 3]]
    again.write(np.array([1]), {"y": torch.ones(1, 2)})
    assert again.read(np.array([1, 8]))["y"].tolist() == [[1, 1], [8, 8]]


def test_a_million_clients_leave_no_trace_in_a_stateless_round():
    """Memory of a round is that of its cohort: peak allocations with a population of 1,000,000 equal those with 100."""
    import tracemalloc

    peaks = []
    for population in (100, 1_000_000):
        order = np.arange(population, dtype=np.int64) % 50
        partition = Partition.from_sizes(order, np.ones(population, dtype=np.int64))
        a = torch.ones(50, 3, dtype=torch.float64)
        fed = quadratic_experiment(
            Quadratic(a, a),
            partition,
            sampling.make("uniform", population=population, cohort=10, seed=0),
            torch.zeros(3, dtype=torch.float64),
            config=Config(lr=0.1, server_lr=0.1, epochs=2),
        )
        progress = RunState.begin(methods.create("feddpc"), torch.zeros(3, dtype=torch.float64), population)
        run_round(fed, methods.create("feddpc"), Loop(), progress)
        tracemalloc.start()
        for _ in range(3):
            record = run_round(fed, methods.create("feddpc"), Loop(), progress)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(record.participants) == 10
    assert peaks[1] < peaks[0] + 100_000


@ENGINES
@pytest.mark.parametrize("name", ["feddpc", "scaffold"])
def test_a_round_whose_updates_are_all_rejected_is_counted(name, engine):
    method, meters = methods.create(name), []
    for bad in ([], [0, 1]):
        state = RunState.begin(method, torch.zeros(3, dtype=torch.float64), 5)
        record = run_round(federation([[0, 1]], bad=bad), method, engine, state)
        assert record.rejected == bad
        meters.append(state.meter)
    for what in ("clients", "steps", "down", "up", "gradients"):
        assert getattr(meters[0], what) == getattr(meters[1], what) > 0
