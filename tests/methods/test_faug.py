"""FAug: what clients send, what the GAN learns from it, and what clients make with the generator."""

import math
import typing
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

from feddpc.checks import coerce
from feddpc.data import Dataset
from feddpc.data.partition import Partition
from feddpc.errors import BadInputError
from feddpc.methods import _gan
from feddpc.methods.base import Method
from feddpc.methods.faug import FAug
from feddpc.methods.federated_data import FederatedData
from support import DEVICE

CPU = torch.device("cpu")
#: Samples of each class at each client: a lack, a balance, one class only, and nobody with class 3.
COUNTS = [[12, 2, 0, 0], [3, 3, 3, 0], [0, 9, 0, 0], [1, 1, 8, 0], [4, 4, 4, 0]]
QUICK = FAug(gan_steps=2)


def make_world(counts=COUNTS, kind="image", seed=0, shape=(6, 5, 1), device=CPU):
    """Clients with these counts; a pixel tells a sample's number, so that no two are the same, nor like a test one."""
    classes, n = len(counts[0]), int(np.sum(counts))
    y = np.concatenate([np.repeat(np.arange(classes), row) for row in counts])
    x = np.random.default_rng(3).integers(0, 60, size=(n, *shape)) + 50 * y.reshape(-1, 1, 1, 1)
    x[:, 0, 0, 0], x[:, 0, 1, 0] = np.arange(n), 255
    test = np.zeros((classes, *shape), np.uint8)
    if kind == "float":
        x, test = (1e3 * x - 7).astype(np.float32).reshape(n, -1), test.astype(np.float32).reshape(classes, -1)
        x[:, 9] = 0.1  # never varies
    data = Dataset.from_arrays(x if kind == "float" else x.astype(np.uint8), y, test, np.arange(classes))
    return FederatedData(data, Partition.from_sizes(np.arange(n), np.sum(counts, 1)), seed, 0.1, 4, device)


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


# The GAN.


def two_kinds(kind, n=40):
    """Two classes, bright above or bright below, or two points in four dimensions."""
    rng, y = np.random.default_rng(0), np.arange(n) % 2
    if kind == "float":
        x = np.where(y[:, None] == 0, [5.0, -3.0, 0.0, 100.0], [-5.0, 3.0, 0.0, 110.0]) + rng.normal(0, 0.2, (n, 4))
        return Dataset.from_arrays(x, y, x[:2], y[:2])
    x = rng.integers(0, 30, (n, 8, 8, 1)) + 180 * (np.arange(8)[:, None, None] // 4 == y[:, None, None, None])
    return Dataset.from_arrays(x.astype(np.uint8), y, x[:2].astype(np.uint8), y[:2])


@pytest.mark.parametrize("kind", ["image", "float"])
def test_the_gan_learns_two_classes(kind):
    data = two_kinds(kind)
    few = np.concatenate([np.flatnonzero(data.y_train == 0), np.flatnonzero(data.y_train == 1)[:5]])
    x, y = data.x_train[few], data.y_train[few]
    generator = _gan.train(data, x, y, steps=250, seed=0, device=CPU)
    for r in (0, 1):
        z = np.random.default_rng(r).standard_normal((200, _gan.LATENT))
        made = _gan.draw(data, generator, z, np.full(200, r))
        real = data.x_train[data.y_train == r].astype(float)
        other = data.x_train[data.y_train != r].astype(float)
        apart = np.abs(real.mean(0) - other.mean(0)).mean()
        assert np.abs(made.astype(float).mean(0) - real.mean(0)).mean() < 0.2 * apart
        assert 0.3 < _gan.variety(made) / _gan.variety(real) < 3


@pytest.mark.parametrize("shape", [(8, 8, 1), (28, 28, 1), (32, 32, 3), (64, 64, 3), (5, 17, 3), (1, 1, 1), (3, 4, 1)])
def test_any_size_of_image(shape):
    x, y = np.zeros((8, *shape), np.uint8), np.arange(8) % 2
    data = Dataset.from_arrays(x, y, x, y)
    generator = _gan.train(data, x, y, steps=1, seed=0, device=CPU)
    made = _gan.draw(data, generator, np.random.default_rng(0).standard_normal((3, _gan.LATENT)), np.array([0, 1, 1]))
    assert (made.shape, made.dtype) == ((3, *shape), np.uint8)


@pytest.mark.parametrize("shape", [(3,), (2, 5), (1, 4, 4)])
def test_any_shape_of_floats(shape):
    x, y = np.random.default_rng(0).normal(size=(8, *shape)).astype(np.float32), np.arange(8) % 2
    x[:, 0] = 7.0
    data = Dataset.from_arrays(x, y, x, y)
    generator = _gan.train(data, x, y, steps=2, seed=0, device=CPU)
    made = _gan.draw(data, generator, np.random.default_rng(0).standard_normal((3, _gan.LATENT)), np.array([0, 1, 1]))
    assert (made.shape, made.dtype) == ((3, *shape), np.float32)
    assert (made[:, 0] == 7.0).all(), "what never varies in the seeds never varies in what is made"


def test_classes_count_alike():
    """A class with one sample is judged as often as one with forty."""
    data = two_kinds("image")
    few = np.concatenate([np.flatnonzero(data.y_train == 0), np.flatnonzero(data.y_train == 1)[:1]])
    seen = []

    class Spy(_gan.Discriminator):
        def forward(self, x, y):
            seen.append(y[: _gan.BATCH].clone())
            return super().forward(x, y)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_gan, "Discriminator", Spy)
        _gan.train(data, data.x_train[few], data.y_train[few], steps=60, seed=0, device=CPU)
    y = torch.stack(seen)
    assert 0.4 < float(y.float().mean()) < 0.6
    packs = y.view(-1, _gan.PACK)
    assert torch.equal(packs, packs[:, :1].expand_as(packs))


