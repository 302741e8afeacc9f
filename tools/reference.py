"""Write the tables of docs/reference.md from the configuration's own facts: ``python tools/reference.py``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from feddpc import config, models, optimizers, sampling, schedules
from feddpc.data import schemes
from feddpc.robust import rules

PAGE = Path(__file__).parents[1] / "docs" / "reference.md"


def keys() -> str:
    """Return the table of all keys."""
    rows = []
    for group in config.GROUPS:
        for name, facts in config.keys().items():
            if facts.group == group and facts.options_of in (None, name):
                values = f" One of {', '.join(config.choices_of(name))}." if config.choices_of(name) else ""
                notes = "" if facts.changes_numbers else " Changes no more than the last digits."
                notes += " A resumed run may change it." if facts.may_change else ""
                rows.append((f"`{name}`", group, config.default_of(name), facts.help + values + notes))
    return _table(("key", "group", "default", "meaning"), rows)


def options() -> str:
    """Return the table of the options of everything that is chosen by name."""
    rows = []
    registries = {
        **{"model": models, "partition": schemes, "participation": sampling, "rule": rules},
        "client_optimizer": optimizers.CLIENT_OPTIMIZERS,
        "server_optimizer": optimizers.SERVER_OPTIMIZERS,
        "lr_schedule": schedules.SCHEDULES,
    }
    for choice, registry in registries.items():
        for name in registry.names():
            known: Mapping[str, object] = registry.options(name)
            if known:
                shared = {"partition": {"alpha": "that of the key `alpha`"}, "lr_schedule": {"over": "the last round"}}
                shown = shared.get(choice, {})
                spelled = ", ".join(f"`{choice}.{k}` ({shown.get(k) or _show(v)})" for k, v in known.items())
                rows.append((f"`{choice} = {name}`", spelled))
    return _table(("choice", "options (defaults)"), rows)


def page(text: str) -> str:
    """Return the page ``text`` with its tables up to date."""
    for name, table in {"keys": keys(), "options": options()}.items():
        begin, end = f"<!-- {name}: written by tools/reference.py -->\n", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        _, marker, after = rest.partition(end)
        if not marker:
            raise SystemExit(f"{PAGE.name} has no table {name!r}: put it between {begin.strip()} and {end}")
        text = f"{before}{begin}{table}{end}{after}"
    return text


def _show(value: object) -> str:
    return "by the data" if value is None else value if isinstance(value, str) else json.dumps(value)


def _table(heading: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [heading, ("---",) * len(heading), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
