"""Run folders of the version before this one (format 2), as it wrote them, are read and continued."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

import feddpc
from feddpc.cli import app
from feddpc.runs import record

FOLDERS = Path(__file__).parent / "format-2"


def numbers(folder):
    return [[r["test_accuracy"], r["test_loss"], r["train_loss"]] for r in record.read_records(folder / "rounds.jsonl")]


@pytest.mark.parametrize("method", ["feddpc", "scaffold"])  # scaffold remembers its clients on disk
def test_an_older_run_goes_on_as_it_would_have(tmp_path, method):
    shutil.copytree(FOLDERS / method, tmp_path / "old")
    done = CliRunner().invoke(app, ["run", "--resume", "--out", str(tmp_path / "old"), "--rounds", "5", "--quiet"])
    assert done.exception is None
    hyper = record.load_config(FOLDERS / method).hyper
    keys = ("clients", "cohort", "model", "model_options", "engine", "batch_size", "threads")
    config = {key: getattr(record.load_config(FOLDERS / method), key) for key in keys}
    whole = feddpc.simulate(method=method, hyper=hyper, rounds=5, out=tmp_path / "new", device="cpu", **config)
    for one, other in zip(numbers(tmp_path / "old"), numbers(tmp_path / "new"), strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    for key, value in load_file(tmp_path / "old" / "model.safetensors").items():
        assert value.numpy() == pytest.approx(whole.state_dict[key].numpy(), abs=1e-5)
    assert json.loads((tmp_path / "old" / "checkpoint" / "checkpoint.json").read_text())["format"] == 3


def test_an_older_run_is_made_again_with_the_rule_of_its_time(tmp_path):
    with pytest.warns(UserWarning, match=r"feddpc .*, was 0\.1\.0"):
        again = feddpc.rerun(FOLDERS / "feddpc", out=tmp_path / "again")
    assert again.likeness.changed == []
    assert record.load_config(tmp_path / "again").hyper["max_scale"] == 0.0
    assert again.likeness.identical or again.likeness.tolerance < 1e-5
