"""Runs with curves that are known beforehand, and a browser to look at their pages."""

import json
from pathlib import Path

import pytest

from browser import Browser, find_chromium
from feddpc.config import Config, write_toml
from feddpc.runs.stored import StoredRun


@pytest.fixture
def make_run():
    """Return a maker of runs: one record for each accuracy, whatever the configuration."""

    def make(
        method="fedavg",
        accuracy=(0.5,),
        *,
        seed=0,
        loss=None,
        status="finished",
        reason=None,
        notes=None,
        folder=None,
        environment=None,
        holdings=None,
        per_client=None,
        costs=None,
        who=lambda t: {"participants": [0, 1]},
        **config,
    ):
        accuracy = list(accuracy)
        loss = [1.0] * len(accuracy) if loss is None else list(loss)
        whole = {"rounds": max(1, len(accuracy)), "batch_size": 32, "server_lr": 0.1, "engine": "loop", "device": "cpu"}
        settings = Config.read(whole | {"method": method, "seed": seed} | config)
        records = [
            {"round": t, "test_accuracy": a, "test_loss": x, "train_loss": x, "seconds": 0.5 * t}
            | {"participants": [], "dropped": [], "rejected": []}
            | who(t)
            | {key: values[t - 1] for key, values in (notes or {}).items()}
            for t, (a, x) in enumerate(zip(accuracy, loss, strict=True), start=1)
        ]
        summary = None if status is None else {"status": status, "reason": reason, "rounds": len(records)}
        summary = summary and summary | ({"costs": costs} if costs else {})
        where = folder or Path("nowhere") / f"{method}-seed{seed}"
        return StoredRun(
            where, settings, records, summary, environment or {}, holdings=holdings or {}, clients=per_client or {}
        )

    return make


@pytest.fixture
def store():
    """Return a writer of run folders."""

    def write(run):
        run.folder.mkdir(parents=True)
        (run.folder / "config.toml").write_text(write_toml(run.config.asdict()), encoding="utf-8")
        (run.folder / "rounds.jsonl").write_text("".join(json.dumps(r) + "\n" for r in run.records), encoding="utf-8")
        if run.summary is not None:
            (run.folder / "summary.json").write_text(json.dumps(run.summary), encoding="utf-8")
        return run.folder

    return write


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """A headless browser; the tests that need one are skipped, and say so, where there is none."""
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium on this machine: install one, or name it in FEDDPC_CHROMIUM")
    shown = Browser(program, tmp_path_factory.mktemp("profile"))
    yield shown
    shown.close()