def test_drawing_does_not_depend_on_how_many_are_drawn_at_once(monkeypatch):
    data = two_kinds("image")
    generator = _gan.train(data, data.x_train, data.y_train, steps=3, seed=0, device=CPU)
    z, y = np.random.default_rng(0).standard_normal((20, _gan.LATENT)), np.arange(20) % 2
    whole = _gan.draw(data, generator, z, y)
    monkeypatch.setattr(_gan, "CHUNK", 7)
    assert np.array_equal(_gan.draw(data, generator, z, y), whole)


# What clients send.


def test_missing():
    assert FAug().missing(np.array(COUNTS)).tolist() == [
        [0, 2, 4, 4],  # 14 / 4 = 3.5: up to 4
        [0, 0, 0, 3],  # 9 / 4 = 2.25: up to 3
        [3, 0, 3, 3],
        [2, 2, 0, 3],
        [0, 0, 0, 3],
    ]
    assert not FAug(balance=0).missing(np.array(COUNTS)).any()
    whole = FAug(balance=100).missing(np.array(COUNTS))
    assert (np.array(COUNTS) + whole == np.max(COUNTS, 1, keepdims=True)).all()
    assert not FAug().missing(np.array([[5, 5], [0, 0]])).any()


def test_rounding_makes_no_target():
    """0.1 * 30 is above 3 in floating point."""
    assert not FAug(balance=0.1).missing(np.array([[30, 30, 3, 57]])).any()


@pytest.mark.parametrize("redundant", [0, 1, 2, 9])
def test_clients_send_targets_and_redundant_classes_of_their_own(redundant):
    world, method = make_world(), FAug(seeds=2, redundant=redundant)
    for j, row in enumerate(method.missing(world.counts())):
        target = np.flatnonzero(row)
        ids, classes = method.upload(world, j, target)
        held = np.flatnonzero(COUNTS[j])
        assert set(ids) <= set(world.partition[j])
        assert len(set(ids)) == len(ids)
        assert set(np.intersect1d(held, target)) <= set(classes) <= set(held)
        others = np.setdiff1d(classes, target)
        assert len(others) == min(redundant, len(np.setdiff1d(held, target)))
        sent = np.bincount(world.data.y_train[ids], minlength=4)
        assert sent.tolist() == [min(2, COUNTS[j][r]) if r in classes else 0 for r in range(4)]


def test_who_lacks_nothing_sends_nothing():
    ids, classes = FAug(redundant=3).upload(make_world(), 4, np.zeros(0, np.int64))
    assert len(ids) == len(classes) == 0


