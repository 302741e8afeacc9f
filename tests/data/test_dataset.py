import numpy as np
import pytest
import torch

from feddpc.data import Dataset
from feddpc.errors import BadInputError, DataError

Y = np.array([0, 1, 2, 1])


def images(*shape):
    return np.arange(np.prod(shape), dtype=np.int64).reshape(shape).astype(np.uint8)


def build(x, y=Y, **kw):
    return Dataset.from_arrays(x, y, x, y, **kw)


def test_images_without_channels_get_an_axis():
    x = images(4, 5, 6)
    data = build(x)
    assert data.sample_shape == (5, 6, 1)
    assert data.is_image
    np.testing.assert_array_equal(data.x_train[..., 0], x)


def test_torch_images_are_turned_to_channels_last():
    x = torch.from_numpy(images(4, 3, 5, 6))
    data = build(x, torch.from_numpy(Y))
    assert data.x_train.shape == (4, 5, 6, 3)
    assert data.x_train[1, 2, 4, 0] == x[1, 0, 2, 4]
    assert data.x_train.flags.c_contiguous
    assert data.y_train.dtype == np.int64


def test_an_array_that_could_be_either_is_read_as_channels_last():
    x = images(4, 3, 7, 3)
    np.testing.assert_array_equal(build(x).x_train, x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_float_data_of_any_shape_becomes_float32_unscaled(dtype):
    data = build(torch.full((4, 2, 3, 5, 7), 300.0, dtype=dtype, requires_grad=True))
    assert data.x_train.dtype == np.float32
    assert data.sample_shape == (2, 3, 5, 7)
    assert not data.is_image
    assert (data.x_test == 300).all()


def test_labels_may_be_a_column_and_classes_follow_from_them():
    data = build(images(4, 5, 5), Y[:, None].astype(np.uint8))
    assert data.classes == 3
    np.testing.assert_array_equal(data.y_train, Y)
    assert build(images(4, 5, 5), classes=10).classes == 10


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_located(bad):
    x = np.zeros((4, 2, 2), np.float32)
    x[2, 0, 1] = x[3, 1, 1] = bad
    with pytest.raises(DataError, match=r"x_test holds 2 values .* at index \(2, 0, 1\)"):
        Dataset.from_arrays(np.zeros_like(x), Y, x, Y)


def test_a_float64_beyond_float32_is_infinite_not_silent():
    with pytest.raises(DataError, match="x_train holds 1 values"):
        build(np.array([[0.0], [1.0], [1e300], [2.0]]))


@pytest.mark.parametrize(("label", "classes"), [(-1, 3), (3, 3), (255, 10)])
def test_labels_out_of_range_are_located(label, classes):
    y = Y.copy()
    y[3] = label
    with pytest.raises(DataError, match=rf"y_test\[3\] is {label}, but with {classes} classes"):
        Dataset.from_arrays(images(4, 5, 5), Y, images(4, 5, 5), y, classes=classes)


def test_a_negative_label_is_caught_when_classes_are_inferred():
    with pytest.raises(DataError, match=r"y_train\[0\] is -1"):
        build(images(4, 5, 5), np.array([-1, 0, 1, 2]))


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (images(3, 5, 5), Y, "x_train has 3 samples but y_train has 4 labels"),
        (images(0, 5, 5), Y[:0], "x_train is empty"),
        (images(4, 5, 5), Y.astype(float), "y_train has type float64"),
        (images(4, 5, 5), np.eye(4, dtype=int), r"y_train has shape \(4, 4\)"),
        (images(4, 5, 5).astype(np.int64), Y, "x_train has type int64"),
        (images(4, 5, 5, 4), Y, r"x_train is uint8 of shape \(4, 5, 5, 4\)"),
        (images(4, 25), Y, r"x_train is uint8 of shape \(4, 25\)"),
    ],
)
def test_other_mistakes_are_named(x, y, message):
    with pytest.raises(DataError, match=message):
        build(x, y)


def test_train_and_test_samples_must_agree():
    with pytest.raises(DataError, match="x_train are 5x5x1 uint8 but those of x_test are 5x6x1 uint8"):
        Dataset.from_arrays(images(4, 5, 5), Y, images(4, 5, 6), Y)
    with pytest.raises(DataError, match="5x5x1 float32"):
        Dataset.from_arrays(images(4, 5, 5), Y, np.zeros((4, 5, 5, 1)), Y)


@pytest.mark.parametrize("classes", [0, -1, 2.5, True])
def test_a_senseless_number_of_classes_is_refused(classes):
    with pytest.raises(BadInputError, match="classes is"):
        build(images(4, 5, 5), classes=classes)


def test_class_names_must_match_the_classes():
    with pytest.raises(BadInputError, match="2 class names for 3 classes"):
        build(images(4, 5, 5), class_names=("a", "b"))


@pytest.mark.parametrize("label", [10**9, 2**63])
def test_a_label_that_is_no_class_number_is_refused(label):
    x = np.zeros((2, 4, 4, 1), np.uint8)
    with pytest.raises(DataError, match=r"y_train\[1\] is"):
        Dataset.from_arrays(x, np.array([0, label], dtype=np.uint64), x, [0, 1])
