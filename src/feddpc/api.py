"""The Python interface: :func:`simulate` for one's own module and data, :func:`rerun` for a run that was made."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from feddpc import methods
from feddpc.build import build, with_reserve
from feddpc.config import Config, code_in
from feddpc.data import Dataset, load
from feddpc.data.loading import DATA
from feddpc.data.partition import Partition
from feddpc.data.schemes import PARTITIONS
from feddpc.errors import BadInputError, unknown
from feddpc.experiment import Experiment
from feddpc.methods.base import Method
from feddpc.models import MODELS
from feddpc.registry import Registry, refuse_code, short_name
from feddpc.report import figures
from feddpc.robust.rules import RULES
from feddpc.runs.engine_choice import ENGINES
from feddpc.runs.record import StoredRun
from feddpc.runs.rerun import RerunPlan, RerunReport
from feddpc.runs.resumable import check_resumable
from feddpc.runs.runner import OnRound, Outcome, Stop, execute
from feddpc.runs.tracking import Track
from feddpc.sampling import SAMPLERS
from feddpc.tasks.kinds import TASKS
from feddpc.tasks.losses import LOSSES
from feddpc.tasks.measures import FUNCTIONS
from feddpc.tasks.metrics import Metric
from feddpc.tasks.network import TRANSFORMS
from feddpc.torch_globals import preserve_torch_globals

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = npt.NDArray[np.float64]

#: Everything that a configuration chooses by name.
REGISTRIES: dict[str, Registry[Any]] = {
    "method": methods.METHODS,
    "model": MODELS,
    "data": DATA,
    "partition": PARTITIONS,
    "sampler": SAMPLERS,
    "rule": RULES,
    "task": TASKS,
    "loss": LOSSES,
    "metric": FUNCTIONS,
    "transform": TRANSFORMS,
    "engine": Registry("engine", cast(dict[str, Callable[..., Any]], ENGINES)),
}


def register(kind: str, name: str, thing: Any = None) -> Any:
    """Make ``thing`` known by ``name`` to :func:`simulate`, the configuration and the command line of this process.

    ``kind`` is method, model, data, partition, sampler, rule, task, loss, metric, transform or engine. A model is a
    module class, or a function that returns a module; it gets what it names of ``classes``, ``channels``, ``size`` and
    ``shape``. A data set is a function that returns a :class:`Dataset` or (x_train, y_train, x_test, y_test). A
    partition is a function of ``labels``, ``clients`` and ``seed`` that returns a list with the sample indices of each
    client. A loss is a function of outputs and targets that returns one value per sample, or per sample and token; a
    metric one of all outputs and targets. Other parameters with defaults are options: ``model_options={...}``,
    ``--set model.KEY=VALUE``. Without ``thing``, this is a decorator.

    >>> @register("partition", "alternating")
    ... def alternating(labels, clients):
    ...     return [range(j, len(labels), clients) for j in range(clients)]
    >>> simulate(rounds=1, clients=20, cohort=2, partition="alternating", engine="loop").status
    'finished'
    >>> del REGISTRIES["partition"].entries["alternating"]
    """
    if kind not in REGISTRIES:
        raise unknown("kind", kind, REGISTRIES)
    if thing is None:
        return functools.partial(register, kind, name)
    if kind == "method":
        if not (isinstance(thing, type) and issubclass(thing, Method)):
            raise _wrong_type("method", thing, "a subclass of feddpc.Method")
        thing.name = thing.name or name
    return REGISTRIES[kind].register(name, thing)


@dataclass(frozen=True, repr=False)
class Result:
    """What a simulation gave: curves, summary and the final model."""

    config: Config  #: complete: says exactly what was computed
    status: str  #: finished, diverged or interrupted
    records: list[dict[str, Any]]  #: one per round, as in rounds.jsonl
    summary: dict[str, Any]
    state_dict: dict[str, Tensor]  #: the final model; ``module.load_state_dict`` accepts it
    folder: Path | None

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {'; '.join(self._facts())}>"

    def _facts(self) -> list[str]:
        config, metric = self.config, self.primary
        best = self.summary[f"best_{metric.name}"]
        facts = [
            f"{short_name(config.method)} on {short_name(config.data)}, "
            f"{len(self.records)} of {config.rounds} rounds, {self.status}",
            f"no test {metric.words}" if best is None else f"best test {metric.words} {metric.with_unit(best)}",
        ]
        return facts if self.folder is None else [*facts, str(self.folder)]

    def curve(self, name: str) -> Floats:
        """Return one value per round, NaN where there is none: ``test_accuracy``, ``train_loss``, a method's note."""
        return np.array([np.nan if r.get(name) is None else r[name] for r in self.records], dtype=np.float64)

    @property
    def primary(self) -> Metric:
        """The metric that runs of this task are compared by."""
        return Metric.read(self.summary["primary"])

    @property
    def metrics(self) -> dict[str, float | None]:
        """All metrics of the last round that was evaluated: ``test_accuracy``, ``test_loss``."""
        return dict(self.summary["metrics"])

    @property
    def test_accuracy(self) -> Floats:
        """Test accuracy after every round, from 0 to 1."""
        return self.curve("test_accuracy")

    @property
    def test_loss(self) -> Floats:
        """Mean test loss after every round."""
        return self.curve("test_loss")

    @property
    def train_loss(self) -> Floats:
        """Mean loss of the participants during local training, every round."""
        return self.curve("train_loss")

    @property
    def best_accuracy(self) -> float:
        """The largest test accuracy over rounds; NaN where no round has one."""
        best = self.summary.get("best_accuracy")
        return float("nan" if best is None else best)

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw the primary metric and the training loss over rounds; save the picture if ``path`` is given."""
        run = StoredRun(self.folder or Path(), self.config, self.records, self.summary, {}, metrics=(self.primary,))
        figure = figures.curves([run])
        if path is not None:
            figures.save(figure, Path(path))
        return figure


@dataclass(frozen=True, repr=False)
class Rerun(Result):
    """What a run gave that was made again, and how it compares with the first one."""

    likeness: RerunReport

    def _facts(self) -> list[str]:
        return [*super()._facts(), str(self.likeness)]


def simulate(
    *,
    data: Dataset | str | Sequence[Any] = "digits",
    model: nn.Module | str = "auto",
    method: Method | type[Method] | str = "feddpc",
    rounds: int = 100,
    clients: int = 100,
    cohort: int = 10,
    client_lr: float | None = None,
    server_lr: float | None = None,
    partition: Partition | Sequence[npt.ArrayLike] | str = "dirichlet",
    out: str | Path | None = None,
    resume: bool = False,
    on_round: OnRound | None = None,
    track: Track = (),
    **more: Any,
) -> Result:
    """Simulate a federation and return its curves and final model.

    The first Ctrl-C ends the simulation after the present round, and what there is so far is returned with the status
    ``interrupted``; the second one raises ``KeyboardInterrupt`` at once. A handler of your own for SIGINT is kept.

    Args:
        data: a known name, a path, a :class:`Dataset`, or ``(x_train, y_train, x_test, y_test)`` arrays or tensors.
        model: a module without buffers (it is copied, and its weights are the initial model), or a known name. Names of
            data, model and partition may be registered (:func:`register`) or in a file, ``FILE.py:NAME``.
        method: a method, its class, or its name (hyper-parameters then through ``hyper={...}``).
        rounds: communication rounds.
        clients: population; ignored when ``partition`` is given as index lists.
        cohort: clients per round.
        client_lr: local learning rate, by default 0.1; ``lr`` is another name for it.
        server_lr: server learning rate, by default the local one.
        partition: a known name, a :class:`Partition`, or one sequence of training-sample indices a client.
        out: folder for records and checkpoints; nothing is written without it.
        resume: continue the run in ``out``.
        on_round: called with every round's record.
        track: trackers that are told of every round, by name (``"tensorboard,mlflow"``) or one's own; needs ``out``.
        more: any other key of the configuration, e.g. ``alpha=0.6, batch_size=32, engine="loop", hyper={"lam": 0.5}``,
            or ``participation="poisson", privacy={"clip": 1.0, "epsilon": 8.0}`` for differential privacy.

    >>> result = simulate(rounds=2, clients=20, cohort=2, method="fedavg", engine="loop")
    >>> len(result.test_accuracy), result.status
    (2, 'finished')
    """
    for name, value in {"data": data, "model": model, "method": method, "partition": partition}.items():
        if value is None:
            raise BadInputError(f"{name} is None: leave it out to have the default")
    values: dict[str, Any] = {"rounds": rounds, "cohort": cohort, "server_lr": server_lr, **_one_rate(more, client_lr)}
    if isinstance(partition, str):
        values["clients"] = clients
    if "hyper" in more and not isinstance(method, str):
        raise BadInputError("hyper is for a method given by name: set the hyper-parameters of the method you pass")
    folder = Path(out) if out is not None else None
    if resume:
        if folder is None:
            raise BadInputError("resume=True needs out, the folder of the run to continue")
        check_resumable(folder)
    with preserve_torch_globals():
        own = _Own.of(data=data, model=model, method=method, partition=partition)
        config = Config.read(values | own.values)
        chosen = own.method or methods.create(config.method, **config.hyper)
        experiment, stop = own.experiment(config, chosen), Stop()
        with stop.on_callers_interrupt():
            outcome = execute(
                experiment,
                method=chosen,
                out=folder,
                resume=resume,
                on_round=on_round,
                stop=stop,
                track=track,
            )
    return _result(outcome)


def rerun(
    folder: str | Path,
    *,
    data: Dataset | str | Sequence[Any] | None = None,
    model: nn.Module | str | None = None,
    method: Method | type[Method] | str | None = None,
    partition: Partition | Sequence[npt.ArrayLike] | str | None = None,
    out: str | Path | None = None,
    on_round: OnRound | None = None,
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
        changes: keys of the configuration to have otherwise, e.g. ``seed=1``; they are listed in the likeness.
    """
    changes = _one_rate(changes, changes.pop("client_lr", None))
    with preserve_torch_globals():
        own = _Own.of(data=data, model=model, method=method, partition=partition)
        again = RerunPlan.plan(Path(folder), changes | own.values, lambda text: warnings.warn(text, stacklevel=5))
        again.refuse_missing(data=data is not None, model=model is not None, partition=partition is not None)
        refuse_code(Path(folder), code_in(again.config.asdict()), code_in(changes | own.values))
        chosen = own.method or methods.create(again.config.method, **again.config.hyper)
        experiment, stop = own.experiment(again.config, chosen), Stop()
        with stop.on_callers_interrupt():
            outcome = execute(
                experiment,
                method=chosen,
                out=Path(out) if out is not None else None,
                on_round=on_round,
                stop=stop,
                examine=again.examine,
            )
    return Rerun(**vars(_result(outcome)), likeness=again.compare(outcome.records))


