"""The adaptive norm bound, and robust rules with every method."""

from dataclasses import dataclass, replace

import pytest
import torch

import feddpc
from feddpc import methods, sampling
from feddpc.config import Config
from feddpc.engines.loop import Loop
from feddpc.errors import BadInputError
from feddpc.methods import FedVARP, Step
from feddpc.methods.base import Cohort, overrides
from feddpc.policies import Policies
from feddpc.robust import defense, rules
from feddpc.robust.defense import Defense
from feddpc.round.round import run_round
from feddpc.round.server_step import server_step
from feddpc.round.state import RunState
from support import VARIANTS, run_rounds, setting_for, small_setting

F64 = torch.float64
#: Every server rule there is, once; one variant of FedDPC takes no robust rule.
SERVERS = {k: v for k, v in VARIANTS.items() if overrides(v, "aggregate") or k == "fedavg"}
del SERVERS["feddpc exclude"]
ALL = pytest.mark.parametrize("method", SERVERS.values(), ids=SERVERS.keys())


def rows(*norms):
    return {"delta": torch.tensor(norms, dtype=F64)[:, None]}


def screened(guard, up, memory):
    """All of them trained."""
    return guard.screen(up, torch.ones(len(next(iter(up.values()))), dtype=torch.bool), memory)


def test_the_bound_is_a_multiple_of_the_median_norm():
    good, memory = screened(Defense(norm=3.0), rows(1, 2, -3, 5.9, 6.1, 100), {})
    # The lower of the two middle norms, 3, times 3.
    assert good.tolist() == [True] * 5 + [False]
    assert memory["norms.delta"].tolist() == [1, 2, 3, 5.9, 6.1, 100]


def test_the_bound_follows_the_norms_and_forgets_old_ones():
    guard, memory = Defense(norm=2.0, window=4), {}
    for size in (1.0, 1.0, 1.0):
        good, memory = screened(guard, rows(size, size), memory)
        assert good.all()
    good, memory = screened(guard, rows(10.0, 10.0), memory)
    assert not good.any()  # half of the pool is 1
    good, memory = screened(guard, rows(10.0, 10.0), memory)
    assert good.all()  # what was turned away counted for the median
    assert memory["norms.delta"].tolist() == [10.0] * 4


def test_a_minority_cannot_move_the_bound():
    guard, memory = Defense(norm=3.0), {}
    for _ in range(30):
        good, memory = screened(guard, rows(1, 1.5, 2, 1, 1e20, 1e25, 1e30), memory)
        assert good.tolist() == [True] * 4 + [False] * 3


def test_zeros_bound_nothing():
    assert screened(Defense(norm=3.0), rows(0, 0, 0, 5), {})[0].all()


def test_each_vector_has_a_bound_of_its_own():
    up = {"delta": torch.ones(3, 2), "change": torch.tensor([[1.0], [1.0], [50.0]])}
    good, memory = screened(Defense(norm=3.0), up, {})
    assert good.tolist() == [True, True, False]
    assert memory.keys() == {"norms.delta", "norms.change"}


def test_screened_clients_are_in_the_records_and_cost_their_own_vote_only():
    """Eight clients, a quarter of them huge: the run is that of the six others."""
    how = {"cohort": 8, "faults": {"huge": 0.25}}
    method = methods.create("fedvarp")
    setting = small_setting(**how, screen={"norm": 50.0})
    progress, records = run_rounds(setting, method, Loop(), 3)
    bad = setting.policies.faults.members["huge"].tolist()
    assert [r.rejected for r in records] == [bad] * 3
    assert not set(bad) & {int(j) for j in progress.slots.export()[0]}
    schedule = [[j for j in range(8) if j not in bad]] * 3
    well = replace(
        setting,
        policies=Policies(),
        sampler=sampling.make("fixed", population=8, cohort=8, seed=0, schedule=schedule),
    )
    other, _ = run_rounds(well, method, Loop(), 3)
    assert torch.equal(other.w, progress.w)


@pytest.mark.parametrize(
    ("table", "words"),
    [({"norm": 0.5}, "at least 1"), ({"nrm": 3}, "did you mean 'norm'"), ({"window": 3}, "without screen.norm")],
)
def test_bad_screens_say_what_to_do(table, words):
    with pytest.raises(BadInputError, match=words):
        defense.complete(table)


def test_weights_by_samples_are_refused_with_a_rule():
    """A hostile client could claim as many samples as it likes."""
    with pytest.raises(BadInputError, match="counts clients alike"):
        Config.read({"rule": "krum", "weighting": "samples"})


