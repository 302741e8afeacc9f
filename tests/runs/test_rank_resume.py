"""A run goes on with another number of ranks, and ends as one that was never cut off."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from feddpc.methods.base import Method
from feddpc.ranks import ALONE
from feddpc.runs.runner import execute
from ranks_in_threads import on_ranks
from support import VARIANTS, run_by_the_loop, small_setting

ROUNDS = 4
#: Methods whose server or clients remember something, and some that travel in other ways.
SOME = [
    "feddpc",
    "fedavg",
    "scaffold",
    "fedvarp",
    "clusterfedvarp",
    "mifa",
    "moon",
    "fedbn",
    "feddc",
    "feddyn",
    "fedamd",
]


def go(method: Method, size: int, folder: Path, rounds: int, memory: str) -> torch.Tensor:
    """Run or continue on some ranks up to a round; return the model."""
    how = {"engine": "distributed", "inner_engine": "loop", "client_memory": memory, "rounds": rounds}
    settings, mine = [small_setting(**how) for _ in range(size)], threading.local()

    def one(ranks) -> torch.Tensor:
        mine.ranks = ranks
        setting = settings[ranks.rank]
        return execute(setting, method=method, out=folder, resume=True, checkpoint_seconds=0, last_use=True).w

    with patch("feddpc.runs.runner.join", lambda *_: mine.ranks):
        models = [one(ALONE)] if size == 1 else on_ranks(size, one)
    assert all(torch.equal(model, models[0]) for model in models)
    return models[0]


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize(("before", "after", "memory"), [(2, 3, "disk"), (3, 1, "host"), (1, 2, "disk")])
def test_another_number_of_ranks_goes_on(name, before, after, memory, tmp_path):
    method = VARIANTS[name]
    go(method, before, tmp_path / "run", 2, memory)
    w = go(method, after, tmp_path / "run", ROUNDS, memory)
    expected, records = run_by_the_loop(method, {"rounds": ROUNDS}, ROUNDS)
    torch.testing.assert_close(w, expected.w, rtol=0, atol=1e-10)
    lines = [json.loads(text) for text in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert [line["participants"] for line in lines] == [record.participants for record in records]
    for line, record in zip(lines, records, strict=True):
        found = float("nan") if line["train_loss"] is None else line["train_loss"]
        assert found == pytest.approx(record.train_loss, abs=1e-10, nan_ok=True)
