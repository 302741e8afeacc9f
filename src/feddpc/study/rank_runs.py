"""One run of a study on several ranks of one machine, which a worker starts and waits for."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from feddpc.config import Config
from feddpc.errors import FeddpcError
from feddpc.launch import launch
from feddpc.ranks import RankError, place
from feddpc.runs.stop import Stop
from feddpc.study.spec import RunSpec

#: Exit code of ranks that stopped before the last round because they were asked to.
INTERRUPTED = 130


def execute_on_ranks(spec: RunSpec, path: Path, ranks: int, *, stop: Stop, checkpoint_seconds: float) -> str:
    """Run one spec in the folder ``path`` on several ranks; return how it ended, or raise what they say."""
    about = {"config": spec.config.asdict(), "path": str(path.resolve()), "checkpoint_seconds": checkpoint_seconds}
    about["extendable"] = spec.extendable
    with tempfile.TemporaryDirectory(prefix="feddpc-ranks-") as folder, (Path(folder) / "said").open("w+b") as said:
        task = Path(folder) / "run.json"
        task.write_text(json.dumps(about), encoding="utf-8")
        command = [sys.executable, "-m", __name__, str(task)]
        code = launch(ranks, command, stopping=lambda: stop.wanted, output=said)
        said.seek(0)
        lines = said.read().decode(errors="replace").strip().splitlines()
    if code not in (0, INTERRUPTED):
        raise RankError(lines[-1].removeprefix("error: ") if lines else f"the ranks ended with code {code}")
    return "interrupted" if code == INTERRUPTED else "ended"


def main() -> None:
    """Be one of the ranks."""
    from feddpc.study.workers import execute_spec

    about = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    spec, stop, where = RunSpec(Config.read(about["config"]), extendable=about["extendable"]), Stop(), place()
    try:
        with stop.on_interrupt():
            outcome = execute_spec(spec, Path(about["path"]), stop=stop, checkpoint_seconds=about["checkpoint_seconds"])
    except FeddpcError as error:
        if where is None or not where.rank:
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(INTERRUPTED if outcome.status == "interrupted" else 0)


if __name__ == "__main__":
    main()
