"""Buffers of a state dict, such as BatchNorm's statistics, through the drop-in strategies."""

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from feddpc import flower
from feddpc.errors import BadInputError
from feddpc.runs.checkpoint import load_model
from federations import NODES, Unreliable

EVERYBODY = {"min_train_nodes": NODES, "min_available_nodes": NODES, "fraction_evaluate": 0.0}
FIRST = ArrayRecord(
    {
        "weight": Array(np.zeros(3, np.float32)),
        "bn.running_mean": Array(np.zeros(2, np.float32)),
        "bn.running_var": Array(np.ones(2, np.float32)),
        "bn.num_batches_tracked": Array(np.array(0, np.int64)),
    }
)
STATISTICS = ("bn.running_mean", "bn.running_var")


def sent(node, t):
    """What node ``node`` answers with in round ``t``."""
    rng = np.random.default_rng([node, t])
    return {
        "weight": rng.normal(size=3).astype(np.float32),
        "bn.running_mean": rng.normal(size=2).astype(np.float32),
        "bn.running_var": rng.exponential(size=2).astype(np.float32),
        "bn.num_batches_tracked": np.array(10 * t + node, np.int64),
    }


def app(change=lambda node, arrays: arrays, seen=None):
    """A client app that answers with ``sent``, changed; what it receives is listed in ``seen``."""
    made = ClientApp()

    @made.train()
    def train(message, context):
        t, node = message.content["config"]["server-round"], context.node_config["partition-id"]
        if seen is not None:
            seen.append({k: a.numpy() for k, a in message.content["arrays"].items()})
        arrays = ArrayRecord({k: Array(v) for k, v in change(node, sent(node, t)).items()})
        return Message(
            RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1 + node})}), reply_to=message
        )

    return made


def run(strategy, grid=None, rounds=2, first=FIRST):
    result = strategy.start(grid or Unreliable(app()), first, num_rounds=rounds)
    return {name: array.numpy() for name, array in result.arrays.items()}


class OneByOne(flower.InProcessGrid):
    def __init__(self):
        super().__init__(app(), NODES, one_by_one=True)


