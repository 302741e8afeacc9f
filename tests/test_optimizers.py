"""Optimizers of clients and server, and schedules: torch's rules, golden values, all engines, refusals."""

import math

import numpy as np
import pytest
import torch

import feddpc
from feddpc import methods
from feddpc.config import Config
from feddpc.data import load
from feddpc.engines.cuda.captured import Cuda
from feddpc.engines.loop import Loop
from feddpc.engines.stacked import Stacked
from feddpc.engines.threads import Threads
from feddpc.errors import BadInputError, RunFolderError
from feddpc.methods.base import Cohort, Method
from feddpc.optimizers import make_client_optimizer
from feddpc.policies import resolve_policies
from feddpc.quadratic import trajectory
from feddpc.resolve import resolve
from feddpc.round.exchange import empty_exchange
from feddpc.round.server_step import apply_step_
from feddpc.round.state import RunState
from feddpc.schedules import make_schedule, name_of_schedule
from feddpc.study.overrides import Overrides
from feddpc.tasks.base import BatchIndices
from support import Q4, run_rounds, same_memories, setting_for, small_setting

#: Settings of the clients' optimizer, and the torch optimizer with the same rule.
CLIENT = {
    "momentum": ({"name": "sgd", "momentum": 0.9}, torch.optim.SGD, {"momentum": 0.9}),
    "nesterov": (
        {"name": "sgd", "momentum": 0.9, "nesterov": True, "weight_decay": 1e-2},
        torch.optim.SGD,
        {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-2},
    ),
    "decay": ({"name": "sgd", "weight_decay": 1e-2}, torch.optim.SGD, {"weight_decay": 1e-2}),
    "adam": ({"name": "adam", "weight_decay": 1e-2}, torch.optim.Adam, {"weight_decay": 1e-2}),
    "adam b": (
        {"name": "adam", "b1": 0.8, "b2": 0.95, "eps": 1e-6},
        torch.optim.Adam,
        {"betas": (0.8, 0.95), "eps": 1e-6},
    ),
    "adamw": ({"name": "adamw"}, torch.optim.AdamW, {}),
}
ALL = pytest.mark.parametrize(("given", "optimizer", "options"), CLIENT.values(), ids=CLIENT.keys())


def torch_steps(setting, optimizer, options, clip, ids):
    """The models of clients ``ids`` after local training by torch's own optimizer."""
    task, w, plan = setting.task, setting.w0, setting.plan(1, ids)
    ends = []
    for i in range(len(ids)):
        y = w.clone().requires_grad_()
        rule = optimizer([y], lr=setting.config.lr, **options)
        for k in range(plan.steps[i]):
            batch = task.fetch(BatchIndices(torch.from_numpy(plan.index[i, k, : plan.count[i, k]])))
            y.grad = task.value_and_grad(lambda at, batch=batch: task.loss(at, batch), y.detach())[1]
            if clip:
                y.grad = y.grad * min(1.0, clip / float(y.grad.norm()))
            rule.step()
        ends.append(y.detach())
    return torch.stack(ends), plan


@ALL
@pytest.mark.parametrize("clip", [None, 0.5])
@torch.no_grad()
def test_local_steps_are_those_of_torch(given, optimizer, options, clip):
    """Eight steps and fewer, with partial batches, in float64."""
    setting = small_setting(client_optimizer=given, clip_norm=clip)
    ids = np.array([1, 2, 4])
    want, plan = torch_steps(setting, optimizer, options, clip, ids)
    local = setting.local(methods.create("fedavg"))
    trained = Loop().train(local, setting.task, setting.w0, {}, {}, plan, setting.config.lr)
    torch.testing.assert_close(setting.w0 - trained.uploads["delta"], want, rtol=0, atol=1e-12)
    assert float(trained.uploads["delta"].norm()) > 1e-2


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("given", [value[0] for value in CLIENT.values()], ids=CLIENT.keys())
def test_all_engines_agree(given, clip):
    how = {"client_optimizer": given, "clip_norm": clip, "lr_schedule": "cosine", "server_optimizer": "adam"}
    for method in (methods.create("feddpc"), methods.create("fedga")):
        setting = setting_for(method, **how)
        a, left = run_rounds(setting, method, Loop(), 3)
        assert float((a.w - setting.w0).norm()) > 1e-3
        engines = Threads(2), Stacked(), Stacked(narrow=False), Cuda(anywhere=True), Cuda(anywhere=True, streams=True)
        for engine in engines:
            b, right = run_rounds(setting, method, engine, 3)
            torch.testing.assert_close(b.w, a.w, rtol=0, atol=1e-10)
            assert b.server.keys() == a.server.keys()
            for key, value in a.server.items():
                torch.testing.assert_close(b.server[key], value, rtol=0, atol=1e-10)
            same_memories(a, b)
            assert [r.train_loss for r in left] == pytest.approx([r.train_loss for r in right], abs=1e-10)


