"""Run folders: what they hold, resuming, damage, a full disk, two processes, and divergence."""

import dataclasses
import errno
import json
import os
import shutil
import stat
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from feddpc import methods, storage
from feddpc.build import build
from feddpc.config import Config
from feddpc.errors import RunFolderError
from feddpc.runs import checkpoint, provenance, record
from feddpc.runs import stored as stored_runs
from feddpc.runs.runner import execute
from feddpc.runs.stop import Stop
from support import VARIANTS, blobs, small_setting, tiny_net, uneven


def lines(folder: Path) -> list[dict]:
    """The records without the seconds."""
    return [{k: v for k, v in r.items() if k != "seconds"} for r in record.read_records(folder / "rounds.jsonl")]


def run(out, rounds=6, method=None, **more):
    values = {k: more.pop(k) for k in ("engine", "lr", "precision") if k in more}
    method = method or methods.create("feddpc")
    setting = small_setting(rounds=rounds, reserve=method.reserve, **{"engine": "loop", **values})
    return execute(setting, method=method, out=out, checkpoint_seconds=0, **more)


class StopAfter(Stop):
    """Wishes to stop when a round is reached."""

    def __init__(self, round):
        super().__init__()
        self.round = round

    def see(self, line):
        self.wanted = line["round"] >= self.round


def interrupted(out, at, rounds=6, **more):
    """A run that was killed after round ``at``: nothing written but records and checkpoint."""

    class KilledError(Exception):
        pass

    def kill(line):
        if line["round"] == at:
            raise KilledError

    with pytest.raises(KilledError):
        run(out, rounds, on_round=kill, **more)


def test_what_a_run_folder_holds(tmp_path):
    outcome = run(tmp_path / "r")
    names = {p.name for p in (tmp_path / "r").iterdir()} - {".lock"}
    assert names == {
        "config.toml",
        "rounds.jsonl",
        "summary.json",
        "environment.json",
        "privacy.json",
        "holdings.json",
        "checkpoint",
        "model.safetensors",
    }
    rows = record.read_records(tmp_path / "r" / "rounds.jsonl")
    assert [r["round"] for r in rows] == [1, 2, 3, 4, 5, 6]
    order = ["round", "test_accuracy", "test_loss", "train_loss", "seconds", "participants", "dropped", "rejected"]
    assert list(rows[0])[:8] == order
    assert {"mean_scale", "mean_cosine", "guarded"} <= rows[0].keys()
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert summary == outcome.summary
    best = max(rows, key=lambda r: r["test_accuracy"])
    assert (summary["best_accuracy"], summary["best_round"]) == (best["test_accuracy"], best["round"])
    assert summary["final_accuracy"] == rows[-1]["test_accuracy"]
    assert summary["last10_accuracy"] == pytest.approx(sum(r["test_accuracy"] for r in rows) / 6)
    assert summary["rounds"] == 6
    assert summary["method"] == "feddpc"
    assert summary["hyper"]["lam"] == 1.0
    stored = stored_runs.load(tmp_path / "r")
    assert stored.config == outcome.config
    assert stored.config.engine == "loop"
    assert stored.environment["torch"] == torch.__version__
    module = small_setting().task.module
    module.load_state_dict(load_file(tmp_path / "r" / "model.safetensors"))


def test_a_run_folder_says_who_holds_what(tmp_path, monkeypatch):
    outcome = run(tmp_path / "r", rounds=1)
    counts = stored_runs.load(tmp_path / "r").holdings["counts"]
    assert [sum(row) for row in counts] == [3, 9, 1, 6, 13, 2, 5, 7]
    labels = outcome.experiment.data.y_train
    for row, mine in zip(counts, outcome.experiment.partition, strict=True):
        assert row == [(labels[mine] == c).sum() for c in range(3)]
    assert stored_runs.load(tmp_path / "r").holdings["classes"] == ["0", "1", "2"]
    monkeypatch.setattr(provenance, "MOST_HOLDINGS", 23)  # eight clients, three classes
    run(tmp_path / "many", rounds=1)
    assert stored_runs.load(tmp_path / "many").holdings == {}


