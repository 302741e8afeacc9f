"""Runs with the memory of clients on the device, in host memory and on disk: the same results, whatever happens."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import feddpc
from feddpc import methods
from feddpc.config import Config
from feddpc.errors import BadInputError, RunFolderError
from feddpc.methods.base import Step
from feddpc.round.client_table import ClientTable
from feddpc.runs import checkpoint, record
from feddpc.runs.runner import execute
from feddpc.runs.stop import Stop
from feddpc.study.compare import Overrides, compare
from support import small_setting

KINDS = ("device", "host", "disk")


@dataclass(frozen=True, kw_only=True)
class Both(methods.Method):
    """A method whose clients and whose server remember, and whose every step depends on it."""

    name: ClassVar[str] = "both"

    def init_slot(self, w):
        return {"y": torch.zeros_like(w)}

    def init_client(self, w):
        return {"c": torch.zeros_like(w), "visits": w.new_zeros(())}

    def correct(self, g, y, ctx):
        return g + 0.1 * ctx.state["c"] / (1 + ctx.state["visits"])

    def finish(self, y, ctx):
        delta = ctx.w - y
        return {"delta": delta}, {"c": 0.5 * ctx.state["c"] + delta, "visits": ctx.state["visits"] + 1}

    def aggregate(self, w, server, up, cohort):
        update = cohort.mean(up["delta"] + 0.1 * cohort.slots["y"])
        return Step(update, rate=cohort.server_lr / cohort.client_lr, slots={"y": up["delta"]})


class KilledError(Exception):
    pass


def run(out, memory="auto", rounds=6, method=None, **more):
    more = {"checkpoint_seconds": 0, **more}
    setting = small_setting(rounds=rounds, engine="loop", client_memory=memory)
    return execute(setting, method=method or Both(), out=out, **more)


def lines(folder: Path) -> list[dict]:
    return [{k: v for k, v in r.items() if k != "seconds"} for r in record.read_records(folder / "rounds.jsonl")]


NOTES = ["checkpoint.json", "checkpoint.previous.json"]


def names(out):
    return sorted(p.name for p in (out / "checkpoint").iterdir())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "r"
    return folder, run(folder, "device").w


def check(whole, out, w):
    folder, expected = whole
    assert torch.equal(expected, w)
    assert lines(folder) == lines(out)
    model = "model.safetensors"
    assert (folder / model).read_bytes() == (out / model).read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_placements_give_the_same_run(tmp_path, whole, kind):
    outcome = run(tmp_path / "r", kind)
    check(whole, tmp_path / "r", outcome.w)
    assert torch.equal(run(None, kind).w, outcome.w)
    assert outcome.config.client_memory == record.load_config(tmp_path / "r").client_memory == kind
    on_disk = ["clients.rows", "slots.rows"] if kind == "disk" else []
    states = ["round-0000005.safetensors", "round-0000006.safetensors"]
    assert names(tmp_path / "r") == [*NOTES, *on_disk[:1], *states, *on_disk[1:]]


def test_auto_is_resolved_and_written_down(tmp_path):
    assert run(tmp_path / "r").config.client_memory == "device"
    assert record.load_config(tmp_path / "r").client_memory == "device"


def test_a_method_without_memory_leaves_no_file(tmp_path):
    run(tmp_path / "r", "disk", method=methods.create("fedavg"))
    assert names(tmp_path / "r") == [*NOTES, "round-0000005.safetensors", "round-0000006.safetensors"]


@pytest.mark.parametrize("moment", ["before the rows", "before the file", "before the index", "after it"])
@pytest.mark.parametrize("seconds", [0, 1e9])
def test_killed_around_a_checkpoint(tmp_path, monkeypatch, whole, moment, seconds):
    """Killed while round 4 is saved, with a checkpoint a round or none before; rows were written meanwhile."""
    where = {
        "before the rows": (ClientTable, "export"),
        "before the file": (checkpoint, "save_file"),
        "before the index": (checkpoint, "replace_text"),
        "after it": (ClientTable, "committed"),
    }[moment]

    def kill(*_):
        raise KilledError

    def armed(line):
        if line["round"] == 3:
            monkeypatch.setattr(*where, kill)

    with pytest.raises(KilledError):
        run(tmp_path / "r", "disk", 4 if seconds else 6, on_round=armed, checkpoint_seconds=seconds)
    monkeypatch.undo()
    again = run(tmp_path / "r", "disk", resume=True)
    check(whole, tmp_path / "r", again.w)


def test_killed_in_the_middle_of_a_round(tmp_path, monkeypatch, whole):
    """The rows of half a cohort are written, and then no more."""
    calls = 0
    write = ClientTable.write

    def torn(self, clients, state):
        nonlocal calls
        calls += 1
        if calls == 8:
            write(self, clients[:2], {k: v[:2] for k, v in state.items()})
            raise KilledError
        write(self, clients, state)

    monkeypatch.setattr(ClientTable, "write", torn)
    with pytest.raises(KilledError):
        run(tmp_path / "r", "disk")
    monkeypatch.undo()
    assert checkpoint.load(tmp_path / "r" / "checkpoint").round == 3
    check(whole, tmp_path / "r", run(tmp_path / "r", resume=True).w)
    assert record.load_config(tmp_path / "r").client_memory == "disk"


@pytest.mark.parametrize(("before", "after"), [(a, b) for a in KINDS for b in KINDS if a != b])
def test_a_resumed_run_may_keep_its_memory_elsewhere(tmp_path, whole, before, after):
    out, stop = tmp_path / "r", Stop()

    def see(line):
        stop.wanted = line["round"] == 2

    run(out, before, on_round=see, stop=stop)
    assert checkpoint.load(out / "checkpoint").round == 3
    check(whole, out, run(out, after, resume=True).w)
    assert record.load_config(out).client_memory == after
    assert ("clients.rows" in names(out)) == ("slots.rows" in names(out)) == (after == "disk")


@pytest.mark.parametrize("memory", KINDS)
@pytest.mark.parametrize("damage", ["missing", "short", "flipped"])
def test_a_damaged_file_is_said_and_the_rest_is_kept(tmp_path, damage, memory):
    run(tmp_path / "r", "disk", 4)
    file = tmp_path / "r" / "checkpoint" / "slots.rows"
    good = file.read_bytes()
    bad = {"short": good[:100], "flipped": bytes(byte ^ 1 for byte in good)}
    file.unlink() if damage == "missing" else file.write_bytes(bad[damage])
    before = (tmp_path / "r" / "rounds.jsonl").read_bytes()
    with pytest.raises(
        RunFolderError, match=r"slots\.rows (is missing|has 100|does not hold what was written).*start a new run"
    ):
        run(tmp_path / "r", memory, resume=True)
    assert (tmp_path / "r" / "rounds.jsonl").read_bytes() == before


def test_without_a_checkpoint_what_the_file_holds_is_nothing(tmp_path, whole):
    run(tmp_path / "r", "disk", 4)
    for path in (tmp_path / "r" / "checkpoint").glob("*.safetensors"):
        path.unlink()
    (tmp_path / "r" / "checkpoint" / "checkpoint.json").unlink()
    (tmp_path / "r" / "summary.json").unlink()  # a run that was killed
    check(whole, tmp_path / "r", run(tmp_path / "r", resume=True).w)


def test_each_run_of_a_comparison_has_its_own_place(tmp_path):
    values = {"clients": 20, "cohort": 4, "model": "mlp", "engine": "loop", "rounds": 2}

    def go(resume, **more):
        wishes = Overrides({**values, **more})
        return compare(wishes, ["fedavg", "fedvarp"], [0], tmp_path / "x", resume=resume, checkpoint_seconds=0)

    assert [o.config.client_memory for o in go(False, client_memory="disk")] == ["disk", "disk"]
    assert (tmp_path / "x" / "fedvarp-seed0" / "checkpoint" / "slots.rows").exists()
    assert [o.config.client_memory for o in go(True, rounds=3)] == ["disk", "disk"]
    moved = go(True, rounds=4, client_memory="host")
    assert [o.config.client_memory for o in moved] == ["host", "host"]
    assert not list(tmp_path.rglob("*.rows"))
    plan = json.loads((tmp_path / "x" / "compare.json").read_text())
    assert plan["config"]["client_memory"] == "host"
    whole = feddpc.simulate(**values | {"rounds": 4}, method="fedvarp", client_memory="device")
    assert [r["test_loss"] for r in moved[1].records] == whole.test_loss.tolist()


def test_an_unknown_place_is_said():
    with pytest.raises(BadInputError, match="unknown client_memory 'disc': did you mean 'disk'"):
        Config.read({"client_memory": "disc"})
