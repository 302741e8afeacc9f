"""Global Gaussian mixtures: federated EM against the textbook's, and what clients make of the mixtures."""

import typing
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture

from feddpc.checks import coerce as fit_type
from feddpc.data import Dataset
from feddpc.data.partition import Partition
from feddpc.errors import BadInputError
from feddpc.methods import _em
from feddpc.methods._em import Box, Mixture
from feddpc.methods.base import Method
from feddpc.methods.federated_data import FederatedData
from feddpc.methods.gmm import GMM

FLOOR = 1e-3
SIZES = (3, 17, 1, 9, 30, 5, 11, 14)


def unit(dim):
    return Box(np.zeros(dim), np.ones(dim))


def clusters(n=200, dim=5, seed=0):
    """Samples of three overlapping clusters inside the unit cube."""
    rng = np.random.default_rng(seed)
    centres = rng.uniform(0.2, 0.8, (3, dim))
    return np.clip(centres[rng.integers(3, size=n)] + rng.normal(0, 0.12, (n, dim)), 0, 1)


def likelihood(mixture, z):
    return logsumexp(_em.log_joint(mixture, z, z * z), axis=1).sum()


def same(a, b, tolerance):
    for key in ("counts", "means", "variances"):
        np.testing.assert_allclose(getattr(a, key), getattr(b, key), rtol=0, atol=tolerance)


def make_world(kind="image", sizes=SIZES, seed=0, n=100, classes=4):
    """Clients of unequal sizes, who hold 90 of 100 samples; class 3 is rare."""
    rng = np.random.default_rng(5)
    y = rng.choice(classes, size=n, p=[0.4, 0.3, 0.27, 0.03])
    x = rng.integers(0, 90, size=(n, 4, 3, 1)) + 40 * y[:, None, None, None]
    x = x.astype(np.uint8) if kind == "image" else (1e3 * x.reshape(n, 12) - 7).astype(np.float32)
    if kind == "float":
        x[:, 4] = 0.1  # never varies
    data = Dataset.from_arrays(x, y, x[::-1][:20], y[::-1][:20], classes=classes)
    order = rng.permutation(n)[: sum(sizes)]
    return FederatedData(data, Partition.from_sizes(order, np.array(sizes)), seed, 0.1, 4, torch.device("cpu"))


def tables(state):
    return {key: value.numpy().tobytes() for key, value in state.items()}


KINDS = pytest.mark.parametrize("kind", ["image", "float"])


# Federated EM.


def test_log_joint_is_the_density_of_the_mixture():
    rng = np.random.default_rng(0)
    mixture = Mixture(np.array([3.0, 1.0]), rng.random((2, 4)), rng.uniform(0.1, 1, (2, 4)))
    z = rng.random((6, 4))
    normal = torch.distributions.Normal(torch.tensor(mixture.means), torch.tensor(mixture.variances).sqrt())
    expected = normal.log_prob(torch.tensor(z)[:, None]).sum(-1).numpy() + np.log([0.75, 0.25])
    np.testing.assert_allclose(_em.log_joint(mixture, z, z * z), expected, rtol=1e-12)


def test_one_component_is_mean_and_variance_of_the_class():
    z = clusters()
    got = _em.fit(z, np.sort(np.arange(200) % 7), unit(5), 1, 1, FLOOR, np.random.default_rng(0))
    same(got, Mixture(np.array([200.0]), z.mean(0, keepdims=True), z.var(0, keepdims=True)), 1e-13)


