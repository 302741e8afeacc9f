"""Fuzz one reader, guided by coverage: ``python tests/fuzz/explore.py TARGET [--seconds S | --runs N] [--seed K]``.

Starts from the corpus, writes what reaches new code to ``.fuzz/TARGET`` and an input that breaks a reader to
``.fuzz/crash-...``; the last lines say how many inputs were tried. ``everything.py`` does so for all readers.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
from pathlib import Path

import atheris

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))
WATCHED = ["feddpc", "zipfile", "tarfile", "gzip", "tomllib", "numpy.lib"]
# It lists every module it watches.
with contextlib.redirect_stderr(io.StringIO()), atheris.instrument_imports(include=WATCHED):
    from feddpc.errors import FeddpcError
    from fuzz import targets

from fuzz.guard import Guard, limit_memory  # noqa: E402


def explore(name: str, *, runs: int = -1, seconds: int = 0, seed: int = 1, place: Path = ROOT / ".fuzz") -> None:
    """Fuzz a reader for so many ``runs`` or ``seconds``; ends this process, with 0 if nothing was found.

    With ``runs`` it starts from the corpus alone, so that the same seed leads to the same inputs.
    """
    found = place / name if runs < 0 else Path(tempfile.mkdtemp(dir=targets.FOLDER))
    found.mkdir(parents=True, exist_ok=True)
    corpus, read = Path(__file__).parent / "corpus" / name, targets.TARGETS[name]
    targets.blind()
    guard = Guard(targets.FOLDER)
    for path in sorted(corpus.iterdir()):  # imports what is imported late
        one(read, path.read_bytes())
    limit_memory()
    guard.armed = True
    options = [f"-max_total_time={seconds}", f"-runs={runs}", f"-seed={seed}", "-timeout=20", "-rss_limit_mb=0"]
    options += ["-max_len=8192", "-print_final_stats=1", "-verbosity=1", f"-artifact_prefix={place}/crash-{name}-"]
    atheris.Setup([sys.argv[0], *options, str(found), str(corpus)], lambda content: one(read, content))
    atheris.Fuzz()


def one(read: targets.Target, content: bytes) -> None:
    """Read one input; the declared error is the only one that may come out."""
    with contextlib.suppress(FeddpcError):
        read(content)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=targets.TARGETS)
    parser.add_argument("--seconds", type=int, default=0)
    parser.add_argument("--runs", type=int, default=-1)
    parser.add_argument("--seed", type=int, default=1)
    with targets.one_version():
        explore(**vars(parser.parse_args()))