def test_plain_sgd_takes_the_plain_way():
    method = methods.create("feddpc")
    for given in ("sgd", {"name": "sgd", "momentum": 0.0, "weight_decay": 0.0}):
        assert small_setting(client_optimizer=given).local(method) is method
    other = small_setting(client_optimizer={"name": "sgd", "momentum": 0.5}).local(method)
    assert (other.name, other.hyper(), type(other).__module__) == (method.name, method.hyper(), type(method).__module__)


def test_the_state_starts_at_zero_in_every_round():
    """Two rounds of one step each with momentum are two plain steps."""
    problem = {**Q4, "steps": 1}
    plain, heavy = (
        trajectory("fedavg", **problem, client_optimizer=o) for o in ("sgd", {"name": "sgd", "momentum": 0.9})
    )
    np.testing.assert_allclose(heavy, plain, rtol=0, atol=1e-15)
    assert not np.allclose(trajectory("fedavg", **Q4, client_optimizer={"name": "sgd", "momentum": 0.9})[1], plain[1])


GOLDEN = {
    "momentum": (0.1, (0.132597, 0.141559, -0.23004425), (-0.462263059014, 0.603685099842, -1.014036318228)),
    "adam": (
        0.01,
        (0.4805568595761603, -0.4779859439966299, 0.9783592411552981),
        (0.456136144894838, -0.4496031703160232, 0.9525253494185086),
    ),
    "yogi": (
        0.01,
        (0.4805600146880647, -0.4780332218405598, 0.9784104915621333),
        (0.4562293525935341, -0.4497964493968042, 0.9527088885213783),
    ),
    "adagrad": (
        0.01,
        (0.4978733045188081, -0.4977411642287248, 0.9978090803887767),
        (0.4953712670451456, -0.4948497101313312, 0.9952112579049268),
    ),
}


@pytest.mark.parametrize("engine", [Loop(), Stacked()], ids=["loop", "stacked"])
@pytest.mark.parametrize(("name", "golden"), GOLDEN.items(), ids=GOLDEN)
def test_golden_values_of_server_optimizers(name, golden, engine):
    """methods.md 13: 50-digit values on problem Q4, for the rule and for the method that is FedAvg with it."""
    rate, w2, w4 = golden
    problem = {**Q4, "server_lr": rate, "engine": engine}
    own = "fedavgm" if name == "momentum" else f"fed{name}"
    for path in (trajectory("fedavg", **problem, server_optimizer=name), trajectory(own, **problem)):
        np.testing.assert_allclose(path[2], w2, atol=1e-10, rtol=0)
        np.testing.assert_allclose(path[4], w4, atol=1e-10, rtol=0)


def test_a_method_remembers_its_own_direction():
    """FedDPC's delta is the projected mean, whatever the server optimizer makes of it; beta = 0 changes nothing."""
    method = methods.create("feddpc")
    plain, _ = run_rounds(small_setting(), method, Loop(), 1)
    heavy, _ = run_rounds(small_setting(server_optimizer={"name": "momentum", "beta": 0.5}), method, Loop(), 1)
    torch.testing.assert_close(heavy.server["delta"], plain.server["delta"], rtol=0, atol=0)
    idle, _ = run_rounds(small_setting(server_optimizer={"name": "momentum", "beta": 0.0}), method, Loop(), 4)
    torch.testing.assert_close(idle.w, run_rounds(small_setting(), method, Loop(), 4)[0].w, rtol=0, atol=1e-12)


