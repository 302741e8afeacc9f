"""Several ranks as threads of this process, which exchange tensors as processes do; for tests of what ranks compute."""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from feddpc.ranks import Place, Ranks


class Room:
    """Where the ranks meet: everybody brings something, and takes what all have brought."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier = size, threading.Barrier(size, timeout=120)
        self.brought: list[Any] = [None] * size
        self.turn = threading.Condition()
        self.next = 0  #: whose turn it is
        self.mail: dict[tuple[int, int], queue.SimpleQueue[Tensor]] = {
            (a, b): queue.SimpleQueue() for a in range(size) for b in range(size)
        }

    def swap(self, rank: int, value: Any) -> list[Any]:
        self.brought[rank] = value
        self.barrier.wait()
        found = list(self.brought)
        self.barrier.wait()
        return found


class ThreadRanks(Ranks):
    """One of several ranks in this process."""

    def __init__(self, rank: int, room: Room) -> None:
        super().__init__(Place(rank, room.size, rank, room.size))
        self.room = room
        self.sent = 0  #: numbers that were added up or gathered

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """One rank after the other, so that what they do to files is done in one order."""
        with self.room.turn:
            assert self.room.turn.wait_for(lambda: self.room.next == self.rank, timeout=120)
        error = None
        try:
            yield
        except Exception as raised:
            error = raised
        with self.room.turn:
            self.room.next = (self.rank + 1) % self.size
            self.room.turn.notify_all()
        self._settle(doing, error)

    def gather(self, value: Any) -> list[Any]:
        return copy.deepcopy(self.room.swap(self.rank, value))

    def numbers(self, mine: Sequence[int]) -> list[list[int]]:
        return self.room.swap(self.rank, list(mine))

    def _add(self, x: Tensor) -> Tensor:
        self.sent += x.numel()
        parts = [part.clone() for part in self.room.swap(self.rank, x)]
        return torch.stack(parts).sum(0).to(x.dtype)

    def columns(self, mine: Tensor, counts: Sequence[int]) -> list[Tensor]:
        self.sent += mine.numel()
        mine = mine.detach().to("cpu", torch.float64).clone()
        tables = self.room.swap(self.rank, mine)
        assert [len(table) for table in tables] == list(counts)
        return tables

    def rows(self, mine: Tensor, places: Sequence[Any]) -> Tensor:
        self.sent += mine.numel()
        whole = mine.new_empty((sum(map(len, places)), *mine.shape[1:]))
        for at, part in zip(places, self.room.swap(self.rank, mine.clone()), strict=True):
            assert len(at) == len(part)
            whole[torch.from_numpy(at)] = part
        return whole

    def move(self, sent: Sequence[tuple[int, Tensor]], expected: Sequence[tuple[int, Tensor]]) -> None:
        for rank, x in sent:
            self.room.mail[self.rank, rank].put(x.clone())
        for rank, x in expected:
            x.copy_(self.room.mail[rank, self.rank].get(timeout=60))


def on_ranks(size: int, work: Callable[[ThreadRanks], Any]) -> list[Any]:
    """Do ``work`` on so many ranks at the same time and return what each of them returns."""
    room, results, errors = Room(size), [None] * size, []

    def one(rank: int) -> None:
        try:
            results[rank] = work(ThreadRanks(rank, room))
        except BaseException as error:
            errors.append(error)
            room.barrier.abort()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return results
