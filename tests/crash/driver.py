"""A process of its own that starts a world again and again, cuts it off, lets it go on, and says what came out.

``driver.py WORLD FOLDER`` reads points from standard input, one JSON list ``[number, end]`` a line, and answers each
with one JSON line. A number from 0 to 1 instead of a count is a moment: the share of the time that a whole run takes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from crash import worlds
from crash.disk import Disk
from feddpc.errors import FeddpcError

#: Exit codes of a process that ended by itself.
DONE, REFUSED, BROKEN = 0, 3, 4


def apart(world: worlds.World, folder: Path, disk: Disk | None, kill_after: float | None = None) -> tuple[int, str]:
    """Run the world in a process of its own; return how that ended (minus the signal, if by one), and what it said."""
    said = folder.with_suffix(".said")
    said.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        code = BROKEN
        try:
            if disk is not None:
                disk.install()
            world.go(folder)
            code = DONE
            if disk is not None:
                said.write_text(json.dumps(disk.calls))
        except FeddpcError as error:
            code = REFUSED
            said.write_text(str(error))
        except BaseException:
            said.write_text(traceback.format_exc())
        finally:
            os._exit(code)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), said.read_text() if said.exists() else ""


def differences(expected: dict[str, bytes], found: dict[str, bytes]) -> list[str]:
    return [name for name in sorted({*expected, *found}) if expected.get(name) != found.get(name)]


def main() -> None:
    torch.set_num_threads(1)
    world, place = worlds.make(sys.argv[1]), Path(sys.argv[2]).resolve()
    whole, cut = place / "whole", place / "cut"
    code, calls = apart(world, whole, Disk(whole))
    assert code == DONE, calls
    expected = world.facts(whole)
    began = time.monotonic()
    apart(world, place / "timed", None)
    seconds = time.monotonic() - began
    print(json.dumps({"calls": json.loads(calls), "seconds": seconds}), flush=True)
    for line in sys.stdin:
        number, end = json.loads(line)
        shutil.rmtree(cut, ignore_errors=True)
        if end == "kill at random":
            first, said = apart(world, cut, None, kill_after=number * seconds)
        else:
            first, said = apart(world, cut, Disk(cut, number, end))
        kept = world.kept(cut)
        again, more = apart(world, cut, None)
        try:
            wrong = differences(expected, world.facts(cut)) if again == DONE else [more]
        except Exception:
            wrong = [traceback.format_exc()]
        print(json.dumps({"first": first, "said": said, "kept": kept, "again": again, "wrong": wrong}), flush=True)


if __name__ == "__main__":
    main()