def test_a_round_without_updates_keeps_the_optimizers_state():
    setting = small_setting(server_optimizer="adam", server_lr=0.01)
    method = methods.create("feddpc")
    progress, _ = run_rounds(setting, method, Loop(), 2)
    before = {k: v.clone() for k, v in progress.server.items() if k.startswith("optimizer.")}
    _, cohort = setting.cohort(method, 3, np.array([0, 1]), {})
    w = progress.w.clone()
    empty_exchange(setting, method, progress, cohort)
    assert before.keys() == {"optimizer.m", "optimizer.v"}
    assert all(torch.equal(progress.server[k], v) for k, v in before.items())
    assert torch.equal(progress.w, w)


@pytest.mark.parametrize(
    ("given", "rate"),
    [
        ({}, 0.05),
        ({"server_optimizer": "momentum"}, 0.05),
        ({"server_optimizer": "adam"}, 0.01),
        ({"server_optimizer": {"name": "yogi", "tau": 0.1}}, 0.01),
        ({"method": "fedadagrad"}, 0.01),
        ({"method": "fedavgm"}, 0.05),
        ({"server_optimizer": "adam", "server_lr": 0.3}, 0.3),
    ],
)
def test_the_servers_rate_where_none_is_given(given, rate):
    assert resolve(Config.read({"lr": 0.05, **given}), load("digits")).server_lr == rate


def test_a_resumed_run_with_server_adam_is_bit_identical(tmp_path):
    how = {
        **{"clients": 20, "cohort": 4, "method": "feddpc", "engine": "loop", "batch_size": 32, "model": "mlp"},
        **{"server_optimizer": "adam", "client_optimizer": {"name": "sgd", "momentum": 0.9}, "clip_norm": 1.0},
        **{"lr_schedule": {"name": "cosine", "over": 4}},
    }
    whole = feddpc.simulate(rounds=4, out=tmp_path / "whole", **how)
    feddpc.simulate(rounds=2, out=tmp_path / "halves", **how)
    halves = feddpc.simulate(rounds=4, out=tmp_path / "halves", resume=True, **how)
    assert all(torch.equal(whole.state_dict[k], v) for k, v in halves.state_dict.items())
    assert whole.config.server_lr == 0.01
    assert whole.config.client_optimizer_options == {"momentum": 0.9, "nesterov": False, "weight_decay": 0.0}
    with pytest.raises(RunFolderError, match="server_optimizer"):
        feddpc.simulate(rounds=5, out=tmp_path / "halves", resume=True, **{**how, "server_optimizer": "yogi"})
    with pytest.raises(RunFolderError, match="client_optimizer"):
        feddpc.simulate(rounds=5, out=tmp_path / "halves", resume=True, **{**how, "client_optimizer": "sgd"})
    other = {**how, "client_optimizer": {"name": "sgd", "momentum": 0.8}}
    with pytest.raises(RunFolderError, match="momentum"):
        feddpc.simulate(rounds=5, out=tmp_path / "halves", resume=True, **other)


def test_a_changed_schedule_of_the_users_own_is_refused(tmp_path):
    def halving(half_life):
        def factor(t):
            return 0.5 ** ((t - 1) / half_life)

        return factor

    how = {"clients": 20, "cohort": 2, "method": "fedavg", "engine": "loop", "model": "mlp", "out": tmp_path / "run"}
    first = feddpc.simulate(rounds=1, lr_schedule=halving(2), **how)
    assert first.config.lr_schedule.startswith("factor#")
    feddpc.simulate(rounds=2, lr_schedule=halving(2), resume=True, **how)
    with pytest.raises(RunFolderError, match="lr_schedule"):
        feddpc.simulate(rounds=3, lr_schedule=halving(3), resume=True, **how)
    with pytest.raises(BadInputError, match="give the same function again"):
        feddpc.simulate(rounds=1, lr_schedule="factor#00", clients=20, cohort=2)


