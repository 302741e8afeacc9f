"""Rounds that several processes share, timed on their first rank, in turns with everything else that is measured."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import IO, Any

from feddpc import launch, methods
from feddpc.bench.clock import timed, wait
from feddpc.bench.entrants import WARM_UP, Entrant, Workbench
from feddpc.bench.workloads import Workload, read
from feddpc.errors import FeddpcError
from feddpc.ranks import RankError, Ranks, join, place
from feddpc.runs.engine_choice import choose_engine
from feddpc.torch_globals import set_precision

#: Seconds that ranks wait for each other.
TIMEOUT = 600.0
#: What a rank is told to do.
ORDERS = ("end", "whole", "training")


def label(size: int) -> str:
    """Return how a table names so many ranks."""
    return "1 rank" if size == 1 else f"{size} ranks"


class SharedRounds:
    """This rank's part of two runs that all ranks share, one with evaluation and one without."""

    def __init__(self, bench: Workbench, method: str, precision: str, ranks: Ranks) -> None:
        self.ranks, self.device = ranks, bench.device
        rule = methods.create(method)
        set_precision(precision)

        def begin(evaluate: bool) -> Callable[[], object]:
            engine = choose_engine("distributed", bench.experiment(precision), rule, ranks=ranks)
            run = bench.run(engine, rule, precision, evaluate)
            for _ in range(WARM_UP):
                run()
            return run

        self.warm_up, self.whole = timed(lambda: begin(True), self.device)
        self.training = begin(False)

    def time(self, what: str) -> float:
        """Make a round on all ranks; return the seconds from when all begin to when all have ended."""
        run = self.whole if what == "whole" else self.training

        def together() -> None:
            run()
            wait(self.device)
            self.ranks.numbers([0])

        wait(self.device)
        self.ranks.numbers([0])
        return timed(together)[0]


class JoinedEntrant(Entrant):
    """The ranks that this process belongs to, started by torchrun or SLURM; every one of them takes the same turns."""

    def __init__(self, bench: Workbench, method: str, precision: str, ranks: Ranks) -> None:
        super().__init__(label(ranks.size), method, precision, bench.device)
        self.bench, self.ranks = bench, ranks

    def warm(self) -> None:
        """Make the first rounds."""
        with self._noting_errors():
            self.rounds = SharedRounds(self.bench, self.method, self.precision, self.ranks)
            self.warm_up = self.rounds.warm_up
            self.last, _ = self._time_both()

    def _time_both(self) -> tuple[float, float]:
        return self.rounds.time("whole"), self.rounds.time("training")


class RanksEntrant(Entrant):
    """Ranks of this machine that are started here, with so many threads each; they sleep between their turns."""

    def __init__(self, bench: Workbench, size: int, threads: int, method: str, precision: str) -> None:
        super().__init__(label(size), method, precision, bench.device)
        about = {"work": bench.workload.asdict(), "method": method, "precision": precision, "device": bench.device}
        self.size, self.threads, self.about = size, threads, json.dumps(about)
        self._processes: list[subprocess.Popen[str]] = []

    def warm(self) -> None:
        """Start the ranks and let them make their first rounds."""
        with self._noting_errors():
            command = [sys.executable, "-m", __name__, self.about]
            self._processes = start(self.size, command, self.threads)
            self.warm_up = float(self._answer())
            self.last, last = self._time_both()
            self.spent = self.warm_up + self.last + last

    def close(self) -> None:
        """End the ranks."""
        for process in self._processes:
            process.kill()
            process.communicate()

    def _time_both(self) -> tuple[float, float]:
        return self._order("whole"), self._order("training")

    def _order(self, what: str) -> float:
        stream = _pipe(self._processes[0].stdin)
        stream.write(f"{what}\n")
        stream.flush()
        return float(self._answer())

    def _answer(self) -> str:
        answer = _pipe(self._processes[0].stdout).readline()
        if not answer:
            said = _pipe(self._processes[0].stderr).read().strip().splitlines()
            raise RankError(said[-1].removeprefix("error: ") if said else "the ranks ended and said nothing")
        return answer


def start(size: int, command: Sequence[str], threads: int) -> list[subprocess.Popen[str]]:
    """Start ranks on this machine; only the first one has pipes to this process."""
    port, processes = launch.free_port(), []
    for rank in range(size):
        pipe = subprocess.DEVNULL if rank else subprocess.PIPE
        environment = launch.environment(rank, size, port) | {"OMP_NUM_THREADS": str(threads)}
        words = [*launch.end_with_parent(), *command]
        process = subprocess.Popen(words, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        processes.append(process)
    return processes


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def serve(about: dict[str, Any]) -> None:
    """Be one of the ranks of a `RanksEntrant`: make a round whenever rank 0 is told to."""
    where, device = place(), about["device"]
    assert where is not None
    ranks, first = join(device, TIMEOUT), where.rank == 0
    workload: Workload = read(about["work"])
    rounds = SharedRounds(Workbench(workload, device), about["method"], about["precision"], ranks)
    if first:
        print(rounds.warm_up, flush=True)
    while True:
        word = sys.stdin.readline().strip() if first else ""
        order = ORDERS[ranks.numbers([ORDERS.index(word or "end")])[0][0]]
        if order == "end":
            return
        seconds = rounds.time(order)
        if first:
            print(seconds, flush=True)


def main() -> None:
    """Be a rank; what goes wrong is one line on standard error."""
    try:
        serve(json.loads(sys.argv[1]))
    except FeddpcError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
