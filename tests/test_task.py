"""Loss, gradients, evaluation, scaling and augmentation."""

import numpy as np
import pytest
import torch

from feddpc.build import build
from feddpc.config import Config
from feddpc.data import Dataset
from feddpc.data.scaling import channel_statistics, make_scaler
from feddpc.errors import BadInputError
from feddpc.tasks.augmentation import crop_and_flip
from feddpc.tasks.base import Batch, BatchIndices, by_autograd, by_transform
from support import DEVICE, blobs, small_setting


def test_padding_changes_neither_loss_nor_gradient():
    setting = small_setting()
    task, w = setting.task, setting.w0
    plain = task.fetch(BatchIndices(torch.tensor([4, 7, 9])))
    padded = task.fetch(BatchIndices(torch.tensor([4, 7, 9, 0, 0]), torch.tensor([1, 1, 1, 0, 0])))
    for differentiate in (by_autograd, by_transform):
        a, b = (differentiate(lambda y, batch=batch: task.loss(y, batch), w) for batch in (plain, padded))
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def test_an_empty_batch_has_zero_loss_and_gradient():
    setting = small_setting()
    batch = setting.task.fetch(BatchIndices(torch.tensor([0, 0]), torch.tensor([0, 0])))
    value, gradient = by_autograd(lambda y: setting.task.loss(y, batch), setting.w0)
    assert float(value) == 0
    assert float(gradient.norm()) == 0


def test_full_gradient_is_the_gradient_of_all_samples():
    setting = small_setting()
    task, w = setting.task, setting.w0
    index = torch.arange(23)
    _, whole = by_autograd(lambda y: task.loss(y, task.fetch(BatchIndices(index))), w)
    parts = task.full_gradient(w, [BatchIndices(part) for part in torch.split(index, 5)])
    masked = [
        BatchIndices(torch.tensor([*range(20)])),
        BatchIndices(torch.tensor([20, 21, 22, 0]), torch.tensor([1, 1, 1, 0])),
    ]
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-13)
    torch.testing.assert_close(task.full_gradient(w, masked), whole, rtol=0, atol=1e-13)


def test_batch_mean():
    values = torch.tensor([1.0, 3.0, 100.0])
    assert float(Batch(values, values).mean(values[:2])) == 2
    assert float(Batch(values, values, torch.tensor([1.0, 1.0, 0.0])).mean(values)) == 2


def test_evaluation_is_accuracy_and_mean_loss():
    setting = small_setting()
    task, w = setting.task, setting.w0
    logits = task.flat(w, (task.x_test if task.test_scaled else task.scaler(task.x_test)))
    found = task.evaluate(w, batch_size=7)
    assert list(found) == [metric.name for metric in task.metrics] == ["accuracy", "loss"]
    assert found["accuracy"] == pytest.approx(float((logits.argmax(1) == task.y_test).double().mean()))
    assert found["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(logits, task.y_test)))


def test_evaluation_scales_on_the_fly_when_data_are_large(monkeypatch):
    from feddpc.tasks import Classification

    small = small_setting().task
    monkeypatch.setattr(Classification, "resident_bytes", 0)
    large = small_setting().task
    assert (small.test_scaled, large.test_scaled) == (True, False)
    assert small.evaluate(small.initial()) == large.evaluate(large.initial())


@pytest.mark.parametrize(
    ("name", "expected"),
    [("half", (-1.0, 1.0)), ("unit", (0.0, 1.0)), ("none", (0.0, 255.0)), ("channel", (-1.0, 1.0))],
)
def test_scalings(name, expected):
    x = np.array([0, 255], dtype=np.uint8).reshape(2, 1, 1, 1)
    data = Dataset.from_arrays(x, [0, 1], x, [0, 1])
    scaled = make_scaler(name, data).to("cpu", torch.float32)(torch.from_numpy(x.transpose(0, 3, 1, 2).copy()))
    assert scaled.flatten().tolist() == pytest.approx(expected)


def test_channel_statistics_are_exact():
    x = blobs(50).x_train
    mean, deviation = channel_statistics(np.concatenate([x, 255 - x], axis=-1))
    np.testing.assert_allclose(mean, [x.mean(), (255 - x.astype(float)).mean()])
    np.testing.assert_allclose(deviation, [x.std()] * 2)


@pytest.mark.parametrize("name", ["half", "channel", "unit"])
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_fetched_images_are_scaled_as_if_one_by_one(name, precision):
    """The layout in which images lie, and terms at every pixel, change no bit."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, size=(20, 5, 7, 3), dtype=np.uint8), np.arange(20) % 3
    config = Config(model="mlp", scaling=name, precision=precision, clients=2, cohort=1, partition="iid", device=DEVICE)
    task = build(config, data=Dataset.from_arrays(x, y, x[:3], y[:3])).task
    ids = torch.tensor([3, 0, 19, 3], device=DEVICE)
    mean, deviation = (t.to(DEVICE, task.dtype) for t in make_scaler(name, task.data).terms)
    images = torch.from_numpy(x).movedim(3, 1)[ids.cpu()].contiguous().to(DEVICE)
    expected = (images.to(task.dtype) - mean) / deviation
    found = task.fetch(BatchIndices(ids)).x
    assert torch.equal(found, expected)
    if DEVICE == "cpu":
        assert found.is_contiguous(memory_format=torch.channels_last)
        assert task.transformable().fetch(BatchIndices(ids)).x.is_contiguous()  # what vmap stacks has no such layout
    assert torch.equal(task.transformable().fetch(BatchIndices(ids)).x, expected)


def test_float_data_are_not_scaled():
    x = np.random.default_rng(0).standard_normal((4, 5)).astype(np.float32)
    data = Dataset.from_arrays(x, [0, 1, 0, 1], x, [0, 1, 0, 1])
    with pytest.raises(BadInputError, match="use 'none'"):
        make_scaler("half", data)
    assert torch.equal(make_scaler("none", data).to("cpu", torch.float32)(torch.from_numpy(x)), torch.from_numpy(x))


def test_crop_and_flip_by_hand():
    x = torch.arange(9).view(1, 1, 3, 3).repeat(4, 1, 1, 1)
    draws = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 1, 0], [2, 0, 1]], dtype=torch.int8)
    same, mirrored, down, up = crop_and_flip(x, draws, 1)[:, 0]
    assert torch.equal(same, x[0, 0])
    assert torch.equal(mirrored, x[0, 0].flip(1))
    assert down.tolist() == [[0, 0, 0], [0, 1, 2], [3, 4, 5]]
    assert up.tolist() == [[4, 3, 0], [7, 6, 0], [0, 0, 0]]