def test_the_server_trains_on_what_was_sent_and_nothing_else(monkeypatch):
    world, got = make_world(), []
    train = _gan.train
    monkeypatch.setattr(_gan, "train", lambda data, x, y, **how: got.append((x, y)) or train(data, x, y, **how))
    method = replace(QUICK, seeds=2)
    learned = method.learn(world)
    ((x, y),) = got
    number = x[:, 0, 0, 0]  # a training sample's number; test samples are black
    assert np.array_equal(world.data.x_train[number], x)
    assert np.array_equal(world.data.y_train[number], y)
    targets = [np.flatnonzero(row) for row in method.missing(world.counts())]
    assert number.tolist() == [i for j, t in enumerate(targets) for i in method.upload(world, j, t)[0]]
    assert learned["sent"].tolist() == np.bincount(y, minlength=4).tolist()


def test_leakage_and_counts_by_hand():
    """Client 0 lacks class 1 of its two, client 1 lacks class 0 and holds none: one true label of three."""
    method = replace(QUICK, seeds=4)
    world = make_world([[9, 3], [0, 8]])
    learned = method.learn(world)
    assert learned["labels"].tolist() == [1, 3]
    assert learned["sent"].tolist() == [4, 3 + 4]
    new = method.extend_data(world, learned)
    assert new.disclosed["share_of_true_targets"] == pytest.approx(1 / 3)
    assert new.disclosed["raw_samples"] == 11
    assert new.disclosed["raw_samples_of_a_client"] == 5.5
    assert new.disclosed["synthetic_samples"] == 3 + 4
    assert new.up_once == 11 * (6 * 5 + 1) / 2


def test_more_seeds_than_samples():
    with pytest.raises(BadInputError, match=r"faug: seeds = 13 is outside its domain: seeds <= 12"):
        FAug(seeds=13).learn(make_world())
    assert replace(QUICK, seeds=12).learn(make_world())


def test_no_seed_at_all():
    """Each client holds one class: without redundant classes nothing would reach the server."""
    with pytest.raises(BadInputError, match=r"redundant = 0 is outside its domain: redundant >= 1"):
        FAug(redundant=0).learn(make_world([[8, 0], [0, 8]]))


# What they make of it.


def test_clients_fill_up_what_they_lack():
    world = make_world()
    new = QUICK.extend_data(world, QUICK.learn(world))
    lacks = QUICK.missing(world.counts())
    lacks[:, 3] = 0  # of class 3 nobody has any
    assert (new.counts() == world.counts() + lacks).all()
    first = len(world.data.y_train)
    assert np.array_equal(new.data.x_train[:first], world.data.x_train)
    assert new.data.x_train.shape[1:] == (6, 5, 1)
    assert new.data.x_train.dtype == np.uint8
    assert new.data.x_test is world.data.x_test
    for j, mine in enumerate(new.partition):
        assert mine[: len(world.partition[j])].tolist() == world.partition[j].tolist()
    assert new.disclosed["synthetic_samples"] == lacks.sum()
    assert "diversity_class_2" in new.disclosed
    assert "diversity_class_3" not in new.disclosed


def test_the_samples_are_those_of_the_generator():
    world = make_world([[9, 3], [0, 8]])
    learned = QUICK.learn(world)
    new = QUICK.extend_data(world, learned)
    z = world.rng("faug", 1).standard_normal((4, _gan.LATENT))
    made = _gan.draw(world.data, learned["generator"], z, np.zeros(4, np.int64))
    assert np.array_equal(new.data.x_train[new.partition[1][8:]], made)
    assert torch.equal(new.one_time_payload["generator"], learned["generator"])


@pytest.mark.parametrize("kind", ["image", "float"])
def test_learning_and_furnishing_are_repeatable_and_pure(kind):
    world = make_world(kind=kind)
    x, order = world.data.x_train.copy(), world.partition.order.copy()
    state = torch.random.get_rng_state()
    numpy_state = np.random.get_state()[1].copy()  # noqa: NPY002
    learned, again = QUICK.learn(world), QUICK.learn(world)
    assert same(learned, again)
    kept = {key: value.clone() for key, value in learned.items()}
    one, other = QUICK.extend_data(world, learned), QUICK.extend_data(world, kept)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)  # noqa: NPY002
    assert same(learned, kept)
    assert np.array_equal(world.data.x_train, x)
    assert np.array_equal(world.partition.order, order)
    assert np.array_equal(one.data.x_train, other.data.x_train)
    assert np.array_equal(one.partition.order, other.partition.order)
    assert (one.disclosed, one.up_once) == (other.disclosed, other.up_once)
    assert one.data.x_train.dtype == world.data.x_train.dtype
    assert np.isfinite(one.data.x_train).all()
    assert not torch.equal(QUICK.learn(replace(world, seed=1))["generator"], learned["generator"])


