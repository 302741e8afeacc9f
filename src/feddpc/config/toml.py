"""TOML files and ``KEY=VALUE`` texts, read and written."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from feddpc.errors import BadInputError


def read_toml(path: Path) -> dict[str, Any]:
    """Return the contents of a TOML file, or say where it is wrong."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInputError(f"there is no file {path}") from None
    except (ValueError, RecursionError, OSError) as error:  # a number may be too long, a list too deep
        raise BadInputError(f"{path} cannot be read as TOML: {error}") from None


def parse_set(text: str) -> tuple[str, Any]:
    """Split ``KEY=VALUE``; the value is read as TOML where that works, else as a plain word.

    >>> parse_set("lam=0.5"), parse_set("variant=fresh"), parse_set("scaling=false")
    (('lam', 0.5), ('variant', 'fresh'), ('scaling', False))
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise BadInputError(f"--set {text!r}: write KEY=VALUE")
    try:
        parsed = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError):
        return key.strip(), value.strip()
    plain = parsed.get("value")
    return key.strip(), plain if isinstance(plain, bool | int | float | str | list) and len(
        parsed
    ) == 1 else value.strip()


def write_toml(values: Mapping[str, Any]) -> str:
    """Return TOML text: plain values first, then one table for each dictionary.

    >>> print(write_toml({"lr": 0.1, "hyper": {"lam": 1.0, "guard": "zero"}}))
    lr = 0.1
    <BLANKLINE>
    [hyper]
    lam = 1.0
    guard = "zero"
    <BLANKLINE>
    """
    plain = [f"{k} = {_toml(v)}" for k, v in values.items() if not isinstance(v, dict)]
    tables = [
        "\n".join([f"[{k}]", *(f"{key} = {_toml(value)}" for key, value in v.items())])
        for k, v in values.items()
        if isinstance(v, dict) and v
    ]
    return "\n\n".join(["\n".join(plain), *tables]) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    # Strings, whole numbers and booleans are written alike in both, but for one control character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