@pytest.mark.parametrize(
    ("given", "factors"),
    [
        ("constant", [1, 1, 1, 1, 1]),
        (
            {"name": "cosine", "final": 0.2},
            [1, 0.2 + 0.4 * (1 + math.sqrt(0.5)), 0.6, 0.2 + 0.4 * (1 - math.sqrt(0.5)), 0.2],
        ),
        ({"name": "step", "every": 2, "factor": 0.5}, [1, 1, 0.5, 0.5, 0.25]),
        ({"name": "warmup", "warm": 4}, [0.25, 0.5, 0.75, 1, 1]),
        ({"name": "warmup", "warm": 3, "then": "cosine", "final": 0.5}, [1 / 3, 2 / 3, 1, 0.75, 0.5]),
        (lambda t: 1 / t, [1, 1 / 2, 1 / 3, 1 / 4, 1 / 5]),
    ],
)
def test_schedules(given, factors):
    setting = small_setting(rounds=5, lr_schedule=given, lr=0.1, server_lr=0.2)
    for t, factor in enumerate(factors, start=1):
        assert setting.population.rates(t) == pytest.approx((0.1 * factor, 0.2 * factor), rel=1e-14)


def test_functions_are_told_apart_by_what_they_compute():
    one, two = name_of_schedule(lambda t: 1 / t), name_of_schedule(lambda t: 0.5 / t)
    again = name_of_schedule(lambda t: 1 / t)
    assert one == again != two
    console: dict = {}
    exec("def falling(t): return 1 / t", console)
    assert name_of_schedule(console["falling"]).startswith("falling#")


def test_a_schedule_never_reaches_zero():
    with pytest.raises(BadInputError, match=r"gives 0 in round 3: return a number in \(0, 1\]"):
        small_setting(rounds=5, lr_schedule=lambda t: 3 - t if t > 2 else 1)
    factor = make_schedule("cosine", {}, rounds=7)
    assert min(factor(t) for t in range(1, 20)) == pytest.approx(0.01)


@pytest.mark.parametrize("name", ["fedspeed", "feddyn", "feddc", "scaffold"])
@pytest.mark.parametrize("given", [{"name": "sgd", "momentum": 0.9}, "adam"], ids=["momentum", "adam"])
def test_who_assumes_plain_steps_refuses_momentum_and_adam(name, given):
    with pytest.raises(BadInputError, match=rf"client_optimizer.* {name} .*leave it out"):
        feddpc.simulate(method=name, client_optimizer=given, rounds=1, clients=20, cohort=2)
    with pytest.raises(BadInputError, match=r"client_optimizer"):
        trajectory(name, **Q4, client_optimizer=given)
    trajectory(name, **Q4, client_optimizer={"name": "sgd", "weight_decay": 0.1})


@pytest.mark.parametrize(
    ("name", "refuses"), [("scaffold", True), ("feddc", True), ("feddyn", False), ("fedspeed", False)]
)
def test_who_reads_gradients_off_moves_refuses_clipping(name, refuses):
    if refuses:
        with pytest.raises(BadInputError, match=r"clip_norm = 0.5"):
            trajectory(name, **Q4, clip_norm=0.5)
    else:
        assert not np.allclose(trajectory(name, **Q4, clip_norm=0.5), trajectory(name, **Q4))
    trajectory(methods.create("scaffold", option="I"), **Q4, clip_norm=0.5, client_optimizer="adam")


@pytest.mark.parametrize("how", [{"clip_norm": 1.0}, {"client_optimizer": "adam"}])
def test_who_makes_steps_of_its_own_refuses_all(how):
    with pytest.raises(BadInputError, match="fedamd makes local steps of its own"):
        trajectory("fedamd", **Q4, **how)


