"""Metrics at each client, personalization, and transforms of training batches."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import feddpc
from feddpc import methods
from feddpc.build import build
from feddpc.config import Config
from feddpc.data import Dataset
from feddpc.data.partition import Partition
from feddpc.engines.cuda.captured import Cuda
from feddpc.engines.loop import Loop
from feddpc.engines.stacked import Stacked
from feddpc.errors import BadInputError
from feddpc.round.client_evaluation import split_clients
from feddpc.runs.record import read_records
from feddpc.runs.runner import execute
from feddpc.task_parts import TaskParts
from feddpc.tasks.measures import measure_of
from support import run_rounds

RNG = np.random.default_rng(1)
X = RNG.standard_normal((130, 4)).astype(np.float32)
Y = (X @ RNG.standard_normal((4, 3))).argmax(1)
DATA = Dataset.from_arrays(X[:100], Y[:100], X[100:], Y[100:])
FEDAVG = methods.create("fedavg")


def experiment(own=None, **values):
    torch.manual_seed(0)
    config = {"clients": 12, "cohort": 4, "batch_size": 4, "lr": 0.2, "precision": "float64", "partition": "iid"}
    return build(Config.read({"device": "cpu", **config, **values}), data=DATA, module=nn.Linear(4, 3), own=own)


def test_every_client_keeps_some_samples_out_of_training():
    partition = Partition.from_lists([[0, 1, 2], [3, 4], list(range(5, 25))])
    kept, held = split_clients(partition, 0.2, seed=0)
    assert held.sizes.tolist() == [1, 1, 4]
    for client in range(3):
        both = np.concatenate([kept[client], held[client]])
        assert np.sort(both).tolist() == partition[client].tolist()
    with pytest.raises(BadInputError, match="client_test"):
        split_clients(Partition.from_lists([[0, 1], [2]]), 0.2, seed=0)


@pytest.mark.parametrize("engine", [Loop, Stacked, lambda: Cuda(anywhere=True)], ids=["loop", "stacked", "cuda"])
def test_each_client_is_evaluated_on_its_own_samples(engine):
    setting = experiment(evaluate_clients=True, finetune_steps=3)
    state, records = run_rounds(setting, FEDAVG, engine(), 2)
    found, task = records[-1].client_metrics, setting.task
    for client in range(12):
        mine = torch.tensor(setting.client_tests[client])
        scores = task.outputs(state.w, task.x[mine].double())
        assert found["accuracy"][client] == pytest.approx((scores.argmax(1) == task.y[mine]).double().mean().item())
    values, told = np.array(found["accuracy"]), records[-1].metrics
    assert told["clients_accuracy_mean"] == pytest.approx(values.mean())
    assert told["clients_accuracy_std"] == pytest.approx(values.std())
    assert told["clients_accuracy_worst_tenth"] == values.min()
    assert told["clients_loss_worst_tenth"] == max(found["loss"])


def test_fine_tuning_makes_local_steps_from_the_model_and_leaves_it():
    tuned, plain = experiment(evaluate_clients=True, finetune_steps=5), experiment(evaluate_clients=True)
    a, first = run_rounds(tuned, FEDAVG, Loop(), 2)
    b, second = run_rounds(plain, FEDAVG, Loop(), 2)
    assert torch.equal(a.w, b.w)
    assert a.meter.gradients == b.meter.gradients
    assert first[-1].client_metrics["accuracy"] == second[-1].client_metrics["accuracy"]
    plan, w = replace(tuned.planner, epochs=5).plan(2, np.array([3])), a.w.clone()
    for k in range(5):
        ids = torch.from_numpy(plan.index[0, k, : plan.count[0, k]])
        leaf = w.detach().requires_grad_(True)
        loss = nn.functional.cross_entropy(tuned.task.outputs(leaf, tuned.task.x[ids].double()), tuned.task.y[ids])
        w = w - 0.2 * torch.autograd.grad(loss, leaf)[0]
    mine = torch.tensor(tuned.client_tests[3])
    loss = nn.functional.cross_entropy(tuned.task.outputs(w, tuned.task.x[mine].double()), tuned.task.y[mine])
    assert first[-1].client_metrics["finetuned_loss"][3] == pytest.approx(loss.item(), abs=1e-12)


def test_a_run_folder_has_the_values_of_every_client(tmp_path):
    setting = experiment(evaluate_clients=True, rounds=3, evaluate_every=2)
    outcome = execute(setting, out=tmp_path / "run")
    assert len(outcome.clients["accuracy"]) == 12
    records = read_records(tmp_path / "run" / "rounds.jsonl")
    assert ["clients_accuracy_mean" in record for record in records] == [False, True, True]
    assert (tmp_path / "run" / "clients.json").exists()


def jitter(x, u):
    return x + 0.1 * (u[:, :1] - 0.5)


@pytest.mark.parametrize("engine", [Stacked, lambda: Cuda(anywhere=True)], ids=["stacked", "cuda"])
def test_a_transform_changes_training_batches_alike_in_every_engine(engine):
    setting = experiment(TaskParts(transform=jitter))
    a, _ = run_rounds(setting, FEDAVG, Loop(), 3)
    b, _ = run_rounds(setting, FEDAVG, engine(), 3)
    torch.testing.assert_close(a.w, b.w, rtol=0, atol=1e-10)
    plain, _ = run_rounds(experiment(), FEDAVG, Loop(), 3)
    assert not torch.allclose(a.w, plain.w)
    assert setting.task.evaluate(plain.w) == experiment().task.evaluate(plain.w)  # tests are not transformed


def test_random_numbers_of_a_transform_belong_to_the_sample_and_round():
    planner = experiment(TaskParts(transform=jitter)).planner
    alone, together = planner.plan(3, np.array([5])), planner.plan(3, np.array([2, 5]))
    k, n = alone.steps[0], alone.count[0, 0]
    assert np.array_equal(alone.draws[0, :k, :n], together.draws[1, :k, :n])
    assert not np.array_equal(alone.draws[0, 0, :n], planner.plan(4, np.array([5])).draws[0, 0, :n])
    assert planner.sweep(np.array([5])).draws is None


@pytest.mark.parametrize(
    ("transform", "values"),
    [
        (lambda x, u: x[:, :2], {}),
        (lambda x: x, {}),
        (lambda x, u: x.double().tolist(), {}),
        (jitter, {"augment": True}),
    ],
)
def test_transforms_that_do_not_fit(transform, values):
    with pytest.raises(BadInputError, match=r"transform|augment"):
        experiment(TaskParts(transform=transform), **values)


@pytest.mark.parametrize(
    "values", [{"client_test": 0.0}, {"finetune_steps": 2}, {"finetune_steps": -1}, {"evaluate_every": 0}]
)
def test_settings_out_of_range(values):
    (name,) = values
    with pytest.raises(BadInputError, match=name):
        Config.read(values)


def fails_always(outputs, targets):
    raise ZeroDivisionError("mine")


def several(outputs, targets):
    return outputs.mean(0)


def fails_for_few(outputs, targets):
    if len(targets) < 5:
        raise ValueError("too few")
    return 1.0


@pytest.mark.parametrize(("metric", "word"), [(fails_always, "mine"), (several, "one number")])
def test_a_metric_that_fails_is_refused_before_round_1(tmp_path, metric, word):
    with pytest.raises(BadInputError, match=f"{metric.__name__}.*{word}"):
        feddpc.simulate(
            data=DATA,
            model=nn.Linear(4, 3),
            metrics=["accuracy", metric],
            clients=12,
            cohort=4,
            engine="loop",
            out=tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()


def test_a_metric_that_fails_at_a_client_is_refused_before_round_1():
    how = {"evaluate_clients": True, "client_test": 0.3}
    with pytest.raises(BadInputError, match=r"client \d+ has \d test samples.*fails_for_few.*client_test"):
        experiment(TaskParts(metrics=(measure_of(fails_for_few),)), **how)
    # It is measured at clients if it is the primary one.
    setting = experiment(TaskParts(metrics=("accuracy", measure_of(fails_for_few))), **how)
    _, records = run_rounds(setting, FEDAVG, Loop(), 1)
    assert records[0].metrics["test_fails_for_few"] == 1.0
    assert records[0].metrics["clients_accuracy_mean"] is not None


@pytest.mark.parametrize(("metrics", "share", "warned"), [("r2", 0.1, True), ("r2", 0.5, False), ("mse", 0.1, False)])
def test_a_metric_without_a_value_at_clients_is_named_once(metrics, share, warned):
    data = Dataset.from_arrays(X[:100], X[:100, 0], X[100:], X[100:, 0])
    more = {"clients": 10, "cohort": 2, "rounds": 2, "partition": "iid", "client_test": share, "engine": "loop"}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        result = feddpc.simulate(data=data, model=nn.Linear(4, 1), metrics=metrics, evaluate_clients=True, **more)
    lines = [str(w.message) for w in told if f"clients_{metrics}" in str(w.message)]
    assert len(lines) == warned
    assert all("10 of 10 clients" in line and "with 1 test samples" in line for line in lines)
    assert (result.records[-1][f"clients_{metrics}_mean"] is None) == warned
