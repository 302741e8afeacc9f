"""Put the whole corpus through its targets, watched and with little memory: prints what came of it as JSON."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from feddpc.errors import FeddpcError
from fuzz import targets
from fuzz.guard import Guard, limit_memory

CORPUS = Path(__file__).parent / "corpus"


def outcome(read: targets.Target, content: bytes) -> str:
    """Return ``read`` or ``refused``, or what else came out."""
    try:
        read(content)
    except FeddpcError:
        return "refused"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "read"


def main() -> None:
    corpus = {name: sorted(path for path in (CORPUS / name).iterdir()) for name in targets.TARGETS}
    inputs = {name: {path.name: path.read_bytes() for path in paths} for name, paths in corpus.items()}
    guard, outcomes = Guard(targets.FOLDER), {}
    with targets.one_version(), contextlib.redirect_stdout(sys.stderr):
        for name, read in targets.TARGETS.items():
            outcome(read, inputs[name]["seed-0"])  # imports what is imported late
        limit_memory()
        guard.armed = True
        for name, read in targets.TARGETS.items():
            outcomes[name] = {file: outcome(read, content) for file, content in inputs[name].items()}
        guard.armed = False
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
