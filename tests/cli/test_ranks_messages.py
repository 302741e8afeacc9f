"""Which rank prints an error before the ranks have met: all that they can tell apart, and none is lost."""

import pytest

from feddpc import cli
from feddpc.errors import BadInputError
from feddpc.launch import PRINTED


def told(capsys, monkeypatch, rank, text):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    cli._tell(BadInputError(text))
    return capsys.readouterr().err


@pytest.fixture(autouse=True)
def _not_met(monkeypatch):
    monkeypatch.setattr("feddpc.ranks.have_met", lambda: False)


def test_ranks_started_by_us_print_each_mistake_once(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv(PRINTED, str(tmp_path))
    assert told(capsys, monkeypatch, 1, "cohort = 0") == "error: cohort = 0\n"
    assert told(capsys, monkeypatch, 0, "cohort = 0") == ""
    assert told(capsys, monkeypatch, 2, "no CUDA") == "error: no CUDA\n"


def test_ranks_started_by_others_each_print_theirs(capsys, monkeypatch):
    monkeypatch.delenv(PRINTED, raising=False)
    assert told(capsys, monkeypatch, 0, "no CUDA") == "error: no CUDA\n"
    assert told(capsys, monkeypatch, 1, "no CUDA") == "error: rank 1: no CUDA\n"
