"""Trackers are told what rounds.jsonl says, once, whatever happens to the run; whatever happens to them, it goes on."""

import json
import logging
import re
import shutil
import sqlite3
import sys
import warnings

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import feddpc
from feddpc import methods
from feddpc.cli import main
from feddpc.errors import BadInputError
from feddpc.runs.record import read_records
from feddpc.runs.runner import execute
from feddpc.runs.tracking import Tracking, check, tensorboard, tracked
from feddpc.runs.tracking import mlflow as tracking_mlflow
from feddpc.study.compare import Overrides, compare
from support import blobs, small_setting, tiny_net, uneven

KEYS = {"test_accuracy", "test_loss", "train_loss", "seconds", "participants", "dropped", "rejected"}
CAME_TO = ("rounds", "best_accuracy", "best_round", "final_accuracy", "last10_accuracy", "seconds_per_round")
QUICK = {"clients": 20, "cohort": 3, "rounds": 2, "engine": "loop", "model": "mlp", "threads": 1}


class KilledError(Exception):
    """Stands for the end of a process."""


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory):
    """An MLflow store with its tables, which take seconds to make."""
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        tracking_mlflow.mlflow.MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def store(empty_store, tmp_path, monkeypatch):
    """The working folder of a run, with an MLflow store of its own in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return shutil.copy(empty_store, tmp_path / "mlflow.db")


@pytest.fixture
def in_mlflow(store):
    """Return a reader of what MLflow knows of a run: values by name and round, what it came to, and the run itself."""

    def read(folder):
        client = tracking_mlflow.mlflow.MlflowClient(f"sqlite:///{store}")
        run = client.get_run(json.loads((folder / "mlflow.json").read_text())["run_id"])
        history = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
        points = {name: sorted((m.step, m.value) for m in metrics) for name, metrics in history.items()}
        came_to = {name: points.pop(name) for name in CAME_TO if name in points}
        return points, came_to, run

    return read


def in_tensorboard(folder):
    """The values that TensorBoard reads from a folder, by name: rounds and values."""
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def recorded(folder):
    """The same out of rounds.jsonl."""
    found = {}
    for record in read_records(folder / "rounds.jsonl"):
        for name, value in record.items():
            if name != "round" and value is not None:
                found.setdefault(name, []).append((record["round"], len(value) if isinstance(value, list) else value))
    return found


def run(out, rounds=6, **more):
    setting = small_setting(rounds=rounds, engine="loop", **{k: more.pop(k) for k in ("lr",) if k in more})
    return execute(setting, method=methods.create("feddpc"), out=out, **more)


def same(tracked_values, folder, approximately=0.0):
    expected = recorded(folder)
    assert {name: [t for t, _ in points] for name, points in tracked_values.items()} == {
        name: [t for t, _ in points] for name, points in expected.items()
    }
    for name, points in expected.items():
        found = [value for _, value in tracked_values[name]]
        assert found == pytest.approx([value for _, value in points], rel=approximately, abs=0.0), name


def test_both_hold_what_the_records_hold(tmp_path, in_mlflow):
    out = tmp_path / "r"
    outcome = run(out, track="tensorboard,mlflow")
    assert recorded(out).keys() > KEYS
    assert {"mean_scale", "mean_cosine", "guarded"} < recorded(out).keys()
    same(in_tensorboard(out), out, approximately=1e-6)  # event files hold 32 bits
    values, came_to, known = in_mlflow(out)
    same(values, out)
    assert known.info.status == "FINISHED"
    assert known.info.run_name == "r"
    assert came_to == {name: [(6, outcome.summary[name])] for name in CAME_TO}
    assert (known.data.params["method"], known.data.params["hyper.lam"]) == ("feddpc", "1.0")
    assert known.data.tags["rounds"] == "6"


def test_without_trackers_nothing_of_theirs_is_there(tmp_path):
    run(tmp_path / "r")
    assert tracked(tmp_path / "r") == []


@pytest.mark.parametrize("checkpoints", ["every round", "none"])
def test_a_killed_run_goes_on_without_gaps_and_without_rounds_that_come_twice(
    tmp_path, in_mlflow, monkeypatch, checkpoints
):
    """Killed after round 3: of the rounds, the trackers hold some that are computed again, and lack others."""
    out = tmp_path / "r"
    killed = check("tensorboard,mlflow")

    def kill(record):
        if record["round"] == 2 and checkpoints == "none":
            killed[1]._send()
        if record["round"] == 3:
            raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(Tracking, "end", lambda self, summary: None)  # a killed process says nothing
        with pytest.raises(KilledError):
            run(out, track=killed, on_round=kill, checkpoint_seconds=0 if checkpoints == "every round" else 100)
    before = json.loads((out / "mlflow.json").read_text())
    run(out, resume=True)
    killed[0]._file.close()
    assert json.loads((out / "mlflow.json").read_text()) == before
    values, _, known = in_mlflow(out)
    assert [t for t, _ in values["test_loss"]] == [1, 2, 3, 4, 5, 6]
    same({k: v for k, v in values.items() if k != "seconds"} | {"seconds": recorded(out)["seconds"]}, out)
    assert known.info.status == "FINISHED"
    same(in_tensorboard(out), out, approximately=1e-6)
    assert len(list((out / "tensorboard").iterdir())) == 1


def test_more_rounds_go_into_the_same_tracked_run_and_a_finished_one_stays(tmp_path, in_mlflow):
    out = tmp_path / "r"
    run(out, rounds=4, track="mlflow")
    for _ in range(2):
        run(out, rounds=6, resume=True)
        values, came_to, known = in_mlflow(out)
        same(values, out)
        assert came_to["rounds"] == [(4, 4), (6, 6)]
        assert known.data.tags["rounds"] == "6"


def test_tracking_may_begin_late_and_a_lost_store_is_filled_again(tmp_path, in_mlflow, store, empty_store):
    out = tmp_path / "r"
    run(out, rounds=3)
    run(out, rounds=4, resume=True, track=["mlflow", "tensorboard"])
    shutil.copy(empty_store, store)
    run(out, rounds=5, resume=True)
    same(in_mlflow(out)[0], out)
    same(in_tensorboard(out), out, approximately=1e-6)


@pytest.mark.parametrize(("change", "status"), [({"lr": 1e100}, "FAILED"), ({}, "KILLED")])
def test_mlflow_is_told_how_a_run_ended(tmp_path, in_mlflow, change, status):
    def stop(record):
        if status == "KILLED" and record["round"] == 2:
            raise KilledError

    out = tmp_path / "r"
    if status == "KILLED":
        with pytest.raises(KilledError):
            run(out, track="mlflow", on_round=stop)
    else:
        assert run(out, track="mlflow", **change).status == "diverged"
    values, _, known = in_mlflow(out)
    assert known.info.status == status
    assert values["seconds"] == recorded(out)["seconds"]


class Watcher:
    """A tracker of one's own, which may break."""

    name = "watcher"

    def __init__(self, breaks=None):
        self.breaks, self.seen = breaks, []

    def begin(self, config, folder, past):
        self._see("begin", (config.method, folder.name, len(past)))

    def round(self, record):
        self._see("round", record)

    def end(self, summary):
        self._see("end", summary)

    def _see(self, what, value):
        self.seen.append((what, value))
        if what == self.breaks:
            raise OSError("nobody listens\nat all")


