"""The metrics endpoint of a server app, for Prometheus: off by default, on loopback unless asked otherwise.

It only reads what the run has recorded, in a thread of its own, and never makes a round fail: a port that is in use is
logged and tried again, and an error while answering is the scraper's answer.
"""

from __future__ import annotations

import functools
import json
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from logging import INFO, WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from flwr.app import Message
from flwr.common.logger import log
from flwr.serverapp import Grid

from feddpc._version import __version__
from feddpc.errors import BadInputError
from feddpc.flower import versions
from feddpc.flower.exposition import Counts, render, render_info
from feddpc.flower.polling import GridWrapper
from feddpc.flower.run_log import REFUSALS
from feddpc.runs.record import is_run, line
from feddpc.storage import replace_text, without_sync
from feddpc.tasks.metrics import CLASSIFICATION

if TYPE_CHECKING:
    from feddpc.flower.method_strategy import MethodStrategy

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="MethodStrategy")
LOOPBACK = "127.0.0.1"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: Seconds until a port in use is tried again, and that a scraper may take to send its request.
RETRY, REQUEST_TIMEOUT = 10.0, 10.0
#: Files of a run folder: records, and how many bytes came and went.
ROUNDS, TRAFFIC = "rounds.jsonl", "traffic.json"


def address_of(value: str | int | None) -> tuple[str, int] | None:
    """Return host and port of the endpoint: a port is on loopback, 0 is any free port, None is no endpoint.

    >>> address_of(9464), address_of("0.0.0.0:9464"), address_of(None), address_of("")
    (('127.0.0.1', 9464), ('0.0.0.0', 9464), None, None)
    """
    if value is None or value == "":
        return None
    text = str(value)
    host, _, port = text.rpartition(":") if ":" in text else (LOOPBACK, "", text)
    if isinstance(value, bool) or not host or not port.isdecimal() or int(port) > 65535:
        raise BadInputError(f"prometheus = {value!r}: must be a port, which is then on {LOOPBACK}, or HOST:PORT")
    return host.strip("[]"), int(port)


def exported(start: Callable[Concatenate[S, Grid, P], R]) -> Callable[Concatenate[S, Grid, P], R]:
    """Let a strategy's ``start`` run with the endpoint that its ``prometheus`` asks for."""

    @functools.wraps(start)
    def run(self: S, grid: Grid, *args: P.args, **more: P.kwargs) -> R:
        address = address_of(self.prometheus)
        if address is None:
            return start(self, grid, *args, **more)
        with Exporter(self, address) as exporter:
            return start(self, MeteredGrid(grid, exporter), *args, **more)

    return run  # type: ignore[return-value]  # a method keeps being one


