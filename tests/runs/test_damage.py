"""Every file that a resumed run reads, cut short, with one bit turned, or gone: it is named, and nothing is changed."""

import shutil

import pytest
import torch

from feddpc import methods
from feddpc.errors import RunFolderError
from feddpc.runs.runner import execute
from support import small_setting

#: By the method that has such files. What a memory on disk holds is checked row by row: see test_client_memory.py.
FILES = {
    "scaffold": ("rounds.jsonl",),
    "gmm": ("learned.safetensors", "environment.json", "config.toml"),
}
DAMAGE = {
    "a bit at the start": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "a bit in the middle": lambda data: (
        data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]
    ),
    "a bit at the end": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "cut in the middle": lambda data: data[: len(data) // 2],
    "cut by one byte": lambda data: data[:-2],  # the last one of a text is the end of a line, which says nothing
    "emptied": lambda data: b"",
    "no text": lambda data: b"\xff\xfe" + data,
    "gone": None,
}
#: What is made again if it is gone, and comes out as it was; where a bit may be one of a text that decides nothing.
MADE_AGAIN = {("learned.safetensors", "gone")}
NO_MATTER = {("environment.json", "a bit in the middle"), ("config.toml", "a bit in the middle")}


class KilledError(Exception):
    pass


def run(name, folder, kill=False):
    method = methods.create(name)
    setting = small_setting(rounds=4, reserve=method.reserve, engine="loop", client_memory="disk")

    def on_round(record):
        if kill and record["round"] == 3:
            raise KilledError

    return execute(setting, method=method, out=folder, resume=True, checkpoint_seconds=0, on_round=on_round)


def contents(folder):
    """All files, but for rows on disk, behind whose last one there may be others that do not count."""
    found = (p for p in folder.rglob("*") if p.is_file() and p.suffix != ".rows")
    return {p.relative_to(folder): p.read_bytes() for p in found}


@pytest.fixture(scope="module", params=FILES)
def killed(request, tmp_path_factory):
    """A run that was killed after round 3, and the model of one that was not."""
    place = tmp_path_factory.mktemp("damage")
    whole = run(request.param, place / "whole")
    with pytest.raises(KilledError):
        run(request.param, place / "cut", kill=True)
    return request.param, place / "cut", whole.w


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_is_named_and_nothing_is_changed(killed, tmp_path, how):
    method, cut, w = killed
    for pattern in FILES[method]:
        if (pattern, how) in NO_MATTER:
            continue
        folder = shutil.copytree(cut, tmp_path / pattern.replace("/", "-"))
        (path,) = folder.glob(pattern)
        good = path.read_bytes()
        path.unlink() if DAMAGE[how] is None else path.write_bytes(DAMAGE[how](good))
        if (pattern, how) not in MADE_AGAIN:
            before = contents(folder)
            with pytest.raises(RunFolderError) as said:
                run(method, folder)
            assert path.name in str(said.value) or (path.name == "config.toml" and str(folder) in str(said.value))
            assert contents(folder) == before
            path.write_bytes(good)
        assert torch.equal(run(method, folder).w, w)


LAST = ("checkpoint.json", "round-0000003.safetensors")
BEFORE = ("checkpoint.previous.json", "round-0000002.safetensors")


def hurt(path, how):
    path.unlink() if DAMAGE[how] is None else path.write_bytes(DAMAGE[how](path.read_bytes()))


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("name", LAST)
def test_a_damaged_checkpoint_costs_the_rounds_since_the_one_before(killed, tmp_path, how, name):
    """And the run ends as if nothing had happened, rows on disk included."""
    method, cut, w = killed
    folder = shutil.copytree(cut, tmp_path / "run")
    hurt(folder / "checkpoint" / name, how)
    with pytest.warns(UserWarning, match="of round 2"):
        again = run(method, folder)
    assert torch.equal(again.w, w)
    assert [record["round"] for record in again.records] == [1, 2, 3, 4]


@pytest.mark.parametrize("name", BEFORE)
def test_damage_of_the_older_checkpoint_goes_unnoticed(killed, tmp_path, name):
    method, cut, w = killed
    folder = shutil.copytree(cut, tmp_path / "run")
    hurt(folder / "checkpoint" / name, "emptied")
    assert torch.equal(run(method, folder).w, w)


@pytest.mark.parametrize("how", ["a bit in the middle", "gone"])
@pytest.mark.parametrize("names", [(LAST[0], BEFORE[0]), (LAST[1], BEFORE[1]), (LAST[0], BEFORE[1])])
def test_if_both_are_damaged_it_is_said_and_nothing_is_changed(killed, tmp_path, how, names):
    method, cut, _ = killed
    folder = shutil.copytree(cut, tmp_path / "run")
    for name in names:
        hurt(folder / "checkpoint" / name, how)
    before = contents(folder)
    with pytest.raises(RunFolderError) as said:
        run(method, folder)
    assert names[0] in str(said.value) or "checkpoint" in str(said.value)
    assert contents(folder) == before


@pytest.mark.parametrize("how", ["no text", "gone", "emptied"])
@pytest.mark.parametrize("name", LAST)
def test_after_a_fallback_there_are_two_good_generations_again(killed, tmp_path, how, name):
    """Whatever is lost next, of the two that were written since."""
    method, cut, w = killed
    folder = shutil.copytree(cut, tmp_path / "run")
    hurt(folder / "checkpoint" / name, how)
    with pytest.warns(UserWarning, match="of round 2"), pytest.raises(KilledError):
        run(method, folder, kill=True)  # it falls back, makes round 3 again, and is killed after it
    hurt(folder / "checkpoint" / LAST[0], "emptied")
    with pytest.warns(UserWarning, match="of round 2"):
        assert torch.equal(run(method, folder).w, w)
