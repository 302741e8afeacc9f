"""What is learned, as a caller gives it: names in the configuration, or objects in place of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from feddpc.config import Config
from feddpc.errors import BadInputError, wrong_type
from feddpc.own_functions import describe
from feddpc.registry import is_code
from feddpc.tasks.augmentation import TRANSFORMS, Transform
from feddpc.tasks.kinds import TASKS, is_task
from feddpc.tasks.losses import LOSSES
from feddpc.tasks.measures import FUNCTIONS, Measure, measure_of
from feddpc.tasks.network import NetworkTask


@dataclass(frozen=True)
class TaskParts:
    """What a caller gives as objects: task class, loss, transform, metrics; the configuration holds their names."""

    task: type[NetworkTask] | None = None
    loss: Callable[[Tensor, Tensor], Tensor] | None = None
    transform: Transform | None = None
    metrics: tuple[Any, ...] = ()

    @classmethod
    def take(cls, values: dict[str, Any]) -> tuple[TaskParts, dict[str, str]]:
        """Take out of ``values`` the parts that are objects; return them, and what the configuration calls them."""
        parts: dict[str, Any] = {}
        words: dict[str, str] = {}
        for name in ("task", "loss", "transform"):
            if name in values and not isinstance(values[name], str):
                part = parts[name] = values.pop(name)
                if name == "task" and not is_task(part):
                    raise _not_a_task(part)
                if not callable(part):
                    raise wrong_type(name, part, "a function, or a name")
                words[name] = describe(part)
        metrics = values.get("metrics")
        if metrics is not None and not isinstance(metrics, str):
            wanted = list(values.pop("metrics")) if isinstance(metrics, Sequence) else [values.pop("metrics")]
            parts["metrics"] = tuple(measure_of(one) for one in wanted)
            words["metrics"] = ",".join(map(_metric_name, wanted, parts["metrics"]))
        return cls(**parts), words


def _not_a_task(part: Any) -> BadInputError:
    kind = type(part)
    if is_task(kind):
        return BadInputError(f"task is an instance of {kind.__name__}: give the class, task={kind.__name__}")
    return wrong_type("task", part, "a subclass of feddpc.tasks.NetworkTask, or a name")


def _metric_name(wanted: Any, measure: Measure) -> str:
    if isinstance(wanted, str):
        return wanted
    return measure.metric.name if isinstance(wanted, Measure) else describe(wanted).replace(",", ";")


def load_code(values: dict[str, Any]) -> None:
    """Replace names of code in files, ``FILE.py:NAME``, by what they name: task, loss, transform and metrics."""
    for name, known in {"task": TASKS, "loss": LOSSES, "transform": TRANSFORMS}.items():
        if isinstance(values.get(name), str) and is_code(values[name]):
            values[name] = known.get(values[name])
    if isinstance(values.get("metrics"), str) and any(map(is_code, _listed(values["metrics"]))):
        values["metrics"] = [FUNCTIONS.get(n) if is_code(n) else n for n in _listed(values["metrics"])]


def registered_code(config: Config) -> dict[str, str]:
    """Return a description of each registered function or class of the user's own that the task is made of."""
    known = {"task": TASKS, "loss": LOSSES, "transform": TRANSFORMS, "metrics": FUNCTIONS}
    described = {
        name: describe(registry.entries[name])
        for key, registry in known.items()
        for name in _listed(getattr(config, key))
        if name in registry.entries
    }
    return {name: text for name, text in described.items() if " " in text}  # those of the library have no digest


def task_class(name: str, own: TaskParts) -> type[NetworkTask]:
    """Return the class of a task: the user's own, or the one that ``name`` names."""
    found: type[NetworkTask] = own.task or TASKS.get(name)  # type: ignore[assignment]
    return found


def targets_of(task: Any, own: TaskParts | None = None) -> Any:
    """Return the kind of targets that a task learns; None where that follows from the data.

    >>> targets_of("regression"), targets_of("auto")
    ('floats', None)
    """
    if own is not None and own.task is not None:
        return own.task.target or None
    known = isinstance(task, str) and (task in TASKS.entries or is_code(task))
    return task_class(task, TaskParts()).target or None if known else None


def named_loss(name: str) -> Callable[[Tensor, Tensor], Tensor] | None:
    """Return a loss by its name, None for the task's own."""
    return None if name == "auto" else LOSSES.get(name)


def named_metrics(names: str) -> tuple[Any, ...]:
    """Return metrics by their names, which commas separate: known, registered, or in files."""
    return tuple(FUNCTIONS.get(n) if is_code(n) else n for n in _listed(names))


def _listed(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]
