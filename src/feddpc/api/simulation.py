"""One run: :func:`simulate` for a module and data of your own, :func:`rerun` to repeat a stored run."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy.typing as npt
from torch import nn

from feddpc import methods
from feddpc.api.results import Rerun, Result, result_of
from feddpc.api.user_objects import UserObjects, refuse_none
from feddpc.build import build
from feddpc.callbacks import Callback, check_callbacks
from feddpc.config import Config, code_in, one_rate
from feddpc.data import Dataset
from feddpc.data.partition import Partition
from feddpc.errors import BadInputError
from feddpc.experiment import Experiment
from feddpc.methods.base import Method
from feddpc.ranks import join, restarted
from feddpc.registry import refuse_code
from feddpc.report.display import make_display
from feddpc.resolve import resolve_device
from feddpc.runs.record import is_run
from feddpc.runs.rerun import RerunPlan
from feddpc.runs.resumable import check_resumable
from feddpc.runs.runner import OnRound, Outcome, execute
from feddpc.runs.stop import Stop
from feddpc.runs.tracking import Track
from feddpc.torch_globals import preserve_torch_globals
from feddpc.unused import refuse_unused


def simulate(
    *,
    data: Dataset | str | Sequence[Any] = "digits",
    model: nn.Module | str = "auto",
    method: Method | type[Method] | str = "feddpc",
    rounds: int = 100,
    clients: int | None = None,
    cohort: int = 10,
    client_lr: float | None = None,
    server_lr: float | None = None,
    partition: Partition | Sequence[npt.ArrayLike] | str = "auto",
    out: str | Path | None = None,
    resume: bool = False,
    on_round: OnRound | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool = False,
    track: Track = (),
    **more: Any,
) -> Result:
    """Simulate a federation and return its curves and final model.

    The first Ctrl-C ends the simulation after the present round, and what there is so far is returned with the status
    ``interrupted``; the second one raises ``KeyboardInterrupt`` at once. A handler of your own for SIGINT is kept.

    Args:
        data: a known name, a path, a :class:`Dataset`, ``(x_train, y_train, x_test, y_test)`` arrays or tensors, a pair
            ``(train, test)`` of torch data sets, or a data set of Hugging Face (with ``data_options`` that name its
            columns). With ``client_ids``, one id per training sample, clients are those who hold the samples.
        model: a module (it is copied, and its weights are the initial model), or a known name. Names of
            data, model and partition may be registered (:func:`register`) or in a file, ``FILE.py:NAME``.
        method: a method, its class, or its name (hyper-parameters then through ``hyper={...}``).
        rounds: communication rounds.
        clients: population, by default 100. Index lists, and data that say who holds what, set it themselves: another
            number beside them is refused.
        cohort: clients per round.
        client_lr: local learning rate, by default 0.1; ``lr`` is another name for it.
        server_lr: server learning rate, by default the local one.
        partition: a known name, a :class:`Partition`, or one sequence of training-sample indices per client; by default
            natural where there are client ids, dirichlet for classes, else iid.
        out: folder for records and checkpoints; nothing is written without it.
        resume: continue the run in ``out``.
        on_round: called with every round's record.
        callbacks: objects of subclasses of :class:`Callback`, which follow the run and may stop it.
        progress: show a bar, or plain lines where there is no terminal, on standard error.
        track: trackers that are told of every round, by name (``"tensorboard,mlflow"``) or your own; needs ``out``.
        more: any other key of the configuration, e.g. ``alpha=0.6, batch_size=32, engine="loop", hyper={"lam": 0.5}``,
            or ``participation="poisson", privacy={"clip": 1.0, "epsilon": 8.0}`` for differential privacy. ``task``,
            ``loss``, ``transform`` and ``metrics`` may also be objects: a class of :class:`NetworkTask`, a function of
            outputs and targets that returns one value per sample or token, a function of a batch of inputs and
            uniform random numbers, and a list of names and functions of all outputs and targets.

    >>> result = simulate(rounds=2, clients=20, cohort=2, method="fedavg", engine="loop")
    >>> len(result.test_accuracy), result.status
    (2, 'finished')
    """
    refuse_none(data=data, model=model, method=method, partition=partition)
    if "hyper" in more and not isinstance(method, str):
        raise BadInputError("hyper is for a method given by name: set the hyper-parameters of the method you pass")
    folder, callbacks = Path(out) if out is not None else None, check_callbacks(callbacks)
    if resume:
        if folder is None:
            raise BadInputError("resume=True needs out, the folder of the run to continue")
        check_resumable(folder)
    resume = resume or (restarted() and folder is not None and is_run(folder))
    with preserve_torch_globals():
        own = UserObjects.of(data=data, model=model, method=method, partition=partition, more=more, progress=progress)
        values = {"rounds": rounds, "cohort": cohort, "server_lr": server_lr, **one_rate(more, client_lr)}
        values |= ({} if clients is None else {"clients": clients}) | own.values
        config = Config.read(values)
        chosen = own.method or methods.create(config.method, **config.hyper)
        with join(resolve_device(config.device), config.rank_timeout).together("preparing data, model and clients"):
            experiment = build(config, method=chosen, **own.parts)
            if not resume:
                given = values if clients is None else values | {"clients": clients}
                refuse_unused([(given, experiment.config)])
        how = {"out": folder, "resume": resume, "track": track, "on_round": on_round, "callbacks": callbacks}
        return result_of(_execute(experiment, chosen, progress, **how))


def rerun(
    folder: str | Path,
    *,
    data: Dataset | str | Sequence[Any] | None = None,
    model: nn.Module | str | None = None,
    method: Method | type[Method] | str | None = None,
    partition: Partition | Sequence[npt.ArrayLike] | str | None = None,
    out: str | Path | None = None,
    on_round: OnRound | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool = False,
    **changes: Any,
) -> Rerun:
    """Make the run in ``folder`` again from its ``config.toml`` and ``environment.json``, and say how alike it is.

    The engine is the one that was used then. Other data or another partition than then are an error; other versions,
    another machine or another initial model are warned of, and listed in ``Rerun.likeness``. Ctrl-C works as in
    :func:`simulate`.

    Args:
        folder: the run folder.
        data: needed where the run had arrays of its own; as in :func:`simulate`.
        model: needed where it had a module of its own.
        method: needed where it had a method that is not registered.
        partition: needed where it had index lists.
        out: folder for the new run; nothing is written without it.
        on_round: called with every round's record.
        callbacks: as in :func:`simulate`; where one stops the run, the rounds that both have are compared.
        progress: as in :func:`simulate`.
        changes: keys of the configuration to have otherwise, e.g. ``seed=1``; they are listed in the likeness.
    """
    callbacks = check_callbacks(callbacks)
    changes = one_rate(changes, changes.pop("client_lr", None))
    with preserve_torch_globals():
        own = UserObjects.of(
            data=data, model=model, method=method, partition=partition, more=changes, progress=progress
        )
        again = RerunPlan.plan(Path(folder), changes | own.values, lambda text: warnings.warn(text, stacklevel=6))
        again.refuse_missing(data=data is not None, model=model is not None, partition=partition is not None)
        refuse_code(Path(folder), code_in(again.config.asdict()), code_in(changes | own.values))
        chosen = own.method or methods.create(again.config.method, **again.config.hyper)
        experiment = build(again.config, method=chosen, **own.parts)
        refuse_unused([(changes, experiment.config)])
        folder_out = Path(out) if out is not None else None
        how = {"out": folder_out, "on_round": on_round, "examine": again.examine, "callbacks": callbacks}
        outcome = _execute(experiment, chosen, progress, **how)
    return Rerun(**vars(result_of(outcome)), likeness=again.compare(outcome.records))


def _execute(experiment: Experiment, method: Method, progress: bool, **how: Any) -> Outcome:
    """Run an experiment, with a display if that is asked for; Ctrl-C ends it after the present round."""
    display, stop = make_display(progress), Stop()
    with stop.on_callers_interrupt(), display or nullcontext():
        return execute(experiment, method=method, listener=display, stop=stop, last_use=True, **how)