@dataclass(frozen=True)
class _Own:
    """What a caller brought along, and what that says in a configuration."""

    values: dict[str, Any]
    data: Dataset | None
    module: nn.Module | None
    method: Method | None
    partition: Partition | None

    @classmethod
    def of(cls, *, data: Any, model: Any, method: Any, partition: Any) -> _Own:
        """Take each thing as it is, by its name, or not at all (None)."""
        named = {"data": str(data) if isinstance(data, Path) else data}
        named |= {"model": model, "method": method, "partition": partition}
        values: dict[str, Any] = {key: value for key, value in named.items() if isinstance(value, str)}
        dataset = module = made = dealt = None
        if data is not None:
            dataset = _dataset(data)
            values.setdefault("data", dataset.name)
        if model is not None and not isinstance(model, str):
            module = _module(model)
            values["model"] = type(module).__name__
        if method is not None and not isinstance(method, str):
            made = _method(method)
            values |= {"method": made.name, "hyper": made.hyper()}
        if partition is not None and not isinstance(partition, str):
            dealt = _partition(partition)
            values |= {"partition": "given", "clients": len(dealt)}
        return cls(values, dataset, module, made, dealt)

    def experiment(self, config: Config, method: Method) -> Experiment:
        """Build what ``config`` says, with these things in their places."""
        return build(with_reserve(config, [method]), data=self.data, module=self.module, partition=self.partition)


