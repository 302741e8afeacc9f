"""The Python interface: :func:`simulate` for one's own module and data, and the :class:`Result` it returns."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from feddpc import methods
from feddpc.data import Dataset, load
from feddpc.data.partition import Partition
from feddpc.errors import BadInputError
from feddpc.methods.base import Method
from feddpc.report import figures
from feddpc.run.config import Config
from feddpc.run.experiment import prepare
from feddpc.run.record import StoredRun
from feddpc.run.runner import OnRound, Outcome, Stop, execute
from feddpc.run.specialise import with_reserve
from feddpc.run.tracking import Track

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Result:
    """What a simulation gave: curves, summary and the final model."""

    config: Config  #: complete: says exactly what was computed
    status: str  #: finished, diverged or interrupted
    records: list[dict[str, Any]]  #: one a round, as in rounds.jsonl
    summary: dict[str, Any]
    state_dict: dict[str, Tensor]  #: the final model; ``module.load_state_dict`` accepts it
    folder: Path | None

    def curve(self, name: str) -> Floats:
        """Return one value a round, NaN where there is none: ``test_accuracy``, ``train_loss``, a method's note."""
        return np.array([np.nan if r.get(name) is None else r[name] for r in self.records], dtype=np.float64)

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
        """The largest test accuracy over rounds."""
        return float(self.summary["best_accuracy"])

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw accuracy and loss over rounds; save the picture if ``path`` is given."""
        run = StoredRun(self.folder or Path(), self.config, self.records, self.summary, {})
        figure = figures.curves([run])
        if path is not None:
            figures.save(figure, Path(path))
        return figure


def simulate(
    *,
    data: Dataset | str | Sequence[Any] = "digits",
    model: nn.Module | str = "auto",
    method: Method | type[Method] | str = "feddpc",
    rounds: int = 100,
    clients: int = 100,
    cohort: int = 10,
    client_lr: float = 0.1,
    server_lr: float | None = None,
    partition: Partition | Sequence[npt.ArrayLike] | str = "dirichlet",
    out: str | Path | None = None,
    resume: bool = False,
    on_round: OnRound | None = None,
    track: Track = (),
    **more: Any,
) -> Result:
    """Simulate a federation and return its curves and final model.

    Args:
        data: a known name, a path, a :class:`Dataset`, or ``(x_train, y_train, x_test, y_test)`` arrays or tensors.
        model: a module without buffers (it is copied, and its weights are the initial model), or a known name.
        method: a method, its class, or its name (hyper-parameters then through ``hyper={...}``).
        rounds: communication rounds.
        clients: population; ignored when ``partition`` is given as index lists.
        cohort: clients a round.
        client_lr: local learning rate.
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
    if "lr" in more:
        raise BadInputError("lr is client_lr here: give that instead")
    values: dict[str, Any] = {"rounds": rounds, "cohort": cohort, "lr": client_lr, "server_lr": server_lr, **more}
    if isinstance(method, str):
        values["method"] = method
    else:
        method = method if isinstance(method, Method) else method()
        values |= {"method": method.name, "hyper": method.hyper()}
        if "hyper" in more:
            raise BadInputError("hyper is for a method given by name: set the hyper-parameters of the method you pass")
    if isinstance(partition, str):
        values |= {"partition": partition, "clients": clients}
        dealt = None
    else:
        dealt = partition if isinstance(partition, Partition) else Partition.from_lists(list(partition))
        values["clients"] = len(dealt)
    if isinstance(model, str):
        values["model"] = model
    dataset = _dataset(data)
    chosen = methods.create(method, **values.get("hyper", {})) if isinstance(method, str) else method
    setting = prepare(
        with_reserve(Config.read({**values, "data": dataset.name}), [chosen]),
        data=dataset,
        module=copy.deepcopy(model) if isinstance(model, nn.Module) else None,
        partition=dealt,
    )
    outcome = execute(
        setting,
        method=chosen,
        out=Path(out) if out is not None else None,
        resume=resume,
        on_round=on_round,
        stop=Stop(),
        track=track,
    )
    return _result(outcome, outcome.setting.flat.state_dict(outcome.w))


def _dataset(data: Dataset | str | Sequence[Any]) -> Dataset:
    if isinstance(data, Dataset):
        return data
    if isinstance(data, str | Path):
        return load(data)
    if len(data) != 4:
        raise BadInputError(f"data has {len(data)} parts: give (x_train, y_train, x_test, y_test)")
    return Dataset.from_arrays(*data)


def _result(outcome: Outcome, state_dict: dict[str, Tensor]) -> Result:
    shared = {f.name: getattr(outcome, f.name) for f in fields(Result) if f.name != "state_dict"}
    return Result(**shared, state_dict=state_dict)
