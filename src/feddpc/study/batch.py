"""The work itself: some items, run in this process, on a GPU beside each other."""

from __future__ import annotations

import atexit
import shutil
import tempfile
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from feddpc.errors import FeddpcError, FolderInUseError, RunFolderError
from feddpc.runs.concurrent import clone_for_thread, run_concurrently
from feddpc.runs.record import is_run
from feddpc.runs.runner import Stop, execute
from feddpc.storage import without_sync
from feddpc.study import claims, setup_cache
from feddpc.study.item import Item, with_how
from feddpc.study.store import Store

#: What a run folder is sent home with, from a machine that does not see the folder of the sweep.
SENT = ("environment.json", "config.toml", "privacy.json", "rounds.jsonl", "summary.json")
OnRound = Callable[[dict[str, Any]], None]
#: Runs beside each other are prepared one at a time: they share what is built for a world.
PREPARING = threading.Lock()


@dataclass(frozen=True)
class Batch:
    """Items for one worker, all of one world; ``token`` is that of the sweep that has claimed them in ``folder``."""

    items: tuple[Item, ...]
    folder: Path
    token: str
    checkpoint_seconds: float
    at_once: int = 1  #: so many beside each other
    home: Path = field(default_factory=Path.cwd)  #: where relative paths begin

    @property
    def keys(self) -> list[str]:
        """The keys of the items."""
        return [item.key for item in self.items]


class Ran(NamedTuple):
    """What a worker says about an item: ended, interrupted, busy (somebody else holds its folder) or failed."""

    key: str
    state: str
    message: str = ""
    trace: str = ""
    files: dict[str, bytes] = {}  # noqa: RUF012 -- the run folder, where the worker could not write to that of the sweep


def run_batch(batch: Batch, *, on_round: OnRound | None = None, stop: Stop | None = None) -> list[Ran]:
    """Run the items of a batch, as many at once as it says, and tell how it went."""
    wish, told = stop or Stop(), threading.Lock()
    seen = claims.holds(batch.folder, batch.items[0].key, batch.token)
    store = Store(batch.folder if seen else _scratch())
    store.make()

    def tell(record: dict[str, Any]) -> None:
        with told:
            if on_round is not None:
                on_round(record)

    def run(item: Item) -> Ran:
        if wish.wanted:
            return Ran(item.key, "interrupted")
        with without_sync():  # what a crash of the machine spoils is found out and run again
            result = _attempt(item, store, batch.checkpoint_seconds, tell, wish, alone=len(batch.items) == 1)
        return result if seen else _packed(result, store.path(item.key))

    return run_concurrently([partial(run, item) for item in batch.items], min(batch.at_once, len(batch.items)))


def _attempt(item: Item, store: Store, checkpoint_seconds: float, on_round: OnRound, stop: Stop, *, alone: bool) -> Ran:
    """Run one item; whatever goes wrong with it is told and stops nobody else."""
    advanced = False

    def count(record: dict[str, Any]) -> None:
        nonlocal advanced
        advanced = True
        on_round(record)

    def go() -> Ran:
        config = with_how(item.complete, item.config)
        with PREPARING:
            setting = setup_cache.setting(config)
            setting = setting if alone else clone_for_thread(setting)
        outcome = execute(
            setting,
            out=store.path(item.key),
            resume=True,
            on_round=count,
            stop=stop,
            checkpoint_seconds=checkpoint_seconds,
            lean=True,
        )
        return Ran(item.key, "interrupted" if outcome.status == "interrupted" else "ended")

    try:
        try:
            return go()
        except FolderInUseError:
            return Ran(item.key, "busy")
        except RunFolderError:
            if advanced or not is_run(store.path(item.key)):
                raise
            store.set_aside(item.key)  # a half run that cannot be continued
            return go()
    except FeddpcError as error:
        return Ran(item.key, "failed", str(error))
    except Exception as error:
        return Ran(item.key, "failed", f"{type(error).__name__}: {error}", traceback.format_exc())


def _packed(ran: Ran, folder: Path) -> Ran:
    """Return what was run here with its files, and clear it away."""
    if ran.state != "ended":
        return ran
    files = {name: (folder / name).read_bytes() for name in SENT}
    shutil.rmtree(folder, ignore_errors=True)
    return ran._replace(files=files)


@cache
def _scratch() -> Path:
    """Return a folder of this process for runs whose own folder it does not see."""
    place = Path(tempfile.mkdtemp(prefix="feddpc-sweep-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    return place
