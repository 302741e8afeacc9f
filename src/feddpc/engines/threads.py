"""Several clients at a time on a CPU: the reference engine, with one thread per client and one core per thread."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from feddpc.data.batches import BatchPlan
from feddpc.engines.loop import Loop
from feddpc.tasks.base import Task
from feddpc.tasks.network import NetworkTask

R = TypeVar("R")


class Threads(Loop):
    """As many clients at a time as torch has threads, each on one.

    Threads that share one client wait for each other after every operation, which costs little on an idle machine and
    much on a busy one. A client's arithmetic is that of ``loop`` with one thread, bit for bit, whatever the number of
    workers; with several threads ``loop`` itself may add in another order.
    """

    name: ClassVar[str] = "threads"

    def __init__(self, workers: int | None = None) -> None:
        self.workers = workers  #: None means as many as torch has threads
        self._threads: _TaskThreads | None = None

    def refuses(self, task: Task) -> str | None:
        """A GPU wants no threads, there is one stream of random numbers, and every thread needs a copy of the model."""
        if task.device.type != "cpu":
            return "it is for CPUs"
        if task.stochastic:
            return "the model draws random numbers (dropout), which would depend on the order of clients"
        try:
            task.twin()
        except (RuntimeError, TypeError, AttributeError) as error:
            return f"the model cannot be copied: {str(error).splitlines()[0]}"
        return None

    def each(self, work: Callable[[Task, int], R], task: Task, plan: BatchPlan) -> list[R]:
        """Do ``work`` for every client of ``plan``, those with most samples first."""
        return self._threads_of(task).each(work, np.argsort(-plan.count.sum(1), kind="stable").tolist())

    @torch.no_grad()
    def evaluate(self, task: Task, w: Tensor) -> dict[str, float]:
        """Return the metrics of ``w``, with one batch of the test set per thread; sums are those of one thread."""
        if not isinstance(task, NetworkTask) or not task.sums_suffice:
            return task.evaluate(w)
        return task.means(functools.reduce(torch.add, self.test_totals(task, w, task.test_batches())).tolist())

    @torch.no_grad()
    def test_totals(self, task: NetworkTask, w: Tensor, batches: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Return the totals of parts of the test set, one part per thread."""

        def totals_of(twin: Task, i: int) -> Tensor:
            assert isinstance(twin, NetworkTask)
            twin.module.eval()
            totals = twin.test_totals(w, *batches[i])
            twin.module.train()
            return totals

        return self._threads_of(task).each(totals_of, list(range(len(batches))))

    def _threads_of(self, task: Task) -> _TaskThreads:
        workers = self.workers or torch.get_num_threads()
        if self._threads is None or self._threads.task is not task or self._threads.workers != workers:
            self._threads = _TaskThreads(task, workers)
        return self._threads


class _TaskThreads:
    """Threads with one core each, and a twin of ``task`` for each."""

    def __init__(self, task: Task, workers: int) -> None:
        self.task, self.workers = task, workers
        self.twins = [task.twin() for _ in range(workers)]
        self.idle: queue.SimpleQueue[Task] = queue.SimpleQueue()
        for twin in self.twins:
            self.idle.put(twin)
        threads, together = torch.get_num_threads(), threading.Barrier(workers)
        self.pool = ThreadPoolExecutor(workers, "feddpc", initializer=_on_one_core)
        wait([self.pool.submit(together.wait) for _ in range(workers)])
        torch.set_num_threads(threads)  # what was set last is what new threads of others start with

    def each(self, work: Callable[[Task, int], R], order: list[int]) -> list[R]:
        """Do ``work`` in this order, and return what came of it in that of the clients."""
        jobs = {i: self.pool.submit(self._one, work, i) for i in order}
        try:
            return [jobs[i].result() for i in range(len(jobs))]
        finally:
            for job in jobs.values():  # when one failed, the others are not waited for in vain
                job.cancel()
            wait(jobs.values())
            for twin in self.twins:
                self.task.work.add(twin.work.gradients, twin.work.passes)
                twin.work.gradients = twin.work.passes = 0

    @torch.no_grad()
    def _one(self, work: Callable[[Task, int], R], i: int) -> R:
        twin = self.idle.get()
        try:
            return work(twin, i)
        finally:
            self.idle.put(twin)


def _on_one_core() -> None:
    torch.set_num_threads(1)
    torch.get_num_threads()  # a thread takes over the number that was set last when it first asks, and keeps it then