@pytest.mark.parametrize("method", VARIANTS.values(), ids=VARIANTS.keys())
def test_resume_is_bit_identical_for_every_method(tmp_path, method):
    whole = run(tmp_path / "whole", method=method)
    interrupted(tmp_path / "cut", 3, method=method)
    again = run(tmp_path / "cut", method=method, resume=True)
    assert torch.equal(whole.w, again.w)
    assert lines(tmp_path / "whole") == lines(tmp_path / "cut")
    model = "model.safetensors"
    assert (tmp_path / "whole" / model).read_bytes() == (tmp_path / "cut" / model).read_bytes()


def test_records_behind_the_checkpoint_are_computed_again(tmp_path):
    whole = run(tmp_path / "whole")
    interrupted(tmp_path / "cut", 3)
    with (tmp_path / "cut" / "rounds.jsonl").open("ab") as handle:
        handle.write(b'{"round": 4, "test_accuracy": 0.5}\n{"round": 5, "test_acc')
    again = run(tmp_path / "cut", resume=True)
    assert torch.equal(whole.w, again.w)
    assert lines(tmp_path / "whole") == lines(tmp_path / "cut")


def test_a_lost_checkpoint_of_a_run_that_got_to_an_end_is_no_new_start(tmp_path):
    run(tmp_path / "r")
    shutil.rmtree(tmp_path / "r" / "checkpoint")
    before = (tmp_path / "r" / "rounds.jsonl").read_bytes()
    with pytest.raises(RunFolderError, match=r"remove summary\.json and rounds\.jsonl"):
        run(tmp_path / "r", resume=True)
    assert (tmp_path / "r" / "rounds.jsonl").read_bytes() == before


def test_before_the_first_checkpoint_a_resumed_run_starts_again(tmp_path):
    whole = run(tmp_path / "whole")
    interrupted(tmp_path / "cut", 2)
    shutil.rmtree(tmp_path / "cut" / "checkpoint")
    again = run(tmp_path / "cut", resume=True)
    assert torch.equal(whole.w, again.w)
    assert lines(tmp_path / "whole") == lines(tmp_path / "cut")


def test_more_rounds_may_be_asked_for(tmp_path):
    whole = run(tmp_path / "whole", rounds=6)
    run(tmp_path / "short", rounds=4)
    longer = run(tmp_path / "short", rounds=6, resume=True)
    assert torch.equal(whole.w, longer.w)
    assert stored_runs.load(tmp_path / "short").config.rounds == 6
    assert lines(tmp_path / "whole") == lines(tmp_path / "short")
    with pytest.raises(RunFolderError, match="past round 6"):
        run(tmp_path / "short", rounds=3, resume=True)


@pytest.mark.parametrize("keep", ["last", "best"])
def test_the_former_last_round_counts_only_if_its_model_may_be_kept(tmp_path, keep):
    values = {"evaluate_every": 3, "keep": keep, "engine": "loop"}
    execute(small_setting(rounds=4, **values), out=tmp_path / "run")
    longer = small_setting(rounds=8, **values)
    extended = execute(longer, out=tmp_path / "run", resume=True)
    evaluated = [r["round"] for r in extended.records if r["test_loss"] is not None]
    assert evaluated == ([3, 6, 8] if keep == "last" else [3, 4, 6, 8])
    stored = stored_runs.load(tmp_path / "run")
    assert stored.records == extended.records
    assert stored.summarize("finished")["best_round"] == extended.summary["best_round"]
    if keep == "last":
        alone = execute(longer, out=tmp_path / "alone")
        timeless = [[{k: v for k, v in r.items() if k != "seconds"} for r in o.records] for o in (alone, extended)]
        assert timeless[0] == timeless[1]


def test_a_finished_run_is_left_as_it_is(tmp_path):
    run(tmp_path / "r")
    before = (tmp_path / "r" / "rounds.jsonl").read_bytes()
    again = run(tmp_path / "r", resume=True)
    assert again.status == "finished"
    assert (tmp_path / "r" / "rounds.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lr": 0.01}, "lr = 0.01, was 0.05"),
        ({"method": methods.create("feddpc", lam=2.0)}, "hyper.lam = 2.0, was 1.0"),
    ],
)
def test_another_configuration_is_refused_and_nothing_is_lost(tmp_path, change, said):
    interrupted(tmp_path / "r", 3)
    before = {p: p.read_bytes() for p in (tmp_path / "r").rglob("*") if p.is_file()}
    with pytest.raises(RunFolderError, match=said):
        run(tmp_path / "r", resume=True, **change)
    assert {p: p.read_bytes() for p in (tmp_path / "r").rglob("*") if p.is_file()} == before


