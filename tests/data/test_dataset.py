import numpy as np
import pytest
import torch

import feddpc
from feddpc.data import Dataset
from feddpc.data.scaling import default_scaling, make_scaler
from feddpc.errors import BadInputError, DataError
from feddpc.methods.federated_data import reserved
from feddpc.validation import held_out

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
        (images(4, 5, 5) > 3, Y, "x_train has type bool"),
        (images(4, 5, 5), np.array(list("abcd")), "y_train has type <U1"),
    ],
)
def test_other_mistakes_are_named(x, y, message):
    with pytest.raises(DataError, match=message):
        build(x, y)


@pytest.mark.parametrize(
    ("y", "message"),
    [(Y.astype(float), "y_train has type float64"), (np.eye(4, dtype=int), r"y_train has shape \(4, 4\)")],
)
def test_targets_that_are_no_classes_are_refused_where_classes_are_wanted(y, message):
    with pytest.raises(DataError, match=message):
        build(images(4, 5, 5), y, target="classes")


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


@pytest.mark.parametrize("shape", [(4, 25), (4, 5, 5, 4), (4, 2, 3, 4, 5), (4,)])
def test_bytes_of_other_shapes_are_kept_as_they_are(shape):
    data = build(images(*shape))
    assert data.x_train.dtype == np.uint8
    assert data.x_train.shape == shape
    assert not data.is_image


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int32, np.uint64])
def test_integers_become_tokens(dtype):
    data = build(images(4, 7).astype(dtype))
    assert data.x_train.dtype == np.int64
    assert data.sample_shape == (7,)


@pytest.mark.parametrize(
    ("y", "target", "classes", "dtype"),
    [
        (Y, "classes", 3, np.int64),
        (Y[:, None], "classes", 3, np.int64),
        (Y / 2, "floats", 1, np.float32),
        (np.ones((4, 3)), "floats", 3, np.float32),
        (np.eye(4, dtype=int), "multihot", 4, np.float32),
        (np.eye(4, dtype=bool), "multihot", 4, np.float32),
        (np.arange(8).reshape(4, 2), "tokens", 8, np.int64),
        (np.array([[0, -100]] * 4), "tokens", 1, np.int64),
    ],
)
def test_the_target_follows_from_type_and_shape(y, target, classes, dtype):
    data = build(np.zeros((4, 2)), y)
    assert (data.target, data.classes, data.y_train.dtype) == (target, classes, dtype)
    assert data.y_train.shape == (y.shape if target != "classes" else (4,))


@pytest.mark.parametrize(
    ("y", "target", "dtype"),
    [(Y, "floats", np.float32), (np.eye(4), "multihot", np.float32), (np.eye(4, dtype=int), "tokens", np.int64)],
)
def test_a_target_that_is_given_wins(y, target, dtype):
    data = build(np.zeros((4, 2)), y, target=target)
    assert (data.target, data.y_train.dtype) == (target, dtype)
    np.testing.assert_array_equal(data.y_train, y)


def test_the_vocabulary_holds_the_tokens_of_the_samples_too():
    assert build(np.array([[9, 1]] * 4), np.array([[1, 2]] * 4)).classes == 10
    assert build(np.array([[9, 1]] * 4), np.array([[1, 2]] * 4), classes=20).classes == 20


@pytest.mark.parametrize(
    ("y", "target", "message"),
    [
        ([0.5, np.nan, 1, 1], None, r"y_train holds 1 values that are NaN or infinite, .* index \(1,\): remove"),
        (np.full((4, 2), np.inf), None, "y_train holds 8 values"),
        (np.zeros((4, 2, 2)), None, r"y_train has shape \(4, 2, 2\): float targets"),
        (list("abcd"), "floats", "y_train has type <U1"),
        (np.array([[0, 2]] * 4), "multihot", r"y_train\[0, 1\] is 2: .*target="),
        (Y, "multihot", r"y_train is int64 of shape \(4,\)"),
        (np.array([[0, -1]] * 4), None, r"y_train\[0, 1\] is -1: tokens"),
        (np.array([[1, 2**40]] * 4), None, r"y_train\[0, 1\] is .*: tokens"),
        (np.array([[0, 3], [-100, -100]] * 2), None, r"y_train\[1\] has only ignored tokens"),
        (Y, "tokens", r"y_train is int64 of shape \(4,\): token targets"),
        ([[0], [0, 1], [1], [1]], None, "y_train is not an array"),
        (Y, "labels", "unknown target 'labels'"),
    ],
)
def test_bad_targets_are_named(y, target, message):
    with pytest.raises(BadInputError, match=message):
        build(np.zeros((4, 2)), y, target=target)


