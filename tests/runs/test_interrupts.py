"""Ctrl-C in `feddpc.simulate` and `feddpc.rerun`: the rounds so far are returned, and the process is left alone."""

import os
import signal
import threading

import pytest
import torch

import feddpc
from feddpc.runs.stop import Stop

QUICK = {"clients": 20, "cohort": 2, "model": "mlp", "engine": "loop", "method": "fedavg"}


def interrupt_at(number, times=1):
    """Press Ctrl-C in one round, so often."""

    def on_round(record):
        if record["round"] == number:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)

    return on_round


@pytest.fixture(autouse=True)
def default_handler():
    """A test runner in the background starts with SIGINT ignored; afterwards all handlers must be what they were."""
    runner = signal.signal(signal.SIGINT, signal.default_int_handler)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    signal.signal(signal.SIGINT, runner)


def test_the_first_interrupt_returns_the_rounds_so_far(capfd):
    result = feddpc.simulate(**QUICK, rounds=50, on_round=interrupt_at(2))
    assert result.status == result.summary["status"] == "interrupted"
    assert [r["round"] for r in result.records] == [1, 2, 3]
    assert "Ctrl-C" in capfd.readouterr().err
    whole = feddpc.simulate(**QUICK, rounds=3)
    for name, value in whole.state_dict.items():
        assert torch.equal(value, result.state_dict[name])


def test_an_interrupted_run_with_a_folder_can_be_resumed(tmp_path):
    feddpc.simulate(**QUICK, rounds=5, out=tmp_path / "r", on_round=interrupt_at(1))
    again = feddpc.simulate(**QUICK, rounds=5, out=tmp_path / "r", resume=True)
    whole = feddpc.simulate(**QUICK, rounds=5)
    assert (again.status, len(again.records)) == ("finished", 5)
    assert again.records[-1]["test_loss"] == whole.records[-1]["test_loss"]


def test_the_second_interrupt_is_obeyed_at_once():
    seen = []

    def on_round(record):
        seen.append(record["round"])
        interrupt_at(2, times=2)(record)

    with pytest.raises(KeyboardInterrupt):
        feddpc.simulate(**QUICK, rounds=50, on_round=on_round)
    assert seen == [1, 2]


def test_an_interrupted_rerun_is_compared_as_far_as_it_got(tmp_path):
    feddpc.simulate(**QUICK, rounds=5, out=tmp_path / "r")
    again = feddpc.rerun(tmp_path / "r", on_round=interrupt_at(2))
    assert again.status == "interrupted"
    assert (again.likeness.rounds, again.likeness.identical) == (3, True)


def test_a_handler_of_the_callers_own_is_left_alone():
    called = []

    def own(number, frame):
        called.append(number)

    signal.signal(signal.SIGINT, own)
    try:
        result = feddpc.simulate(**QUICK, rounds=3, on_round=interrupt_at(1))
    finally:
        assert signal.getsignal(signal.SIGINT) is own
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert called == [signal.SIGINT]
    assert (result.status, len(result.records)) == ("finished", 3)


def test_sigterm_stays_the_callers():
    seen = []
    before = signal.signal(signal.SIGTERM, lambda *_: seen.append("term"))
    try:
        result = feddpc.simulate(
            **QUICK, rounds=3, on_round=lambda r: r["round"] == 1 and os.kill(os.getpid(), signal.SIGTERM)
        )
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == ["term"]
    assert result.status == "finished"


def test_another_thread_may_simulate():
    found = []
    thread = threading.Thread(target=lambda: found.append(feddpc.simulate(**QUICK, rounds=2).status))
    thread.start()
    thread.join()
    assert found == ["finished"]


def test_the_command_line_turns_both_signals_into_a_wish():
    for number in (signal.SIGINT, signal.SIGTERM):
        stop = Stop()
        with stop.on_interrupt():
            signal.raise_signal(number)
        assert stop.wanted