def test_what_is_learned_can_be_stored():
    learned = QUICK.learn(make_world())
    assert learned["generator"].dtype == torch.float32
    assert learned["generator"].ndim == 1
    assert all(value.device == CPU and value.is_contiguous() for value in learned.values())
    assert all(torch.isfinite(value).all() for value in learned.values())


@pytest.mark.parametrize(("method", "counts"), [(FAug(balance=0), COUNTS), (FAug(), [[4, 4, 4], [7, 7, 7]])])
def test_without_targets_the_world_stays_as_it_is(method, counts):
    world = make_world(counts)
    learned = method.learn(world)
    assert learned == {}
    assert method.extend_data(world, learned) is world


def test_the_rounds_are_those_of_fedavg():
    own = {name for name in vars(FAug) if name in dir(Method) and not name.startswith("_")}
    said = {"name", "title", "reference", "costs", "privacy", "targets", "needs_only_sums"}
    assert own <= said | {"learn", "extend_data", "light"}


# Diversity.


def test_variety():
    assert _gan.variety(np.array([[0, 0], [3, 4], [0, 0]], np.uint8)) == pytest.approx(10 / 3)
    assert _gan.variety(np.full((5, 4, 4, 1), 9, np.uint8)) == 0
    assert math.isnan(_gan.variety(np.zeros((1, 3))))


def test_a_collapsed_generator_shows(monkeypatch):
    """A generator whose last layer ignores its input makes the same sample again and again: diversity 0."""

    def collapsed(data, x, y, **how):
        generator = _gan.Generator((1, 6, 5), data.classes, image=True)
        nn.init.zeros_(generator.body[-1][-1].weight)
        return parameters_to_vector(generator.parameters()).detach()

    world = make_world()
    healthy = QUICK.learn(world)["diversity"]
    assert (healthy[:3] > 0).all()
    monkeypatch.setattr(_gan, "train", collapsed)
    new = QUICK.extend_data(world, QUICK.learn(world))
    assert [new.disclosed[f"diversity_class_{r}"] for r in range(3)] == [0, 0, 0]


def test_diversity_is_unknown_where_seeds_tell_nothing():
    """A class with a single sample has no distance to compare with."""
    world = make_world([[9, 1], [9, 0]])
    learned = QUICK.learn(world)
    assert learned["diversity"][1] == -1
    disclosed = QUICK.extend_data(world, learned).disclosed
    assert disclosed["diversity_class_1"] == "unknown"
    assert disclosed["diversity_class_0"] > 0


# Hyper-parameters.


@pytest.mark.parametrize(
    ("name", "value", "domain"),
    [
        ("seeds", 0, "seeds >= 1"),
        ("redundant", -1, "redundant >= 0"),
        ("balance", -0.1, "balance >= 0"),
        ("balance", math.nan, "balance >= 0"),
        ("gan_steps", 0, "gan_steps >= 1"),
    ],
)
def test_domains(name, value, domain):
    with pytest.raises(BadInputError, match=f"faug: {name} = {value} is outside its domain: {domain}"):
        FAug(**{name: value})


def test_what_it_says_about_itself():
    text = FAug.describe()
    for word in ("Server", "Departures", "Confidence", ">>>", *(f"| {key} " for key in FAug().hyper())):
        assert word in text
    hints = typing.get_type_hints(FAug)
    for key, value in FAug().hyper().items():
        assert coerce(key, value, hints[key]) == value
    with pytest.raises(BadInputError, match="expected int"):
        coerce("faug: seeds", 2.5, hints["seeds"])


def test_where_it_is_trained_matters_little():
    """With FEDDPC_TEST_DEVICE=cuda the generator is trained there, and no global stream is touched."""
    world = make_world(device=torch.device(DEVICE))
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if DEVICE == "cuda" else [])]
    learned = QUICK.learn(world)
    after = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if DEVICE == "cuda" else [])]
    assert all(torch.equal(a, b) for a, b in zip(states, after, strict=True))
    assert learned["generator"].device == CPU
    torch.testing.assert_close(learned["generator"], QUICK.learn(make_world())["generator"], rtol=0, atol=0.02)
