"""Every kind of task, own losses, metrics, tasks and transforms over Flower: the numbers are those of the simulator."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from flwr.app import MetricRecord
from torch import nn

from feddpc import flower, methods
from feddpc.build import build
from feddpc.config import Config, keys
from feddpc.data import Dataset
from feddpc.engines.loop import Loop
from feddpc.errors import BadInputError, RunFolderError
from feddpc.method_changes import for_method
from feddpc.runs.checkpoint import load_model
from feddpc.runs.record import read_records
from feddpc.runs.runner import execute
from feddpc.task_parts import TaskParts
from feddpc.tasks import Regression
from federations import Unreliable, forged, halves, train
from support import run_rounds, small_setting

RNG = np.random.default_rng(0)
X = RNG.standard_normal((90, 5)).astype(np.float32)
NUMBERS = (X @ RNG.standard_normal(5)).astype(np.float32)
PAIRS = (X @ RNG.standard_normal((5, 2))).astype(np.float32)
LABELS = (X @ RNG.standard_normal((5, 3)) > 0).astype(np.int64)
CLASSES = (X @ RNG.standard_normal((5, 3))).argmax(1)
TOKENS = RNG.integers(0, 7, (90, 9))
NEXT = np.where(RNG.random((90, 8)) < 0.3, -100, TOKENS[:, 1:])
NEXT[:, 0] = TOKENS[:, 1]
NODES = 8


class Letters(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)

    def forward(self, x):
        return self.head(self.embed(x))


def split(x, y, **more):
    return Dataset.from_arrays(x[:60], y[:60], x[60:], y[60:], **more)


KINDS = {
    "classification": (split(X, CLASSES), lambda: nn.Linear(5, 3)),
    "regression": (split(X, NUMBERS), lambda: nn.Linear(5, 1)),
    "two numbers": (split(X, PAIRS), lambda: nn.Linear(5, 2)),
    "multilabel": (split(X, LABELS), lambda: nn.Linear(5, 3)),
    "next-token": (split(TOKENS[:, :-1], NEXT, target="tokens"), Letters),
}


def setting(kind, own=None, **values):
    data, net = KINDS[kind]
    torch.manual_seed(0)
    config = {"clients": NODES, "cohort": 4, "batch_size": 4, "epochs": 2, "lr": 0.05, "precision": "float64"}
    return build(Config.read({**config, "device": "cpu", "rounds": 4, **values}), data=data, module=net(), own=own)


def federated(made, method, *, app=None, **more):
    halved = flower.app_arguments(made)
    grid = Unreliable(app or flower.client_app(**halved.client()), NODES)
    strategy = flower.strategy(method, **halved.server(), **more)
    train(strategy, grid, made.config.rounds)
    return strategy


def agree(kind, method="feddpc", own=None, **values):
    """Assert that the simulator and the grid give the same model and records, bit by bit."""
    rule = methods.create(method)
    made = setting(kind, own, **values)
    progress, records = run_rounds(for_method(made, rule), rule, Loop(), made.config.rounds)
    strategy = federated(setting(kind, own, **values), rule)
    assert strategy.refusals == []
    assert torch.equal(strategy.now.w, progress.w)
    for key, value in progress.server.items():
        assert torch.equal(strategy.now.server[key], value)
    for one, other in zip(records, strategy.records, strict=True):
        assert repr(one.metrics) == repr(other.metrics)  # NaN and None included
        assert one.train_loss == pytest.approx(other.train_loss, abs=0, nan_ok=True)
        assert one.participants == other.participants
    return strategy


@pytest.mark.parametrize("method", ["feddpc", "scaffold", "fedprox", "fedamd"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_task_is_the_same_over_flower(kind, method):
    agree(kind, method, weighting="samples")


def cubed(outputs, targets):
    return (outputs - targets).abs() ** 3


def largest_error(outputs, targets):
    return (outputs - targets).abs().max()


largest_error.direction = "min"


def jitter(x, u):
    return x + 0.1 * (u[:, :1] - 0.5)


class Median(Regression):
    """A task of one's own."""

    name = "median"
    measured = ("mae",)

    def sample_losses(self, outputs, targets):
        return (self.aligned(outputs, targets) - targets).abs()


