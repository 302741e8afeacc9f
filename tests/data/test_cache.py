import errno
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from feddpc import data
from feddpc.data import fetch
from feddpc.data.dataset import FIELDS
from feddpc.data.fetch import cache as cache_files
from feddpc.data.specs import SPECS, Archive
from feddpc.errors import DataError


@pytest.fixture
def cached(small, register, cache):
    """A small CIFAR-10 in the cache: its data and its folder."""
    spec, made = small("cifar10")
    register(spec)
    return made, cache_files.write(made, cache)


def test_what_is_stored_comes_back(cached):
    made, _ = cached
    got = data.load("cifar10")
    for field in FIELDS:
        np.testing.assert_array_equal(getattr(got, field), getattr(made, field))
    assert got.class_names == made.class_names
    assert got.checksums() == made.checksums()


def test_the_files_are_plain_uint8_arrays_with_their_checksums(cached):
    made, folder = cached
    about = json.loads((folder / "dataset.json").read_text())
    for field in FIELDS:
        array = np.load(folder / f"{field}.npy")
        assert array.dtype == np.uint8
        assert about["md5"][field] == made.checksums()[field]
    assert sorted(p.name for p in folder.parent.iterdir()) == ["cifar10"]


def test_a_callers_change_never_reaches_the_file(cached):
    made, _ = cached
    data.load("cifar10").x_train[:] = 0
    np.testing.assert_array_equal(data.load("cifar10").x_train, made.x_train)


def test_storing_again_replaces_the_old_copy(cached, cache):
    made, folder = cached
    (folder / "x_test.npy").write_bytes(b"old")
    cache_files.write(made, cache)
    np.testing.assert_array_equal(data.load("cifar10").x_test, made.x_test)
    assert [p.name for p in folder.parent.iterdir()] == ["cifar10"]


@pytest.mark.parametrize("calls_before", [0, 2])
@pytest.mark.parametrize("had_copy", [False, True])
def test_a_full_disk_leaves_nothing_partial(small, register, cache, monkeypatch, calls_before, had_copy):
    spec, made = small("cifar10")
    register(spec)
    if had_copy:
        cache_files.write(made, cache)
    real, calls = cache_files.write_array, []

    def full(path, array):
        calls.append(path)
        if len(calls) > calls_before:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, array)

    monkeypatch.setattr(cache_files, "write_array", full)
    with pytest.raises(DataError, match=r"No space left on device.*FEDDPC_CACHE"):
        cache_files.write(made, cache)
    assert [p.name for p in (cache / "datasets").iterdir()] == ["cifar10"] * had_copy
    if had_copy:
        fetch.check("cifar10")
    else:
        with pytest.raises(DataError, match="not in the cache"):
            data.load("cifar10")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_the_systems_own_full_disk_error_is_seen():
    with pytest.raises(OSError, match="No space left") as caught:
        cache_files.write_array(Path("/dev/full"), np.zeros(100_000, np.uint8))
    assert caught.value.errno == errno.ENOSPC


def test_a_cache_that_cannot_be_written_says_so(small, tmp_path):
    _, made = small("cifar10")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="cannot write cifar10"):
        cache_files.write(made, tmp_path / "file")


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "x_test.npy").unlink(),
        lambda folder: (folder / "x_train.npy").write_bytes((folder / "x_train.npy").read_bytes()[:-1]),
        lambda folder: np.save(folder / "x_test.npy", np.zeros((10, 8, 8, 3), np.uint8)),
        lambda folder: (folder / "dataset.json").write_text("{"),
        lambda folder: (folder / "dataset.json").write_text('{"format": 99}'),
        lambda folder: (folder / "dataset.json").write_text("[]"),
        lambda folder: np.save(folder / "y_test.npy", np.full(10, 11, np.uint8)),
    ],
)
def test_damage_is_seen_on_load_with_its_remedy(cached, damage):
    damage(cached[1])
    with pytest.raises(DataError, match="feddpc data get cifar10 --force"):
        data.load("cifar10")


@pytest.mark.parametrize("damage", [lambda f: (f / "y_test.npy").unlink(), lambda f: _set_format(f, 1)])
def test_get_fetches_a_damaged_or_old_copy_again(cached, register, monkeypatch, damage):
    made, folder = cached
    monkeypatch.setitem(fetch.ROUTES, "official", lambda spec, root: made)
    register(replace(SPECS["cifar10"], archives=(Archive("a", "b", "c"),)))
    assert fetch.get("cifar10").source == "cached"
    damage(folder)
    assert fetch.get("cifar10").source == "official"
    assert fetch.check("cifar10") == made.checksums()


def _set_format(folder, number):
    about = json.loads((folder / "dataset.json").read_text())
    (folder / "dataset.json").write_text(json.dumps(about | {"format": number}))


@pytest.mark.parametrize("field", FIELDS)
def test_check_finds_one_changed_byte_or_swapped_labels(cached, field):
    made, folder = cached
    assert fetch.check("cifar10") == made.checksums()
    array = np.load(folder / f"{field}.npy")
    if field.startswith("x"):
        array[3, 4, 5, 1] ^= 1
    else:  # the balance of classes stays, so only the checksum can tell
        other = int(np.flatnonzero(array != array[0])[0])
        array[[0, other]] = array[[other, 0]]
    np.save(folder / f"{field}.npy", array)
    data.load("cifar10")
    with pytest.raises(DataError, match=f"the md5 of {field} is"):
        fetch.check("cifar10")


def test_check_of_a_copy_that_was_consistently_forged_fails_on_the_known_checksum(small, register, cache):
    spec, made = small("cifar10")
    register(spec)
    made.x_train[0, 0, 0, 0] ^= 1
    cache_files.write(made, cache)
    with pytest.raises(DataError, match="md5 of x_train is"):
        fetch.check("cifar10")


def test_the_folder_follows_the_environment(monkeypatch, tmp_path):
    assert cache_files.cache_root() == tmp_path / "cache"
    assert cache_files.cache_root(tmp_path / "own") == tmp_path / "own"
    monkeypatch.delenv("FEDDPC_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_files.cache_root() == tmp_path / "xdg" / "feddpc"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    for platform, parts in (("linux", ".cache/feddpc"), ("darwin", "Library/Caches/feddpc")):
        monkeypatch.setattr(sys, "platform", platform)
        assert cache_files.cache_root() == tmp_path / parts
