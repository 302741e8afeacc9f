"""Faults, the adaptive bound and robust rules over Flower: what they do in the simulator, and with foreign apps."""

import dataclasses

import numpy as np
import pytest
import torch
from flwr.serverapp.strategy import FedAvg

from feddpc import flower, methods
from feddpc.config import Config
from feddpc.engines.loop import Loop
from feddpc.errors import BadInputError, RunFolderError
from feddpc.flower.server import from_run_config
from feddpc.policies import resolve_policies
from feddpc.robust import faults, rules
from feddpc.round.state import RunState
from federations import NODES, Unreliable, move, plain_app, train, vector
from support import VARIANTS, run_rounds, small_setting

ROUNDS = 6
EVERYBODY = {"min_train_nodes": NODES, "min_available_nodes": NODES, "fraction_evaluate": 0.0}
#: Every kind of fault, at most one client each.
KINDS = [kind for kind in faults.KINDS if kind != "straggler"]


def both(method, **how):
    """Run an experiment in the simulator and over Flower; return where each got, and both lists of records."""
    progress, records = run_rounds(small_setting(**how), method, Loop(), ROUNDS)
    halves = flower.app_arguments(small_setting(**how))
    grid = flower.InProcessGrid(flower.client_app(**halves.client()), 8)
    strategy = flower.strategy(method, **halves.server())
    strategy.start(grid, strategy.initial_arrays(), num_rounds=ROUNDS)
    return progress, records, strategy


def same(progress: RunState, records, strategy) -> None:
    assert torch.equal(strategy.now.w, progress.w)
    for key, value in progress.server.items():
        assert torch.equal(strategy.now.server[key], value)
    for one, other in zip(records, strategy.records, strict=True):
        assert (one.participants, one.dropped, one.rejected) == (other.participants, other.dropped, other.rejected)
        assert one.faults == other.faults


@pytest.mark.parametrize("name", ["feddpc", "fedavg", "scaffold I", "fedvarp"])
def test_faults_over_flower_are_those_of_the_simulator(name):
    shares = {"sign_flip": 0.25, "nan": 0.125, "noise": 0.125, "straggler": 0.125, "replayed": 0.25, "often": 0.8}
    progress, records, strategy = both(VARIANTS[name], cohort=6, faults=shares)
    same(progress, records, strategy)
    did = {kind for record in records for kind in record.faults}
    assert did == {"sign_flip", "nan", "noise", "straggler", "replayed"}
    assert any("not finite" in refusal.reason for refusal in strategy.refusals)


@pytest.mark.parametrize("kind", KINDS)
def test_each_fault_over_flower(kind):
    progress, records, strategy = both(VARIANTS["feddpc"], cohort=8, faults={kind: 0.25})
    same(progress, records, strategy)
    assert any(kind in record.faults for record in records)


@pytest.mark.parametrize("rule", [name for name in rules.names() if name != "mean"])
@pytest.mark.parametrize("name", ["feddpc streaming", "fedavg"])
def test_robust_rules_over_flower_are_those_of_the_simulator(rule, name):
    same(*both(VARIANTS[name], cohort=8, rule=rule, screen={"norm": 5.0}, faults={"scaled": 0.25, "scale": 50.0}))


def test_a_rejected_client_is_named_with_its_node():
    *_, strategy = both(VARIANTS["fedavg"], cohort=8, screen={"norm": 3.0}, faults={"scaled": 0.25, "scale": 100.0})
    culprits = {client for record in strategy.records for client in record.faults["scaled"]}
    assert {r.client for r in strategy.refusals} == culprits
    assert {r.node for r in strategy.refusals} == {1000 + client for client in culprits}
    assert all("longer than usual" in r.reason for r in strategy.refusals)


def test_a_round_with_too_few_within_the_bound_changes_nothing():
    setting = small_setting(cohort=8, screen={"norm": 10.0}, faults={"scaled": 0.125, "scale": 1000.0})
    halves = flower.app_arguments(setting)
    grid = flower.InProcessGrid(flower.client_app(**halves.client()), 8)
    strategy = flower.strategy("feddpc", **{**halves.server(), "min_replies": 8})
    strategy.start(grid, strategy.initial_arrays(), num_rounds=2)
    assert [record.participants for record in strategy.records] == [[], []]
    assert torch.equal(strategy.now.w, setting.w0)
    assert not strategy.now.server["delta"].any()


