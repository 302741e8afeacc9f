"""Callbacks, early stopping, and the model that a run keeps."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import feddpc
from feddpc.errors import BadInputError, RunFolderError
from feddpc.report.groups import status
from feddpc.runs.checkpoint import load_model
from feddpc.runs.stored import load
from support import blobs, tiny_net, uneven


def setting(**more):
    values = {"data": blobs(), "model": tiny_net(), "partition": uneven(90), "cohort": 3, "rounds": 6}
    return values | {"batch_size": 4, "engine": "loop"} | more


def simulate(**more):
    return feddpc.simulate(**setting(**more))


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def without_seconds(records):
    return [{k: v for k, v in record.items() if k != "seconds"} for record in records]


class StopAt(feddpc.Callback):
    def __init__(self, last, reason="enough"):
        self.last, self.reason = last, reason

    def on_round_end(self, run):
        if run.round == self.last:
            run.stop(self.reason)


class Remember(feddpc.Callback):
    def __init__(self):
        self.told, self.models, self.statuses = [], [], []

    def on_run_begin(self, run):
        self.told.append(("begin", run.round, run.record, run.config.seed))

    def on_round_end(self, run):
        self.told.append(("round", run.round, run.record["round"]))
        self.models.append(run.model)
        run.record["round"] = "changed"  # a copy

    def on_run_end(self, run):
        self.told.append(("end", run.round))
        self.statuses.append(run.status)


def test_callbacks_see_every_round_and_its_model():
    seen = Remember()
    records = []
    result = simulate(rounds=3, callbacks=[seen], on_round=records.append)
    assert seen.told == [("begin", 0, {}, 0), *(("round", t, t) for t in (1, 2, 3)), ("end", 3)]
    assert seen.statuses == ["finished"]
    assert records == result.records
    for t, model in enumerate(seen.models, start=1):
        assert same(model.state_dict(), simulate(rounds=t).state_dict)
        assert not model.training
    assert same(seen.models[-1].state_dict(), result.model.state_dict())


def test_models_of_callbacks_may_be_changed():
    class Spoil(feddpc.Callback):
        def on_round_end(self, run):
            for p in run.model.parameters():
                p.data.zero_()

    assert same(simulate(callbacks=[Spoil()]).state_dict, simulate().state_dict)


def test_stopping_counts_the_round_and_a_resumed_run_is_bit_identical(tmp_path):
    whole = simulate(rounds=6)
    short = simulate(rounds=6, out=tmp_path / "r", callbacks=[StopAt(3)])
    assert (short.status, len(short.records)) == ("stopped", 3)
    assert "StopAt" in short.reason
    assert "enough" in short.reason
    stored = load(tmp_path / "r")
    assert status(stored) == "stopped"
    assert stored.summary["reason"] == short.reason
    assert same(short.state_dict, simulate(rounds=3).state_dict)
    again = simulate(rounds=6, out=tmp_path / "r", resume=True)
    assert again.status == "finished"
    assert without_seconds(again.records) == without_seconds(whole.records)
    assert same(again.state_dict, whole.state_dict)


def test_stopping_in_the_last_round_is_finishing():
    assert simulate(rounds=3, callbacks=[StopAt(3)]).status == "finished"


def test_stopping_before_the_first_round_takes_one(tmp_path):
    class Never(feddpc.Callback):
        def on_run_begin(self, run):
            run.stop()

    result = simulate(out=tmp_path / "r", callbacks=[Never()])
    assert (result.status, len(result.records)) == ("stopped", 1)
    assert same(simulate(out=tmp_path / "r", resume=True).state_dict, simulate().state_dict)


@pytest.mark.parametrize("hook", ["on_run_begin", "on_round_end", "on_run_end"])
def test_an_error_names_the_callback_and_leaves_a_run_to_resume(tmp_path, hook):
    class Breaks(feddpc.Callback):
        pass

    def fail(self, run):
        if run.round in (0, 2, 6):
            raise ValueError("mine")

    setattr(Breaks, hook, fail)
    with pytest.raises(ValueError, match="mine") as caught:
        simulate(out=tmp_path / "r", callbacks=[Breaks()])
    assert f"Breaks.{hook}" in " ".join(caught.value.__notes__)
    seen = Remember()
    again = simulate(out=tmp_path / "r", resume=True, callbacks=[seen])
    assert seen.told[0][1] == {"on_run_begin": 0, "on_round_end": 2, "on_run_end": 6}[hook]
    assert same(again.state_dict, simulate().state_dict)
    assert again.status == "finished"


@pytest.mark.parametrize("name", ["on_round_ends", "on_epoch_end", "on_run_started"])
def test_a_hook_that_would_never_be_called_is_refused(name):
    typo = type("Typo", (feddpc.Callback,), {name: lambda self, run: None})
    with pytest.raises(BadInputError, match=f"Typo.*{name}"):
        simulate(callbacks=[typo()])


def test_a_misspelt_hook_is_refused_with_the_nearest_one():
    typo = type("Typo", (feddpc.Callback,), {"on_round_ends": lambda self, run: None})
    with pytest.raises(BadInputError, match="did you mean 'on_round_end'"):
        feddpc.compare(["fedavg"], rounds=1, callbacks=[typo()])


def test_a_hook_that_cannot_take_the_run_is_refused():
    deaf = type("Deaf", (feddpc.Callback,), {"on_round_end": lambda self: None})
    with pytest.raises(BadInputError, match="on_round_end"):
        simulate(callbacks=[deaf()])


@pytest.mark.parametrize(
    ("callbacks", "field"),
    [([print], "callbacks"), (Remember(), "callbacks"), ([Remember], "callbacks"), (3, "callbacks")],
)
def test_what_is_no_callback_is_refused(callbacks, field, tmp_path):
    for call in (simulate, lambda **more: feddpc.compare(["fedavg"], **setting(**more))):
        with pytest.raises(BadInputError, match=field):
            call(callbacks=callbacks, out=tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_rerun_takes_callbacks(tmp_path):
    simulate(out=tmp_path / "r")
    own = {key: setting()[key] for key in ("data", "model", "partition")}
    again = feddpc.rerun(tmp_path / "r", callbacks=[StopAt(2)], **own)
    assert (again.status, again.likeness.rounds, again.likeness.identical) == ("stopped", 2, True)


# Early stopping.


def first_stop(values, patience, sign):
    """Return after which of ``values`` patience ends, the number of values if never."""
    best, waited = None, 0
    for t, value in enumerate(values, start=1):
        if best is None or sign * value > sign * best:
            best, waited = value, 0
        else:
            waited += 1
        if waited >= patience:
            return t
    return len(values)


@pytest.mark.parametrize(
    ("named", "key", "sign", "more"),
    [
        (None, "test_accuracy", 1, {}),
        (None, "validation_accuracy", 1, {"validation": 0.2, "partition": "iid", "clients": 8}),
        ("test_loss", "test_loss", -1, {}),
        ("train_loss", "train_loss", -1, {}),
    ],
)
def test_early_stopping(named, key, sign, more, tmp_path):
    more |= {"rounds": 20, "client_lr": 0.5, "cohort": 2}
    whole = simulate(**more)
    for patience in (1, 2, 3):
        expected = first_stop(whole.curve(key), patience, sign)
        out = tmp_path / str(patience)
        short = simulate(callbacks=[feddpc.EarlyStopping(patience, named)], out=out, **more)
        assert len(short.records) == expected
        assert short.status == ("stopped" if expected < 20 else "finished")
    assert first_stop(whole.curve(key), 1, sign) < 20, "the setting is too easy to test anything"


def test_early_stopping_begins_anew_in_every_run_and_continues_in_a_resumed_one(tmp_path):
    more = {"rounds": 20, "client_lr": 0.5, "cohort": 2}
    stopping = feddpc.EarlyStopping(2)
    rounds = len(simulate(callbacks=[stopping], **more).records)
    assert len(simulate(callbacks=[stopping], **more).records) == rounds
    simulate(callbacks=[StopAt(rounds - 1)], out=tmp_path / "r", **more)
    assert len(simulate(callbacks=[stopping], out=tmp_path / "r", resume=True, **more).records) == rounds


def test_bad_early_stopping():
    with pytest.raises(BadInputError, match="patience = 0"):
        feddpc.EarlyStopping(0)
    with pytest.raises(BadInputError, match="test_acuracy"):
        simulate(callbacks=[feddpc.EarlyStopping(2, "test_acuracy")])


# Which model a run keeps.

BUMPY = {"rounds": 10, "client_lr": 0.5, "cohort": 2}


def best_round(result, key):
    return int(result.curve(key).argmax()) + 1


@pytest.mark.parametrize(
    ("more", "key"),
    [({}, "test_accuracy"), ({"validation": 0.2, "partition": "iid", "clients": 8}, "validation_accuracy")],
)
def test_the_best_model_is_that_of_the_best_round(tmp_path, more, key):
    more = BUMPY | more
    seen = Remember()
    last = simulate(**more, callbacks=[seen])
    best = best_round(last, key)
    assert 0 < best < 10, "the setting is too easy to test anything"
    result = simulate(keep="best", out=tmp_path / "r", **more)
    assert without_seconds(result.records) == without_seconds(last.records)
    assert result.summary["model_round"] == best
    assert same(result.state_dict, seen.models[best - 1].state_dict())
    assert same(result.model.state_dict(), result.state_dict)
    assert same(load_model(tmp_path / "r" / "model.safetensors"), result.state_dict)


def test_keeping_the_last_model_writes_what_it_wrote(tmp_path):
    result = simulate(out=tmp_path / "r")
    assert "model_round" not in result.summary
    assert same(load_model(tmp_path / "r" / "model.safetensors"), result.state_dict)
    from safetensors.torch import load_file

    assert "best" not in load_file(next((tmp_path / "r" / "checkpoint").glob("*.safetensors")))


@pytest.mark.parametrize("last", range(1, 10))
def test_the_best_model_survives_a_stop_in_any_round(tmp_path, last):
    whole = simulate(keep="best", **BUMPY)
    simulate(keep="best", out=tmp_path / "r", callbacks=[StopAt(last)], **BUMPY)
    again = simulate(keep="best", out=tmp_path / "r", resume=True, **BUMPY)
    assert same(again.state_dict, whole.state_dict)
    assert again.summary["model_round"] == whole.summary["model_round"]


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import feddpc
from test_callbacks import BUMPY, setting

class Kill(feddpc.Callback):
    def on_round_end(self, run):
        if run.round == {last}:
            os.kill(os.getpid(), signal.SIGKILL)

import feddpc.runs.runner as runner
runner.CHECKPOINT_SECONDS = 0.0
runner.execute.__kwdefaults__["checkpoint_seconds"] = 0.0
feddpc.simulate(**setting(keep="best", out={out!r}, callbacks=[Kill()], **BUMPY))
"""