@ALL
def test_a_rule_that_changes_nothing_gives_the_method_itself(method):
    """Clipping far away and taking all rows are the mean, for every method: rows and combine are the server rule."""
    for rule, options in (("centered_clipping", {"radius": 1e9}), ("multi_krum", {"select": 4})):  # the cohort
        plain, _ = run_rounds(setting_for(method), method, Loop(), 3)
        guarded, records = run_rounds(setting_for(method, rule=rule, rule_options=options), method, Loop(), 3)
        torch.testing.assert_close(guarded.w, plain.w, rtol=0, atol=1e-10)
        for key, value in plain.server.items():
            torch.testing.assert_close(guarded.server[key], value, rtol=0, atol=1e-9)
        assert not any(r.rejected for r in records)


@pytest.mark.parametrize("rule", [name for name in rules.names() if name != "mean"])
@pytest.mark.parametrize("name", [name for name in SERVERS if name != "fedamd"])
def test_every_rule_bears_a_huge_client_with_every_method(name, rule):
    """One client of eight sends 1e30 for ever: model and memories stay where honest clients would put them.

    Only FedAMD that tosses coins is left out: nobody outvotes a hostile client that is the only anchor of a round.
    """
    method = SERVERS[name]
    options = {"share": 0.2} if rule in ("trimmed_mean", "krum", "multi_krum") else {}
    how = {"cohort": 8, "faults": {"huge": 0.125}, "rule": rule, "rule_options": options}
    progress, records = run_rounds(setting_for(method, **how), method, Loop(), 2)
    assert all(r.diverged is None for r in records)
    assert float(progress.w.abs().max()) < 1e3
    for table in (progress.server, progress.slots.export()[1]):
        assert all(float(v.double().abs().max()) < 1e6 for v in table.values() if v.is_floating_point() and v.numel())


def test_a_selecting_rule_lists_the_others_as_rejected():
    setting = small_setting(cohort=8, rule="krum")
    _, records = run_rounds(setting, methods.create("feddpc"), Loop(), 3)
    assert [len(r.participants) for r in records] == [1] * 3
    assert [len(r.rejected) for r in records] == [7] * 3


def test_those_who_trained_are_judged_apart_from_those_who_did_not():
    """FedAMD's anchors send changes of gradients, its miners updates: a median over both would mean nothing."""
    up = {"sent": torch.tensor([[1.0], [100.0], [2.0], [300.0], [3.0], [200.0]])}
    trained = torch.tensor([True, False, True, False, True, False])
    assert Defense(norm=1.6).screen(up, trained, {})[0].tolist() == [True] * 6
    assert screened(Defense(norm=1.6), up, {})[0].tolist() == [True, False, True, False, True, False]
    judged = Defense(rules.make("median")).apply_rule(up, trained)
    assert judged.up["sent"].flatten().tolist() == [2, 200, 2, 200, 2, 200]


def test_orthogonality_survives_every_rule():
    """FedDPC's Delta_t stays orthogonal to the one before, whatever a rule makes of the rows."""
    method = methods.create("feddpc")
    for rule in rules.names():
        setting = small_setting(rule=rule, faults={"sign_flip": 0.2, "noise": 0.2})
        last = None
        progress = RunState.begin(method, setting.w0, 8)
        for _ in range(4):
            run_round(setting, method, Loop(), progress)
            delta = progress.server["delta"]
            if last is not None:
                assert abs(float(delta @ last)) <= 1e-10 * float(delta.norm() * last.norm())
            last = delta


def test_a_rule_reaches_the_last_word_of_a_method():
    """A subclass that overrides `aggregate` alone gets judged uploads there, not the `combine` of its base."""

    @dataclass(frozen=True, kw_only=True)
    class Mine(FedVARP):
        def aggregate(self, w, server, up, cohort):
            return Step(up["delta"].mean(0) + 40, rate=1.0, server=server)

    w = torch.zeros(2)
    cohort = Cohort(1, torch.arange(3), 3, torch.full((3,), 1 / 3, dtype=torch.float64), torch.ones(3), 1.0, 1.0)
    up = {"delta": torch.tensor([[1.0, 1.0], [2.0, 2.0], [900.0, 900.0]])}
    policies = Policies(Defense(rules.make("median")))
    outcome = server_step(Mine(), w, Mine().init_server(w, 3), up, cohort, policies, {})
    assert outcome.step.update.tolist() == [42.0, 42.0]


def test_a_guard_that_excludes_is_refused_with_a_rule_before_anything_is_written(tmp_path):
    with pytest.raises(BadInputError, match="guard"):
        feddpc.simulate(hyper={"guard": "exclude"}, rule="median", rounds=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