FEATURES = {
    "a loss by name": ("regression", None, {"loss": "huber"}),
    "a loss of one's own": ("regression", TaskParts(loss=cubed), {}),
    "metrics by name": ("classification", None, {"metrics": "f1,top-5,auc"}),
    "metrics of one's own": ("regression", TaskParts(metrics=(largest_error, "r2")), {}),
    "a task of one's own": ("regression", TaskParts(task=Median), {}),
    "a transform": ("regression", TaskParts(transform=jitter), {}),
    "evaluate_every": ("multilabel", None, {"evaluate_every": 3}),
    "validation": ("regression", None, {"validation": 0.2}),
    "adam at the clients": ("next-token", None, {"client_optimizer": "adam", "lr": 0.01}),
    "clipping": ("regression", None, {"clip_norm": 0.3}),
    "a schedule": ("multilabel", None, {"lr_schedule": {"name": "warmup", "warm": 2}}),
    "a server optimizer": ("regression", None, {"server_optimizer": "adam"}),
}


@pytest.mark.parametrize("name", FEATURES)
def test_features_are_the_same_over_flower(name):
    kind, own, values = FEATURES[name]
    agree(kind, "fedavg", own, **values)


def test_a_natural_partition_is_the_same_over_flower():
    data, net = KINDS["regression"]
    owners = [f"client {i % NODES}" for i in range(60)]
    named = dataclasses.replace(data, client_ids=np.array(owners))
    torch.manual_seed(0)
    module = net()
    values = Config.read({"cohort": 4, "batch_size": 4, "precision": "float64", "rounds": 3, "device": "cpu"})
    made = [build(values, data=named, module=module) for _ in range(2)]
    progress, _ = run_rounds(made[0], methods.create("feddpc"), Loop(), 3)
    assert torch.equal(federated(made[1], "feddpc").now.w, progress.w)


def test_a_model_is_evaluated_in_every_third_round_and_in_the_last():
    strategy = federated(setting("regression", rounds=4, evaluate_every=3), "fedavg")
    assert [record.metrics["test_mse"] is not None for record in strategy.records] == [False, False, True, True]


def test_a_run_folder_says_what_was_measured_and_which_direction_is_better(tmp_path):
    made = setting("regression", TaskParts(metrics=(largest_error, "r2")))
    strategy = federated(made, "fedavg", folder=tmp_path / "run")
    listed = json.loads((tmp_path / "run" / "environment.json").read_text())["metrics"]
    assert [(metric["name"], metric["direction"]) for metric in listed] == [
        ("largest_error", "min"),
        ("r2", "max"),
        ("loss", "min"),
    ]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["primary"]["name"] == "largest_error"
    values = [record["test_largest_error"] for record in read_records(tmp_path / "run" / "rounds.jsonl")]
    assert values == [record.metrics["test_largest_error"] for record in strategy.records]
    assert summary["best_largest_error"] == min(values)


def test_a_run_without_a_test_set_knows_its_metrics():
    server = flower.app_arguments(setting("regression")).server()
    strategy = flower.strategy("fedavg", **{**server, "test": None})
    grid = Unreliable(flower.client_app(**flower.app_arguments(setting("regression")).client()), NODES)
    train(strategy, grid, 1)
    assert strategy.records[0].metrics == {"test_mse": None, "test_mae": None, "test_r2": None, "test_loss": None}


class TestBestRound:
    """With ``keep = "best"`` a run returns and writes the model of its best round."""

    def run(self, rounds=6, folder=None, **values):
        made = setting("regression", rounds=rounds, lr=0.4, keep="best", **values)
        halved = flower.app_arguments(made)
        strategy = flower.strategy("fedavg", **halved.server(), folder=folder)
        app = flower.client_app(**halved.client())
        return strategy, train(strategy, Unreliable(app, NODES), rounds), made

    @pytest.mark.parametrize("values", [{}, {"validation": 0.2}], ids=["test", "validation"])
    def test_it_is_the_model_of_the_simulator(self, values, tmp_path):
        strategy, result, made = self.run(folder=tmp_path / "run", **values)
        in_loop = dataclasses.replace(made, config=dataclasses.replace(made.config, engine="loop"))
        expected = execute(in_loop, method=methods.create("fedavg"))
        for name, value in made.task.flat.parameters(expected.w).items():
            assert torch.equal(torch.from_numpy(result.arrays[name].numpy()), value)
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        assert summary["model_round"] == expected.summary["model_round"] < len(strategy.records)
        stored = load_model(tmp_path / "run" / "model.safetensors")
        assert torch.equal(stored["weight"], made.task.flat.parameters(expected.w)["weight"])

    def test_it_survives_a_restart(self, tmp_path):
        whole, result, _ = self.run()
        self.run(rounds=4, folder=tmp_path / "run")
        _, again, _ = self.run(folder=tmp_path / "run")
        assert np.array_equal(again.arrays["weight"].numpy(), result.arrays["weight"].numpy())
        assert whole.now.best is not None

    def test_it_needs_samples_of_the_server(self):
        server = flower.app_arguments(setting("regression", keep="best")).server()
        with pytest.raises(BadInputError, match="keep"):
            flower.strategy("fedavg", **{**server, "test": None})


