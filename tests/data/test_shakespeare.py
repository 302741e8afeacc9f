"""The plays as a federation: a made-up play with two long roles and one short one."""

from dataclasses import replace

import numpy as np
import pytest

from feddpc import data
from feddpc.data import fetch
from feddpc.data.fetch import shakespeare
from feddpc.data.specs import SPECS
from feddpc.errors import DataError

LINE = "The quick brown fox jumps over the lazy dog, and so do I:\nand again!"
PLAY = "\n\n".join([f"BOB:\n{LINE}", f"ANN:\n{LINE}", "ANN:"] * 20 + ["CLOWN:\nNo."]) + "\n"


@pytest.fixture
def play(tmp_path):
    path = tmp_path / "play.txt"
    path.write_text(PLAY, encoding="utf-8")
    return path


def spec(**changes):
    return replace(SPECS["shakespeare"], classes=len(set(PLAY)), clients=2, md5={}, archives=(), **changes)


def text(made, rows):
    return "".join(made.class_names[i] for i in rows.ravel())


def test_one_client_per_long_role_in_sorted_order(play):
    made = shakespeare.decode(spec(), play)
    partition, names = made.natural_partition()
    assert names == ("ANN", "BOB")
    assert made.class_names == tuple(sorted(set(PLAY)))
    assert (made.target, made.classes, made.sample_shape) == ("tokens", len(set(PLAY)), (80,))
    np.testing.assert_array_equal(partition.order, np.arange(len(made.y_train)))


def test_training_and_test_parts_are_the_text_in_order(play):
    made = shakespeare.decode(spec(), play)
    whole = (LINE + "\n") * 20
    split = len(whole) - round(0.2 * len(whole))
    mine = made.natural_partition()[0][0]
    for x, y, part in (
        (made.x_train[mine], made.y_train[mine], whole[:split]),
        (made.x_test, made.y_test, whole[split:]),
    ):
        assert text(made, x)[: len(part) - 1] == part[:-1]
        assert text(made, y[y >= 0])[: len(part) - 1] == part[1:]
    rows = -(-(split - 1) // 80)
    assert len(mine) == rows
    assert (made.y_train[mine] == -100).sum() == rows * 80 - (split - 1)


def test_targets_are_shifted_by_one(play):
    made = shakespeare.decode(spec(), play)
    np.testing.assert_array_equal(made.x_train[0, 1:], made.y_train[0, :-1])
    assert made.x_train[1, 0] == made.y_train[0, -1]


@pytest.mark.parametrize("form", ["folder", "tar", "zip"])
def test_folders_and_archives_of_the_text_are_read(form, write, tmp_path, play):
    path = write[form]({"data/input.txt": PLAY.encode(), "data/readme": b""}, tmp_path / "source")
    assert shakespeare.decode(spec(), path).digest == shakespeare.decode(spec(), play).digest


def test_windows_line_breaks_do_not_matter(play, tmp_path):
    other = tmp_path / "dos.txt"
    other.write_bytes(PLAY.replace("\n", "\r\n").encode())
    assert shakespeare.decode(spec(), other).digest == shakespeare.decode(spec(), play).digest


@pytest.mark.parametrize("content", [b"\xff\xfe", b"", b"Only prose, no roles.", b"ANN:\nHi."])
def test_other_texts_are_refused(content, tmp_path):
    path = tmp_path / "other.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"other\.txt"):
        shakespeare.decode(spec(), path)


def test_a_part_of_the_text_is_refused(play):
    with pytest.raises(DataError, match=r"play\.txt has \d+ different characters"):
        shakespeare.decode(replace(spec(), classes=65), play)


def test_it_is_fetched_cached_and_loaded(play, register):
    made = shakespeare.decode(spec(), play)
    known = register(spec(train=len(made.x_train), test=len(made.x_test)))
    assert fetch.get("shakespeare", play).source == str(play)
    loaded = data.load("shakespeare")
    assert loaded.digest == made.digest
    assert (loaded.target, loaded.class_names) == ("tokens", made.class_names)
    assert fetch.check("shakespeare").keys() == {"x_train", "y_train", "x_test", "y_test", "client_ids"}
    register(replace(known, clients=3))
    with pytest.raises(DataError, match="client_ids"):
        data.load("shakespeare")


def test_the_official_file_is_checked(tmp_path):
    (tmp_path / "input.txt").write_text(PLAY)
    with pytest.raises(DataError, match="md5"):
        fetch.get("shakespeare", tmp_path / "input.txt")
