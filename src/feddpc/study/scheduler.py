"""Running what is not there yet: claims, batches, workers that die, and what is told meanwhile."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from feddpc.runs.runner import CHECKPOINT_SECONDS, Stop
from feddpc.storage import explain_os_errors
from feddpc.study import setup_cache
from feddpc.study.batch import Batch, Ran
from feddpc.study.claims import Claims
from feddpc.study.item import Item
from feddpc.study.outcome import Outcome
from feddpc.study.store import Store
from feddpc.study.workers import Crew, InProcess, Returned, Workers
from feddpc.torch_globals import preserve_torch_globals

#: How often a worker may die over an item before the item is given up.
DEATHS = 3
#: Seconds between two looks at what others do, and between two reports of progress.
POLL = 0.5


@dataclass(frozen=True)
class Progress:
    """How far a sweep is."""

    total: int
    ended: int  #: done or diverged
    failed: int
    running: int
    rounds: int  #: recorded so far, in all items
    all_rounds: int  #: to be recorded in all


OnProgress = Callable[[Progress], None]


@preserve_torch_globals()
def execute(
    items: Sequence[Item],
    folder: Path,
    *,
    workers: Workers | None = None,
    on_progress: OnProgress | None = None,
    stop: Stop | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> list[Outcome]:
    """Run what is not there yet and return the outcomes of all items, in their order.

    Items that were run before are not run again, one that was cut off goes on from its checkpoint, and one that failed
    is tried once more. Other calls may work on the same folder, from this machine or another: they share the work, and
    each returns when all its items are there; but they must be processes, not threads of one. A wish to ``stop`` is
    obeyed after the present round.
    """
    sweep = _Sweep(items, folder, checkpoint_seconds, on_progress, stop or Stop())
    sweep.run(workers or InProcess())
    outcomes = {key: sweep.outcome(key) for key in sweep.items}
    sweep.store.write_results(list(outcomes.values()))
    return [dataclasses.replace(outcomes[item.key], item=item) for item in items]


class _Sweep:
    """One call of :func:`execute`."""

    def __init__(
        self, items: Sequence[Item], folder: Path, checkpoint_seconds: float, on_progress: OnProgress | None, stop: Stop
    ) -> None:
        self.store, self.stop, self.on_progress = Store(folder), stop, on_progress
        self.checkpoint_seconds = checkpoint_seconds
        self.items = {item.key: item for item in items}
        self.store.make()
        self.outcomes = {key: self.store.read(item) for key, item in self.items.items()}
        self.open = _by_world([item for key, item in self.items.items() if not self.outcomes[key].ended])
        for item in self.open:
            self.store.forgive(item.key)
        self.out: list[Batch] = []
        self.deaths: Counter[str] = Counter()
        self.not_before: dict[str, float] = {}
        self.told = 0.0

    def run(self, workers: Workers) -> None:
        """Work until nothing is open, or somebody wants to stop."""
        if not self.open:
            return
        with Claims(self.store.folder) as claims, workers.ready(self.stop) as crew:
            stopping = False
            while self.open or self.out:
                if self.stop.wanted and not stopping:
                    stopping = True
                    crew.stop()
                if stopping and not self.out:
                    return
                while not stopping and len(self.out) < crew.size and self._send(claims, crew, workers):
                    pass
                if self.out:
                    for returned in crew.wait(POLL, self._tick):
                        self._receive(returned, claims)
                elif self.open:
                    self._tick()
                    time.sleep(POLL)  # others are at what is left

    def outcome(self, key: str) -> Outcome:
        """Return what came of an item, read anew unless it was complete before."""
        if not self.outcomes[key].ended:
            self.outcomes[key] = self.store.read(self.items[key])
        return self.outcomes[key]

    def _send(self, claims: Claims, crew: Crew, workers: Workers) -> bool:
        """Give the next items that nobody has to a worker; False if there are none."""
        batch: list[Item] = []
        load = workers.load(len(self.open))
        out, now = {key for sent in self.out for key in sent.keys}, time.monotonic()
        for item in list(self.open):
            if batch and setup_cache.world(item.complete) != setup_cache.world(batch[0].complete):
                break
            if item.key in out or self.not_before.get(item.key, now) > now or not claims.take(item.key):
                continue
            # Only now is it sure that nobody else changes its folder.
            found = self.store.read(item)
            if found.ended or found.status == "failed":
                self._close(item.key, claims)
                continue
            if found.damaged:
                self.store.set_aside(item.key)
            batch.append(item)
            if len(batch) == load:
                break
        if not batch:
            return False
        folder = self.store.folder.resolve()
        sent = Batch(tuple(batch), folder, claims.token, self.checkpoint_seconds, workers.at_once)
        self.out.append(sent)
        crew.start(sent)
        return True

    def _receive(self, returned: Returned, claims: Claims) -> None:
        """Note how a batch went."""
        self.out.remove(returned.batch)
        keys = returned.batch.keys
        for ran in returned.ran:
            self._note(ran, claims)
        if not returned.ran:
            self.deaths.update(keys)
            for key in keys:
                if self.deaths[key] >= DEATHS:
                    self.store.fail(self.items[key], f"its worker died {DEATHS} times, last: {returned.died}")
                    self._close(key, claims)
        for key in keys:
            claims.release(key)
        self._tick(now=True)

    def _note(self, ran: Ran, claims: Claims) -> None:
        if ran.files:
            self._bring_home(ran)
        if ran.state == "failed":
            self.store.fail(self.items[ran.key], ran.message, ran.trace)
        if ran.state in ("ended", "failed"):
            self._close(ran.key, claims)
        if ran.state == "busy":
            self.not_before[ran.key] = time.monotonic() + POLL

    def _bring_home(self, ran: Ran) -> None:
        """Put a run folder in place that was made where this folder is not seen."""
        part, place = self.store.items / f".{ran.key}.part", self.store.path(ran.key)
        with explain_os_errors(place):
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            for name, content in ran.files.items():
                (part / name).write_bytes(content)
            shutil.rmtree(place, ignore_errors=True)  # an unfinished attempt
            part.rename(place)

    def _close(self, key: str, claims: Claims) -> None:
        self.open = [item for item in self.open if item.key != key]
        self.outcome(key)
        claims.release(key)

    def _tick(self, *, now: bool = False) -> None:
        """Tell how far it is, now and then."""
        if self.on_progress is None or (not now and time.monotonic() - self.told < POLL):
            return
        self.told = time.monotonic()
        for key in [key for sent in self.out for key in sent.keys if not self.outcomes[key].ended]:
            if self.store.summarized(key):  # one of a batch that is still out
                self.outcome(key)
        ended = sum(outcome.ended for outcome in self.outcomes.values())
        rounds = sum(outcome.rounds for outcome in self.outcomes.values() if outcome.ended)
        sent = [key for batch in self.out for key in batch.keys]
        running = [key for key in sent if not self.outcomes[key].ended and self.store.begun(key)]
        rounds += sum(self.store.rounds(key) for key in running)
        failed = sum(outcome.status == "failed" for outcome in self.outcomes.values())
        all_rounds = sum(item.config.rounds for item in self.items.values())
        self.on_progress(Progress(len(self.items), ended, failed, len(running), rounds, all_rounds))


def _by_world(items: Sequence[Item]) -> list[Item]:
    """Put items together that share data, partition and model, so that these are built once."""
    groups: dict[str, list[Item]] = {}
    for item in items:
        groups.setdefault(setup_cache.world(item.complete), []).append(item)
    return [item for group in groups.values() for item in group]
