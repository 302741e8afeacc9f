"""Partitions: the published fingerprints, and what must hold for every scheme and every request."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feddpc.data import schemes
from feddpc.data.partition import Partition
from feddpc.data.schemes import make, resolve_min_size, summary
from feddpc.errors import BadInputError

# classes, samples per class, alpha; sizes of clients 0..7; min, max, std; classes per client; steps at batch 256; hash
FINGERPRINTS = [
    (10, 5000, 0.2, [1010, 605, 504, 180, 511, 154, 247, 473], (70, 1630, 269.9), 5.84, 2.42, "792d69dd0d2a9284"),
    (10, 5000, 0.6, [516, 390, 263, 544, 510, 664, 577, 230], (160, 902, 147.9), 8.53, 2.46, "a8544cb596ce616a"),
    (100, 500, 0.2, [523, 457, 529, 543, 500, 506, 503, 510], (322, 623, 52.6), 48.56, 2.44, "d4322e6e0eed654a"),
    (100, 500, 0.6, [502, 517, 530, 510, 504, 505, 388, 451], (384, 587, 28.9), 77.50, 2.23, "17c92bbead89ffc6"),
    (200, 500, 0.2, [943, 918, 871, 1003, 1005, 1001, 1000, 1017], (742, 1141, 57.8), 100.88, 4.23, "acba5298e10011ed"),
    (
        200,
        500,
        0.6,
        [1023, 1016, 1000, 1006, 1000, 1014, 955, 1000],
        (818, 1097, 35.4),
        155.58,
        4.12,
        "a8796d94e2f4923a",
    ),
]


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize(("classes", "each", "alpha", "first", "spread", "held", "steps", "digest"), FINGERPRINTS)
def test_dirichlet_is_the_published_partition(classes, each, alpha, first, spread, held, steps, digest, shuffled):
    labels = np.repeat(np.arange(classes), each)
    if shuffled:
        labels = np.random.default_rng(5).permutation(labels)
    p = make("dirichlet", labels, 100, seed=0, alpha=alpha)
    counts = p.counts(labels, classes)
    assert hashlib.sha256(counts.astype("<i8").tobytes()).hexdigest()[:16] == digest
    assert p.sizes[:8].tolist() == first
    assert (p.sizes.min(), p.sizes.max(), round(float(p.sizes.std()), 1)) == spread
    assert round(float((counts > 0).sum(1).mean()), 2) == held
    assert round(float(np.ceil(p.sizes / 256).mean()), 2) == steps
    assert_partition(p, len(labels))


def test_dirichlet_follows_the_legacy_stream_through_retries_and_final_shuffles():
    """The routine once more, written with Python lists, on a request whose first tries fail."""
    labels = np.random.default_rng(1).permutation(np.repeat(np.arange(4), 40))
    stream, tries, lists = np.random.RandomState(3), 0, [[]]
    while min(map(len, lists)) < 5:
        tries, lists = tries + 1, [[] for _ in range(12)]
        for r in range(4):
            members = np.flatnonzero(labels == r)
            stream.shuffle(members)
            p = stream.dirichlet([0.3] * 12)
            p = np.array([share * (len(mine) < 160 / 12) for share, mine in zip(p, lists, strict=True)])
            cuts = (np.cumsum(p / p.sum()) * len(members)).astype(int)[:-1]
            lists = [mine + more.tolist() for mine, more in zip(lists, np.split(members, cuts), strict=True)]
    for mine in lists:
        stream.shuffle(mine)
    assert tries > 1
    assert [mine.tolist() for mine in make("dirichlet", labels, 12, seed=3, alpha=0.3, min_size=5)] == lists


@pytest.mark.parametrize("seed", range(21))
def test_dirichlet_serves_few_samples_a_client(seed):
    p = make("dirichlet", np.arange(1437) % 10, 100, seed=seed, alpha=0.2, min_size=1)
    assert_partition(p, 1437)


def test_dirichlet_gives_up_with_what_is_possible():
    labels = np.repeat(np.arange(3), 40)
    with pytest.raises(BadInputError, match=r"min_size = 11 .*set min_size = \d+.*fewer clients.*larger alpha"):
        make("dirichlet", labels, 10, seed=0, alpha=0.05, min_size=11)
    with pytest.raises(BadInputError, match="larger alpha"):  # every share underflows: 0/0 in each try
        make("dirichlet", labels, 10, seed=0, alpha=1e-300)


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf"), "big", True, None])
@pytest.mark.parametrize("name", ["dirichlet", "dirichlet-equal", "quantity"])
def test_alpha_must_be_finite_and_positive(name, alpha):
    with pytest.raises(BadInputError, match="alpha"):
        make(name, np.arange(100) % 5, 4, seed=0, alpha=alpha)


@pytest.mark.parametrize("name", schemes.names())
@given(
    labels=st.lists(st.integers(0, 6), min_size=1, max_size=120),
    clients=st.integers(1, 40),
    seed=st.integers(0, 2**32 - 1),
    extra=st.fixed_dictionaries(
        {}, optional={"alpha": st.floats(1e-12, 1e308), "min_size": st.integers(1, 12), "shards": st.integers(1, 5)}
    ),
)
@settings(max_examples=40, deadline=None)
def test_any_request_ends_in_a_partition_or_an_error(name, labels, clients, seed, extra):
    options = {k: v for k, v in extra.items() if k in schemes.options(name)}
    try:
        p = make(name, labels, clients, seed=seed, **options)
    except BadInputError:
        return
    assert len(p) == clients
    assert_partition(p, len(labels))
    assert p.sizes.min() >= options.get("min_size", 1)
    if name in ("iid", "dirichlet-equal"):  # the remainder: one more for each of the first clients
        even, more = divmod(len(labels), clients)
        assert p.sizes.tolist() == [even + 1] * more + [even] * (clients - more)
    again = make(name, labels, clients, seed=seed, **options)
    assert np.array_equal(p.order, again.order)
    assert np.array_equal(p.starts, again.starts)


@pytest.mark.parametrize("name", ["dirichlet-equal", "quantity", "iid", "shards"])
@given(samples=st.integers(1, 80), clients=st.integers(1, 80), alpha=st.floats(5e-324, 1e308), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_possible_requests_succeed(name, samples, clients, alpha, seed):
    options = {"alpha": alpha} if "alpha" in schemes.options(name) else {}
    options |= {"shards": 1} if name == "shards" else {}
    labels = np.arange(samples) % 7
    if clients > samples:
        with pytest.raises(BadInputError, match=f"at most {samples} clients"):
            make(name, labels, clients, seed=seed, **options)
    else:
        assert_partition(make(name, labels, clients, seed=seed, **options), samples)


@pytest.mark.parametrize("name", sorted(set(schemes.names()) - {"natural"}))
def test_seeds_differ(name):
    labels = np.arange(600) % 10
    assert not np.array_equal(make(name, labels, 5, seed=0).order, make(name, labels, 5, seed=1).order)


def test_dirichlet_equal_approaches_one_class_and_all_classes():
    labels = np.repeat(np.arange(10), 500)  # 50 clients of 100 samples: a class suffices for five clients
    narrow, wide = (make("dirichlet-equal", labels, 50, seed=0, alpha=a) for a in (1e-9, 1e6))
    # Who wants one class gets only that unless more than five want it; this spares 22 clients on average.
    assert ((narrow.counts(labels, 10) > 0).sum(1) == 1).sum() > 10
    assert summary(narrow, labels, 10)["mean_label_distance"] > 0.7
    assert summary(wide, labels, 10)["mean_classes"] == 10
    assert summary(wide, labels, 10)["mean_label_distance"] < 0.15


def test_shards_deal_pieces_of_the_sorted_data():
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 60))
    p = make("shards", labels, 30, seed=0, shards=2)  # 60 pieces of 10: none crosses a class
    counts = p.counts(labels, 10)
    assert (p.sizes == 20).all()
    assert np.isin(counts, [0, 10, 20]).all()
    assert ((counts > 0).sum(1) <= 2).all()


def test_shards_of_uneven_length_keep_their_runs():
    labels = np.arange(11)
    pieces = {(0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10)}  # even pieces, the first ones longer
    assert {tuple(mine.tolist()) for mine in make("shards", labels, 4, seed=2, shards=1)} == pieces


def test_quantity_sizes_spread_as_alpha_falls_and_labels_stay_alike():
    labels = np.arange(50_000) % 10
    wide, narrow = (make("quantity", labels, 100, seed=0, alpha=a) for a in (0.2, 1000.0))
    assert wide.sizes.std() > 10 * narrow.sizes.std()
    assert wide.sizes.min() == 10
    assert summary(narrow, labels, 10)["mean_label_distance"] < 0.1


def test_resolved_min_size():
    assert resolve_min_size(10_000, 100) == 10
    assert resolve_min_size(9_999, 100) == 9
    assert resolve_min_size(150, 100) == 1
    assert resolve_min_size(50_000, 100, 3) == 3
    with pytest.raises(BadInputError, match="at most 14 is possible"):
        resolve_min_size(1437, 100, 15)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dirichelt", {}, "did you mean 'dirichlet'"),
        ("dirichlet", {"aplha": 1.0}, "did you mean 'alpha'"),
        ("iid", {"alpha": 1.0}, "has no options"),
        ("dirichlet", {"min_size": 0}, "min_size = 0"),
        ("quantity", {"min_size": 60}, "at most 20 is possible"),
        ("shards", {"shards": 21}, "at most 20 shards"),
        ("shards", {"shards": 1.5}, "whole number"),
    ],
)
def test_bad_requests_are_named(name, options, message):
    with pytest.raises(BadInputError, match=message):
        make(name, np.arange(100) % 5, 5, seed=0, **options)


def test_bad_labels_clients_and_seeds_are_named():
    with pytest.raises(BadInputError, match="labels"):
        make("dirichlet", [0.5, 1.0], 1, seed=0)
    with pytest.raises(BadInputError, match="clients = 0"):
        make("iid", [0, 1], 0, seed=0)
    with pytest.raises(BadInputError, match="only 0 samples"):
        make("iid", [], 1, seed=0)
    with pytest.raises(BadInputError, match="seed"):
        make("dirichlet", [0, 1], 1, seed=-1)


def test_partition_from_lists_allows_overlap_and_knows_its_parts():
    p = Partition.from_lists([[3, 1], np.array([1]), [0, 1, 2]])
    assert [mine.tolist() for mine in p] == [[3, 1], [1], [0, 1, 2]]
    assert p[-1].tolist() == [0, 1, 2]
    assert p.sizes.tolist() == [2, 1, 3]
    assert p.counts([0, 1, 1, 0], 3).tolist() == [[1, 1, 0], [0, 1, 0], [1, 2, 0]]
    p.check(4)
    with pytest.raises(IndexError):
        p[3]
    with pytest.raises(ValueError, match="read-only"):
        p[0][0] = 7


def test_partition_check_names_the_client():
    with pytest.raises(BadInputError, match=r"client 1 holds sample 4.*0 to 3"):
        Partition.from_lists([[0], [4, 1]]).check(4)
    with pytest.raises(BadInputError, match="client 0 holds sample -1"):
        Partition.from_lists([[-1]]).check(4)
    with pytest.raises(BadInputError, match="no samples for client 1, 2"):
        Partition.from_lists([[0], [], [], [1]]).check(4)
    with pytest.raises(BadInputError, match="and 2 more"):
        Partition.from_lists([[0]] + [[]] * 7).check(1)
    with pytest.raises(BadInputError, match="at least one client"):
        Partition.from_lists([])
    with pytest.raises(BadInputError, match="classes = 2"):
        Partition.from_lists([[0]]).counts([2], 2)
    with pytest.raises(BadInputError, match="starts"):
        Partition(np.arange(3), np.array([0, 2, 1, 3]))


def test_a_million_clients_are_cheap():
    labels = np.arange(1_000_000) % 10
    p = make("iid", labels, 1_000_000, seed=0)
    assert p.counts(labels, 10).sum() == 1_000_000
    p.check(1_000_000)


def test_summary_of_a_partition_computed_by_hand():
    s = summary(Partition.from_lists([[0, 1], [2, 3, 4, 5]]), [0, 0, 0, 1, 1, 1], 2)
    assert (s["clients"], s["samples"], s["min_size"], s["median_size"], s["max_size"]) == (2, 6, 2, 3.0, 4)
    assert s["std_size"] == 1.0
    assert s["mean_classes"] == 1.5
    assert s["mean_label_distance"] == pytest.approx((0.5 + 0.25) / 2)


def assert_partition(p, samples):
    """Every sample exactly once, and no client without samples."""
    assert np.array_equal(np.sort(p.order), np.arange(samples))
    assert p.sizes.min() >= 1
    p.check(samples)


@pytest.mark.parametrize("name", ["dirichlet", "dirichlet-equal", "shards"])
@pytest.mark.parametrize("targets", [np.zeros(6, np.float32), np.zeros((6, 3), np.int64)])
def test_schemes_by_class_refuse_other_targets_and_name_those_that_work(name, targets):
    with pytest.raises(BadInputError, match=rf"partition = '{name}'.*'iid', 'quantity' or 'natural'"):
        make(name, targets, 2, seed=0)


@pytest.mark.parametrize("name", ["iid", "quantity"])
@pytest.mark.parametrize("targets", [np.zeros(6, np.float32), np.zeros((6, 3), np.int64)])
def test_schemes_without_classes_only_count_the_targets(name, targets):
    p = make(name, targets, 2, seed=0)
    assert_partition(p, 6)
    assert np.array_equal(p.order, make(name, np.zeros(6, np.int64), 2, seed=0).order)
    assert summary(p, targets, 3).keys() == {"clients", "samples", "min_size", "median_size", "max_size", "std_size"}


@pytest.mark.parametrize(("ids", "lists"), [([7, 2, 7, 2, 10], [[1, 3], [0, 2], [4]]), (list("bab"), [[1], [0, 2]])])
def test_natural_deals_by_sorted_ids_and_sets_the_number_of_clients(ids, lists):
    p = make("natural", np.zeros(len(ids)), None, seed=0, client_ids=ids)
    assert [mine.tolist() for mine in p] == lists


def test_natural_needs_ids_that_fit_samples_and_clients():
    with pytest.raises(BadInputError, match=r"client_ids.*partition = 'iid'"):
        make("natural", [0, 1], None, seed=0)
    with pytest.raises(BadInputError, match=r"client_ids has 3 ids for 2 samples"):
        make("natural", [0, 1], None, seed=0, client_ids=[1, 2, 3])
    with pytest.raises(BadInputError, match="returned 2 clients"):
        make("natural", [0, 1, 1], 3, seed=0, client_ids=[1, 2, 1])
    with pytest.raises(BadInputError, match="give clients"):
        make("iid", [0, 1], None, seed=0)


def test_partitions_of_ones_own_get_client_ids(monkeypatch):
    monkeypatch.setitem(schemes.PARTITIONS.entries, "pairs", lambda client_ids: [[0], [1, 2]])
    assert len(make("pairs", [0, 1, 1], None, seed=0, client_ids=[1, 2, 1])) == 2