def test_the_number_of_outputs_must_fit():
    with pytest.raises(BadInputError, match="classes = 3, but targets have 2 values"):
        build(np.zeros((4, 2)), np.ones((4, 2)), classes=3)
    with pytest.raises(DataError, match=r"x_train\[0, 0\] is 9, but with 5 classes a token is 0 to 4"):
        build(np.array([[9, 1]] * 4), np.array([[1, 2]] * 4), classes=5)
    with pytest.raises(DataError, match=r"targets of y_train are 2 float32 but those of y_test are 3 float32"):
        Dataset.from_arrays(np.zeros((4, 2)), np.ones((4, 2)), np.zeros((4, 2)), np.ones((4, 3)))


def test_client_ids_give_the_natural_partition_in_sorted_order():
    data = build(np.zeros((4, 2)), client_ids=[10, 9, 10, 9])
    partition, names = data.natural_partition()
    assert names == ("9", "10")
    assert [mine.tolist() for mine in partition] == [[1, 3], [0, 2]]
    assert build(np.zeros((4, 2)), client_ids=np.array(["b", "a", "c", "a"], object)).natural_partition()[1] == (
        "a",
        "b",
        "c",
    )


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 2, 3], r"client_ids has shape \(3,\), but there are 4 training samples"),
        ([[1], [2], [3], [4]], r"client_ids has shape \(4, 1\)"),
        ([0.5, 1, 2, 3], "client_ids has type float64"),
        ([None, "a", "b", "c"], "client_ids has type object"),
        ([True, False, True, True], "client_ids has type bool"),
        (np.array([2**63] * 4, np.uint64), "client_ids holds"),
    ],
)
def test_bad_client_ids_are_named(ids, message):
    with pytest.raises(BadInputError, match=message):
        build(np.zeros((4, 2)), client_ids=ids)


def test_a_data_set_without_ids_has_no_natural_partition():
    with pytest.raises(BadInputError, match=r"client_ids.*partition = 'iid'"):
        build(np.zeros((4, 2))).natural_partition()


def test_ids_and_targets_count_for_the_digest():
    x, ones = np.zeros((4, 2)), np.eye(4, dtype=int)
    plain = build(x)
    assert len({plain.digest, build(x, client_ids=[1, 1, 2, 2]).digest, build(x, client_ids=list("aabb")).digest}) == 3
    assert build(x, ones.astype(np.float32)).digest != build(x, ones).digest
    assert plain.checksums().keys() == {"x_train", "y_train", "x_test", "y_test"}
    assert build(x, client_ids=list("aabb")).checksums().keys() > plain.checksums().keys()


def test_what_needs_classes_says_so():
    build(np.zeros((4, 2))).require_classes("reserve", "leave it out")
    with pytest.raises(
        BadInputError, match="reserve needs class labels, but the targets of custom are floats: leave it out"
    ):
        build(np.zeros((4, 2)), Y / 2).require_classes("reserve", "leave it out")


def test_strata_are_classes_or_one_group():
    np.testing.assert_array_equal(build(np.zeros((4, 2))).strata, Y)
    np.testing.assert_array_equal(build(np.zeros((4, 2)), Y / 2).strata, np.zeros(4))


def test_only_images_are_scaled_and_tokens_stay_integers():
    tokens, rows = build(np.arange(8).reshape(4, 2)), build(images(4, 25))
    assert (default_scaling(tokens), default_scaling(rows), default_scaling(build(images(4, 5, 5)))) == (
        "none",
        "none",
        "half",
    )
    scaler = make_scaler("none", tokens).to("cpu", torch.float64)
    assert scaler(torch.from_numpy(tokens.x_train)).dtype == torch.int64
    assert scaler(torch.from_numpy(rows.x_train)).dtype == torch.float64
    with pytest.raises(BadInputError, match="'none'"):
        make_scaler("half", rows)


def test_validation_holds_out_a_share_of_all_samples_where_there_are_no_classes():
    data = build(np.zeros((40, 2)), np.arange(40) / 2)
    held = held_out(0.25, data, np.zeros(0, np.int64), 0)
    assert len(set(held.tolist())) == 10


def test_a_reserve_needs_classes():
    with pytest.raises(BadInputError, match=r"reserve = 0\.1 needs class labels"):
        reserved(0.1, build(np.zeros((40, 2)), np.arange(40) / 2), 0)


@pytest.mark.parametrize("how", ["ids", "lists"])
def test_a_cohort_may_be_larger_than_the_default_population(how):
    """Client ids and index lists say how many clients there are; 100 is only what there are without them."""
    x, y = np.random.default_rng(0).random((240, 3), np.float32), np.arange(240) % 2
    more = {"partition": [[i] for i in range(240)]} if how == "lists" else {}
    data = Dataset.from_arrays(x, y, x[:9], y[:9], client_ids=np.arange(240) if how == "ids" else None)
    result = feddpc.simulate(data=data, model="mlp", cohort=120, rounds=1, engine="loop", **more)
    assert result.config.clients == 240
    assert len(set(result.records[0]["participants"])) == 120
    with pytest.raises(BadInputError, match="cohort = 241"):
        feddpc.simulate(data=data, model="mlp", cohort=241, rounds=1, **more)
