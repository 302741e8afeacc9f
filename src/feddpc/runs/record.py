"""The run folder: configuration, one line per round, summary, environment, checkpoint. Nothing is ever half written."""

from __future__ import annotations

import errno
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from feddpc.config import EXECUTION_KEYS, MAY_CHANGE, Config, read_toml, write_toml
from feddpc.errors import BadInputError, FolderInUseError, RunFolderError, unusable
from feddpc.experiment import evaluated_in
from feddpc.round.round import RoundRecord
from feddpc.runs.append_log import AppendLog, LogMark
from feddpc.storage import explain_os_errors, make_folder, replace_text
from feddpc.tasks.metrics import PARTS

#: What every record has besides its metrics, in their order: those on the test set come after the round.
FIELDS = ("round", "train_loss", "seconds", "participants", "dropped", "rejected")
#: The file of records, one line per round.
ROUNDS = "rounds.jsonl"
#: What a method found out before round 1; a resumed run reads it instead of computing it again.
LEARNED = "learned.safetensors"
#: Where the folder of a federation says how many samples there were, ``.json``.
COUNTED = "federation"


class RunFolder:
    """The folder of one run, held by one process at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoint = path / "checkpoint"
        self._lock: IO[bytes] | None = None
        self._lines: dict[str, AppendLog] = {}

    @classmethod
    def create(cls, path: Path) -> RunFolder:
        """Make a folder for a new run; one that already holds anything is left alone. It is a run from `begin` on."""
        if not is_blank(path):
            if is_run(path):
                raise RunFolderError(
                    f"{path} already holds a run: add --resume to continue it, or choose another --out"
                )
            raise RunFolderError(f"{path} exists and holds something that is no run: choose another --out")
        make_folder(path)
        run = cls.reopen(path)
        if is_run(path):  # since it was looked at
            run.close()
            raise FolderInUseError(f"{path} was taken by another process just now: choose another --out")
        return run

    @classmethod
    def reopen(cls, path: Path) -> RunFolder:
        """Lock an existing folder, so that no other process changes it."""
        run = cls(path)
        run._acquire()
        return run

    def begin(self, config: Config) -> None:
        """Make the folder that of a run, which can be resumed: all that round 1 needs is there."""
        self.amend(config)
        self.go_on(LogMark())

    def go_on(self, mark: LogMark, beside: Mapping[str, LogMark] | None = None) -> None:
        """Truncate the records at ``mark``, and other files at theirs; later rounds are computed again."""
        for name, end in {ROUNDS: mark, **(beside or {})}.items():
            self._lines[name] = AppendLog(self.path / name, end)

    def lines(self, name: str) -> AppendLog:
        """Return a file of lines where the checkpoint left it, a new one if that knows of none."""
        if name not in self._lines:
            self._lines[name] = AppendLog(self.path / name, LogMark())
        return self._lines[name]

    @property
    def records(self) -> AppendLog:
        """The rounds."""
        return self._lines[ROUNDS]

    def append(self, record: RoundRecord) -> None:
        """Add a round."""
        self.records.append(line(record))

    def amend(self, config: Config) -> None:
        """Note what changed when a run was resumed: more rounds, another place for memories."""
        replace_text(self.path / "config.toml", write_toml(config.asdict()))

    def note(self, name: str, value: dict[str, Any], *, indent: int | None = 1) -> None:
        """Write a small file ``NAME.json`` beside the records."""
        replace_text(self.path / f"{name}.json", json.dumps(value, indent=indent) + "\n")

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the summary."""
        replace_text(self.path / "summary.json", json.dumps(summary, indent=1) + "\n")

    def close(self) -> None:
        """Let go of the folder."""
        for handle in (*self._lines.values(), self._lock):
            if handle is not None:
                handle.close()
        self._lines, self._lock = {}, None

    def _acquire(self) -> None:
        with explain_os_errors(self.path):
            self._lock = (self.path / ".lock").open("wb")
        try:
            import fcntl

            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            return
        except OSError as error:
            self._lock.close()
            if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
                raise unusable(self.path, error.errno, f"it cannot be locked: {error.strerror}") from error
            raise FolderInUseError(
                f"{self.path} is in use by another process: wait for it, or choose another --out"
            ) from None