def test_scaffold_with_weight_decay_is_scaffold_on_the_decayed_objective():
    """1/2 a (w - c)^2 + mu/2 w^2 is, but for a constant, a quadratic of curvature a + mu around a c / (a + mu)."""
    a, c = np.array(Q4["curvature"], float), np.array(Q4["centre"], float)
    decayed = {**Q4, "curvature": a + 0.3, "centre": a * c / (a + 0.3)}
    for name in ("scaffold", "feddc", "feddyn"):
        path = trajectory(name, **Q4, client_optimizer={"name": "sgd", "weight_decay": 0.3})
        np.testing.assert_allclose(path, trajectory(name, **decayed), rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"client_optimizer": "adm"}, r"unknown client optimizer 'adm': did you mean .*Valid: adam, adamw, sgd"),
        (
            {"client_optimizer": {"name": "sgd", "momentun": 0.9}},
            r"did you mean 'momentum'\? Valid: momentum, nesterov",
        ),
        ({"client_optimizer": {"momentum": 0.9}}, r"has no name"),
        ({"client_optimizer": {"name": "sgd", "momentum": 1.0}}, r"client_optimizer.momentum = 1.0"),
        ({"client_optimizer": {"name": "sgd", "nesterov": True}}, r"needs client_optimizer.momentum"),
        ({"client_optimizer": {"name": "adam", "weight_decay": -1}}, r"client_optimizer.weight_decay = -1"),
        ({"clip_norm": 0}, r"clip_norm = 0.0"),
        ({"server_optimizer": "yoga"}, r"did you mean 'yogi'\? Valid: adagrad, adam, momentum, sgd, yogi"),
        ({"server_optimizer": {"name": "adam", "beta": 0.9}}, r"Valid: b1, b2, tau"),
        ({"server_optimizer": {"name": "sgd", "beta": 0.9}}, r"has no options"),
        ({"server_optimizer": {"name": "momentum", "beta": -0.1}}, r"server_optimizer.beta = -0.1"),
        ({"lr_schedule": "cosin"}, r"did you mean 'cosine'\? Valid: constant, cosine, step, warmup"),
        ({"lr_schedule": {"name": "cosine", "final": 0.0}}, r"lr_schedule.final = 0.0"),
        ({"lr_schedule": {"name": "warmup", "then": "linear"}}, r"Valid: constant, cosine"),
        ({"lr_schedule": "cosine", "lr_decay": 0.9}, r"lr_decay = 0.9: must be left out with lr_schedule = 'cosine'"),
    ],
)
def test_bad_settings(given, message):
    with pytest.raises(BadInputError, match=message):
        resolve_policies(Config.read(given))


def cohort_of(steps, momentum=0.0):
    m = len(steps)
    return Cohort(
        round=1,
        clients=torch.arange(m),
        population=m,
        weights=torch.full((m,), 1 / m, dtype=torch.float64),
        steps=torch.tensor(steps, dtype=torch.float64),
        client_lr=0.1,
        server_lr=0.2,
        momentum=momentum,
    )


def test_fednova_is_fedavg_where_all_make_the_same_number_of_steps():
    for given in ("sgd", {"name": "sgd", "momentum": 0.9}):
        paths = [trajectory(name, **Q4, client_optimizer=given) for name in ("fednova", "fedavg")]
        np.testing.assert_allclose(*paths, rtol=0, atol=1e-14)


def test_fednovas_closed_form():
    """w - eta_g tau sum_j p_j D_j / a_j, with a_j counted from the steps of a client with momentum."""
    w, up = torch.zeros(4, dtype=torch.float64), {"delta": torch.randn(3, 4, dtype=torch.float64)}
    for rho in (0.0, 0.6):
        steps = [1, 2, 5]
        counted = [sum(sum(rho**i for i in range(k)) for k in range(1, K + 1)) for K in steps]
        a = torch.tensor(counted, dtype=torch.float64)
        want = -0.2 * a.mean() * (up["delta"] / 0.1 / a[:, None]).mean(0)
        step = methods.create("fednova").aggregate(w, {}, up, cohort_of(steps, rho))
        torch.testing.assert_close(apply_step_(w.clone(), step), want, rtol=0, atol=1e-14)
    nobody = methods.create("fednova").aggregate(w, {}, up, cohort_of([0, 0, 0]))
    assert bool(nobody.update.isfinite().all())