class TestAverage:
    @pytest.mark.parametrize("weighting", ["uniform", "samples"])
    @pytest.mark.parametrize("grid", [Unreliable, OneByOne])
    @pytest.mark.parametrize("name", ["FedDPC", "FedAvg", "FedExP"])
    def test_statistics_are_the_mean_and_counters_the_largest(self, weighting, grid, name):
        made = run(
            getattr(flower, name)(**EVERYBODY, weighting=weighting, server_lr=0.5),
            grid(app()) if grid is Unreliable else grid(),
        )
        weights = np.arange(1, NODES + 1) if weighting == "samples" else np.ones(NODES)
        for key in STATISTICS:
            mean = np.average([sent(node, 2)[key] for node in range(NODES)], axis=0, weights=weights)
            np.testing.assert_allclose(made[key], mean, rtol=1e-6)
        assert made["bn.num_batches_tracked"] == 20 + NODES - 1
        assert {k: (v.dtype, v.shape) for k, v in made.items()} == {
            k: (a.numpy().dtype, a.numpy().shape) for k, a in FIRST.items()
        }
        assert list(made) == list(FIRST)

    def test_parameters_move_as_if_there_were_no_buffers(self):
        """Neither projection nor norms see buffers."""
        only = ArrayRecord({"weight": FIRST["weight"]})
        bare = app(lambda node, arrays: {"weight": arrays["weight"]})
        loud = app(lambda node, arrays: arrays | {"bn.running_mean": np.full(2, 1e20, np.float32)})
        without, with_them = flower.FedDPC(**EVERYBODY), flower.FedDPC(**EVERYBODY)
        run(without, Unreliable(bare), 3, only)
        run(with_them, Unreliable(loud), 3)
        assert torch.equal(without.now.w, with_them.now.w)
        assert with_them.now.w.numel() == 3

    def test_clients_receive_them(self):
        seen = []
        run(flower.FedAvg(**EVERYBODY), Unreliable(app(seen=seen)), 2)
        first, second = seen[0], seen[-1]
        assert np.array_equal(first["bn.running_var"], np.ones(2))
        mean = np.mean([sent(node, 1)["bn.running_var"] for node in range(NODES)], axis=0)
        np.testing.assert_allclose(second["bn.running_var"], mean, rtol=1e-6)

    def test_only_replies_that_count_are_averaged(self):
        def spoilt(node, arrays):
            return arrays | {"weight": np.full(3, np.nan, np.float32)} if node == 3 else arrays

        made = run(flower.FedAvg(**EVERYBODY), Unreliable(app(spoilt)), 1)
        others = [sent(node, 1)["bn.running_mean"] for node in range(NODES) if node != 3]
        np.testing.assert_allclose(made["bn.running_mean"], np.mean(others, axis=0), rtol=1e-6)

    @pytest.mark.parametrize(
        ("name", "value", "reason"),
        [
            ("bn.running_var", np.array([1, -1e-6], np.float32), "negative"),
            ("bn.running_var", np.array([1, np.nan], np.float32), "finite"),
            ("bn.running_mean", np.array([1, np.inf], np.float32), "finite"),
            ("bn.running_mean", np.array([1, 1e300]), "finite"),
            ("bn.running_mean", np.array([1], np.float32), "shape"),
            ("bn.num_batches_tracked", np.array(1.5), "float64"),
        ],
    )
    def test_a_bad_buffer_costs_its_sender_the_vote(self, name, value, reason):
        strategy = flower.FedDPC(**EVERYBODY)
        made = run(strategy, Unreliable(app(lambda node, arrays: arrays | {name: value} if node == 3 else arrays)))
        assert {(r.client, name in r.reason, reason in r.reason) for r in strategy.refusals} == {(3, True, True)}
        assert (made["bn.running_var"] >= 0).all()

    def test_statistics_in_float64_are_cast(self):
        made = run(
            flower.FedAvg(**EVERYBODY),
            Unreliable(app(lambda node, arrays: {k: v.astype(np.float64) if v.ndim else v for k, v in arrays.items()})),
        )
        assert made["bn.running_mean"].dtype == np.float32

    def test_a_void_round_leaves_them(self):
        strategy = flower.FedAvg(**EVERYBODY)
        grid = Unreliable(app(lambda node, arrays: arrays | {"weight": np.full(3, np.nan, np.float32)}))
        made = run(strategy, grid, 1)
        assert all(np.array_equal(made[k], a.numpy()) for k, a in FIRST.items())

    def test_they_survive_a_restart(self, tmp_path):
        wanted = {**EVERYBODY, "folder": tmp_path / "run"}
        run(flower.FedDPC(**wanted), rounds=2)
        seen = []
        made = run(flower.FedDPC(**wanted), Unreliable(app(seen=seen)), 3)
        whole = run(flower.FedDPC(**EVERYBODY), rounds=3)
        mean = np.mean([sent(node, 2)["bn.running_mean"] for node in range(NODES)], axis=0)
        np.testing.assert_allclose(seen[0]["bn.running_mean"], mean, rtol=1e-6)
        assert all(np.array_equal(made[k], whole[k]) for k in whole)
        stored = load_model(tmp_path / "run" / "model.safetensors")
        assert all(np.array_equal(stored[k].numpy(), whole[k]) for k in whole)

    def test_names_and_patterns_of_ones_own(self):
        first = ArrayRecord({k: Array(np.zeros(2, np.float32)) for k in ("w", "ema.a", "ema.b", "scale")})
        own = ClientApp()

        @own.train()
        def train(message, context):
            arrays = ArrayRecord({k: Array(np.full(2, 3.0, np.float32)) for k in message.content["arrays"]})
            return Message(RecordDict({"a": arrays, "m": MetricRecord({"num-examples": 1})}), reply_to=message)

        strategy = flower.FedAvg(**EVERYBODY, server_lr=0.5, buffer_names=["ema.*", "scale"])
        made = run(strategy, Unreliable(own), 1, first)
        assert strategy.now.w.numel() == 2
        assert (made["w"] == 1.5).all()
        assert all((made[k] == 3).all() for k in ("ema.a", "ema.b", "scale"))
        with pytest.raises(BadInputError, match="buffer_names"):
            run(flower.FedAvg(**EVERYBODY, buffer_names=["emma.*"]), Unreliable(own), 1, first)

    def test_a_module_tells_its_buffers(self):
        module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        module.register_buffer("mask", torch.ones(2))
        module.register_buffer("scratch", torch.ones(2), persistent=False)
        assert flower.buffer_names(module) == ["mask", "1.running_mean", "1.running_var", "1.num_batches_tracked"]

    @pytest.mark.parametrize("how", [{"rule": "median"}, {"screen": {"norm": 5}}, {"max_norm": 10.0}])
    def test_it_is_refused_behind_a_defense_that_does_not_see_them(self, how):
        (key,) = how
        with pytest.raises(BadInputError, match=rf"buffers = 'average'.*{key}"):
            run(flower.FedAvg(**EVERYBODY, **how))
        run(flower.FedAvg(**EVERYBODY, **how, buffers="local"))
        only = ArrayRecord({"weight": FIRST["weight"]})
        run(flower.FedAvg(**EVERYBODY, **how), Unreliable(app(lambda n, a: {"weight": a["weight"]})), 2, only)


class TestLocal:
    @pytest.mark.parametrize("withheld", [True, False])
    def test_the_server_neither_reads_nor_changes_them(self, withheld, tmp_path):
        def change(node, arrays):
            kept = {k: v for k, v in arrays.items() if k == "weight"}
            return kept if withheld else arrays | {"bn.running_var": np.full(2, -1, np.float32)}

        wanted, seen = {**EVERYBODY, "buffers": "local", "folder": tmp_path / "run"}, []
        run(flower.FedDPC(**wanted), Unreliable(app(change, seen)), 2)
        strategy = flower.FedDPC(**wanted)
        made = run(strategy, Unreliable(app(change, seen)), 4)
        assert [len(r.participants) for r in strategy.records] == [NODES] * 2
        for arrays in (*seen, made):
            assert all(np.array_equal(arrays[k], FIRST[k].numpy()) for k in FIRST if k != "weight")