class TestCodeAtBothEnds:
    """Code of the user's own is never sent: both ends are given it, and a node without it says so."""

    def served(self, server_own, **client):
        made = setting("regression", server_own)
        known = {"model": flower.app_arguments(made).model, "data": flower.app_arguments(made).data}
        return federated(made, "fedavg", app=flower.client_app(**known, **client))

    def test_a_node_with_the_same_code_takes_part(self):
        own = TaskParts(loss=cubed, transform=jitter, task=Median)
        assert self.served(own, loss=cubed, transform=jitter, task=Median).refusals == []

    @pytest.mark.parametrize("part", ["loss", "transform", "task"])
    def test_a_node_without_it_is_refused(self, part):
        code = {"loss": cubed, "transform": jitter, "task": Median}[part]
        with pytest.raises(BadInputError, match=f"knows no {part}.*client_app"):
            self.served(TaskParts(**{part: code}))

    def test_a_node_with_other_code_of_the_same_name_is_refused(self):
        def other():
            def cubed(outputs, targets):
                return (outputs - targets).abs() ** 4

            return cubed

        with pytest.raises(BadInputError, match=r"loss.*use the same"):
            self.served(TaskParts(loss=cubed), loss=other())

    def test_a_node_with_a_transform_that_the_server_does_not_have_is_refused(self):
        with pytest.raises(BadInputError, match="transform"):
            self.served(None, transform=jitter)

    def test_no_file_is_loaded_because_a_server_names_it(self, tmp_path):
        path = tmp_path / "own.py"
        path.write_text("raise SystemExit('loaded')\n")
        for part in ("loss", "task", "transform", "metrics"):
            halved = flower.app_arguments(setting("regression"))
            strategy = flower.strategy("fedavg", **halved.server())
            strategy.nodes.spec = forged(strategy.nodes.spec, **{part: f"{path}:Own"})
            with pytest.raises(BadInputError, match=f"knows no {part}"):
                train(strategy, Unreliable(flower.client_app(**halved.client()), NODES))

    def test_each_end_may_name_a_file_of_its_own(self, tmp_path):
        paths = [tmp_path / end / "mine.py" for end in ("server", "client")]
        for path in paths:
            path.parent.mkdir()
            path.write_text("def cubed(outputs, targets):\n    return (outputs - targets).abs() ** 3\n")
        halved = flower.app_arguments(setting("regression"))
        server = halved.server() | {"loss": f"{paths[0]}:cubed"}
        strategy = flower.strategy("fedavg", **server)
        app = flower.client_app(**halved.client() | {"loss": f"{paths[1]}:cubed"})
        train(strategy, Unreliable(app, NODES), 4)
        assert torch.equal(strategy.now.w, federated(setting("regression", TaskParts(loss=cubed)), "fedavg").now.w)

    def test_metrics_of_the_server_are_no_concern_of_nodes_that_do_not_evaluate(self):
        assert self.served(TaskParts(metrics=(largest_error,))).refusals == []


