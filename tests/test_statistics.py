"""Networks that measure statistics (BatchNorm) in the simulator, against plain torch loops; FedBN."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import feddpc
from feddpc.build import build
from feddpc.config import Config
from feddpc.data import load
from feddpc.data.batches import Planner
from feddpc.data.partition import Partition
from feddpc.engines.loop import Loop
from feddpc.engines.stacked import Stacked
from feddpc.engines.threads import Threads
from feddpc.errors import BadInputError
from feddpc.method_changes import for_method
from feddpc.methods import create
from feddpc.models.flat import with_weights
from feddpc.round.round import run_round
from feddpc.round.state import RunState

SETTING = {"clients": 8, "cohort": 3, "batch_size": 8, "lr": 0.1, "precision": "float64", "device": "cpu", "alpha": 0.5}


def network(norm=lambda: nn.BatchNorm1d(12)):
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), norm(), nn.ReLU(), nn.Linear(12, 10))


def experiment(net=None, **more):
    return build(Config(**{**SETTING, "rounds": 4, **more}), module=copy.deepcopy(net or network()))


def rounds(world, method, n=4, engine=None):
    method = create(method) if isinstance(method, str) else method
    state = RunState.of(world, method)
    return state, [run_round(world, method, engine or Loop(), state) for _ in range(n)]


def plain_rounds(world, kept=()):
    """FedAvg on whole state dicts, as anybody would write it; what is in ``kept`` stays with its client.

    A client that comes for the first time has the server's parameters, and the statistics of the first model.
    """
    task, planner, lr = world.task, world.planner, world.config.lr
    server = task.flat.state_dict(torch.cat([world.w0, task.first_statistics]))
    own: dict[int, dict[str, torch.Tensor]] = {}
    first = copy.deepcopy(server)
    states = []
    for t in range(1, 5):
        ids = world.draw(t).answered
        plan, begun, replies = planner.plan(t, ids), [], []
        for i, client in enumerate(ids.tolist()):
            net = copy.deepcopy(task.module).train()
            mine = own.get(client, {n: first[n] for n in kept if n in task.traits.statistics})
            net.load_state_dict(server | mine)
            begun.append({n: v.clone() for n, v in net.state_dict().items()})
            optimizer = torch.optim.SGD(net.parameters(), lr)
            for k in range(plan.steps[i]):
                rows = torch.from_numpy(plan.index[i, k, : plan.count[i, k]])
                optimizer.zero_grad()
                F.cross_entropy(net(task.inputs(task.x[rows])), task.y[rows]).backward()
                optimizer.step()
            replies.append({n: v.clone() for n, v in net.state_dict().items()})
            own[client] = {n: replies[-1][n] for n in kept}
        for name in server:
            stack = torch.stack([reply[name] for reply in replies])
            if name in task.traits.statistics:
                server[name] = stack.mean(0) if stack.is_floating_point() else stack.amax(0)
            else:  # the mean of the models, if all began with the server's
                server[name] = server[name] + (stack - torch.stack([b[name] for b in begun])).mean(0)
        states.append(copy.deepcopy(server))
    return states, own


@pytest.mark.parametrize("momentum", [0.1, None])
def test_fedavg_with_batchnorm_is_the_mean_of_state_dicts(momentum):
    world = experiment(network(lambda: nn.BatchNorm1d(12, momentum=momentum)))
    state, _ = rounds(world, "fedavg")
    theirs, _ = plain_rounds(world)
    ours = world.task.flat.state_dict(state.model(create("fedavg")))
    assert ours.keys() == theirs[-1].keys()
    for name, value in theirs[-1].items():
        torch.testing.assert_close(ours[name], value, rtol=1e-12, atol=1e-12)


def test_statistics_that_stay_with_their_client():
    world = experiment(buffers="local")
    state, _ = rounds(world, "fedavg")
    statistics = world.task.traits.statistics
    _, own = plain_rounds(world, kept=statistics)
    ids = np.array(sorted(own))
    assert state.clients.seen(np.arange(8)).nonzero()[0].tolist() == ids.tolist()
    rows = state.clients.read(ids)["/statistics"]
    for row, client in zip(rows, ids.tolist(), strict=True):
        for name, value in world.task.flat.buffers(row).items():
            torch.testing.assert_close(value, own[client][name], rtol=1e-12, atol=1e-12)
    # The global model is evaluated with the mean of what the last cohort has.
    last = world.draw(4).answered
    mean = world.task.flat.buffers(state.statistics)["2.running_mean"]
    torch.testing.assert_close(mean, torch.stack([own[c]["2.running_mean"] for c in last.tolist()]).mean(0))


def test_fedbn_is_fedavg_but_for_the_normalization_layers():
    world = experiment(method="fedbn")
    state, _ = rounds(world, "fedbn")
    layer = [name for name in world.task.module.state_dict() if name.startswith("2.")]
    theirs, own = plain_rounds(world, kept=layer)
    ours = world.task.flat.state_dict(state.model(create("fedbn")))
    for name in set(theirs[-1]) - set(layer):
        torch.testing.assert_close(ours[name], theirs[-1][name], rtol=1e-12, atol=1e-12)
    for client in own:
        memory = {k: v[0] for k, v in state.clients.read(np.array([client])).items()}
        mine = world.task.flat.parameters(create("fedbn").personal(world.task, state.w, memory))
        for name in ("2.weight", "2.bias"):
            torch.testing.assert_close(mine[name], own[client][name], rtol=1e-12, atol=1e-12)


def test_fedbn_without_normalization_is_fedavg():
    world = experiment(network(nn.Identity))
    (one, _), (other, _) = (rounds(world, name) for name in ("fedbn", "fedavg"))
    assert torch.equal(one.w, other.w)


def test_fedbn_keeps_groupnorm_too_in_every_engine():
    world = experiment(network(lambda: nn.GroupNorm(3, 12)))
    states = [rounds(world, "fedbn", engine=engine)[0] for engine in (Loop(), Threads(2), Stacked())]
    for state in states[1:]:
        torch.testing.assert_close(state.w, states[0].w, rtol=1e-10, atol=1e-10)
    assert not torch.equal(states[0].w, rounds(world, "fedavg")[0].w)


@pytest.mark.parametrize("name", ["fedavg", "feddpc", "scaffold", "fedga", "fedbn", "fedspeed"])
@pytest.mark.parametrize("buffers", ["auto", "local"])
def test_threads_are_the_loop(name, buffers):
    torch.set_num_threads(1)
    world = experiment(buffers=buffers, method=name)
    states = [rounds(for_method(world, create(name)), name, engine=engine)[0] for engine in (Loop(), Threads(2))]
    assert torch.equal(states[0].w, states[1].w)
    assert torch.equal(states[0].statistics, states[1].statistics)


@pytest.mark.parametrize("method", ["feddpc", "fedbn"])
@pytest.mark.parametrize("more", [{}, {"keep": "best"}, {"client_optimizer": "adam"}])
def test_a_resumed_run_is_the_same(tmp_path, method, more):
    given = {**SETTING, **more, "data": "digits", "model": network(), "method": method, "evaluate_clients": True}
    whole = feddpc.simulate(rounds=6, **given)
    feddpc.simulate(rounds=3, out=tmp_path / "a", **given)
    resumed = feddpc.simulate(rounds=6, out=tmp_path / "a", resume=True, **given)
    hidden = {"seconds"}
    kept = [[{k: v for k, v in r.items() if k not in hidden} for r in run.records] for run in (whole, resumed)]
    assert kept[0] == kept[1]
    for name, value in whole.state_dict.items():
        assert torch.equal(value, resumed.state_dict[name]), name


def test_the_model_that_is_returned_is_the_one_that_was_measured():
    result = feddpc.simulate(**SETTING, rounds=3, data="digits", model=network(), method="fedavg")
    data = load("digits")
    task = experiment().task
    outputs = result.model.double()(task.inputs(task.tensors(data, data.x_test, data.y_test, "cpu")[0]))
    accuracy = (outputs.argmax(1).numpy() == data.y_test).mean()
    assert accuracy == pytest.approx(result.records[-1]["test_accuracy"], abs=1e-12)
    assert result.config.buffers == "average"
    assert int(result.state_dict["2.num_batches_tracked"]) > 0


def test_clients_are_evaluated_with_what_is_theirs():
    """A client that has not taken part is evaluated with the global model."""
    world = experiment(evaluate_clients=True, method="fedbn")
    state, records = rounds(world, "fedbn", n=1)
    accuracies, held = records[-1].client_metrics["accuracy"], world.client_tests
    task, method = world.task, create("fedbn")
    for client in range(8):
        memory = {k: v[0] for k, v in state.clients.read(np.array([client])).items()}
        if client in records[-1].participants:
            model = torch.cat([method.personal(task, state.w, memory), memory["/statistics"]])
        else:
            model = state.model(method)
        net = with_weights(task.module, task.flat.state_dict(model))
        rows = torch.tensor(held[client])
        right = net(task.inputs(task.x[rows])).argmax(1) == task.y[rows]
        assert accuracies[client] == pytest.approx(right.double().mean().item())


# Constants.


class Masked(nn.Module):
    """A network with a constant buffer, as causal masks and position ids are."""

    def __init__(self, persistent=True):
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("mask", (torch.arange(64) % 3 != 0).float(), persistent=persistent)
        self.register_buffer("ids", torch.arange(10), persistent=persistent)
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        return self.head(x.flatten(1) * self.mask)[:, self.ids]


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("engine", ["loop", "threads", "stacked", "auto"])
def test_constant_buffers_always_work(engine, persistent):
    result = feddpc.simulate(
        **SETTING, rounds=2, data="digits", model=Masked(persistent), method="feddpc", engine=engine, buffers="refuse"
    )
    plain = Masked(persistent)
    assert result.state_dict.keys() == plain.state_dict().keys()
    assert torch.equal(result.model.mask, plain.mask.to(result.model.mask.dtype))


# Batches of one.


def test_a_last_batch_of_one_joins_the_one_before_it():
    partition = Partition.from_sizes(np.arange(30), np.array([17, 8, 5]))
    planner = Planner(partition, 8, 2, seed=0, smallest=2)
    plan = planner.plan(1, np.arange(3))
    assert [plan.count[i][plan.count[i] > 0].tolist() for i in range(3)] == [[8, 9] * 2, [8, 8], [5, 5]]
    assert planner.steps(partition.sizes).tolist() == plan.steps.tolist()
    assert sorted(plan.index[0, :2][plan.count[0, :2, None] > np.arange(9)].tolist()) == partition[0].tolist()


def test_draws_do_not_depend_on_others_with_joined_batches():
    partition = Partition.from_sizes(np.arange(30), np.array([17, 8, 5]))
    planner = Planner(partition, 8, 1, seed=0, uniforms=2, smallest=2)
    together, alone = planner.plan(1, np.arange(3)), planner.plan(1, np.array([1]))
    assert np.array_equal(together.draws[1, :1, :8], alone.draws[0, :1, :8])


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("batch_size", {"batch_size": 1}),
        ("client 1", {"partition": [[0, 1, 2, 3], [4], [5, 6, 7]], "cohort": 2}),
    ],
)
def test_a_batch_that_batchnorm_cannot_take_is_refused(field, more):
    with pytest.raises(BadInputError, match=field):
        feddpc.simulate(**{**SETTING, **more}, rounds=1, data="digits", model=network())


# Refusals.


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("buffers", {"buffers": "refuse"}),
        ("buffers", {"rule": "median"}),
        ("buffers", {"screen": {"norm": 2.0}}),
        ("buffers", {"privacy": {"clip": 1.0, "noise": 1.0}, "participation": "poisson"}),
        ("buffers", {"buffers": "average", "method": "fedbn"}),
        ("buffers", {"buffers": "mean"}),
        ("moon", {"method": "moon"}),
        ("stacked", {"engine": "stacked"}),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(field, more):
    net = network()
    if more.get("method") == "moon":

        class Parts(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.head = network()[:4], nn.Linear(12, 10)

            def features(self, x):
                return self.body(x)

            def forward(self, x):
                return self.head(self.features(x))

        net = Parts()
    with pytest.raises(BadInputError, match=field):
        feddpc.simulate(**{**SETTING, **more}, rounds=1, data="digits", model=net)


def test_privacy_with_local_statistics_runs():
    more = {"privacy": {"clip": 1.0, "noise": 1.0}, "participation": "poisson", "buffers": "local"}
    result = feddpc.simulate(**SETTING, **more, rounds=2, data="digits", model=network(), method="fedavg")
    assert result.status == "finished"


@pytest.mark.parametrize("cohort", [1, 3, 6])
def test_auto_takes_an_engine_without_padding(cohort):
    result = feddpc.simulate(**{**SETTING, "cohort": cohort}, rounds=1, data="digits", model=network(), method="fedavg")
    assert result.config.engine == ("loop" if cohort == 1 else "threads")


def test_a_round_without_uploads_leaves_the_statistics():
    world = experiment(dropout=0.999)
    state, records = rounds(world, "fedavg", n=2)
    assert not any(record.participants for record in records)
    assert torch.equal(state.statistics, world.task.first_statistics)