@pytest.mark.parametrize("name", ["bn.num_batches_tracked", "bn.running_mean"])
def test_refuse_names_the_array_and_the_remedy(name):
    arrays = ArrayRecord({"weight": FIRST["weight"], name: FIRST[name]})
    with pytest.raises(BadInputError, match=rf"{name}.*to_groupnorm"):
        run(flower.FedDPC(buffers="refuse"), first=arrays)


def test_bad_choices_are_explained():
    with pytest.raises(BadInputError, match="buffers = 'mean'"):
        flower.FedDPC(buffers="mean")
    with pytest.raises(BadInputError, match="no parameters"):
        run(flower.FedDPC(), first=ArrayRecord({k: a for k, a in FIRST.items() if k != "weight"}))


@pytest.mark.parametrize("value", [-1.0, np.nan])
def test_a_first_model_with_an_impossible_variance_is_refused(value):
    arrays = ArrayRecord({**FIRST, "bn.running_var": Array(np.array([1, value], np.float32))})
    with pytest.raises(BadInputError, match="running_var"):
        run(flower.FedAvg(**EVERYBODY), first=arrays)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 16),
            nn.BatchNorm1d(16),
            nn.ReLU(),
            nn.Linear(16, 8),
            nn.BatchNorm1d(8),
            nn.ReLU(),
            nn.Linear(8, 3),
        )

    def forward(self, x):
        return self.layers(x)


def samples(node):
    """Samples of one node; nodes differ in mean and scale."""
    generator = torch.Generator().manual_seed(node)
    x = torch.randn(40, 6, generator=generator) * (1 + node) + node
    return x, (x[:, 0] > node).long() + (x[:, 1] > node).long()


def batchnorm_app(local=False):
    """A client app as people have them; with ``local`` it keeps its buffers in its context, as docs/flower.md says."""
    made = ClientApp()

    @made.train()
    def train(message, context):
        net, (x, y) = Net(), samples(context.node_config["partition-id"])
        state = message.content["arrays"].to_torch_state_dict()
        if local and "buffers" in context.state:
            state |= context.state["buffers"].to_torch_state_dict()
        net.load_state_dict(state)
        net.train()
        steps = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(3):
            steps.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            steps.step()
        if local:
            context.state["buffers"] = ArrayRecord({k: net.state_dict()[k] for k in flower.buffer_names(net)})
        metrics = MetricRecord({"num-examples": len(y), "loss": float(loss.detach())})
        return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)

    return made


@pytest.mark.parametrize("name", ["FedDPC", "FedAvg", "FedExP"])
def test_a_network_with_batchnorm_trains(name):
    torch.manual_seed(0)
    losses, least = [], []
    x, y = (torch.cat(parts) for parts in zip(*map(samples, range(NODES)), strict=True))

    def evaluate(t, arrays):
        net = Net().eval()
        net.load_state_dict(arrays.to_torch_state_dict())
        with torch.no_grad():
            losses.append(float(nn.functional.cross_entropy(net(x), y)))
        least.append(min(float(v.min()) for k, v in net.state_dict().items() if k.endswith("running_var")))

    strategy = getattr(flower, name)(**EVERYBODY)
    strategy.start(Unreliable(batchnorm_app()), ArrayRecord(Net().state_dict()), num_rounds=10, evaluate_fn=evaluate)
    assert [len(r.participants) for r in strategy.records] == [NODES] * 10
    assert min(least) > 0
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]


def test_clients_that_keep_their_statistics_go_on_from_their_own():
    torch.manual_seed(0)
    grid, first = Unreliable(batchnorm_app(local=True)), Net().state_dict()
    strategy = flower.FedDPC(**EVERYBODY, buffers="local")
    result = strategy.start(grid, ArrayRecord(first), num_rounds=10)
    assert [len(r.participants) for r in strategy.records] == [NODES] * 10
    end = result.arrays.to_torch_state_dict()
    assert all(torch.equal(end[k], first[k]) for k in flower.buffer_names(Net()))
    own = [context.state["buffers"].to_torch_state_dict() for context in grid.contexts.values()]
    assert all(int(state["layers.1.num_batches_tracked"]) == 30 for state in own)  # three steps in each round
    assert not torch.equal(own[0]["layers.1.running_mean"], own[1]["layers.1.running_mean"])


def test_faults_are_made_in_parameters_only():
    grid = flower.FaultyGrid(Unreliable(app()), {"sign_flip": 1.0}, nodes=NODES)
    strategy = flower.FedAvg(**EVERYBODY)
    made = run(strategy, grid, 1)
    honest = flower.FedAvg(**EVERYBODY)
    expected = run(honest, rounds=1)
    torch.testing.assert_close(strategy.now.w, -honest.now.w)
    assert all(np.array_equal(made[k], expected[k]) for k in expected if k != "weight")