class TestForeignApps:
    """An unchanged client app that returns weights, and Flower's own FedAvg."""

    def grid(self, **shares):
        return flower.FaultyGrid(Unreliable(plain_app()), shares, nodes=NODES, seed=3)

    def test_one_bad_number_poisons_flowers_fedavg_and_not_ours(self):
        theirs, ours = FedAvg(**EVERYBODY), flower.FedDPC(**EVERYBODY)
        poisoned = train(theirs, self.grid(nan=1 / NODES)).arrays
        assert any(np.isnan(array.numpy()).any() for array in poisoned.values())
        train(ours, self.grid(nan=1 / NODES))
        assert bool(vector(ours).isfinite().all())
        assert len({r.node for r in ours.refusals}) == 1
        assert len(ours.refusals) == 3

    def test_what_arrives_is_the_update_turned_round(self):
        grid, strategy = self.grid(sign_flip=1.0), flower.FedAvg(**EVERYBODY)
        train(strategy, grid)
        honest = flower.FedAvg(**EVERYBODY)
        train(honest, Unreliable(plain_app()))
        torch.testing.assert_close(vector(strategy), -vector(honest), rtol=0, atol=1e-12)
        assert grid.who == [{"sign_flip": list(range(NODES))}] * 3

    def test_stragglers_are_absent(self):
        grid, strategy = self.grid(straggler=2 / NODES), flower.FedAvg(**EVERYBODY)
        train(strategy, grid)
        late = grid.who[0]["straggler"]
        assert len(late) == 2
        assert [record.dropped for record in strategy.records] == [late] * 3

    def test_parallel_attackers_know_the_last_update_from_two_models(self):
        grid, strategy = self.grid(parallel=1 / NODES), flower.FedDPC(**EVERYBODY, max_scale=10)
        train(strategy, grid)
        assert "parallel" not in grid.who[0]
        assert len(grid.who[1]["parallel"]) == 1
        assert strategy.records[1].notes["capped"] == 1  # the bound on the scale meets it

    def test_a_median_bears_a_minority(self):
        """The coordinate median stays within what honest clients say; the mean goes anywhere."""
        shares = {"huge": 0.2}
        strategy = flower.FedAvg(**EVERYBODY, rule="median")
        train(strategy, self.grid(**shares), rounds=1)
        honest = np.stack([np.concatenate([v.ravel() for v in move(n, 1).values()]) for n in range(NODES)])
        reached = -vector(strategy).numpy()
        assert (honest.min(0) - 1e-12 <= reached).all()
        assert (reached <= honest.max(0) + 1e-12).all()
        mean = flower.FedAvg(**EVERYBODY, screen=None)
        train(mean, self.grid(**shares), rounds=1)
        assert float(vector(mean).abs().max()) > 1e20

    def test_the_bound_and_the_folder_go_together(self, tmp_path):
        wanted = {**EVERYBODY, "screen": {"norm": 3.0}, "rule": "multi_krum"}
        whole = flower.FedDPC(**wanted)
        train(whole, Unreliable(plain_app()), rounds=4)
        first = flower.FedDPC(**wanted, folder=tmp_path / "run")
        train(first, Unreliable(plain_app()), rounds=2)
        again = flower.FedDPC(**wanted, folder=tmp_path / "run")
        train(again, Unreliable(plain_app()), rounds=4)
        assert torch.equal(vector(again), vector(whole))
        with pytest.raises(RunFolderError, match="rule = 'mean', was 'multi_krum'"):
            train(flower.FedDPC(**EVERYBODY, folder=tmp_path / "run"), Unreliable(plain_app()), rounds=4)

    def test_no_share_is_no_faulty_grid(self):
        with pytest.raises(BadInputError, match="sign_flip"):
            self.grid()


def test_the_apps_configuration_reaches_rules_faults_and_privacy():
    told = from_run_config(
        {"rule": "krum", "rule.share": 0.2, "faults.zero": 0.1, "screen.norm": 4.0, "privacy.clip": 1.0, "deadline": 9}
    )
    assert told.pop("deadline") == 9
    config = resolve_policies(Config.read({k: v for k, v in told.items() if k != "privacy"}))
    assert (config.rule, config.rule_options["share"], config.faults["zero"]) == ("krum", 0.2, 0.1)
    assert told["privacy"] == {"clip": 1.0}


@pytest.mark.parametrize("how", [{"rule": "median"}, {"screen": {"norm": 4.0}}])
def test_what_would_break_the_promise_of_privacy_is_refused(how):
    private = {"participation": "poisson", "privacy": {"clip": 0.1, "noise": 0.5, "delta": 0.01}}
    with pytest.raises(BadInputError, match="cannot be run with privacy"):
        small_setting(**private, **how)


@pytest.mark.parametrize(
    ("how", "said"), [({"rule": "median"}, "single updates"), ({"faults": {"zero": 0.1}}, "masked")]
)
def test_what_a_server_that_sees_sums_cannot_do_is_refused(how, said):
    halves = flower.app_arguments(small_setting())
    with pytest.raises(BadInputError, match=said):
        flower.secure_strategy(**{**halves.server(), "method": "feddpc", **how})


def test_a_method_may_not_be_given_with_hyper_parameters_apart():
    app = flower.server_app(
        methods.create("feddpc"), **flower.app_arguments(small_setting()).server(), hyper={"lam": 2.0}
    )
    grid = flower.InProcessGrid(flower.client_app(**flower.app_arguments(small_setting()).client()), 8)
    with pytest.raises(BadInputError, match="by name"):
        app(grid, dataclasses.replace(next(iter(grid.contexts.values()))))
