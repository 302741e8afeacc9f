"""Every kind of task: what is averaged, what is measured, and equality of the engines."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import feddpc
from feddpc import methods
from feddpc.build import build
from feddpc.config import Config
from feddpc.data import Dataset
from feddpc.engines.cuda.captured import Cuda
from feddpc.engines.loop import Loop
from feddpc.engines.stacked import Stacked
from feddpc.engines.threads import Threads
from feddpc.errors import BadInputError
from feddpc.method_changes import for_method
from feddpc.task_parts import TaskParts
from feddpc.tasks import Batch, NetworkTask
from feddpc.tasks.kinds import Classification
from feddpc.tasks.measures import measure_of
from support import blobs, run_rounds, tiny_net

RNG = np.random.default_rng(0)
X = RNG.standard_normal((90, 5)).astype(np.float32)
NUMBERS = (X @ RNG.standard_normal(5)).astype(np.float32)
PAIRS = (X @ RNG.standard_normal((5, 2))).astype(np.float32)
LABELS = (X @ RNG.standard_normal((5, 3)) > 0).astype(np.int64)
TOKENS = RNG.integers(0, 7, (90, 9))
NEXT = np.where(RNG.random((90, 8)) < 0.3, -100, TOKENS[:, 1:])
NEXT[:, 0] = TOKENS[:, 1]


class Letters(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)

    def forward(self, x):
        return self.head(self.embed(x))


def split(x, y, **more):
    return Dataset.from_arrays(x[:60], y[:60], x[60:], y[60:], **more)


KINDS = {
    "regression": (split(X, NUMBERS), lambda: nn.Linear(5, 1)),
    "two numbers": (split(X, PAIRS), lambda: nn.Linear(5, 2)),
    "multilabel": (split(X, LABELS), lambda: nn.Linear(5, 3)),
    "next-token": (split(TOKENS[:, :-1], NEXT, target="tokens"), Letters),
}


def experiment(kind, own=None, **values):
    data, net = KINDS[kind]
    torch.manual_seed(0)
    config = {"clients": 8, "cohort": 4, "batch_size": 4, "epochs": 2, "lr": 0.05, "precision": "float64", **values}
    return build(Config.read({"device": "cpu", **config}), data=data, module=net(), own=own)


@pytest.mark.parametrize("engine", [Threads, Stacked, lambda: Cuda(anywhere=True)], ids=["threads", "stacked", "cuda"])
@pytest.mark.parametrize("method", ["feddpc", "scaffold"])
@pytest.mark.parametrize("kind", KINDS)
def test_engines_agree(kind, method, engine):
    rule = methods.create(method)
    setting = for_method(experiment(kind, weighting="samples"), rule)
    a, first = run_rounds(setting, rule, Loop(), 3)
    b, second = run_rounds(setting, rule, engine(), 3)
    torch.testing.assert_close(a.w, b.w, rtol=0, atol=1e-10)
    for one, two in zip(first, second, strict=True):
        assert one.metrics == pytest.approx(two.metrics, abs=1e-9)


def test_a_batch_averages_what_counts():
    y = torch.tensor([[1, -100, 2], [3, -100, -100]])
    values = torch.tensor([[1.0, 50.0, 3.0], [8.0, 50.0, 50.0]])
    assert Batch(y, y).mean(values) == 4.0
    assert Batch(y, y, torch.tensor([1.0, 0.0])).mean(values) == 2.0
    assert Batch(y, y).number(values) == 3
    assert Batch(y, y, torch.tensor([0.0, 1.0])).number(values) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_metrics_are_those_of_their_definitions(kind):
    setting = experiment(kind)
    task, w = setting.task, setting.w0
    found = task.evaluate(w, batch_size=7)
    outputs, y = task.module(task.x_test).detach(), task.y_test
    if kind == "next-token":
        counted = y != -100
        loss = F.cross_entropy(outputs[counted], y[counted]).item()
        expected = {"accuracy": (outputs.argmax(-1) == y)[counted].double().mean().item(), "perplexity": math.exp(loss)}
    elif kind == "multilabel":
        loss = F.binary_cross_entropy_with_logits(outputs, y).item()
        said = outputs > 0
        f1 = [2 * (said & (y > 0)).sum(0) / (said.sum(0) + y.sum(0))]
        expected = {"f1": f1[0].double().mean().item(), "accuracy": (said == (y > 0)).double().mean().item()}
    else:
        outputs = outputs.squeeze(-1) if y.ndim == 1 else outputs
        errors = outputs - y
        loss = (errors**2).mean().item()
        r2 = 1 - (errors**2).sum(0) / ((y - y.mean(0)) ** 2).sum(0)
        expected = {"mse": loss, "mae": errors.abs().mean().item(), "r2": r2.mean().item()}
    assert found == pytest.approx({**expected, "loss": loss}, abs=1e-6)
    assert [metric.name for metric in task.metrics] == [*expected, "loss"]


def test_an_own_loss_is_learned_and_evaluated():
    own = experiment("regression", TaskParts(loss=lambda outputs, targets: (outputs - targets) ** 2))
    usual = experiment("regression")
    a, _ = run_rounds(own, methods.create("fedavg"), Loop(), 2)
    b, _ = run_rounds(usual, methods.create("fedavg"), Loop(), 2)
    torch.testing.assert_close(a.w, b.w, rtol=0, atol=1e-12)


def test_own_metrics_see_all_outputs():
    def largest(outputs, targets):
        return (outputs - targets).abs().max()

    largest.direction = "min"
    setting = experiment("regression", TaskParts(metrics=(largest, "r2")))
    errors = setting.task.module(setting.task.x_test).squeeze(-1) - setting.task.y_test
    assert setting.task.evaluate(setting.w0)["largest"] == pytest.approx(errors.abs().max().item())
    assert setting.task.metrics[0].direction == "min"
    _, records = run_rounds(setting, methods.create("fedavg"), Cuda(anywhere=True), 2)
    assert records[0].metrics["test_largest"] > 0


def test_auc_is_the_share_of_ordered_pairs():
    scores, labels = RNG.standard_normal(40).round(1), np.arange(40) % 2
    pairs = [(a > b) + 0.5 * (a == b) for a in scores[labels == 1] for b in scores[labels == 0]]
    outputs = torch.tensor(np.stack([np.zeros(40), scores], 1))
    assert measure_of("auc").compute(outputs, torch.tensor(labels)) == pytest.approx(np.mean(pairs))


@pytest.mark.parametrize(
    ("own", "values", "words"),
    [
        (TaskParts(loss=lambda o, t: ((o - t) ** 2).mean()), {}, "reduction"),
        (TaskParts(loss=lambda o, t: (o - t).log()), {}, "nan"),
        (TaskParts(loss=lambda o, t: o.nothing), {}, "fails"),
        (TaskParts(metrics=(lambda o, t: o.nothing,)), {}, "metric"),
        (TaskParts(metrics=(3,)), {}, "metrics"),
        (None, {"metrics": "acuracy"}, "accuracy"),
        (None, {"metrics": "accuracy"}, "floats"),
        (None, {"metrics": "mse,mse"}, "once"),
        (None, {"task": "classification"}, "task"),
        (None, {"loss": "hubr"}, "huber"),
        (None, {"partition": "dirichlet"}, "iid"),
        (None, {"partition": "natural"}, "client_ids"),
        (None, {"augment": True}, "augment"),
    ],
)
def test_mistakes_name_the_field(own, values, words):
    with pytest.raises(BadInputError, match=words):
        run_rounds(experiment("regression", own, **values), methods.create("fedavg"), Loop(), 1)


def test_outputs_must_fit_the_targets():
    data, _ = KINDS["two numbers"]
    with pytest.raises(BadInputError, match="samples, 2"):
        build(Config(clients=4, cohort=2, device="cpu"), data=data, module=nn.Linear(5, 3))


@pytest.mark.parametrize(("method", "kind"), [("fedbr", "regression"), ("gmm", "multilabel"), ("moon", "next-token")])
def test_methods_refuse_what_they_cannot_learn(method, kind):
    with pytest.raises(BadInputError, match=method):
        for_method(experiment(kind), methods.create(method))


def test_rounds_are_evaluated_every_so_often_and_at_the_end():
    setting = experiment("regression", evaluate_every=3, rounds=8, validation=0.2)
    for engine in (Loop(), Cuda(anywhere=True)):
        _, records = run_rounds(setting, methods.create("fedavg"), engine, 8)
        known = [r.round for r in records if r.metrics["test_mse"] is not None]
        assert known == [3, 6, 8]
        assert known == [r.round for r in records if r.metrics["validation_mse"] is not None]


def test_a_task_of_ones_own():
    class Ranked(NetworkTask):
        """Squared error that counts positive targets twice."""

        target, measured = "floats", ("mae",)

        def sample_losses(self, outputs, targets):
            return (1 + (targets > 0)) * (self.aligned(outputs, targets) - targets) ** 2

    setting = experiment("regression", TaskParts(task=Ranked))
    _, records = run_rounds(setting, methods.create("feddpc"), Stacked(), 2)
    assert set(records[0].metrics) == {"test_mae", "test_loss"}


def test_samples_with_owners_are_a_natural_partition():
    ids = np.array(["ann", "bob", "eve"])[RNG.integers(0, 3, 60)]
    data = split(X, NUMBERS)
    data = Dataset.from_arrays(data.x_train, data.y_train, data.x_test, data.y_test, client_ids=ids)
    setting = build(Config(cohort=2, clients=50, device="cpu"), data=data, module=nn.Linear(5, 1))
    assert setting.config.partition == "natural"
    assert setting.config.clients == len(setting.partition) == 3
    assert setting.partition[1].tolist() == np.flatnonzero(ids == "bob").tolist()


@pytest.mark.parametrize("classes", [2, 3])
def test_a_loss_that_fits_by_broadcasting_is_refused(classes):
    """Scores [n, classes] minus class numbers [n] is no error where n is 1, or the number of classes."""
    x, y = np.zeros((6, 5), np.float32), np.arange(6) % classes
    data = Dataset.from_arrays(x, y, x, y)
    config = Config(clients=2, cohort=2, device="cpu")
    for loss in (lambda o, t: (o - t) ** 2, lambda o, t: F.huber_loss(o, t.double(), reduction="none")):
        with pytest.raises(BadInputError, match="loss"):
            build(config, data=data, module=nn.Linear(5, classes), own=TaskParts(loss=loss))


class MeanError:
    """An object with the hooks of torchmetrics, which accumulates and knows its direction."""

    higher_is_better = False

    def __init__(self):
        self.reset()

    def reset(self):
        self.total, self.count = 0.0, 0

    def to(self, device):
        return self

    def update(self, outputs, targets):
        self.total, self.count = self.total + float((outputs - targets).abs().sum()), self.count + len(targets)

    def compute(self):
        return self.total / self.count


def test_an_object_like_those_of_torchmetrics_starts_anew_at_every_evaluation():
    setting = experiment("regression", TaskParts(metrics=(MeanError(), "mae")))
    found = [setting.task.evaluate(setting.w0) for _ in range(2)]
    assert found[0] == found[1]
    assert found[0]["meanerror"] == pytest.approx(found[0]["mae"])
    assert setting.task.metrics[0].direction == "min"


def test_a_loss_per_sequence_is_averaged_over_sequences():
    rng = np.random.default_rng(5)
    x, y = rng.integers(0, 6, (24, 5)), rng.integers(0, 6, (24, 5))
    y[::2, 2:] = -100

    def per_sequence(outputs, targets):
        values = F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none", ignore_index=-100)
        return values.sum(1) / (targets != -100).sum(1)

    more = {"model": "transformer", "clients": 4, "cohort": 2, "rounds": 1, "method": "fedavg", "engine": "loop"}
    result = feddpc.simulate(data=(x, y, x, y), loss=per_sequence, precision="float64", **more)
    with torch.no_grad():
        outputs = result.model.double().eval()(torch.from_numpy(x))
    expected = per_sequence(outputs, torch.from_numpy(y)).mean().item()
    assert result.metrics["test_loss"] == pytest.approx(expected, rel=1e-10)
    assert result.metrics["test_perplexity"] == pytest.approx(math.exp(expected), rel=1e-10)


def test_full_gradients_weight_batches_as_the_loss_does():
    x, y = torch.zeros(3, 4), torch.tensor([[1, 2, -100, -100]] * 3)
    batch = Batch(x, y)
    assert batch.number(x).item() == 6
    assert batch.number(x, per_token=False).item() == 3


def test_outputs_of_one_column_fit_targets_in_a_task_of_ones_own():
    class Own(feddpc.Task):
        target = "floats"
        measured = ("mse",)

        def sample_losses(self, outputs, targets):
            return (outputs - targets) ** 2

    rng = np.random.default_rng(5)
    x = rng.normal(size=(40, 3))
    data = (x, x.sum(1), x, x.sum(1))
    more = {"clients": 4, "cohort": 4, "rounds": 3, "method": "fedavg", "engine": "loop", "client_lr": 0.1}
    module = torch.nn.Linear(3, 1)
    one = feddpc.simulate(data=data, task=Own, model=copy.deepcopy(module), **more)
    other = feddpc.simulate(data=data, task="regression", model=copy.deepcopy(module), **more)
    assert one.metrics["test_mse"] == other.metrics["test_mse"]


@pytest.mark.parametrize(
    "loss", [lambda o, y: o.argmax(-1) != y, lambda o, y: F.cross_entropy(o.detach(), y, reduction="none")]
)
def test_losses_without_a_gradient_are_refused(loss):
    with pytest.raises(BadInputError, match="loss"):
        feddpc.simulate(data="digits", loss=loss, rounds=1)


@pytest.mark.parametrize("schedule", [lambda t: 1 / 0, lambda: 1.0])
def test_schedules_that_fail_are_named(schedule):
    with pytest.raises(BadInputError, match="lr_schedule"):
        feddpc.simulate(data="digits", lr_schedule=schedule, rounds=1)


def test_a_transform_without_random_numbers_is_applied():
    def tripled(x, uniforms):
        return 3 * x

    tripled.uniforms = 0
    more = {"data": "digits", "rounds": 1, "method": "fedavg", "engine": "loop"}
    plain, changed = feddpc.simulate(**more), feddpc.simulate(transform=tripled, **more)
    assert plain.records[0]["train_loss"] != changed.records[0]["train_loss"]


def test_sample_losses_of_ones_own_are_evaluated_too():
    class Doubled(Classification):
        def sample_losses(self, outputs, targets):
            return 2 * super().sample_losses(outputs, targets)

    values = Config.read({"clients": 8, "cohort": 4, "batch_size": 4, "precision": "float64", "device": "cpu"})
    plain, doubled = (
        build(values, data=blobs(), module=tiny_net(), own=TaskParts(task=task)) for task in (Classification, Doubled)
    )
    expected = 2 * plain.task.evaluate(plain.w0)["loss"]
    assert doubled.task.evaluate(plain.w0)["loss"] == pytest.approx(expected, rel=1e-12)
