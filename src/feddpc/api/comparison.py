"""Several methods and seeds on the same partitions, participants and batches: :func:`compare`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy.typing as npt
from torch import nn

from feddpc import methods as registered
from feddpc.api.results import Comparison, result_of
from feddpc.api.user_objects import UserObjects, refuse_none
from feddpc.callbacks import Callback, check_callbacks
from feddpc.checks import check_int
from feddpc.config import one_rate
from feddpc.data import Dataset
from feddpc.data.partition import Partition
from feddpc.errors import BadInputError, unknown, wrong_type
from feddpc.method_changes import make_method
from feddpc.methods.base import Method
from feddpc.report.display import make_display
from feddpc.report.groups import differing, show
from feddpc.runs.resumable import check_resumable
from feddpc.runs.stop import Stop
from feddpc.runs.tracking import Track
from feddpc.study.compare import ComparisonParts, run_comparison
from feddpc.study.overrides import Overrides


def compare(
    methods: Sequence[Method | type[Method] | str],
    seeds: Sequence[int] = (0,),
    *,
    data: Dataset | str | Sequence[Any] = "digits",
    model: nn.Module | str = "auto",
    partition: Partition | Sequence[npt.ArrayLike] | str = "auto",
    rounds: int = 100,
    clients: int | None = None,
    cohort: int = 10,
    client_lr: float | None = None,
    server_lr: float | None = None,
    hyper: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    progress: bool = False,
    track: Track = (),
    **more: Any,
) -> Comparison:
    """Train with several methods and seeds; for each seed on the same partition, first model, participants and batches.

    It computes what ``feddpc compare`` computes. Ctrl-C ends it after the present round, and what there is so far is
    returned.

    Args:
        methods: methods, their classes, or their names; also ``FILE.py:CLASS``. One class may be there several times
            with other hyper-parameters.
        seeds: of partition, first model, participants and batches. A module, or a partition, of your own is the same
            for every seed.
        data: as in :func:`simulate`.
        model: as in :func:`simulate`.
        partition: as in :func:`simulate`.
        rounds: communication rounds.
        clients: as in :func:`simulate`.
        cohort: clients per round.
        client_lr: local learning rate, by default 0.1; ``lr`` is another name for it.
        server_lr: server learning rate, by default the local one.
        hyper: hyper-parameters of methods given by name: ``{"feddpc": {"lam": 0.5}}``, or ``{"lam": 0.5}`` for all
            that have it.
        out: folder for records, models and checkpoints, as ``feddpc compare`` makes it; nothing is written without it.
        resume: continue the comparison in ``out``.
        callbacks: objects of subclasses of :class:`Callback`, which follow one run after the other.
        progress: show a bar per run, or plain lines where there is no terminal, on standard error.
        track: trackers, as in :func:`simulate`; they need ``out``.
        more: as in :func:`simulate`, e.g. ``alpha=0.6, batch_size=32, validation=0.1``.

    >>> comparison = compare(["feddpc", "fedavg"], seeds=[0, 1], rounds=2, clients=20, cohort=2, engine="loop")
    >>> comparison.results["fedavg", 1].test_accuracy.shape
    (2,)
    """
    refuse_none(methods=methods, data=data, model=model, partition=partition)
    for key in ("method", "seed"):
        if key in more:
            raise BadInputError(f"{key} = {more[key]!r}: a comparison has {key}s, a list: give {key}s=[...]")
    callbacks, folder = check_callbacks(callbacks), None if out is None else Path(out)
    if resume:
        if folder is None:
            raise BadInputError("resume=True needs out, the folder of the comparison to continue")
        check_resumable(folder, "comparison")
    numbers = _seeds(seeds)
    overrides = _overrides(methods, hyper or {})
    labels = _labels(methods, overrides)
    own = UserObjects.of(data=data, model=model, method=None, partition=partition, more=more, progress=progress)
    given = {"clients": clients, "rounds": rounds, "cohort": cohort, "server_lr": server_lr}
    given |= one_rate(more, client_lr) | own.values
    overrides.values |= {key: value for key, value in given.items() if value is not None}
    own_task = "own" in own.parts and own.parts["own"].task is not None  # which may say how the data are read
    if isinstance(data, str | Path) and own.parts["data"].client_ids is None and not own_task:
        del own.parts["data"]  # it is loaded by its name, once for all comparisons of this process
    things = ComparisonParts(own.parts, {name: method for name, (_, method) in labels.items() if method is not None})
    display, stop = make_display(progress), Stop()
    with stop.on_callers_interrupt(), display or nullcontext():
        outcomes = run_comparison(
            overrides,
            list(labels),
            numbers,
            folder,
            own=things,
            resume=resume,
            listener=display,
            stop=stop,
            track=track,
            callbacks=callbacks,
        )
    results = {(labels[name][0], seed): result_of(outcome) for (name, seed), outcome in outcomes.items()}
    recorded = frozenset(name for result in results.values() for name in result.recorded)
    results = {key: replace(result, elsewhere=recorded) for key, result in results.items()}
    return Comparison(results, len(labels) * len(numbers), folder)


def _seeds(seeds: Any) -> list[int]:
    if isinstance(seeds, str) or not isinstance(seeds, Sequence) or not seeds:
        raise BadInputError(f"seeds = {seeds!r}: give a list with at least one whole number, such as [0, 1, 2]")
    return [check_int("seeds", seed, 0, 2**32 - 1) for seed in seeds]


def _overrides(methods: Any, hyper: Mapping[str, Any]) -> Overrides:
    """Return the hyper-parameters of the methods that are given by name."""
    if isinstance(methods, str) or not isinstance(methods, Sequence) or not methods:
        raise BadInputError(f"methods = {methods!r}: give a list with at least one, such as ['feddpc', 'fedavg']")
    names = [method for method in methods if isinstance(method, str)]
    if not isinstance(hyper, Mapping):
        raise wrong_type("hyper", hyper, "a table of names and values")
    for key, value in hyper.items():
        if isinstance(value, Mapping) and key not in names:
            raise unknown("method in hyper", key, names)
    overrides = Overrides()
    overrides.absorb({"hyper": dict(hyper)}, names)
    return overrides


def _labels(methods: Sequence[Any], overrides: Overrides) -> dict[str, tuple[str, Method | None]]:
    """Return what tables call each method, and the method itself where it was not given by name; by name.

    Those of the same name are told apart by their hyper-parameters.
    """
    for one in methods:
        if isinstance(one, str) and methods.count(one) > 1:
            raise BadInputError(f"methods holds {one!r} {methods.count(one)} times: give each once")
    instances = [
        registered.create(one, **overrides.hyper.get(one, {})) if isinstance(one, str) else make_method(one)
        for one in methods
    ]
    count = Counter(method.name for method in instances)
    labels: dict[str, tuple[str, Method | None]] = {}
    for one, method in zip(methods, instances, strict=True):
        label, alike = method.name, [other.hyper() for other in instances if other.name == method.name]
        if count[method.name] > 1:
            if alike.count(method.hyper()) > 1:
                raise BadInputError(
                    f"methods holds two with the name {method.name!r} and the same hyper-parameters: give a class of "
                    "your own another name, or leave one of them out"
                )
            own = method.hyper()
            label = " ".join([label, *(f"{key}={show(own[key])}" for key in differing(alike) if key in own)])
        labels[one if isinstance(one, str) else label] = (label, None if isinstance(one, str) else method)
    return labels