def test_ones_own_tracker_sees_everything_in_order(tmp_path):
    def simulate(**more):
        fixed = {"data": blobs(), "model": tiny_net(), "partition": uneven(90), "cohort": 3, "engine": "loop"}
        return feddpc.simulate(**fixed, out=tmp_path / "r", batch_size=4, method="fedavg", **more)

    first, second = Watcher(), Watcher()
    simulate(rounds=2, track=[first])
    result = simulate(rounds=3, resume=True, track=[second])
    assert [what for what, _ in first.seen] == ["begin", "round", "round", "end"]
    assert first.seen[0] == ("begin", ("fedavg", "r", 0))
    assert second.seen == [("begin", ("fedavg", "r", 2)), ("round", result.records[2]), ("end", result.summary)]


@pytest.mark.parametrize("breaks", ["begin", "round", "end"])
def test_a_tracker_that_breaks_is_named_once_and_the_run_is_what_it_was(tmp_path, breaks):
    plain = run(tmp_path / "plain")
    broken, sound = Watcher(breaks), Watcher()
    sound.name = "sound"
    with pytest.warns(UserWarning, match=r"watcher has stopped \(nobody listens\): the run goes on") as said:
        outcome = run(tmp_path / "r", track=[broken, sound])
    assert len(said) == 1
    assert outcome.status == "finished"
    assert [{k: v for k, v in r.items() if k != "seconds"} for r in outcome.records] == [
        {k: v for k, v in r.items() if k != "seconds"} for r in plain.records
    ]
    assert [what for what, _ in broken.seen][-1] == breaks
    assert len(sound.seen) == 8


