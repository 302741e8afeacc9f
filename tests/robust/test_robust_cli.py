"""Faults, screening and rules on the command line and in the run folder."""

import sys

import pytest

from feddpc.cli import main
from feddpc.runs.record import load_config, read_records

QUICK = ["run", "--clients", "20", "--cohort", "10", "--engine", "loop", "--model", "mlp", "--rounds", "2", "--quiet"]


@pytest.fixture
def feddpc(monkeypatch):
    """The installed command, in this process; it returns the exit code."""

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["feddpc", *QUICK, *map(str, args)])
        with pytest.raises(SystemExit) as done:
            main()
        return done.value.code or 0

    return run


def test_a_file_of_faults_and_its_flags(feddpc, tmp_path):
    file = tmp_path / "faults.toml"
    file.write_text("sign_flip = 0.2\nnoise = 0.1\nspread = 2\n")
    flags = [
        "--set",
        "faults.noise=0.3",
        "--set",
        "rule=trimmed_mean",
        "--set",
        "rule.share=0.4",
        "--set",
        "screen.norm=5",
    ]
    assert feddpc("--faults", file, *flags, "--out", tmp_path / "X") == 0
    config = load_config(tmp_path / "X")
    assert config.faults == {"sign_flip": 0.2, "noise": 0.3, "often": 1.0, "scale": 10.0, "spread": 2.0, "tilt": 0.001}
    assert (config.rule, config.rule_options) == ("trimmed_mean", {"share": 0.4})
    assert config.screen == {"norm": 5.0, "window": 100}
    records = read_records(tmp_path / "X" / "rounds.jsonl")
    assert all(r["faults"].keys() <= {"sign_flip", "noise"} for r in records)
    assert sum(len(ids) for r in records for ids in r["faults"].values()) > 0


def test_without_them_config_and_records_are_as_ever(feddpc, tmp_path):
    assert feddpc("--out", tmp_path / "X") == 0
    assert load_config(tmp_path / "X").faults == {}
    assert "faults" not in (tmp_path / "X" / "config.toml").read_text()
    assert all("faults" not in r for r in read_records(tmp_path / "X" / "rounds.jsonl"))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--set", "faults.sign=0.2"], "unknown fault 'sign'"),
        (["--set", "faults.zero=2"], "must be a probability"),
        (["--set", "faults.spreed=2"], "options of faults: often, scale, spread, tilt"),
        (["--set", "rule=krun"], "did you mean 'krum'"),
        (["--set", "rule=multi_krum", "--set", "rule.select=11"], "rule_options.select = 11: at most 10 clients"),
        (["--set", "rule.share=0.2"], "rule 'mean' has no options"),
        (["--set", "screen.norm=0"], "above 0"),
        (["--faults", "no-such-file.toml"], "there is no file"),
    ],
)
def test_mistakes_are_told_without_a_traceback(feddpc, flags, words, tmp_path, capsys):
    assert feddpc(*flags, "--out", tmp_path / "X") == 2
    said = capsys.readouterr().err
    assert words in " ".join(said.split())
    assert "Traceback" not in said
