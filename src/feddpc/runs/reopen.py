"""Opening a run folder where its last checkpoint left it, if it was made with the same settings, data and code."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from feddpc.config import EXECUTION_KEYS, MAY_CHANGE, OPTIONS_BY_CHOICE, Config
from feddpc.errors import RunFolderError
from feddpc.ranks import ALONE, Ranks
from feddpc.round.state import RunState
from feddpc.runs import checkpoint
from feddpc.runs.append_log import LogMark
from feddpc.runs.record import (
    RunFolder,
    config_digest,
    load_config,
    read_json,
    read_records,
    without_former_last,
)


def fingerprint(hashes: dict[str, str], config: Config) -> dict[str, str]:
    """Return what tells whether a run is resumed with the settings, data and code that it started with."""
    return hashes | {"configuration": config_digest(config)}


def reopen(
    out: Path, config: Config, state: RunState, hashes: dict[str, str], ranks: Ranks = ALONE
) -> tuple[RunFolder | None, list[dict[str, Any]], tuple[str, str | None] | None]:
    """Open a run folder at its last checkpoint, move ``state`` there, and say how the run had ended, if it had.

    Of several ranks, only rank 0 holds the folder and changes what is in it.
    """
    folder: RunFolder | None = None
    try:
        with ranks.together("opening the run folder"):
            folder = RunFolder.reopen(out) if not ranks.rank else None
            stored = load_config(out)
            _refuse_changes(out, _where_it_runs(stored, config), config, fingerprint(hashes, stored))
        saved = checkpoint.load(out / "checkpoint", ranks)
        with ranks.together("continuing the run"):
            if saved is None and (out / "summary.json").exists():
                raise RunFolderError(
                    f"the checkpoint of {out} is missing, though the run got to an end: restore {out / 'checkpoint'}, "
                    "or remove summary.json and rounds.jsonl to compute all rounds again"
                )
            mark, beside = (saved.records, saved.beside) if saved else (LogMark(), {})
            if saved is not None:
                checkpoint.restore(saved, state, ranks)
            if folder is not None:
                folder.go_on(mark, beside)
            records = without_former_last(config, read_records(out / "rounds.jsonl", mark.size))
            if len(records) != state.round:
                raise RunFolderError(
                    f"{out}: {len(records)} rounds are recorded, the checkpoint is of round {state.round}"
                )
            if config.rounds < state.round:
                raise RunFolderError(
                    f"rounds = {config.rounds}, but {out} is past round {state.round}: ask for at least that"
                )
        with ranks.together("continuing the run"):
            now = dataclasses.replace(stored, **{key: getattr(config, key) for key in MAY_CHANGE})
            if folder is not None and now != stored:
                folder.amend(now)
            if folder is not None and saved is not None:
                checkpoint.adopt(out / "checkpoint", saved)
    except BaseException:
        if folder is not None:
            folder.close()
        raise
    if saved is not None and saved.diverged:
        return folder, records, ("diverged", f"round {saved.round}: {saved.diverged}")
    return folder, records, ("finished", None) if len(records) >= config.rounds else None


def _where_it_runs(stored: Config, config: Config) -> Config:
    """Return a stored configuration as it is on the machines that go on: other ranks may have another device."""
    if "distributed" not in (stored.engine, config.engine):
        return stored
    return dataclasses.replace(stored, **{key: getattr(config, key) for key in EXECUTION_KEYS})


def _refuse_changes(out: Path, stored: Config, config: Config, now: dict[str, str]) -> None:
    """Raise if a run folder was made with something else than what is to be continued."""
    different = stored.differences({k: v for k, v in config.asdict().items() if k not in MAY_CHANGE})
    asked, before, free = config.asdict(), stored.asdict(), {*MAY_CHANGE, *EXECUTION_KEYS}
    free |= {table for choice, table in OPTIONS_BY_CHOICE.items() if asked.get(choice) != before.get(choice)}
    different += [f"without {key}" for key in before if before[key] and not asked.get(key) and key not in free]
    if not (out / "environment.json").exists():
        raise RunFolderError(
            f"{out / 'environment.json'} is missing, which says what the run was made with: restore it"
        )
    before = read_json(out / "environment.json").get("fingerprint", {})
    different += [f"other {part}" for part in before if before[part] != now.get(part)]
    if different:
        over, remedy = stored.lr_schedule_options.get("over"), "choose another --out"
        if asked["lr_schedule"] == stored.lr_schedule and over != config.lr_schedule_options.get("over"):
            remedy += (
                f", or give lr_schedule_options = {{'over': {over}}} to go on with the schedule of the first rounds"
            )
        raise RunFolderError(f"{out} was made with another configuration ({'; '.join(different)}): {remedy}")