def _one_rate(values: dict[str, Any], client_lr: float | None) -> dict[str, Any]:
    """Return ``values`` with the local learning rate, which has two names: ``lr`` and ``client_lr``."""
    if client_lr is None:
        return values
    if "lr" in values:
        raise BadInputError(f"lr = {values['lr']} and client_lr = {client_lr} are the same setting: give one of them")
    return {**values, "lr": client_lr}


def _dataset(data: Any) -> Dataset:
    if isinstance(data, Dataset):
        return data
    if isinstance(data, str | Path):
        return load(data)
    if not isinstance(data, Sequence):
        raise _wrong_type("data", data, "a name, a path, a Dataset or (x_train, y_train, x_test, y_test)")
    if len(data) != 4:
        raise BadInputError(f"data has {len(data)} parts: give (x_train, y_train, x_test, y_test)")
    return Dataset.from_arrays(*data)


def _module(model: Any) -> nn.Module:
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise BadInputError(f"model is the class {model.__name__}: give an instance, such as {model.__name__}(...)")
    if not isinstance(model, nn.Module):
        raise _wrong_type("model", model, "a torch.nn.Module or a name")
    return copy.deepcopy(model)


def _method(method: Any) -> Method:
    made = method() if isinstance(method, type) and issubclass(method, Method) else method
    if not isinstance(made, Method):
        raise _wrong_type("method", method, "a Method, its class or its name")
    return made


def _partition(partition: Any) -> Partition:
    if isinstance(partition, Partition):
        return partition
    wanted = "a name, a Partition, or one sequence of sample indices per client"
    if not isinstance(partition, Iterable):
        raise _wrong_type("partition", partition, wanted)
    lists = list(partition)
    if lists and all(np.ndim(one) == 0 for one in lists):
        raise BadInputError(f"partition is an array of {len(lists)} numbers: give {wanted}")
    return Partition.from_lists(lists)


def _wrong_type(name: str, value: object, wanted: str) -> BadInputError:
    return BadInputError(f"{name} is of type {type(value).__name__}: give {wanted}")


def _result(outcome: Outcome) -> Result:
    shared = {f.name: getattr(outcome, f.name) for f in fields(Result) if f.name != "state_dict"}
    return Result(**shared, state_dict=outcome.experiment.task.flat.state_dict(outcome.w))
