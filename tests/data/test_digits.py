import numpy as np
from sklearn.datasets import load_digits

from feddpc import data


def test_every_digit_is_in_exactly_one_part_and_scaled():
    d = data.load("digits")
    raw = np.rint(load_digits().images * 255 / 16).astype(np.uint8)
    ours = np.concatenate([d.x_train, d.x_test])[..., 0]
    assert sorted(image.tobytes() for image in ours) == sorted(image.tobytes() for image in raw)
    assert d.x_train.max() == 255
    assert d.x_train.dtype == np.uint8


def test_labels_still_belong_to_their_images():
    d, raw = data.load("digits"), load_digits()
    label = {np.rint(x * 255 / 16).astype(np.uint8).tobytes(): y for x, y in zip(raw.images, raw.target, strict=True)}
    for x, y in ((d.x_train, d.y_train), (d.x_test, d.y_test)):
        assert [label[image.tobytes()] for image in x] == y.tolist()


def test_the_split_is_stratified():
    d = data.load("digits")
    train, test = np.bincount(d.y_train), np.bincount(d.y_test)
    np.testing.assert_array_equal(train + test, np.bincount(load_digits().target))
    assert (np.abs(test - 0.2 * (train + test)) <= 0.5).all()


def test_the_split_never_changes():
    np.random.seed(3)  # noqa: NPY002 - global state must not matter
    first = data.load("digits").checksums()
    np.random.seed(4)  # noqa: NPY002
    assert data.load("digits").checksums() == first


def test_the_split_is_random_not_the_head_of_each_class():
    d, raw = data.load("digits"), load_digits()
    zeros = np.rint(raw.images[raw.target == 0] * 255 / 16).astype(np.uint8)
    test = {image.tobytes() for image in d.x_test}
    marked = [image.tobytes() in test for image in zeros]
    assert not all(marked[: sum(marked)])