def test_a_folder_in_use_is_not_overwritten(tmp_path):
    run(tmp_path / "r")
    with pytest.raises(RunFolderError, match="already holds a run: add --resume"):
        run(tmp_path / "r")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.txt").write_text("years of work")
    for resume in (False, True):
        with pytest.raises(RunFolderError, match="no run"):
            run(tmp_path / "foreign", resume=resume)
    assert (tmp_path / "foreign" / "thesis.txt").read_text() == "years of work"
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunFolderError, match="no run"):
        run(tmp_path / "file")


def test_two_processes_on_one_folder(tmp_path):
    interrupted(tmp_path / "r", 2)
    held = record.RunFolder.reopen(tmp_path / "r")
    with pytest.raises(RunFolderError, match="in use by another process"):
        run(tmp_path / "r", resume=True)
    held.close()


def test_a_checkpoint_of_another_version_is_an_error_and_not_a_reason_to_go_back(tmp_path):
    interrupted(tmp_path / "r", 3)
    index = tmp_path / "r" / "checkpoint" / "checkpoint.json"
    index.write_text(index.read_text().replace('"format": 3', '"format": 99'))
    before = (tmp_path / "r" / "rounds.jsonl").read_bytes()
    with pytest.raises(RunFolderError, match="format 99"):
        run(tmp_path / "r", resume=True)
    assert (tmp_path / "r" / "rounds.jsonl").read_bytes() == before


def test_foreign_and_damaged_folders_are_explained(tmp_path):
    run(tmp_path / "r")
    (tmp_path / "r" / "rounds.jsonl").write_text('{"round": 1}\nnonsense\n')
    with pytest.raises(RunFolderError, match=r"rounds.jsonl, line 2"):
        stored_runs.load(tmp_path / "r")
    (tmp_path / "r" / "config.toml").write_text("tree = 3")
    with pytest.raises(RunFolderError, match="no run folder of this program"):
        stored_runs.load(tmp_path / "r")
    with pytest.raises(RunFolderError, match="no run folder"):
        stored_runs.load(tmp_path / "absent")


def test_a_torn_last_line_is_left_out(tmp_path):
    path = tmp_path / "rounds.jsonl"
    path.write_bytes(b'{"round": 1}\n{"round": 2}\n{"rou')
    assert [r["round"] for r in record.read_records(path)] == [1, 2]


@pytest.mark.parametrize("where", ["record", "checkpoint"])
def test_a_full_disk_keeps_what_was_there(tmp_path, monkeypatch, where):
    """/dev/full refuses every byte as a full disk does; safetensors reports the same in its own words."""
    whole = run(tmp_path / "whole")
    interrupted(tmp_path / "r", 3)
    if where == "record":
        opened = record.RunFolder.go_on

        def open_full(self, *written):
            opened(self, *written)
            self.records.close()
            self.records._file = open("/dev/full", "wb", buffering=0)  # noqa: PTH123, SIM115

        monkeypatch.setattr(record.RunFolder, "go_on", open_full)
    else:
        full = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        monkeypatch.setattr(checkpoint, "save_file", lambda tensors, path: (_ for _ in ()).throw(full))
    with pytest.raises(RunFolderError, match=r"the disk of .* is full; what was recorded so far is kept"):
        run(tmp_path / "r", resume=True)
    monkeypatch.undo()
    assert checkpoint.load(tmp_path / "r" / "checkpoint").round == 3
    assert not list(tmp_path.rglob("*.part"))
    again = run(tmp_path / "r", resume=True)
    assert torch.equal(whole.w, again.w)


def test_what_a_run_killed_at_its_very_start_left_is_no_obstacle(tmp_path):
    (tmp_path / "r").mkdir()
    for name in (".lock", "environment.json", ".config.toml.part"):
        (tmp_path / "r" / name).write_text("")
    for resume in (True, False):
        assert record.is_blank(tmp_path / "r") == resume
        if resume:
            assert run(tmp_path / "r", resume=True).status == "finished"


def test_a_diverged_run_killed_before_its_summary_does_not_go_on(tmp_path):
    first = run(tmp_path / "r", rounds=50, lr=1e100)
    before = (tmp_path / "r" / "rounds.jsonl").read_bytes()
    (tmp_path / "r" / "summary.json").unlink()
    again = run(tmp_path / "r", rounds=50, lr=1e100, resume=True)
    assert (again.status, again.reason) == (first.status, first.reason)
    assert (tmp_path / "r" / "rounds.jsonl").read_bytes() == before