class TestEvaluationAtClients:
    """Clients answer with metrics by name; each reply is screened on its own."""

    def run(self, change=None, own=None, **client):
        made = setting("regression", own, cohort=NODES)
        halved = flower.app_arguments(made)

        def data(client, clients):
            x, y = halved.data(client, clients)
            return x, y, x[: 1 + client % 2], y[: 1 + client % 2]

        class Changed(Unreliable):
            def deliver(self, message):
                replies = super().deliver(message)
                if change and message.metadata.message_type == "evaluate" and message.metadata.dst_node_id == 1003:
                    change(replies[0].content)
                return replies

        app = flower.client_app(**halved.client() | {"data": data} | client)
        strategy = flower.strategy("fedavg", **halved.server(), fraction_evaluate=1.0)
        return strategy, train(strategy, Changed(app, NODES), 1), made, data

    def test_the_mean_is_weighted_by_test_samples(self):
        strategy, result, made, data = self.run()
        errors, count = 0.0, 0
        for client in range(NODES):
            _, _, x, y = data(client, NODES)
            outputs = made.task.outputs(strategy.now.w, torch.from_numpy(x).double()).squeeze(-1)
            errors += float((outputs - torch.from_numpy(y).double()).square().sum())
            count += len(y)
        found = result.evaluate_metrics_clientapp[1]
        assert found["mse"] == pytest.approx(errors / count, rel=1e-12)
        assert {"mse", "mae", "r2", "loss"} >= set(found)

    def test_own_metrics_are_measured_at_nodes_that_have_them(self):
        own = TaskParts(metrics=(largest_error,))
        _, result, *_ = self.run(None, own)
        assert result.evaluate_metrics_clientapp[1]["largest_error"] > 0
        with pytest.raises(BadInputError, match="knows no metrics"):
            self.run(None, own, metrics=None)

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (lambda c: c["metrics"].pop("loss"), "loss"),
            (lambda c: c["metrics"].update({"accuracy": 1.0}), "accuracy"),
            (lambda c: c["metrics"].update({"mse": float("nan")}), "mse"),
            (lambda c: c["metrics"].update({"mse": float("inf")}), "mse"),
            (lambda c: c["metrics"].update({"mse": 1e306}), "mse"),
            (lambda c: c["metrics"].update({"mse": [1.0, 2.0]}), "mse"),
            (lambda c: c["metrics"].update({"num-examples": -1}), "examples"),
            (lambda c: c["metrics"].update({"num-examples": 10**12}), "examples"),
            (lambda c: c.update({"more": MetricRecord({"mse": 1.0})}), "2 metric records"),
            (lambda c: c["reply"].update({"client": 5}), "client"),
            (lambda c: c["reply"].update({"experiment": "another"}), "experiment"),
        ],
    )
    def test_a_malformed_reply_costs_only_its_sender(self, change, reason):
        strategy, result, *_ = self.run(change)
        (refusal,) = strategy.refusals
        assert (refusal.client, refusal.node) == (3, 1003)
        assert reason in refusal.reason
        assert np.isfinite(result.evaluate_metrics_clientapp[1]["mse"])
        assert 0 <= result.evaluate_metrics_clientapp[1]["mse"] < 100

    def test_clients_evaluate_when_the_server_does(self):
        made = setting("regression", rounds=4, evaluate_every=3)
        halved = flower.app_arguments(made)
        app = flower.client_app(**halved.client() | {"data": lambda c, n: halved.data(c, n) * 2})
        strategy = flower.strategy("fedavg", **halved.server(), fraction_evaluate=1.0)
        result = train(strategy, Unreliable(app, NODES), 4)
        assert list(result.evaluate_metrics_clientapp) == [3, 4]


@pytest.mark.parametrize("loss", [float("nan"), 1e306, 3, [0.5, 0.5]])
def test_a_training_loss_that_is_no_number_is_refused(loss):
    server, client = halves(cohort=NODES)

    def change(t, replies):
        replies[0].content["metrics"] = MetricRecord({"num-examples": 9, "loss": loss})
        return replies

    strategy = flower.strategy("fedavg", **server)
    train(strategy, Unreliable(flower.client_app(**client), victim=3, fault=change), 1)
    assert [refusal.client for refusal in strategy.refusals] == [3]
    assert np.isfinite(strategy.records[0].train_loss)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("evaluate_clients", True),
        ("finetune_steps", 2),
        ("validation", 0.2),
        ("reserve", 0.2),
        ("buffers", "local"),
        ("data_memory", "host"),
    ],
)
def test_what_stays_refused_is_refused_by_name(name, value):
    server, _ = halves()
    more = {"evaluate_clients": True} if name == "finetune_steps" else {}
    with pytest.raises(BadInputError, match=name if name != "finetune_steps" else "evaluate_clients"):
        flower.strategy("feddpc", **{**server, **more, name: value})


def test_the_list_of_what_only_the_simulator_has():
    assert [name for name, facts in keys().items() if facts.simulator_only] == [
        "evaluate_clients",
        "finetune_steps",
        "buffers",
        "inner_engine",
        "rank_timeout",
        "data_memory",
    ]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"task": "classification"}, "task"),
        ({"loss": "cross-entropy"}, "loss"),
        ({"metrics": "accuracy"}, "accuracy"),
        ({"method": "gmm"}, "targets"),
        ({"method": "fedadam", "server_optimizer": "yogi"}, "server_optimizer"),
        ({"task": "regresion"}, "did you mean"),
        ({"augment": True, "transform": jitter}, "augment"),
    ],
)
def test_what_does_not_fit_together_is_refused_before_a_client_is_asked(values, reason):
    server = flower.app_arguments(setting("regression")).server()
    with pytest.raises(BadInputError, match=reason):
        flower.strategy(**{"method": "fedavg", **server, **values})


