"""What a user's script is on several ranks: one run, with a fault on rank 1 if the environment says so.

Each rank writes how it ended to a file next to the run's folder.
"""

import errno
import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import feddpc
from feddpc.data import load
from feddpc.runs import checkpoint

OUT, FAULT, RANK = Path(os.environ.get("TEST_OUT", "")), os.environ.get("TEST_FAULT", ""), os.environ.get("RANK", "0")
MINE = FAULT if RANK == "1" else ""


class Trouble(feddpc.Callback):
    def on_round_end(self, run):
        if run.round != 3:
            return
        if MINE == "kill" or (MINE == "kill once" and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"):
            os.kill(os.getpid(), signal.SIGKILL)
        if MINE == "hang":
            time.sleep(1000)
        if MINE == "full":
            checkpoint.save_file = no_space
        if MINE == "raise":
            raise ValueError("oh dear")
        if MINE == "drift":
            run._state.w[3] += 1e-3
        if MINE == "stop":
            run.stop("enough")


def no_space(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def main() -> None:
    data = load("digits")
    if MINE == "version":
        from feddpc.runs import environment

        environment.__version__ = "9.9"
    if MINE == "data":
        x = data.x_train.copy()
        x[7] = 255 - x[7]
        data = feddpc.Dataset.from_arrays(x, data.y_train, data.x_test, data.y_test)
    elif FAULT == "data":
        data = feddpc.Dataset.from_arrays(data.x_train, data.y_train, data.x_test, data.y_test)
    if MINE == "disk":
        Path.write_bytes = no_space
    folder = OUT.with_name("elsewhere") if MINE == "folder" else OUT
    how = {"clients": 20, "cohort": 5, "rounds": 6, "method": "scaffold", "data": data, "out": folder}
    resume = bool(os.environ.get("TEST_RESUME"))
    said = OUT.with_name(f"{OUT.name}-rank-{RANK}.txt")
    try:
        result = feddpc.simulate(
            **how, callbacks=[Trouble()], resume=resume, rank_timeout=float(os.environ.get("TEST_TIMEOUT", "60"))
        )
    except feddpc.errors.FeddpcError as error:
        said.write_text(str(error))
        sys.exit(2)
    weights = np.concatenate([value.numpy().ravel() for value in result.state_dict.values()])
    said.write_text(f"{result.status} {hashlib.sha256(weights.tobytes()).hexdigest()} {len(result.records)}")


if __name__ == "__main__":
    main()
