"""Who does the work: this process, or several of this machine; for other machines see ``ray_workers``."""

from __future__ import annotations

import multiprocessing
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import NamedTuple, Self

from feddpc.checks import check_int
from feddpc.runs.runner import Stop
from feddpc.study.batch import Batch, Ran, run_batch

Tick = Callable[[], None]


class Returned(NamedTuple):
    """A batch that came back: what was run, or how its worker died."""

    batch: Batch
    ran: list[Ran]
    died: str = ""


class Crew(ABC):
    """Workers that are ready: batches go out, and come back in any order."""

    def __enter__(self) -> Self:
        return self

    @property
    @abstractmethod
    def size(self) -> int:
        """How many batches may be out at a time."""

    @abstractmethod
    def start(self, batch: Batch) -> None:
        """Send a batch out."""

    @abstractmethod
    def wait(self, seconds: float, tick: Tick) -> list[Returned]:
        """Return what has come back, after at most ``seconds`` unless something is done here; ``tick`` now and then."""

    @abstractmethod
    def stop(self) -> None:
        """Ask all workers to stop after their present round."""

    @abstractmethod
    def __exit__(self, *exc: object) -> None:
        """Send everybody home."""


#: Times ``at_once`` items that are taken at most, where items follow each other without a wait.
AHEAD = 8


@dataclass(frozen=True)
class Workers(ABC):
    """A kind of workers; each runs ``at_once`` items of one world beside each other."""

    at_once: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        check_int("at_once", self.at_once, 1)

    def load(self, left: int) -> int:
        """Return how many of ``left`` items a worker is given; if it dies, all of them must be run again."""
        return self.at_once

    @abstractmethod
    def ready(self, stop: Stop) -> Crew:
        """Return a crew; ``stop`` is the wish to stop of the process that asks."""


@dataclass(frozen=True)
class InProcess(Workers):
    """This process, one batch after the other."""

    def load(self, left: int) -> int:
        """Where several run at once, return more, so that the next begins as one ends: half, the rest is for others."""
        return self.at_once if self.at_once == 1 else max(self.at_once, min(AHEAD * self.at_once, left // 2))

    def ready(self, stop: Stop) -> Crew:
        """Return a crew of one."""
        return _Here(stop)


class _Here(Crew):
    def __init__(self, stop: Stop) -> None:
        self.wish = stop
        self.batch: Batch | None = None

    @property
    def size(self) -> int:
        return 1

    def start(self, batch: Batch) -> None:
        self.batch = batch

    def wait(self, seconds: float, tick: Tick) -> list[Returned]:
        batch, self.batch = self.batch, None
        if batch is None:
            return []
        return [Returned(batch, run_batch(batch, on_round=lambda _: tick(), stop=self.wish))]

    def stop(self) -> None:
        """Nobody need be asked: the runs have the same wish."""

    def __exit__(self, *exc: object) -> None:
        """Nobody is to be sent home."""


@dataclass(frozen=True)
class Processes(Workers):
    """Several processes of this machine, one thread each."""

    count: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("processes", self.count, 1)

    def ready(self, stop: Stop) -> Crew:
        """Start the processes."""
        return _Apart(self.count)


@dataclass
class _Hand:
    """One process and the line to it."""

    process: BaseProcess
    line: Connection
    batch: Batch | None = None


class _Apart(Crew):
    def __init__(self, count: int) -> None:
        self.count = count
        self.hands: list[_Hand] = []

    @property
    def size(self) -> int:
        return self.count

    def start(self, batch: Batch) -> None:
        hand = next((h for h in self.hands if h.batch is None), None)
        if hand is None:
            hand = _hire()
            self.hands.append(hand)
        hand.batch = batch
        with suppress(OSError):  # one that has died is noticed when it is waited for
            hand.line.send(batch)

    def wait(self, seconds: float, tick: Tick) -> list[Returned]:
        tick()
        busy = {h.line: h for h in self.hands if h.batch is not None}
        back = []
        for line in wait(list(busy), timeout=seconds):
            hand = busy[line]  # type: ignore[index]
            assert hand.batch is not None
            batch, hand.batch = hand.batch, None
            try:
                back.append(Returned(batch, hand.line.recv()))
            except (EOFError, OSError):
                self._dismiss(hand)
                back.append(Returned(batch, [], _death(hand.process.exitcode)))
        return back

    def stop(self) -> None:
        for hand in self.hands:
            if hand.process.is_alive():
                hand.process.terminate()

    def _dismiss(self, hand: _Hand) -> None:
        """Let go of a process that has died."""
        hand.line.close()
        hand.process.join()
        self.hands.remove(hand)

    def __exit__(self, *exc: object) -> None:
        for hand in self.hands:
            hand.line.close()  # an idle one leaves now, a busy one after its round
        if exc[0] is not None:
            self.stop()
        for hand in self.hands:
            hand.process.join()


def _hire() -> _Hand:
    # Not forked: a process that has used threads or a GPU cannot be copied.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, os.getpid()), name="sweep worker", daemon=True)
    with _deaf_to_control_c():
        process.start()
    theirs.close()
    return _Hand(process, ours)


@contextmanager
def _deaf_to_control_c() -> Iterator[None]:
    """Within, processes are started that Ctrl-C does not reach: it is for this one, who says what to do."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _death(code: int | None) -> str:
    """Say how a process died.

    >>> _death(-9), _death(1)
    ('killed by SIGKILL', 'exit code 1')
    """
    return f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"


def _work(line: Connection, parent: int) -> None:
    """Be a worker process: run batches until the line is closed, or the parent is gone."""
    import torch

    torch.set_num_threads(1)
    stop = Stop()

    def wish(*_: object) -> None:
        stop.wanted = True

    signal.signal(signal.SIGTERM, wish)

    def watch(_: object) -> None:
        if os.getppid() != parent:
            stop.wanted = True

    while not stop.wanted:
        try:
            if line.poll(1.0):
                line.send(run_batch(line.recv(), on_round=watch, stop=stop))
        except (EOFError, OSError):
            return
