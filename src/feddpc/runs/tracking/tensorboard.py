"""TensorBoard: an event file in the run folder, ``tensorboard --logdir FOLDER`` shows it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import text

from feddpc.config import Config, write_toml
from feddpc.runs.tracking.base import SECONDS, Tracker, dated, values


def make() -> Tracker:
    """Return the tracker."""
    return TensorBoard()


class TensorBoard:
    """Writes one event per round, with all its numbers.

    Here and not in the thread of torch's SummaryWriter: a full disk is then an error of this call and no traceback
    from elsewhere, and a round costs a tenth. A resumed run writes its file again from the records, so that there are
    neither gaps, where a killed run had not yet written, nor rounds that come twice.
    """

    name = "tensorboard"

    def begin(self, config: Config, folder: Path, past: Sequence[dict[str, Any]]) -> None:
        """Open a new event file, fill it with the past, then remove older ones."""
        place = folder / "tensorboard"
        place.mkdir(exist_ok=True)
        before = list(place.glob("events.out.tfevents.*"))
        now = time.time()
        self._file: IO[bytes] = (place / f"events.out.tfevents.{time.time_ns()}.feddpc").open("wb")
        self._events, self._due = RecordWriter(self._file), time.monotonic() + SECONDS
        self._write(Event(wall_time=now, file_version="brain.Event:2"))
        code = "".join(f"    {line}\n" for line in write_toml(config.asdict()).splitlines())
        self._write(Event(wall_time=now, summary=text("config", code)))  # type: ignore[no-untyped-call]
        for record, when in dated(past, now):
            self._add(record, when)
        self._file.flush()
        for path in before:
            path.unlink()

    def round(self, record: dict[str, Any]) -> None:
        """Write one round."""
        self._add(record, time.time())

    def end(self, summary: dict[str, Any] | None) -> None:
        """Close the file."""
        self._file.close()

    def _add(self, record: dict[str, Any], when: float) -> None:
        scalars = [Summary.Value(tag=key, simple_value=value) for key, value in values(record).items()]
        self._write(Event(wall_time=when, step=record["round"], summary=Summary(value=scalars)))

    def _write(self, event: Event) -> None:
        """Write an event; to the disk every few seconds."""
        try:
            self._events.write(event.SerializeToString())
            if time.monotonic() >= self._due:
                self._file.flush()
                self._due = time.monotonic() + SECONDS
        except OSError:
            with suppress(OSError):
                self._file.close()
            raise
