import numpy as np
from sklearn.datasets import load_diabetes, load_digits

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


def test_diabetes_is_standardized_with_training_statistics():
    d, raw = data.load("diabetes"), load_diabetes(scaled=False)
    assert (d.target, d.classes, d.sample_shape, len(d.x_train), len(d.x_test)) == ("floats", 1, (10,), 354, 88)
    for train, test, whole in ((d.x_train, d.x_test, raw.data), (d.y_train, d.y_test, raw.target)):
        np.testing.assert_allclose(train.mean(0, dtype=np.float64), 0, atol=1e-6)
        np.testing.assert_allclose(train.std(0, dtype=np.float64), 1, atol=1e-5)
        ours, theirs = np.sort(np.concatenate([train, test]), axis=0), np.sort(whole, axis=0)
        affine = (theirs - theirs[0]) / (theirs[-1] - theirs[0])
        np.testing.assert_allclose((ours - ours[0]) / (ours[-1] - ours[0]), affine, atol=1e-5)


def test_the_split_of_diabetes_never_changes():
    assert data.load("diabetes").digest == data.load("diabetes").digest
