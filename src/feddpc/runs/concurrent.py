"""Several runs at once on one GPU: a small model leaves most of it idle.

Every run has a thread and a stream of its own, and shares nothing but the data with the others, so its numbers are
those that it has alone. While one thread waits for its round, another prepares the next one of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import nullcontext
from typing import TypeVar

import torch

from feddpc.experiment import Experiment

T = TypeVar("T")


def clone_for_thread(experiment: Experiment) -> Experiment:
    """Return ``experiment`` for another thread: with a network of its own, and the same data."""
    return experiment.with_task(experiment.task.twin())


def run_concurrently(jobs: Sequence[Callable[[], T]], at_once: int) -> list[T]:
    """Run ``jobs``, at most ``at_once`` of them at a time, and return what they return, in order.

    When one fails, those that run are finished, the others are not begun, and its error is raised.

    >>> run_concurrently([lambda: 1, lambda: 2, lambda: 3], at_once=2)
    [1, 2, 3]
    """
    if at_once > 1 and torch.cuda.is_available() and not _locked():
        warnings.warn("several runs at once on a GPU need torch 2.10 or later: going on with one", stacklevel=2)
        at_once = 1
    if at_once == 1:
        return [job() for job in jobs]
    with ThreadPoolExecutor(at_once) as pool:
        running = [pool.submit(_on_own_stream, job) for job in jobs]
        try:
            wait(running, return_when=FIRST_EXCEPTION)
        except BaseException:  # Ctrl-C
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        for job in running:
            if job.done() and not job.cancelled() and job.exception():
                pool.shutdown(wait=False, cancel_futures=True)
        failed = next((e for e in (j.exception() for j in running if not j.cancelled()) if e), None)
        if failed:
            raise failed
        return [job.result() for job in running]


def _locked() -> bool:
    """Whether torch's table of scratch memory for matrix products, which capturing clears, is safe between threads."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 10)


def _on_own_stream(job: Callable[[], T]) -> T:
    cuda = torch.cuda.is_available()
    with torch.cuda.stream(torch.cuda.Stream()) if cuda else nullcontext():  # type: ignore[no-untyped-call]
        return job()
