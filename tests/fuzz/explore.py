"""Fuzz one reader, guided by coverage: ``python tests/fuzz/explore.py TARGET [--seconds S | --runs N] [--seed K]``.

Starts from the corpus, writes what reaches new code to ``.fuzz/TARGET`` and an input that breaks a reader to
``.fuzz/crash-...``; the last line says how many inputs were tried. ``make fuzz MINUTES=60`` does so for all readers.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

import atheris

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))
with atheris.instrument_imports(
    include=["feddpc", "zipfile", "tarfile", "gzip", "pickletools", "tomllib", "numpy.lib"]
):
    from feddpc.errors import FeddpcError
    from fuzz import targets

from fuzz.guard import Guard, limit_memory  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=targets.TARGETS)
    parser.add_argument("--seconds", type=int, default=0)
    parser.add_argument("--runs", type=int, default=-1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--place", type=Path, default=ROOT / ".fuzz")
    asked = parser.parse_args()
    found = asked.place / asked.target
    found.mkdir(parents=True, exist_ok=True)
    corpus, read = Path(__file__).parent / "corpus" / asked.target, targets.TARGETS[asked.target]
    targets.blind()
    guard = Guard(targets.FOLDER)
    for path in sorted(corpus.iterdir()):  # imports what is imported late
        one(read, path.read_bytes())
    limit_memory()
    guard.armed = True
    options = [f"-max_total_time={asked.seconds}", f"-runs={asked.runs}", f"-seed={asked.seed}", "-timeout=20"]
    options += ["-rss_limit_mb=0", "-max_len=8192", "-print_final_stats=1", "-verbosity=1"]
    options += [f"-artifact_prefix={asked.place}/crash-{asked.target}-"]
    atheris.Setup([sys.argv[0], *options, str(found), str(corpus)], lambda content: one(read, content))
    atheris.Fuzz()


def one(read: targets.Target, content: bytes) -> None:
    """Read one input; the declared error is the only one that may come out."""
    with contextlib.suppress(FeddpcError):
        read(content)


if __name__ == "__main__":
    main()