@pytest.mark.parametrize("rounds", [1, 2, 10])
@pytest.mark.parametrize("components", [2, 3, 5])
def test_one_client_is_ordinary_em(components, rounds):
    """scikit-learn's EM from the same start, the same number of rounds; its variances stay above our floor."""
    z = clusters(500)
    first = _em.start([z], unit(5), components, 1e-6, np.random.default_rng(1))
    got = first
    for _ in range(rounds):
        got = _em.improve(got, [z], unit(5), 1e-6)
    theirs = GaussianMixture(
        components,
        covariance_type="diag",
        weights_init=first.weights,
        means_init=first.means,
        precisions_init=1 / first.variances,
        max_iter=rounds,
        tol=0,
        reg_covar=0,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        theirs.fit(z)
    assert theirs.covariances_.min() > 1e-6
    assert np.abs(got.means - first.means).max() > 1e-3
    np.testing.assert_allclose(got.weights, theirs.weights_, atol=1e-8)
    np.testing.assert_allclose(got.means, theirs.means_, atol=1e-8)
    np.testing.assert_allclose(got.variances, theirs.covariances_, atol=1e-8)


@given(owner=st.lists(st.integers(0, 9), min_size=60, max_size=60), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_who_holds_what_does_not_matter(owner, seed):
    z, rng = clusters(60, seed=seed), np.random.default_rng
    alone = _em.fit(z, np.zeros(60, np.int64), unit(5), 3, 10, FLOOR, rng(seed))
    shared = _em.fit(z, np.sort(np.array(owner)), unit(5), 3, 10, FLOOR, rng(seed))
    same(alone, shared, 1e-10)


def test_blocks_do_not_matter(monkeypatch):
    z = clusters()
    whole = _em.fit(z, np.zeros(200, np.int64), unit(5), 3, 10, FLOOR, np.random.default_rng(0))
    monkeypatch.setattr(_em, "BLOCK", 40)
    same(whole, _em.fit(z, np.zeros(200, np.int64), unit(5), 3, 10, FLOOR, np.random.default_rng(0)), 1e-10)


@given(
    n=st.integers(1, 40),
    dim=st.integers(1, 6),
    components=st.integers(1, 5),
    floor=st.sampled_from([1e-9, 1e-3, 0.1]),
    levels=st.sampled_from([1, 2, 255]),
    seed=st.integers(0, 999),
)
@settings(max_examples=100, deadline=None)
def test_the_likelihood_never_falls(n, dim, components, floor, levels, seed):
    """Also with repeated samples, constant features, variances at the floor and components that become empty."""
    rng = np.random.default_rng(seed)
    z = rng.integers(0, levels, (n, dim)) / 255
    mixture = _em.start([z], unit(dim), components, floor, rng)
    before = likelihood(mixture, z)
    for _ in range(8):
        mixture = _em.improve(mixture, [z], unit(dim), floor)
        after = likelihood(mixture, z)
        assert after >= before - 1e-7 * (1 + abs(before))
        assert mixture.counts.sum() == pytest.approx(n)
        assert mixture.variances.min() >= floor
        before = after


def test_an_empty_component_stays_empty_and_where_it_is():
    z = clusters()
    far = Mixture(np.array([1.0, 1.0]), np.array([[0.5] * 5, [9.0] * 5]), np.full((2, 5), 0.01))
    got = far
    for _ in range(3):
        got = _em.improve(got, [z[:90], z[90:]], unit(5), FLOOR)
    assert got.counts[1] == 0
    assert got.weights.tolist() == [1, 0]
    np.testing.assert_array_equal(got.means[1], far.means[1])
    np.testing.assert_allclose(got.means[0], z.mean(0), rtol=1e-12)


@pytest.mark.parametrize("x", [[[3.0, 4.0]], [[3.0, 4.0]] * 6, [[0.0, 4.0], [9.0, 4.0]]], ids=["one", "equal", "flat"])
def test_degenerate_classes_are_finite(x):
    x = np.array(x)
    box = Box.around([x])
    mixture = _em.fit(x, np.arange(len(x)), box, 3, 10, FLOOR, np.random.default_rng(0))
    assert all(np.isfinite(part).all() for part in (mixture.counts, mixture.means, mixture.variances))
    made = box.outwards(mixture.draw(50, np.random.default_rng(0)))
    assert (made[:, 1] == 4).all()
    assert (made >= x.min(0)).all()
    assert (made <= x.max(0)).all()


def test_high_dimension_does_not_starve_a_component():
    """Without offsets of equal length one component would get nearly every sample of white noise."""
    z = np.random.default_rng(0).random((300, 2000))
    counts = _em.fit(z, np.zeros(300, np.int64), unit(2000), 3, 1, FLOOR, np.random.default_rng(1)).counts
    assert counts.min() > 40


def test_draws_have_the_moments_of_the_mixture():
    mixture = Mixture(np.array([30.0, 10.0]), np.array([[0.0, 5.0], [4.0, 5.0]]), np.array([[0.09, 1.0], [1.0, 0.04]]))
    made = mixture.draw(40_000, np.random.default_rng(0))
    mean = 0.75 * mixture.means[0] + 0.25 * mixture.means[1]
    variance = 0.75 * (mixture.variances[0] + mixture.means[0] ** 2)
    variance += 0.25 * (mixture.variances[1] + mixture.means[1] ** 2) - mean**2
    np.testing.assert_allclose(made.mean(0), mean, atol=0.05)
    np.testing.assert_allclose(made.var(0), variance, atol=0.05)


# What leaves the server, and what clients make of it.


@given(counts=st.lists(st.integers(0, 9) | st.floats(0, 9), min_size=1, max_size=6), below=st.integers(0, 8))
@settings(deadline=None)
def test_suppressed_components_never_generate(counts, below):
    counts = np.array(counts, np.float64)
    mixture = Mixture(counts, np.arange(1.0, len(counts) + 1)[:, None], np.full((len(counts), 1), 1e-6))
    kept = mixture.without(below)
    alive = (counts >= below) & (counts >= _em.NOBODY)
    assert ((kept.weights > 0) == alive).all()
    assert not kept.means[~alive].any()
    assert not kept.variances[~alive].any()
    if alive.any():
        came_from = np.rint(kept.draw(200, np.random.default_rng(0))[:, 0]).astype(int) - 1
        assert alive[came_from].all()


@KINDS
def test_a_rare_class_is_suppressed_and_never_made(kind):
    world = make_world(kind)
    held = world.counts().sum(0)
    assert 0 < held[3] < 5
    learned = GMM().learn(world)
    assert not any(learned[key][3].any() for key in ("weights", "means", "variances"))
    assert float(learned["counts"][3].sum()) == pytest.approx(held[3])
    furnished = GMM(target=20).extend_data(world, learned)
    assert furnished.counts().sum(0)[3] == held[3]
    assert furnished.disclosed["suppressed_components"] >= 3
    assert furnished.disclosed["synthetic_samples"] == len(furnished.data.y_train) - len(world.data.y_train)
    assert GMM(min_count=0, target=20).learn(world)["weights"][3].sum() == pytest.approx(1)


def test_a_class_that_nobody_holds_is_skipped():
    world = make_world()
    without_2 = [mine[world.data.y_train[mine] != 2] for mine in world.partition]
    world = replace(world, partition=Partition.from_lists([mine for mine in without_2 if len(mine)]))
    method = GMM(target=9)
    learned = method.learn(world)
    assert not learned["counts"][2].any()
    assert method.extend_data(world, learned).counts()[:, 2].sum() == 0
    assert method.extend_data(world, learned).disclosed["suppressed_components"] == 3  # those of the rare class


@KINDS
def test_the_state(kind):
    world, method = make_world(kind), GMM(components=2)
    learned = method.learn(world)
    shapes = {key: tuple(value.shape) for key, value in learned.items()}
    assert shapes == {
        "weights": (4, 2),
        "means": (4, 2, 12),
        "variances": (4, 2, 12),
        "counts": (4, 2),
        "box": (2, 12),
    }
    assert all(value.isfinite().all() for value in learned.values())
    np.testing.assert_allclose(learned["counts"].sum(1), world.counts().sum(0), rtol=1e-12)


@KINDS
def test_one_component_learns_the_moments_of_the_samples_that_clients_hold(kind):
    world = make_world(kind)
    learned = GMM(components=1, floor=1e-9).learn(world)
    low, high = learned["box"].numpy()
    held = world.partition.order
    for r in range(3):
        x = world.data.x_train[held[world.data.y_train[held] == r]].reshape(-1, 12).astype(np.float64)
        varies = high > low
        mean, variance = learned["means"][r, 0].numpy(), learned["variances"][r, 0].numpy()
        np.testing.assert_allclose(low + mean * (high - low), x.mean(0), rtol=1e-10)
        np.testing.assert_allclose((variance * (high - low) ** 2)[varies], x.var(0)[varies], rtol=1e-8)


@KINDS
def test_learning_reads_only_what_clients_hold(kind):
    """Neither the test set nor samples that nobody holds."""
    world = make_world(kind)
    x = np.full_like(world.data.x_train, 255 if kind == "image" else 1e9)
    x[world.partition.order] = world.data.x_train[world.partition.order]
    blind = replace(world.data, x_train=x, x_test=world.data.x_test * 0, y_test=world.data.y_test * 0)
    assert tables(GMM().learn(world)) == tables(GMM().learn(replace(world, data=blind)))


@KINDS
@pytest.mark.parametrize("target", ["mean", 7, 30])
def test_every_client_reaches_its_target(kind, target):
    world, method = make_world(kind), GMM(target=target)
    learned = method.learn(world)
    new = method.extend_data(world, learned)
    before, after = world.counts(), new.counts()
    usable = learned["weights"].numpy().any(1)
    assert usable.tolist() == [True, True, True, False]
    for old, now in zip(before, after, strict=True):
        goal = round(old.sum() / 4) if target == "mean" else target
        np.testing.assert_array_equal(now, np.where(usable, np.maximum(old, goal), old))
    assert after.sum() > before.sum()


@KINDS
def test_real_samples_stay_first_and_unchanged(kind):
    world, method = make_world(kind), GMM(target=8)
    x, y = world.data.x_train.copy(), world.data.y_train.copy()
    new = method.extend_data(world, method.learn(world))
    np.testing.assert_array_equal(world.data.x_train, x)
    np.testing.assert_array_equal(new.data.x_train[: len(x)], x)
    np.testing.assert_array_equal(new.data.y_train[: len(y)], y)
    for old, now in zip(world.partition, new.partition, strict=True):
        np.testing.assert_array_equal(now[: len(old)], old)
        assert (now[len(old) :] >= len(x)).all()
    assert new.data.x_test is world.data.x_test
    assert new.data.y_test is world.data.y_test
    new.partition.check(len(new.data.y_train))


def test_made_images_look_like_their_class():
    """The classes of this world differ by 40 grey levels; images are laid out as the real ones."""
    world = make_world()
    x = world.data.x_train.copy()
    x[:, 0, 2, 0] = 255  # one white pixel in every image
    world, method = replace(world, data=replace(world.data, x_train=x)), GMM(target=40)
    new = method.extend_data(world, method.learn(world)).data
    made, y = new.x_train[100:], new.y_train[100:]
    assert (made.dtype, made.shape[1:]) == (np.uint8, (4, 3, 1))
    assert made[:, 0, 2].mean() > 240
    rest = np.delete(made.reshape(-1, 12), 2, axis=1)
    for r in range(3):
        assert rest[y == r].mean() == pytest.approx(44.5 + 40 * r, abs=6)


def test_pixels_are_rounded_not_cut():
    """Where all images of a class are alike, so are those that are made."""
    world = make_world()
    x = np.broadcast_to((77 + world.data.y_train).astype(np.uint8)[:, None, None, None], world.data.x_train.shape)
    world, method = replace(world, data=replace(world.data, x_train=x)), GMM(target=40, floor=1e-9)
    new = method.extend_data(world, method.learn(world)).data
    assert len(new.y_train) > 500
    assert (new.x_train == 77 + new.y_train[:, None, None, None]).all()


def test_made_float_data_stay_in_the_range_of_each_feature():
    world, method = make_world("float"), GMM(target=40)
    new = method.extend_data(world, method.learn(world)).data
    real, made = world.data.x_train[world.partition.order], new.x_train[100:]
    assert made.dtype == np.float32
    assert (made >= real.min(0)).all()
    assert (made <= real.max(0)).all()
    assert (made[:, 4] == np.float32(0.1)).all()
    assert made[:, 0].std() > 1e3


@pytest.mark.parametrize("scale", [1e-38, 1.0, 3e32])
def test_the_scale_of_float_data_does_not_matter(scale):
    """Up to the ends of float32: all is finite, and the mixtures are the same."""
    world, method = make_world("float"), GMM(target=10)
    plain = method.learn(world)
    x = (world.data.x_train.astype(np.float64) * scale).astype(np.float32)
    world = replace(world, data=replace(world.data, x_train=x))
    learned = method.learn(world)
    for key in ("weights", "means", "variances"):
        torch.testing.assert_close(learned[key], plain[key], rtol=0, atol=1e-4)
    new = method.extend_data(world, learned)
    assert np.isfinite(new.data.x_train).all()
    assert new.one_time_payload["mixture"].isfinite().all()


@KINDS
def test_target_0_is_fedavg(kind):
    world, method = make_world(kind), GMM(target=0)
    assert method.extend_data(world, method.learn(world)) is world
    assert GMM.aggregate is Method.aggregate
    assert GMM.finish is Method.finish


@KINDS
def test_the_same_world_gives_the_same_bytes_and_another_seed_others(kind):
    method = GMM(target=8)
    learned, again = (method.learn(make_world(kind)) for _ in range(2))
    assert tables(learned) == tables(again)
    one, two = (method.extend_data(make_world(kind), learned) for _ in range(2))
    assert one.data.x_train.tobytes() == two.data.x_train.tobytes()
    assert one.partition.order.tobytes() == two.partition.order.tobytes()
    assert tables(one.one_time_payload) == tables(two.one_time_payload)
    assert one.disclosed == two.disclosed
    assert tables(method.learn(make_world(kind, seed=1))) != tables(learned)
    other = method.extend_data(make_world(kind, seed=1), learned)
    assert other.data.x_train.tobytes() != one.data.x_train.tobytes()


def test_what_a_client_makes_does_not_depend_on_others():
    world, method = make_world(), GMM(target=8)
    learned = method.learn(world)
    fewer = replace(world, partition=Partition.from_lists(list(world.partition)[:3]))
    few, all_ = method.extend_data(fewer, learned), method.extend_data(world, learned)
    for j in range(3):
        np.testing.assert_array_equal(few.data.x_train[few.partition[j]], all_.data.x_train[all_.partition[j]])


def test_what_travels_is_counted():
    world, method = make_world(), GMM(components=2, em_rounds=4)
    new = method.extend_data(world, method.learn(world))
    held = (world.counts() > 0).sum(1).mean()
    assert new.down_once == pytest.approx(held * 2 * (2 * 12 + 1) * 4)
    assert new.up_once == pytest.approx(new.down_once + held * (2 * 12 + 1))
    assert new.disclosed["numbers_sent_by_a_client"] == new.up_once
    assert new.one_time_payload["mixture"].shape == (4 * 2 * (2 * 12 + 1) + 2 * 12,)


@pytest.mark.parametrize(
    ("hyper", "domain"),
    [
        ({"components": 0}, "components >= 1"),
        ({"em_rounds": 0}, "em_rounds >= 1"),
        ({"floor": 0.0}, "1e-9 <= floor <= 1"),
        ({"floor": float("nan")}, "1e-9 <= floor <= 1"),
        ({"min_count": -1}, "min_count >= 0"),
        ({"target": -1}, "target >= 0, or mean"),
        ({"target": "median"}, "target >= 0, or mean"),
    ],
)
def test_hyper_parameters_outside_their_domain(hyper, domain):
    with pytest.raises(BadInputError, match=domain):
        GMM(**hyper)


def test_the_target_from_a_file_or_a_command_line():
    hint = typing.get_type_hints(GMM)["target"]
    assert fit_type("gmm: target", 3, hint) == 3
    assert fit_type("gmm: target", "mean", hint) == "mean"
    with pytest.raises(BadInputError, match="expected int or 'mean'"):
        fit_type("gmm: target", "median", hint)