def test_the_best_model_survives_a_kill(tmp_path):
    whole = simulate(keep="best", **BUMPY)
    last = min(whole.summary["model_round"] + 2, 10)
    code = KILLED.format(tests=str(Path(__file__).parent), last=last, out=str(tmp_path / "r"))
    done = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert json.loads((tmp_path / "r/checkpoint/checkpoint.json").read_text())["round"] == last - 1
    again = simulate(keep="best", out=tmp_path / "r", resume=True, **BUMPY)
    assert same(again.state_dict, whole.state_dict)
    assert without_seconds(again.records) == without_seconds(whole.records)


def test_what_a_run_keeps_cannot_change(tmp_path):
    simulate(rounds=2, out=tmp_path / "r")
    with pytest.raises(RunFolderError, match="keep"):
        simulate(rounds=4, out=tmp_path / "r", resume=True, keep="best")


def change_rounds(monkeypatch, change):
    """Let ``change`` replace the record of every round, as another evaluation would have made it."""
    from feddpc.runs import runner

    true = runner.run_round
    monkeypatch.setattr(runner, "run_round", lambda *args: change(true(*args)))


def test_only_evaluated_rounds_count(monkeypatch, tmp_path):
    def every_third(record):
        skipped = record.round % 3 != 0
        return replace(record, metrics=dict.fromkeys(record.metrics)) if skipped else record

    seen = Remember()
    change_rounds(monkeypatch, every_third)
    last = simulate(callbacks=[seen], **BUMPY)
    curve = last.curve("test_accuracy")
    assert np.isfinite(curve).sum() == 3
    result = simulate(keep="best", **BUMPY)
    best = int(np.nanargmax(curve)) + 1
    assert result.summary["model_round"] == best
    assert same(result.state_dict, seen.models[best - 1].state_dict())
    stopping = simulate(callbacks=[feddpc.EarlyStopping(1)], **BUMPY)
    values = curve[np.isfinite(curve)]
    assert len(stopping.records) == min(3 * first_stop(values, 1, 1) if first_stop(values, 1, 1) < 3 else 10, 10)