def line(record: RoundRecord) -> bytes:
    """Return the JSON line of a round; a number that is not finite is written as null."""
    tested = {name: value for name, value in record.metrics.items() if name.startswith("test_")}
    values = {"round": record.round} | tested | {name: getattr(record, name) for name in FIELDS} | record.metrics
    if record.faults:
        values["faults"] = record.faults
    values |= record.federation | record.notes
    return (json.dumps({k: _plain(v) for k, v in values.items()}) + "\n").encode()


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_records(path: Path, size: int | None = None, damage: list[str] | None = None) -> list[dict[str, Any]]:
    """Return the rounds of a ``rounds.jsonl`` (its first ``size`` bytes); a torn last line is left out.

    A line that makes no sense is an error; with ``damage`` it is said there, and the rounds before it are returned.
    """
    try:
        data = path.read_bytes()[:size]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read: {error.strerror}") from None
    records = []
    for number, text in enumerate(data.split(b"\n")[:-1], start=1):
        try:
            record = json.loads(text)
            if not isinstance(record, dict) or record.get("round") != number:
                raise ValueError("it is not the record of that round")
        except (ValueError, RecursionError) as error:
            if damage is None:
                raise RunFolderError(f"{path}, line {number}: {error}") from None
            damage.append(f"{path}, line {number}: {error}; the rounds from there on are left out")
            break
        records.append(record)
    return records


def without_former_last(config: Config, records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records as if the run had always had the rounds that it has now.

    The last round is always evaluated. Where a run was continued for more rounds, ``evaluate_every`` would not have
    asked for the evaluation of its former last round. With ``keep = "best"`` it counts, as that model may be kept.

    >>> records = [{"round": t, "test_loss": 0.1} for t in (1, 2)]
    >>> without_former_last(Config(rounds=4, evaluate_every=2), records)
    [{'round': 1, 'test_loss': None}, {'round': 2, 'test_loss': 0.1}]
    """
    if config.keep == "best":
        return list(records)
    return [r if evaluated_in(config, r["round"]) else _without_metrics(r) for r in records]


def _without_metrics(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of a round that was not evaluated."""
    parts = tuple(f"{part}_" for part in PARTS)
    return {k: None if k.startswith(parts) else v for k, v in record.items() if not k.startswith("clients_")}


def is_run(path: Path) -> bool:
    """Say whether ``path`` is the folder of a run."""
    return (path / "config.toml").is_file()


def is_blank(path: Path) -> bool:
    """Say whether a run may begin in ``path``: nothing is there, or only what a run killed at its very start left."""
    whole = ("environment.json", "privacy.json", "holdings.json", "clients.json", f"{COUNTED}.json", LEARNED)
    parts = {f".{name}.part" for name in (*whole, "config.toml", "compare.json")}
    with explain_os_errors(path):
        return not path.exists() or (path.is_dir() and all(p.name in {".lock", *whole, *parts} for p in path.iterdir()))


def load_config(path: Path) -> Config:
    """Read the configuration of a run folder."""
    if not is_run(path):
        raise RunFolderError(f"{path} is no run folder: it has no config.toml")
    try:
        return Config.read(read_toml(path / "config.toml"))
    except BadInputError as error:
        raise RunFolderError(f"{path} is no run folder of this program: {error}") from None


def resumed_config(path: Path, given: Mapping[str, Any]) -> Config:
    """Return the configuration of the run in ``path`` with what is ``given``; only `MAY_CHANGE` may differ."""
    stored = load_config(path)
    if different := stored.differences({k: v for k, v in given.items() if k not in MAY_CHANGE}):
        raise RunFolderError(
            f"{path} was made with another configuration ({'; '.join(different)}): choose another --out"
        )
    return Config.read(stored.asdict() | {k: given[k] for k in MAY_CHANGE if k in given})


def config_digest(config: Config) -> str:
    """Return a hash of what a resumed run must not change; default values are left out, so that new keys may appear."""
    usual = Config().asdict()
    values = {k: v for k, v in config.asdict().items() if k not in MAY_CHANGE and (k not in usual or v != usual[k])}
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).hexdigest()


def numbers_digest(config: Config) -> str:
    """Return a hash of all that decides what a run computes, which must be alike on several ranks."""
    values = {k: v for k, v in config.asdict().items() if k not in EXECUTION_KEYS}
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).hexdigest()


def read_json(path: Path, damage: list[str] | None = None) -> dict[str, Any]:
    """Read a JSON file that holds a table; an absent one is empty, and so is a broken one if ``damage`` says so."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError("it holds no table")
    except (OSError, ValueError, RecursionError) as error:
        if damage is None:
            raise RunFolderError(f"{path} cannot be read: {error}") from None
        damage.append(f"{path} cannot be read: {error}")
        return {}
    return value
