"""Make docs/kill-points.md from what the slow suite wrote: ``python tests/crash/summary.py > docs/kill-points.md``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from crash.disk import CUTS, ERRORS, KILLS

HERE = Path(__file__).parent
REPORTS = Path(os.environ.get("FEDDPC_REPORTS", HERE.parents[1] / "reports"))
MOMENT = "kill at random"
TEXT = """# Kill points

What happens to a run, a sweep and a federation that are cut off at any moment, and started again. In every case
below the second start ended where an uninterrupted one ends, **byte for byte** but for measured seconds: records,
model, state of server and clients, memories on disk, refused replies. What a checkpoint of a run or a federation held
before the end was never computed again.

```
python -m pytest -m slow -n 2 tests/crash   # all of it, about a quarter of an hour on two cores
python -m pytest tests/crash                # some points of each kind, part of the usual suite
python tests/crash/summary.py > docs/kill-points.md
```

Each start is a process of its own. A disk in the place of the real one (`tests/crash/disk.py`) counts every call
that changes a file, and one of them is the last:

- **kill**: a real SIGKILL before the call, in the middle (half of what was to be written is there), or after it.
- **power cut**: the process is killed, and every file is put back to what `fsync` had brought to the disk; names
  of files as their folder was last synced, or all names with only the synced content (what a journal may leave).
- **failing disk**: the call raises ENOSPC, EIO, EROFS or EACCES. The program must say so in one line and end.
- **at random**: a SIGKILL at a random share of the time that a whole run takes.

A call is a write, fsync, rename, open of a new file, truncation, folder, or removal. `scaffold on disk` meets
every end at every call. In the other worlds every call meets one end after the other; of the sweep every fourth
call meets each.

| world | calls | kill | power cut | failing disk | at random | points | continued and equal |
|---|---|---|---|---|---|---|---|
{rows}

Each report lists every point with its call, its file and its outcome: `reports/kill-points-*.json` (or below
`$FEDDPC_REPORTS`). {refused} failing disks ended the start with their reason in one line; in {went_on} cases the
call need not succeed (a folder to be made was there), or only one run of a sweep failed, and the start went on.

The worlds: three rounds of SCAFFOLD with its clients' states in a file on disk, of FedVARP with its table on the
device, of the Gaussian mixtures, which write what they learned before round 1; a sweep of four runs; and
federations over Flower in one process, server and eight clients on the same disk, where one client sends NaN in
two rounds.

{date}; {versions}; Linux.
"""


def row(report: dict) -> str:
    ends = report["by end"]
    counts = [sum(ends.get(end, 0) for end in kind) for kind in (KILLS, CUTS, ERRORS, (MOMENT,))]
    cells = [report["world"], report["calls"], *counts, report["points"], _equal(report)]
    return "| " + " | ".join(map(str, cells)) + " |"


def _equal(report: dict) -> int:
    return sum(count for outcome, count in report["by outcome"].items() if outcome.endswith("continued, equal"))


def main() -> None:
    reports = [json.loads(path.read_text()) for path in sorted(REPORTS.glob("kill-points-*-all.json"))]
    failing = [point for report in reports for point in report["tried"] if point["end"] in ERRORS]
    total = sum(report["points"] for report in reports)
    equal = sum(_equal(report) for report in reports)
    print(
        TEXT.format(
            rows="\n".join([*map(row, reports), f"| all | | | | | | {total} | {equal} |"]),
            refused=sum(point["outcome"].startswith("refused") for point in failing),
            went_on=sum(point["outcome"].startswith("went on") for point in failing),
            date=max(report["date"] for report in reports),
            versions=", ".join(f"{name} {number}" for name, number in reports[0]["versions"].items()),
        ),
        end="",
    )


if __name__ == "__main__":
    main()