def test_garbage_behind_the_checkpoint_is_cut_off(tmp_path):
    whole = run(tmp_path / "whole")
    interrupted(tmp_path / "r", 3)
    with (tmp_path / "r" / "rounds.jsonl").open("ab") as handle:
        handle.write(bytes(5000) + b"\n{}\n")
    assert torch.equal(run(tmp_path / "r", resume=True).w, whole.w)
    assert lines(tmp_path / "whole") == lines(tmp_path / "r")


def test_the_engine_of_a_resumed_run_is_the_one_it_had(tmp_path, monkeypatch):
    interrupted(tmp_path / "r", 2, engine="stacked")
    again = run(tmp_path / "r", resume=True, engine="auto")
    assert again.config.engine == "stacked"


@pytest.mark.parametrize("part", ["data", "partition", "initial model"])
def test_other_things_under_the_same_names_are_refused(tmp_path, part):
    config = Config.read({"cohort": 2, "clients": 8, "batch_size": 8, "rounds": 2, "engine": "loop"})

    def start(changed, resume):
        setting = build(
            config,
            data=blobs(seed=5 if changed == "data" else 0),
            module=tiny_net(seed=5 if changed == "initial model" else 0),
            partition=uneven(
                90, (4, 16, 1, 9, 30, 5, 11, 14) if changed == "partition" else (3, 17, 1, 9, 30, 5, 11, 14)
            ),
        )
        return execute(setting, method=methods.create("fedavg"), out=tmp_path / "r", resume=resume)

    start(None, False)
    start(None, True)
    with pytest.raises(RunFolderError, match=f"other {part}"):
        start(part, True)


def test_replace_file_is_all_or_nothing(tmp_path):
    path = tmp_path / "f"
    storage.replace_text(path, "old")

    def broken(temporary):
        temporary.write_text("half")
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(RunFolderError, match="Input/output error"):
        storage.replace_file(path, broken)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_in_the_place_of_a_folder_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="cannot be used"):
        run(tmp_path / "file" / "below")


def test_a_wish_to_stop_ends_after_the_round(tmp_path):
    stop = StopAfter(2)
    outcome = run(tmp_path / "r", stop=stop, on_round=stop.see)
    assert outcome.status == "interrupted"
    done = len(outcome.records)
    assert done in (2, 3)
    assert checkpoint.load(tmp_path / "r" / "checkpoint").round == done
    whole = run(tmp_path / "whole")
    assert torch.equal(run(tmp_path / "r", resume=True).w, whole.w)


def test_a_diverging_run_keeps_its_records(tmp_path):
    outcome = run(tmp_path / "r", rounds=50, lr=1e100)
    assert outcome.status == "diverged"
    assert outcome.reason.startswith(f"round {len(outcome.records)}: ")
    assert len(outcome.records) < 50
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["status"] == "diverged"
    text = (tmp_path / "r" / "rounds.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert run(tmp_path / "r", rounds=50, lr=1e100, resume=True).status == "diverged"


def test_the_resolved_configuration_is_complete():
    setting = build(Config.read({"clients": 20, "cohort": 2}))
    config = setting.config
    assert (config.model, config.batch_size, config.server_lr, config.scaling) == ("cnn", 32, 0.1, "half")
    assert config.partition_options == {"alpha": 0.2, "min_size": 7}
    assert build(config).config == config


def test_the_names_of_new_folders_are_on_the_disk(tmp_path, monkeypatch):
    """All the way up to what was there before; else a power cut could take a whole run with its checkpoints."""
    synced = []
    monkeypatch.setattr(storage, "sync_folder", synced.append)
    storage.make_folder(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()
    assert set(synced) == {tmp_path, tmp_path / "a", tmp_path / "a" / "b"}
    synced.clear()
    storage.make_folder(tmp_path / "a" / "b")  # perhaps made by a process that was killed before it could sync
    assert synced == [tmp_path / "a"]


def test_files_have_the_mode_that_the_user_wants(tmp_path):
    before = os.umask(0o077)
    try:
        storage.replace_text(tmp_path / "note", "n")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "note").stat().st_mode) == 0o600


def test_other_samples_are_other_data():
    one = small_setting()
    for part in ("x_train", "x_test"):
        changed = getattr(one.data, part).copy()
        changed[1] += 1
        other = dataclasses.replace(one.data, **{part: changed})
        assert other.digest != one.data.digest
