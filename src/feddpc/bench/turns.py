"""Whole rounds of everything that is measured, turn by turn, so that a busy machine slows all alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from feddpc.bench.entrants import Entrant, Workbench, engine_names
from feddpc.bench.rank_rounds import JoinedEntrant, RanksEntrant
from feddpc.bench.workloads import Workload
from feddpc.config import Config, choices_of
from feddpc.ranks import Ranks

#: The least and the most turns of each entrant, when no number was asked for.
LEAST, MOST = 2, 15
#: Turns of ranks that torchrun or SLURM has started; they cannot stop by the clock, which differs between them.
JOINED = 8
#: Seconds for the rounds of one workload when no number of turns was asked for.
LIMIT = 30.0

Tell = Callable[[str], None]


def time_rounds(
    workload: Workload,
    *,
    device: str = "auto",
    names: Sequence[str] = ("feddpc",),
    wanted: Sequence[str] | None = None,
    engines: Sequence[str] | None = None,
    against: str | None = None,
    rounds: int | None = None,
    ranks: Sequence[int] = (),
    tell: Tell = lambda _: None,
) -> dict[str, Any]:
    """Measure all engines on ``workload``; return what was found, the first entrant being what others are compared to.

    ``wanted`` precisions are crossed with all engines. By default all engines run in the usual one, and on a GPU the
    engine that was fastest in all but float64 too, which is for checking. Of two plain loops the faster one counts.
    ``ranks`` are numbers of processes that share a run; each process has the cores of this machine divided by the
    largest of them.
    """
    bench = Workbench(workload, device)
    entrants = bench.eager() if against == "eager" else []
    for precision in wanted or [Config.precision]:
        entrants += [bench.entrant(engine, name, precision) for name in names for engine in engines or engine_names()]
        threads = max(1, torch.get_num_threads() // max(ranks, default=1))
        entrants += [RanksEntrant(bench, size, threads, name, precision) for name in names for size in ranks]
    try:
        return _measure(bench, entrants, names, wanted, rounds, tell)
    finally:
        for entrant in entrants:
            entrant.close()


def time_joined(
    workload: Workload,
    ranks: Ranks,
    *,
    device: str = "auto",
    names: Sequence[str] = ("feddpc",),
    wanted: Sequence[str] | None = None,
    rounds: int | None = None,
    tell: Tell = lambda _: None,
) -> dict[str, Any]:
    """Measure the ``ranks`` that this process belongs to; all of them call this with the same arguments."""
    bench = Workbench(workload, device)
    wanted = wanted or [Config.precision]
    entrants: list[Entrant] = [JoinedEntrant(bench, name, p, ranks) for p in wanted for name in names]
    return _measure(bench, entrants, names, wanted, rounds or JOINED, tell)


def _measure(
    bench: Workbench,
    entrants: list[Entrant],
    names: Sequence[str],
    wanted: Sequence[str] | None,
    rounds: int | None,
    tell: Tell,
) -> dict[str, Any]:
    """Warm everybody up, take turns, and return the figures."""
    _warm(entrants, tell)
    able = [e for e in entrants if not e.error and e.way in engine_names()]
    if wanted is None and able and bench.device != "cpu":
        fastest = min(able, key=lambda e: e.last).way
        others = [p for p in choices_of("precision") if p not in (Config.precision, "float64")]
        more = [bench.entrant(fastest, name, precision) for name in names for precision in others]
        _warm(more, tell)
        entrants += more
    _take_turns([e for e in entrants if not e.error], rounds, tell)
    if plain := [e for e in entrants if e.way == "eager" and not e.error and e.whole]:
        quicker = min(plain, key=lambda e: statistics.median(e.whole))
        entrants.sort(key=lambda e: e is not quicker)  # the others stay in their order
    base = next((e for e in entrants if not e.error), entrants[0])
    config, workload = bench.usual.config, bench.workload
    return {
        "workload": workload.name,
        "title": workload.title,
        **{key: getattr(config, key) for key in ("model", "clients", "cohort", "batch_size", "partition", "alpha")},
        "train_samples": workload.train,
        "test_samples": workload.test,
        "compared_to": f"{base.way}, {base.method}, {base.precision}",
        "rows": [e.row(base) for e in entrants],
    }


def _warm(entrants: Sequence[Entrant], tell: Tell) -> None:
    for entrant in entrants:
        tell(f"warming up {entrant.way}, {entrant.method}, {entrant.precision}")
        entrant.warm()


def _take_turns(entrants: Sequence[Entrant], rounds: int | None, tell: Tell) -> None:
    """Let all run one round after the other; without ``rounds``, until each has used up its share of the time."""
    share = LIMIT / max(len(entrants), 1)
    for turn in range(rounds or MOST):
        asked = rounds is not None or turn < LEAST
        in_time = sum(e.spent for e in entrants) < LIMIT
        live = [e for e in entrants if not e.error and (asked or (in_time and e.spent < share))]
        if not live or (live == entrants[:1] and len(entrants) > 1):
            return
        tell(f"turn {turn + 1}")
        if entrants[0] not in live and not entrants[0].error:
            live.insert(0, entrants[0])  # what others are compared to takes part to the end
        for entrant in live:
            entrant.turn()
