"""The command line as a person or a script uses it: output, exit codes, mistakes, interruption and kill -9."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import forked
from feddpc.cli import main
from feddpc.runs.record import read_records

QUICK = ["--clients", "20", "--cohort", "4", "--engine", "loop", "--model", "mlp"]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}


def feddpc(*args, cwd, check=True, fresh=False):
    """Run the command in a process of its own, forked from one that has imported torch, or ``fresh``."""
    args = [str(arg) for arg in args]
    if fresh:
        command = [sys.executable, "-m", "feddpc", *args]
        done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=ENV, timeout=120)
    else:
        done = forked.run(forked.command_line, *args, cwd=cwd, env=ENV)
    assert not check or done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done


def start(*args, cwd):
    return forked.Forked(forked.command_line, *map(str, args), cwd=cwd, env=ENV)


def wait_for_rounds(path: Path, count: int, process) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until and process.poll() is None:
        if path.exists() and path.read_bytes().count(b"\n") >= count:
            return
        time.sleep(0.002)
    raise AssertionError(f"{path} never had {count} rounds: {process.communicate()}")


def without_seconds(folder: Path) -> bytes:
    return re.sub(rb'"seconds": [^,]+,', b"", (folder / "rounds.jsonl").read_bytes())


def test_compare_from_start_to_page(tmp_path):
    args = [
        "compare",
        "--methods",
        "feddpc,fedavg",
        "--data",
        "digits",
        "--rounds",
        "5",
        "--seeds",
        "0,1",
        "--out",
        "X",
    ]
    done = feddpc(*args, *QUICK, cwd=tmp_path)
    assert re.search(r"feddpc\s+0, 1\s+\d+\.\d\d ± \d+\.\d\d", done.stdout)
    assert "page: X/report.html" in done.stdout
    assert "feddpc seed 0  round 5/5  accuracy" in done.stdout
    for name in ("report.html", "curves.png", "table.csv", "compare.json", "partition.png"):
        assert (tmp_path / "X" / name).stat().st_size > 0
    assert "Who holds what" in (tmp_path / "X" / "report.html").read_text()
    folders = ["feddpc-seed0", "fedavg-seed0", "feddpc-seed1", "fedavg-seed1"]
    assert json.loads((tmp_path / "X" / "compare.json").read_text())["runs"] == folders
    runs = {name: read_records(tmp_path / "X" / name / "rounds.jsonl") for name in folders}
    for seed in (0, 1):
        dpc, avg = runs[f"feddpc-seed{seed}"], runs[f"fedavg-seed{seed}"]
        assert [r["participants"] for r in dpc] == [r["participants"] for r in avg]
        assert dpc[0]["train_loss"] == avg[0]["train_loss"]
    assert runs["feddpc-seed0"][0]["participants"] != runs["feddpc-seed1"][0]["participants"]
    again = feddpc(*args, *QUICK, cwd=tmp_path, check=False)
    assert again.returncode == 2
    assert "already holds a comparison: add --resume" in again.stderr
    report = feddpc("report", "X", cwd=tmp_path)
    assert "fedavg" in report.stdout


@pytest.mark.parametrize(("method", "memory"), [("feddpc", "auto"), ("fedvarp", "auto"), ("fedvarp", "disk")])
def test_kill_nine_and_resume(tmp_path, method, memory):
    """Killed at several moments and resumed: byte for byte the records of an uninterrupted run, but for seconds."""
    args = ["run", "--method", method, "--rounds", "60", *QUICK]
    feddpc(*args, "--out", "whole", cwd=tmp_path)
    feddpc_args = [*args, "--client-memory", memory, "--checkpoint-seconds", "0.02", "--out", "cut"]
    for rounds in (1, 11, 25, 44):
        process = start(*feddpc_args, *(["--resume"] if rounds > 1 else []), cwd=tmp_path)
        wait_for_rounds(tmp_path / "cut" / "rounds.jsonl", rounds, process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    feddpc(*feddpc_args, "--resume", cwd=tmp_path)
    assert without_seconds(tmp_path / "cut") == without_seconds(tmp_path / "whole")
    model = "model.safetensors"
    assert (tmp_path / "cut" / model).read_bytes() == (tmp_path / "whole" / model).read_bytes()


def test_control_c_ends_after_the_round_with_a_checkpoint(tmp_path):
    args = ["run", "--rounds", "2000", *QUICK, "--out", "r"]
    process = start(*args, cwd=tmp_path)
    wait_for_rounds(tmp_path / "r" / "rounds.jsonl", 5, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "interrupted, stopped after round" in out
    done = len(read_records(tmp_path / "r" / "rounds.jsonl"))
    note = json.loads((tmp_path / "r" / "checkpoint" / "checkpoint.json").read_text())
    assert note["round"] == done
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["status"] == "interrupted"
    broken = feddpc("run", "--out", "r", "--resume", "--set", "rounds=2.5", cwd=tmp_path, check=False)
    assert (broken.returncode, "rounds = 2.5 is a float" in broken.stderr) == (2, True)
    feddpc("run", "--out", "r", "--resume", "--rounds", str(done + 3), cwd=tmp_path)
    assert len(read_records(tmp_path / "r" / "rounds.jsonl")) == done + 3


def test_a_comparison_goes_on_after_a_kill(tmp_path):
    args = ["compare", "--methods", "fedavg,fedcm", "--rounds", "25", "--seeds", "0,1", *QUICK]
    feddpc(*args, "--out", "whole", cwd=tmp_path)
    process = start(*args, "--out", "cut", "--checkpoint-seconds", "0.02", cwd=tmp_path)
    wait_for_rounds(tmp_path / "cut" / "fedcm-seed0" / "rounds.jsonl", 7, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    unfinished = feddpc("report", "cut", cwd=tmp_path)
    assert "unfinished" in unfinished.stdout
    feddpc("compare", "--out", "cut", "--resume", cwd=tmp_path)
    for name in ("fedavg-seed0", "fedcm-seed0", "fedavg-seed1", "fedcm-seed1"):
        assert without_seconds(tmp_path / "cut" / name) == without_seconds(tmp_path / "whole" / name)


def test_one_diverging_method_does_not_stop_the_others(tmp_path):
    done = feddpc(
        "compare",
        "--methods",
        "fedprox,fedavg",
        "--set",
        "mu=1e30",
        "--rounds",
        "12",
        "--out",
        "X",
        *QUICK,
        cwd=tmp_path,
    )
    assert "diverged" in done.stdout
    assert json.loads((tmp_path / "X" / "fedavg-seed0" / "summary.json").read_text())["status"] == "finished"
    summary = json.loads((tmp_path / "X" / "fedprox-seed0" / "summary.json").read_text())
    assert summary["status"] == "diverged"
    alone = feddpc(
        "run", "--method", "fedprox", "--set", "mu=1e30", "--rounds", "12", *QUICK, cwd=tmp_path, check=False
    )
    assert alone.returncode == 1


def test_json_is_all_that_standard_output_holds(tmp_path):
    done = feddpc("run", "--rounds", "3", "--json", "--out", "r", *QUICK, cwd=tmp_path)
    summary = json.loads(done.stdout)
    assert (summary["method"], summary["rounds"], summary["folder"]) == ("feddpc", 3, "r")
    assert "round 3/3" in done.stderr
    both = json.loads(
        feddpc(
            "compare", "--methods", "fedavg", "--rounds", "2", "--json", "--quiet", "--out", "c", *QUICK, cwd=tmp_path
        ).stdout
    )
    assert [run["rounds"] for run in both["runs"]] == [2]
    assert both["table"][0]["label"] == "fedavg"


def test_quiet_is_quiet(tmp_path):
    done = feddpc("run", "--rounds", "2", "--quiet", *QUICK, cwd=tmp_path, fresh=True)
    assert (done.stdout, done.stderr) == ("", "")
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_flag_wins_over_file_wins_over_default(tmp_path):
    (tmp_path / "c.toml").write_text(
        'method = "fedcm"\nrounds = 3\nlr = 0.2\nclients = 20\ncohort = 4\nmodel = "mlp"\n[hyper]\nalpha = 0.5\n'
    )
    feddpc("run", "--config", "c.toml", "--rounds", "2", "--set", "model.hidden=[8]", "--out", "r", cwd=tmp_path)
    from feddpc.runs.stored import load

    config = load(tmp_path / "r").config
    assert (config.method, config.rounds, config.lr, config.batch_size) == ("fedcm", 2, 0.2, 32)
    assert (config.hyper, config.model_options) == ({"alpha": 0.5}, {"hidden": [8]})


def test_a_file_may_name_methods_and_seeds(tmp_path):
    (tmp_path / "c.toml").write_text(
        'methods = ["fedavg", "fedcm"]\nseeds = [3]\nrounds = 1\n[hyper.fedcm]\nalpha = 0.3\n'
    )
    feddpc("compare", "--config", "c.toml", "--out", "X", *QUICK, cwd=tmp_path)
    assert json.loads((tmp_path / "X" / "fedcm-seed3" / "summary.json").read_text())["hyper"] == {"alpha": 0.3}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["run", "--method", "fedpdc"], "unknown method 'fedpdc': did you mean 'feddc' or 'feddpc'"),
        (["run", "--data", "digit"], "did you mean 'digits'"),
        (["run", "--data", "cifar100"], "feddpc data get cifar100"),
        (["run", "--model", "cn"], "did you mean 'cnn'"),
        (["run", "--partition", "dirichlt"], "did you mean 'dirichlet'"),
        (["run", "--participation", "unifrom"], "did you mean 'uniform'"),
        (["run", "--engine", "lop"], "did you mean 'loop'"),
        (["run", "--scaling", "haff"], "did you mean 'half'"),
        (["run", "--device", "warp"], "device = 'warp' cannot be used"),
        (["run", "--set", "lamda=1"], "unknown key 'lamda': did you mean 'lam'"),
        (["run", "--set", "lam=big"], "lam = 'big' is a str, expected float"),
        (["run", "--set", "lam"], "write KEY=VALUE"),
        (["run", "--set", "method=fedavg"], "use --method"),
        (["run", "--method", ""], "unknown method ''"),
        (["run", "--device", "meta"], "device = 'meta' cannot be used"),
        (["run", "--out", "x" * 300], "File name too long"),
        (["run", "--set", "model.width=1000000000000"], "cannot be built"),
        (["run", "--participation", "weighted", "--set", "participation.weights=abc"], "must be numbers"),
        (["run", "--method", "clusterfedvarp", "--set", "clusters=[['a']]"], "groups of client ids"),
        (
            ["compare", "--methods", "fedavg,clusterfedvarp", "--clients", "5", "--cohort", "2"],
            "clusters = 10 but there are 5",
        ),
        (["compare", "--set", "seed=5"], "use --seed"),
        (["partition", "--out", "p.jpg"], "the picture is a PNG"),
        (["run", "--set", "model.grups=3"], "unknown option of model"),
        (["run", "--cohort", "101"], "cohort = 101: must be at most clients = 100"),
        (["run", "--clients", "0"], "clients = 0"),
        (["run", "--clients", "5000", "--cohort", "3"], "only 1438 samples"),
        (["run", "--lr", "-0.1"], "lr = -0.1"),
        (["run", "--alpha", "0"], "alpha = 0"),
        (["run", "--alpha", "0.2", "--set", "partition.min_size=14"], "min_size = 14"),
        (["run", "--dropout", "1"], "dropout = 1.0"),
        (["run", "--seed", "-1"], "seed = -1"),
        (["run", "--rounds", "x"], "--rounds"),
        (["run", "--nonsense"], "nonsense"),
        (["run", "--config", "absent.toml"], "there is no file absent.toml"),
        (["run", "--resume"], "--resume needs --out"),
        (["run", "--model", "lenet5"], "too small for lenet5"),
        (["run", "--participation", "cyclic", "--set", "participation.groups=50"], "cohort"),
        (["compare", "--methods", "feddpc,,fedavg"], "--methods"),
        (["compare", "--methods", "feddpc,feddpc"], "methods = feddpc, feddpc"),
        (["compare", "--seeds", "a"], "seeds = 'a'"),
        (["methods", "fedfoo"], "unknown method 'fedfoo'"),
        (["report", "absent"], "absent"),
        (["partition", "--clients", "0"], "clients = 0"),
        (["run", "--transform", "noisy"], "FILE.py:NAME"),
        (["run", "--loss", "huber"], "loss = 'huber'"),
        (["data", "check", "cifar100"], "cifar100"),
    ],
)
def test_mistakes_are_one_line_and_exit_two(tmp_path, monkeypatch, capsys, args, message):
    """In this process, because there are many; main() is what the installed command calls."""
    monkeypatch.setenv("FEDDPC_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["feddpc", *args])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert message in re.sub(r"\s+", " ", said), said
    assert not (tmp_path / "runs").exists()


def test_resume_with_another_configuration_names_the_key(tmp_path):
    feddpc("run", "--rounds", "2", "--out", "r", *QUICK, cwd=tmp_path)
    unknown = feddpc("run", "--method", "fedpdc", cwd=tmp_path, check=False)
    assert (unknown.returncode, unknown.stdout) == (2, "")
    for flags, said in ((["--lr", "0.3"], "lr = 0.3, was 0.1"), (["--set", "lam=3"], "hyper.lam = 3, was 1.0")):
        done = feddpc("run", "--out", "r", "--resume", *flags, cwd=tmp_path, check=False)
        assert done.returncode == 2
        assert said in done.stderr


def test_a_comparison_may_grow_but_not_change(tmp_path):
    feddpc("compare", "--methods", "fedavg", "--rounds", "2", "--out", "X", *QUICK, cwd=tmp_path)
    done = feddpc(
        "compare", "--extend", "--methods", "fedcm", "--alpha", "0.6", "--out", "X", cwd=tmp_path, check=False
    )
    assert done.returncode == 2
    assert "alpha = 0.6, was 0.2" in done.stderr
    refused = feddpc("compare", "--resume", "--methods", "fedcm", "--out", "X", cwd=tmp_path, check=False)
    assert refused.returncode == 2
    assert re.search(r"methods = \['fedavg', 'fedcm'\], was \['fedavg'\].*--extend", refused.stderr, re.S)
    feddpc("compare", "--extend", "--methods", "fedcm", "--rounds", "3", "--out", "X", cwd=tmp_path)
    plan = json.loads((tmp_path / "X" / "compare.json").read_text())
    assert plan["runs"] == ["fedavg-seed0", "fedcm-seed0"]
    for name in plan["runs"]:
        assert len(read_records(tmp_path / "X" / name / "rounds.jsonl")) == 3
    assert "threads = 1" in (tmp_path / "X" / "fedcm-seed0" / "config.toml").read_text()


def test_a_configuration_may_come_through_a_pipe(tmp_path):
    reading, writing = os.pipe()
    os.write(writing, b'method = "fedavg"\nbatch-size = 4\nrounds = 1\n')
    os.close(writing)
    done = subprocess.run(
        [sys.executable, "-m", "feddpc", "run", "--config", f"/dev/fd/{reading}", "--out", "r", *QUICK],
        cwd=tmp_path,
        env=ENV,
        pass_fds=[reading],
        capture_output=True,
        text=True,
    )
    os.close(reading)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "r" / "config.toml").read_text()
    assert 'method = "fedavg"' in text
    assert "batch_size = 4" in text


def test_a_report_does_not_overwrite_what_is_not_its_own(tmp_path):
    feddpc("run", "--rounds", "1", "--out", "paper/run", *QUICK, cwd=tmp_path)
    (tmp_path / "paper" / "site").mkdir()
    (tmp_path / "paper" / "site" / "config.toml").write_text('title = "a web site"')
    feddpc("report", "paper", cwd=tmp_path)
    feddpc("report", "paper", cwd=tmp_path)  # over its own
    resumed = feddpc("run", "--resume", "--out", "paper", cwd=tmp_path, check=False)
    assert (resumed.returncode, "no config.toml" in resumed.stderr) == (2, True)
    (tmp_path / "paper" / "report.html").write_text("years of work")
    done = feddpc("report", "paper", cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert (tmp_path / "paper" / "report.html").read_text() == "years of work"


def test_partition_prints_and_draws(tmp_path):
    done = feddpc("partition", "--alpha", "0.6", "--clients", "30", cwd=tmp_path)
    assert "mean label distance" in done.stdout
    assert (tmp_path / "partition.png").read_bytes()[:4] == b"\x89PNG"
    facts = json.loads(feddpc("partition", "--partition", "shards", "--json", cwd=tmp_path).stdout)
    assert facts["clients"] == 100
    assert facts["shards"] == 2


def test_targets_that_are_no_classes_have_no_picture(tmp_path):
    done = feddpc("partition", "--data", "diabetes", "--clients", "10", cwd=tmp_path)
    assert "iid" in done.stdout
    done = feddpc("run", "--data", "diabetes", "--rounds", "1", "--out", "R", cwd=tmp_path)
    assert "warning" not in done.stderr
    assert not list(tmp_path.rglob("partition.png"))


def test_owners_in_the_data_are_the_partition(tmp_path):
    (tmp_path / "t.csv").write_text("a,b,who\n" + "".join(f"{i}.5,{i % 2},w{i % 3}\n" for i in range(30)))
    chosen = ["--data", "t.csv", "--set", "data.target=b", "--set", "data.client=who"]
    facts = json.loads(feddpc("partition", *chosen, "--json", cwd=tmp_path).stdout)
    assert (facts["partition"], facts["clients"]) == ("natural", 3)


def test_methods_are_listed_and_explained(tmp_path):
    listing = feddpc("methods", cwd=tmp_path).stdout
    for name in ("feddpc", "fedavg", "fedprox", "fedexp", "fedga", "fedcm", "fedvarp", "clusterfedvarp"):
        assert re.search(rf"^{name}\s", listing, re.M)
    text = feddpc("methods", "feddpc", cwd=tmp_path).stdout
    for part in ("lambda + |D_j| / |r_j|", "lam = 1.0", "server state", "arXiv:2512.20329"):
        assert part in text
    assert ">>>" not in text
    facts = json.loads(feddpc("methods", "--json", cwd=tmp_path).stdout)
    assert {f["name"] for f in facts} >= {"feddpc", "fedavg"}
    assert not any("measured" in f for f in facts)
    counted = json.loads(feddpc("methods", "fedavg", "--measure", "--json", cwd=tmp_path).stdout)
    assert (counted["measured"]["down"], counted["measured"]["up"]) == (1.0, 1.0)


def test_own_method_from_a_file_and_its_resume(tmp_path):
    spec = f"{Path(__file__).parents[2] / 'examples' / 'own_method.py'}:ShortSteps"
    feddpc("compare", "--methods", f"fedavg,{spec}", "--rounds", "2", "--out", "X", *QUICK, cwd=tmp_path)
    feddpc("compare", "--out", "X", "--resume", "--rounds", "3", "--methods", spec, cwd=tmp_path)
    assert len(read_records(tmp_path / "X" / "shortsteps-seed0" / "rounds.jsonl")) == 3
    assert len(read_records(tmp_path / "X" / "fedavg-seed0" / "rounds.jsonl")) == 3


def test_version(tmp_path):
    from feddpc import __version__

    assert feddpc("--version", cwd=tmp_path, fresh=True).stdout.strip() == __version__