def test_without_any_evaluation_the_last_model_is_kept(monkeypatch):
    change_rounds(monkeypatch, lambda record: replace(record, metrics=dict.fromkeys(record.metrics)))
    result = simulate(keep="best", **BUMPY)
    assert "model_round" not in result.summary
    assert same(result.state_dict, simulate(**BUMPY).state_dict)


def test_a_round_that_diverged_is_never_the_best(monkeypatch, tmp_path):
    def fourth(record):
        perfect = record.metrics | {"test_accuracy": 1.0}
        return replace(record, metrics=perfect, diverged="it did") if record.round == 4 else record

    seen = Remember()
    best = best_round(simulate(**BUMPY | {"rounds": 3}, callbacks=[seen]), "test_accuracy")
    change_rounds(monkeypatch, fourth)
    result = simulate(keep="best", out=tmp_path / "r", **BUMPY)
    again = simulate(keep="best", out=tmp_path / "r", resume=True, **BUMPY)
    for one in (result, again):
        assert (one.status, one.summary["model_round"]) == ("diverged", best)
        assert same(one.state_dict, seen.models[best - 1].state_dict())


def test_keep_is_a_flag_and_a_key(tmp_path):
    from typer.testing import CliRunner

    from feddpc.cli import app

    (tmp_path / "c.toml").write_text('keep = "best"\n')
    words = f"run --rounds 2 --clients 20 --cohort 2 --engine loop --quiet --config {tmp_path / 'c.toml'}"
    for out, more in (("flag", "--keep best"), ("file", "")):
        done = CliRunner().invoke(app, [*words.split(), *more.split(), "--out", str(tmp_path / out)])
        assert done.exit_code == 0, done.output
        assert load(tmp_path / out).config.keep == "best"
        assert load(tmp_path / out).summary["model_round"] in (1, 2)


def test_a_federation_refuses_to_keep_the_best_model():
    from feddpc.flower import strategy

    with pytest.raises(BadInputError, match="keep"):
        strategy(model=tiny_net(), classes=3, keep="best", clients=2, cohort=1)


def test_an_experiment_is_shown_in_a_few_words():
    from feddpc.build import build
    from feddpc.config import Config

    shown = repr(build(Config(clients=20, cohort=2, model="mlp")))
    assert len(shown) < 120
    for part in ("digits", "mlp", "20", "seed 0"):
        assert part in shown


def test_bad_keep():
    with pytest.raises(BadInputError, match="keep"):
        simulate(keep="first")