def test_a_full_disk_stops_tensorboard_and_not_the_run(tmp_path):
    """/dev/full refuses every byte, as a full disk does."""
    (tracker,) = check("tensorboard")

    def fill(record):
        if record["round"] == 2:
            tracker._file.close()
            tracker._file = open("/dev/full", "wb")  # noqa: PTH123, SIM115
            tracker._events, tracker._due = tensorboard.RecordWriter(tracker._file), 0.0

    with pytest.warns(UserWarning, match=r"tensorboard has stopped .*No space left"):
        assert run(tmp_path / "r", track=[tracker], on_round=fill).status == "finished"
    assert tracker._file.closed
    run(tmp_path / "r", resume=True)  # there is room again
    same(in_tensorboard(tmp_path / "r"), tmp_path / "r", approximately=1e-6)


def test_a_store_that_breaks_stops_mlflow_and_not_the_run(tmp_path, store):
    def spoil(record):
        if record["round"] == 2:
            with sqlite3.connect(store) as database:
                database.execute("DROP TABLE metrics")
            database.close()

    with pytest.warns(UserWarning, match="tracking with mlflow has stopped") as said:
        assert run(tmp_path / "r", track="mlflow", on_round=spoil).status == "finished"
    assert len(said) == 1


def test_a_server_that_is_not_there_does_not_keep_the_run_from_its_work(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.warns(UserWarning, match="tracking with mlflow has stopped"):
        assert run(tmp_path / "r", track="mlflow").status == "finished"


def test_a_comparison_tracks_every_run_and_goes_on_by_itself(tmp_path, in_mlflow):
    out = tmp_path / "X"
    compare(Overrides(dict(QUICK)), ["fedavg", "feddpc"], [0], out, track="tensorboard,mlflow")
    compare(Overrides(dict(QUICK)), ["fedavg", "feddpc"], [0, 1], out, extend=True)
    folders = sorted(out.glob("*-seed*"))
    assert len(folders) == 4
    for folder in folders:
        same(in_tensorboard(folder), folder, approximately=1e-6)
        same(in_mlflow(folder)[0], folder)
    assert len({json.loads((f / "mlflow.json").read_text())["run_id"] for f in folders}) == 4


@pytest.mark.parametrize(("name", "library"), [("tensorboard", "tensorboard"), ("mlflow", "mlflow")])
def test_a_missing_library_is_said_with_the_remedy_before_anything_is_done(tmp_path, monkeypatch, name, library):
    monkeypatch.delitem(sys.modules, f"feddpc.runs.tracking.{name}")
    for module in [m for m in sys.modules if m.split(".")[0] == library]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(BadInputError, match=rf"tracking with {name} needs its library .*pip install '{library}"):
        run(tmp_path / "r", track=name)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("track", "message"),
    [("tensorbord", "unknown tracker 'tensorbord': did you mean 'tensorboard'"), ("mlflow,", "unknown tracker ''")],
)
def test_mistakes_on_the_command_line(tmp_path, monkeypatch, capsys, track, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["feddpc", "run", "--rounds", "1", "--track", track])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert message in re.sub(r"\s+", " ", capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_tracks(tmp_path, monkeypatch, capsys, in_mlflow):
    flags = ["--rounds", "2", "--clients", "20", "--cohort", "3", "--engine", "loop", "--model", "mlp", "--quiet"]
    monkeypatch.setattr(sys, "argv", ["feddpc", "run", *flags, "--out", "r", "--track", "tensorboard,mlflow"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert capsys.readouterr() == ("", "")
    same(in_tensorboard(tmp_path / "r"), tmp_path / "r", approximately=1e-6)
    same(in_mlflow(tmp_path / "r")[0], tmp_path / "r")


def test_tracking_needs_a_folder():
    with pytest.raises(BadInputError, match="track needs a folder"):
        run(None, track="tensorboard")