def test_fednova_knows_the_clients_momentum_and_refuses_what_it_cannot_count():
    setting = small_setting(client_optimizer={"name": "sgd", "momentum": 0.7})
    assert setting.cohort(methods.create("fednova"), 1, np.array([0, 1]), {})[1].momentum == 0.7
    for given in ("adam", {"name": "sgd", "momentum": 0.9, "nesterov": True}):
        with pytest.raises(BadInputError, match="fednova"):
            trajectory("fednova", **Q4, client_optimizer=given)


def test_a_method_of_ones_own_takes_part():
    class Signs(Method):
        name = "signs"

        def correct(self, g, y, ctx):
            return torch.sign(g)

    setting = small_setting(client_optimizer="adam", clip_norm=1.0)
    a, b = (run_rounds(setting, Signs(), engine, 2)[0].w for engine in (Loop(), Stacked()))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_privacy_accepts_a_client_optimizer():
    result = feddpc.simulate(
        **{"method": "fedavg", "rounds": 2, "clients": 20, "cohort": 4, "participation": "poisson", "engine": "loop"},
        privacy={"clip": 1.0, "noise": 0.5},
        client_optimizer={"name": "sgd", "momentum": 0.9},
        server_optimizer="momentum",
    )
    assert result.status == "finished"


def test_a_run_is_made_again_with_another_optimizer(tmp_path):
    feddpc.simulate(rounds=1, clients=20, cohort=2, engine="loop", server_optimizer="adam", out=tmp_path / "run")
    again = feddpc.rerun(tmp_path / "run")
    assert again.likeness.identical
    changes = {"client_optimizer": {"name": "sgd", "momentum": 0.5}, "lr_schedule": lambda t: 1 / t}
    with pytest.warns(UserWarning, match="changed from"):
        other = feddpc.rerun(tmp_path / "run", **changes)
    assert other.config.client_optimizer_options["momentum"] == 0.5
    assert any("client_optimizer" in text for text in other.likeness.changed)


def test_one_table_or_two():
    one = Config.read({"client_optimizer": {"name": "sgd", "momentum": 0.9}})
    assert one == Config.read({"client_optimizer": "sgd", "client_optimizer_options": {"momentum": 0.9}})
    assert make_client_optimizer("sgd", one.client_optimizer_options).features == {"momentum": 0.9}


def test_the_state_before_round_1_has_the_optimizers():
    setting = small_setting(server_optimizer="adam")
    state = RunState.begin(methods.create("fedavg"), setting.w0, 8, optimizer=setting.policies.optimizer)
    assert float(state.server["optimizer.v"].mean()) == pytest.approx(1e-6)


@pytest.mark.parametrize("key", ["client_optimizer", "server_optimizer", "lr_schedule"])
def test_two_tables_with_options_of_one_thing_are_refused(key):
    names = {"client_optimizer": "sgd", "server_optimizer": "momentum", "lr_schedule": "step"}
    options = {"client_optimizer": "momentum", "server_optimizer": "beta", "lr_schedule": "factor"}
    table = {"name": names[key], options[key]: 0.5}
    with pytest.raises(BadInputError, match=f"{key}_options"):
        Config.read({key: table, f"{key}_options": {options[key]: 0.9}})
    assert Config.read({key: table, f"{key}_options": {}}) == Config.read({key: table})


def test_a_single_option_replaces_that_of_a_files_table():
    overrides = Overrides()
    overrides.absorb({"client_optimizer": {"name": "adam", "b1": 0.5, "eps": 1e-6}}, ["fedavg"])
    overrides.set("client_optimizer.b1", 0.8, ["fedavg"])
    assert overrides.config("fedavg").client_optimizer_options == {"b1": 0.8, "eps": 1e-6}