class Exporter:
    """Serves the metrics of a strategy's run, to be used in a ``with`` block."""

    def __init__(self, strategy: MethodStrategy, address: tuple[str, int]) -> None:
        self.strategy, self.address = strategy, address
        self.counts = Counts()
        self.traffic = {"in": 0, "out": 0}
        self.server: ThreadingHTTPServer | None = None
        self.began = False  #: whether the run has begun, and its folder is at its last checkpoint
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._bound = threading.Event()  # whether the endpoint has listened
        self._read = {ROUNDS: 0, REFUSALS: 0}  # bytes of the files, or entries of the lists, that are counted
        self._thread = threading.Thread(target=self._serve, name="prometheus", daemon=True)

    def __enter__(self) -> Exporter:
        self._thread.start()
        self._bound.wait(1.0)
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join(REQUEST_TIMEOUT)

    def text(self) -> str:
        """Return what a scraper gets."""
        strategy = self.strategy
        with self._lock:
            info = {
                "release": __version__,
                "protocols": f"{versions.OLDEST}-{versions.NEWEST}",
                "flwr": metadata.version("flwr"),
                "method": strategy.method.name,
            }
            if not self.began:  # zeros would look like a restart of the counters
                return render_info(info)
            self._update()
            planned = strategy.last_round or None
            primary = (strategy.run_log.metrics or CLASSIFICATION)[0]
            return render(self.counts, info, planned, primary.key(), self.traffic)

    def begin(self) -> None:
        """Take over the bytes of earlier processes; called with the first message of the run's first round."""
        self.began = True
        try:
            if (path := self._folder_file(TRAFFIC)) is not None and path.exists():
                stored = json.loads(path.read_text("utf-8"))
                before = {way: int(stored[way]) for way in self.traffic}
                self.traffic = {way: count + before[way] for way, count in self.traffic.items()}
        except Exception as error:  # nothing here may end a round
            log(WARNING, "metrics: %s cannot be read, bytes are counted from zero: %s", TRAFFIC, error)

    def moved(self, way: str, count: int) -> None:
        """Count bytes of messages."""
        self.traffic[way] += count

    def keep(self) -> None:
        """Write down how many bytes came and went, so that a restart continues the count."""
        try:
            if self.began and (path := self._folder_file(TRAFFIC)) is not None:
                with without_sync():
                    replace_text(path, json.dumps(self.traffic) + "\n")
        except Exception as error:  # a full disk must not end a round here
            log(WARNING, "metrics: %s cannot be written: %s", TRAFFIC, error)

    # Counting.

    def _folder_file(self, name: str) -> Path | None:
        folder = self.strategy.folder
        return folder / name if folder is not None and is_run(folder) else None

    def _update(self) -> None:
        """Count what has been recorded since the last time."""
        records, refusals = self._folder_file(ROUNDS), self._folder_file(REFUSALS)
        if records is None or refusals is None:
            run_log = self.strategy.run_log
            for record in self._new(ROUNDS, run_log.records[: run_log.ended]):
                self.counts.add_record(json.loads(line(record)))
            for refusal in self._new(REFUSALS, run_log.refusals):
                self.counts.add_refusal(refusal.reason)
            return
        for entry in self._new_lines(ROUNDS, records):
            self.counts.add_record(entry)
        for entry in self._new_lines(REFUSALS, refusals):
            self.counts.add_refusal(str(entry.get("reason")))

    def _new(self, name: str, entries: list[Any]) -> list[Any]:
        new = entries[self._read[name] :]
        self._read[name] += len(new)
        return new

    def _new_lines(self, name: str, path: Path) -> Iterator[dict[str, Any]]:
        """Yield the complete lines of a file that are new."""
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._read[name])
            whole = file.read().rpartition(b"\n")[0]
        if whole:
            self._read[name] += len(whole) + 1
            for text in whole.split(b"\n"):
                yield json.loads(text)

    # Serving.

    def _serve(self) -> None:
        warned = False
        while not self._ended.is_set():
            try:
                self.server = server_class(self.address[0])(self.address, _handler(self))
                break
            except OSError as error:
                if not warned:
                    log(WARNING, "metrics: %s:%d cannot be listened on, trying again: %s", *self.address, error)
                    warned = True
                self._bound.set()
                self._ended.wait(RETRY)
        else:
            return
        host, port = self.server.server_address[:2]
        log(INFO, "metrics: http://%s:%d/metrics", host, port)
        self._bound.set()
        with self.server:
            self.server.timeout = 0.1
            while not self._ended.is_set():
                self.server.handle_request()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing about scrapers that hang up."""


class _Server6(_Server):
    address_family = socket.AF_INET6


def server_class(host: str) -> type[ThreadingHTTPServer]:
    """Return a server for the kind of address that ``host`` is."""
    return _Server6 if ":" in host else _Server


def _handler(exporter: Exporter) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_TIMEOUT

        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/metrics":
                self.send_error(404)
                return
            try:
                body, status = exporter.text().encode(), 200
            except Exception as error:
                body, status = f"# the metrics cannot be read: {type(error).__name__}\n".encode(), 500
            self.send_response(status)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Do not log every scrape."""

    return Handler


class MeteredGrid(GridWrapper):
    """A grid that counts the bytes of messages; everything else goes through to ``grid``."""

    def __init__(self, grid: Grid, exporter: Exporter) -> None:
        super().__init__(grid)
        self.exporter = exporter

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and return the replies, one by one if the grid does so."""
        messages = list(messages)
        if not self.exporter.began and any(m.metadata.message_type.startswith("train") for m in messages):
            self.exporter.begin()
        self.exporter.moved("out", sum(map(content_bytes, messages)))
        replies = self.grid.send_and_receive(messages, timeout=timeout)
        del messages
        if isinstance(replies, list):
            self.exporter.moved("in", sum(map(content_bytes, replies)))
            self.exporter.keep()
            return replies
        return self._counted(replies)

    def _counted(self, replies: Iterable[Message]) -> Iterator[Message]:
        for reply in replies:
            self.exporter.moved("in", content_bytes(reply))
            yield reply
        self.exporter.keep()


def content_bytes(message: Message) -> int:
    """Return the size of what a message holds, without the heads that travel with it; errors hold nothing."""
    if not message.has_content():
        return 0
    return sum(record.count_bytes() for record in message.content.values())
