"""Claims: one owner at a time, and owners that are gone lose theirs."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from feddpc.study import claims as module
from feddpc.study.claims import Claims, holds, is_alive, locked


@pytest.fixture
def two(tmp_path):
    with Claims(tmp_path) as one, Claims(tmp_path) as other:
        yield one, other


def test_one_owner_at_a_time(two):
    one, other = two
    assert one.take("a")
    assert not other.take("a")
    assert other.take("b")
    other.release("a")  # not its own
    assert not other.take("a")
    one.release("a")
    assert other.take("a")


def test_leaving_gives_everything_back(tmp_path):
    with Claims(tmp_path) as claims:
        claims.take("a")
        assert holds(tmp_path, "a", claims.token)
        assert not holds(tmp_path, "a", "another")
    assert not [p for p in (tmp_path / "claims").iterdir() if p.name != ".lock"]


def test_of_many_who_want_it_one_gets_it(tmp_path):
    start, got = threading.Barrier(8), []

    def want():
        with Claims(tmp_path) as claims:
            start.wait()
            got.append(claims.take("a"))
            start.wait()

    crowd = [threading.Thread(target=want) for _ in range(8)]
    for thread in crowd:
        thread.start()
    for thread in crowd:
        thread.join()
    assert sorted(got) == [False] * 7 + [True]


def pretend(claims, key, **note):
    claims.path(key).write_text(json.dumps(note))


def here(**note):
    return {"host": module.socket.gethostname(), "token": "x", **note}


def test_a_dead_owner_of_this_machine_loses_its_claim_at_once(two):
    one, _ = two
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    pretend(one, "a", **here(pid=gone.pid))
    assert one.take("a")
    pretend(one, "b", **here(pid=os.getpid(), began=1))  # the number was given to another process since
    assert one.take("b")
    pretend(one, "c", **here(pid=os.getpid()))
    assert not one.take("c")


def test_a_process_that_nobody_waits_for_is_dead():
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    until = time.monotonic() + 10
    while is_alive(child.pid) and time.monotonic() < until:
        time.sleep(0.01)
    assert not is_alive(child.pid)  # a zombie still has its number
    child.wait()
    assert is_alive(os.getpid())
    assert is_alive(1)
    assert not is_alive(0)


def test_an_owner_elsewhere_is_believed_gone_after_a_minute_of_silence(two):
    one, _ = two
    pretend(one, "a", host="elsewhere", pid=os.getpid(), token="x")
    assert not one.take("a")
    silent = time.time() - module.GONE - 5
    os.utime(one.path("a"), (silent, silent))
    assert one.take("a")


@pytest.mark.parametrize("damage", ["", "[]", "{", '{"host": 3}'])
def test_a_damaged_claim_is_that_of_somebody_elsewhere(two, damage):
    one, _ = two
    one.path("a").write_text(damage)
    assert not one.take("a")
    os.utime(one.path("a"), (1, 1))
    assert one.take("a")


def test_a_claim_shows_that_its_owner_lives(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BEAT", 0.02)
    with Claims(tmp_path) as claims:
        claims.take("a")
        os.utime(claims.path("a"), (1, 1))
        until = time.monotonic() + 10
        while claims.path("a").stat().st_mtime < 2 and time.monotonic() < until:
            time.sleep(0.01)
        assert claims.path("a").stat().st_mtime == pytest.approx(time.time(), abs=5)


def test_being_alone_means_that_others_wait(tmp_path):
    order = []

    def second():
        with locked(tmp_path):
            order.append("second")

    with locked(tmp_path):
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.05)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