class WithBase(nn.Module):
    """A frozen base with a small part that is trained."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.base, self.adapter = nn.Linear(5, 4), nn.Linear(4, 1)
        self.base.requires_grad_(False)
        self.register_buffer("shift", torch.full((1,), 0.25))
        nn.init.constant_(self.adapter.weight, 0.1)

    def forward(self, x):
        return self.adapter(torch.relu(self.base(x))) + self.shift


class TestFrozenParameters:
    """Parameters that are not trained do not travel, so their values must be the same at both ends."""

    def made(self):
        values = {"clients": NODES, "cohort": NODES, "batch_size": 4, "rounds": 2, "device": "cpu"}
        return build(Config.read(values), data=KINDS["regression"][0], module=WithBase())

    def run(self, other=None, **more):
        halved = flower.app_arguments(self.made())
        apps = [flower.client_app(**halved.client()) for _ in range(NODES)]
        if other is not None:
            apps[3] = flower.client_app(**halved.client() | {"model": other})
        strategy = flower.strategy("fedavg", **halved.server(), min_available_nodes=NODES - 1, **more)
        train(strategy, Unreliable(apps, NODES), 2)
        return strategy

    def test_a_node_with_another_constant_is_refused_by_name(self):
        def other():
            net = WithBase()
            net.shift.fill_(0.5)
            return net

        (refusal,) = self.run(other).refusals
        assert refusal.node == 1003
        assert "shift" in refusal.reason

    def test_a_node_with_another_base_is_refused_by_name(self):
        strategy = self.run(lambda: WithBase(seed=1))
        (refusal,) = strategy.refusals
        assert refusal.node == 1003
        assert "base.weight" in refusal.reason
        assert [len(record.participants) for record in strategy.records] == [NODES - 1] * 2

    def test_a_node_that_trains_other_parameters_is_refused(self):
        assert "same model" in self.run(lambda: WithBase().requires_grad_(True)).refusals[0].reason

    def test_a_node_with_the_same_base_in_another_precision_takes_part(self):
        assert self.run(lambda: WithBase().double()).refusals == []

    def test_the_numbers_are_those_of_the_simulator(self):
        progress, _ = run_rounds(self.made(), methods.create("fedavg"), Loop(), 2)
        assert torch.equal(self.run().now.w, progress.w)

    def test_a_run_is_not_continued_with_another_base(self, tmp_path):
        self.run(folder=tmp_path / "run")
        halved = flower.app_arguments(self.made())
        strategy = flower.strategy("fedavg", **halved.server() | {"model": WithBase(1)}, folder=tmp_path / "run")
        app = flower.client_app(**halved.client() | {"model": lambda: WithBase(1)})
        with pytest.raises(RunFolderError, match="model"):
            train(strategy, Unreliable(app, NODES), 3)

    def test_the_model_of_a_run_folder_is_whole(self, tmp_path):
        self.run(folder=tmp_path / "run")
        WithBase(1).load_state_dict(load_model(tmp_path / "run" / "model.safetensors"))


def test_a_small_setting_is_a_classification():
    """What is said of a task is resolved before it is sent."""
    strategy = flower.strategy("feddpc", **flower.app_arguments(small_setting()).server())
    spec = strategy.nodes.spec
    assert (spec.config.task, spec.config.loss, spec.target) == ("classification", "cross-entropy", "classes")


def test_secure_sums_learn_any_task():
    own = TaskParts(loss=cubed, transform=jitter)
    made = setting("regression", own, cohort=NODES, rounds=3)
    progress, _ = run_rounds(made, methods.create("fedavg"), Loop(), 3)
    halved = flower.app_arguments(setting("regression", own, cohort=NODES, rounds=3))
    strategy = flower.secure_strategy("fedavg", **halved.server())
    train(strategy, Unreliable(flower.secure_client_app(**halved.client()), NODES), 3)
    assert strategy.refusals == []
    torch.testing.assert_close(strategy.now.w, progress.w, rtol=0, atol=1e-5)
