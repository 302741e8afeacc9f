"""Making strategies and server apps for any method, and what the server needs for them."""

from __future__ import annotations

import copy
import dataclasses
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result
from numpy.typing import NDArray
from torch import nn

from feddpc import methods
from feddpc.checks import check_int, check_positive
from feddpc.config import EXECUTION_KEYS, MAY_CHANGE, OPTION_TABLES, Config, keys, one_rate
from feddpc.data import Dataset
from feddpc.data.array_checks import Target
from feddpc.data.scaling import Scaler
from feddpc.errors import BadInputError
from feddpc.experiment import Experiment
from feddpc.flower.assets import Reserve, ServerAssets
from feddpc.flower.client_app_strategy import ClientAppStrategy
from feddpc.flower.prometheus import address_of
from feddpc.flower.quarantine import USUAL, usual_quarantine
from feddpc.flower.screening import Bounds
from feddpc.method_changes import check_method, make_method
from feddpc.methods.base import Method
from feddpc.policies import resolve_policies
from feddpc.resolve import resolve_task
from feddpc.robust.defense import FEDERATION
from feddpc.task_parts import TaskParts, load_code, task_class
from feddpc.tasks import TASKS
from feddpc.tasks.augmentation import TRANSFORMS
from feddpc.tasks.losses import LOSSES
from feddpc.tasks.measures import MEASURES

Array = NDArray[Any]
#: Tables that the app's configuration may switch off as a whole.
SWITCHES = ("screen", "quarantine")
#: Seconds that a server waits for its clients to come.
WAIT = 600.0


def strategy(
    method: Method | type[Method] | str = "feddpc",
    *,
    model: nn.Module,
    test: tuple[Any, Any] | None = None,
    classes: int | None = None,
    target: Target | None = None,
    validation: tuple[Any, Any] | None = None,
    reserve: Reserve | None = None,
    scaler: Scaler | None = None,
    samples: int | None = None,
    min_replies: int = 1,
    max_void_rounds: int = 3,
    min_available_nodes: int | None = None,
    max_norm: float | None = None,
    max_examples: int = 10**9,
    fraction_evaluate: float = 0.0,
    folder: str | Path | None = None,
    check_initial_arrays: bool = True,
    quarantine: Mapping[str, int] | bool | None = USUAL,
    wait: float = WAIT,
    reproducible: bool = False,
    prometheus: str | int | None = None,
    kind: type[ClientAppStrategy] = ClientAppStrategy,
    **config: Any,
) -> ClientAppStrategy:
    """Return a Flower strategy for any method, for nodes that run :func:`feddpc.flower.client_app`.

    Args:
        method: a method, its class, or its name (hyper-parameters then through ``hyper={...}``).
        model: the network; its weights are the first model.
        test: samples and targets on which the server evaluates the model.
        classes: how many classes there are (of numbers, how many per sample; of labels, how many; of tokens, the
            vocabulary), by default what ``test`` has.
        target: what the targets are: ``classes``, ``floats``, ``multihot`` or ``tokens``; by default those of the task,
            or what those of ``test`` look like.
        validation: samples and targets that no client has, evaluated like ``test``.
        reserve: samples of the server, for methods that hand some out.
        scaler: how samples are scaled where that depends on all data (``scaling="channel"``).
        samples: how many there are in all, by default what the clients count and the reserve.
        min_replies: how many usable replies make a round count; at most the cohort.
        max_void_rounds: how many rounds in a row without that many end the run with an error.
        min_available_nodes: how many clients must be there before round 1, by default all.
        max_norm: the longest vector that a reply may hold.
        max_examples: the most examples that a client may count.
        fraction_evaluate: share of the nodes that evaluate the model on test samples of their own, every round.
        folder: where records and checkpoints go; a run that is there is continued.
        check_initial_arrays: whether that run must have begun with the weights of ``model``. False is for models that
            are made without a seed.
        quarantine: after how many refused replies in a row a node is not asked, and for how many rounds; None: never.
        wait: seconds to wait for clients.
        reproducible: with differential privacy, draw participants and noise from the experiment's seed, as the
            simulator does. Clients know that seed, and could take the noise away: only for comparisons.
        prometheus: where a metrics endpoint listens: a port on loopback, or HOST:PORT; by default there is none.
        kind: the class of the strategy.
        config: keys of the configuration: ``clients``, ``cohort``, ``client_lr``, ``server_lr``, ``batch_size``, ...;
            ``task``, ``loss``, ``transform`` and ``metrics`` may also be objects, which nodes must be given too.
            ``screen`` is ``{"norm": 30}`` unless given; None, False or an empty table switches it off.
    """
    for name, samples_of in {"reserve": reserve, "validation": validation}.items():
        if isinstance(samples_of, int | float):
            raise BadInputError(
                f"{name} = {samples_of} is a share of all training samples, which no server has in a federation: give "
                "the samples themselves, or leave it out"
            )
    address_of(prometheus)
    check_positive("wait", wait)
    if min_available_nodes is not None:
        check_int("min_available_nodes", min_available_nodes, 1)
    config = one_rate(config, config.pop("client_lr", None))
    if isinstance(method, str):
        method = methods.create(method, **config.get("hyper", {}))
    else:
        method = make_method(method)
        if config.get("hyper", method.hyper()) != method.hyper():
            raise BadInputError("hyper is for a method given by name: set the hyper-parameters of the method you pass")
    if "screen" not in config and kind.sees_uploads and not config.get("privacy"):
        config["screen"] = dict(FEDERATION)
    config["screen"] = config.get("screen") or {}
    load_code(config)
    own, words = TaskParts.take(config)
    settings = Config.read({**config, **words, "method": method.name, "hyper": method.hyper()})
    _refuse_unread(settings, config)
    if settings.privacy and min_replies > 1:
        raise BadInputError(
            f"min_replies = {min_replies} cannot be run with privacy: one client more or less would decide whether all "
            "the others count, and the budget is counted for one: leave it out"
        )
    settings = resolve_policies(settings, method.usual_server_lr)
    if target is None and (own.task or settings.task != "auto"):
        target = task_class(settings.task, own).target or None  # type: ignore[assignment]
    held = {"test": test, "validation": validation}
    for name, pair in held.items():
        if pair is not None:
            data = Dataset.from_arrays(*pair, *pair, classes=classes, target=target, name=f"the {name} set")
            held[name], classes, target = (data.x_test, data.y_test), data.classes, data.target
    if classes is None:
        raise BadInputError("how many classes there are is unknown: give classes=, or a test set")
    target = target or "classes"
    settings = dataclasses.replace(settings, **resolve_task(settings, own, target, "this federation"))
    check_method(method, settings, target, "this federation")
    network = copy.deepcopy(model)
    assets = ServerAssets(
        settings, method, network, classes, target, own, reserve=reserve, scaler=scaler, samples=samples, **held
    )
    made = kind(
        assets,
        wait=wait,
        secret=None if reproducible else secrets.randbits(128),
        bounds=Bounds(max_norm, max_examples),
        min_replies=min_replies,
        max_void_rounds=max_void_rounds,
        folder=folder,
        check_initial_arrays=check_initial_arrays,
        quarantine=usual_quarantine(quarantine, private=bool(settings.privacy)),
        min_available_nodes=settings.clients if min_available_nodes is None else min_available_nodes,
        fraction_evaluate=fraction_evaluate,
        min_evaluate_nodes=1,
    )
    made.prometheus = prometheus
    return made


def _refuse_unread(settings: Config, given: Mapping[str, Any]) -> None:
    """Raise if a setting would do nothing: only the simulator has it, or nodes decide it."""
    usual = Config()
    for name, facts in keys().items():
        value = getattr(settings, name)
        if facts.simulator_only and value != getattr(usual, name):
            raise BadInputError(f"{name} = {value!r} works in the simulator only, not in a federation: leave it out")
        if facts.at_nodes and name in given and value != getattr(usual, name):
            raise BadInputError(
                f"{name} = {value!r}: nodes have data, networks and machines of their own: leave it out"
            )


def server_app(
    method: Method | str = "feddpc",
    *,
    rounds: int = 100,
    deadline: float = 3600.0,
    on_result: Callable[[ClientAppStrategy, Result], object] | None = None,
    make: Callable[..., ClientAppStrategy] = strategy,
    **settings: Any,
) -> ServerApp:
    """Return a server app that runs ``rounds`` rounds of :func:`strategy`; ``settings`` are that function's.

    The app's configuration (``[tool.flwr.app.config]``, or ``flwr run -c "rounds=5 hyper.lam=0.5"``) overrides these
    arguments. Its keys are those of the configuration, with - or _; ``hyper.NAME`` is a hyper-parameter of any method,
    ``feddpc.NAME`` one of a single method, ignored when another one runs; ``privacy.clip``, ``screen.norm`` and
    ``faults.sign_flip`` are options of a part.

    Args:
        method: a method, or its name.
        rounds: communication rounds.
        deadline: seconds after which a round goes on without the replies that are missing.
        on_result: called with the strategy and Flower's result at the end.
        make: returns the strategy for the method and the settings.
        settings: everything else.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        values: dict[str, Any] = {"method": method, "rounds": rounds, "deadline": deadline, **settings}
        values = one_rate(values, values.pop("client_lr", None))
        named = method if isinstance(method, str) else None
        for key, value in from_run_config(context.run_config, named).items():
            values[key] = {**(values.get(key) or {}), **value} if isinstance(value, dict) else value
        if not isinstance(values["method"], str) and values.get("hyper"):
            raise BadInputError("hyper is for a method given by name: set the hyper-parameters of the method you pass")
        timeout = values.pop("deadline")
        new_strategy = make(**values)
        result = new_strategy.start(grid, new_strategy.initial_arrays(), num_rounds=values["rounds"], timeout=timeout)
        if on_result is not None:
            on_result(new_strategy, result)

    return app


def from_run_config(values: Any, method: str | None = None) -> dict[str, Any]:
    """Return what an app's configuration says about the experiment; other keys are the app's own.

    ``method`` is the name of the method that runs, unless the configuration names another.

    >>> from_run_config({"client-lr": 0.1, "hyper.lam": 0.5, "screen.norm": 5.0, "folder": "", "greeting": "hello"})
    {'hyper': {'lam': 0.5}, 'screen': {'norm': 5.0}, 'lr': 0.1}
    >>> from_run_config({"method": "fedprox", "fedprox.mu": 0.1, "feddpc.lam": 0.5})
    {'method': 'fedprox', 'hyper': {'mu': 0.1}}
    >>> from_run_config({"quarantine.after": 5, "screen": False})
    {'quarantine': {'after': 5}, 'screen': False}
    """
    at_nodes = {name for name, facts in keys().items() if facts.at_nodes}  # the app's own, if it has such keys
    tables = {"hyper": "hyper", "quarantine": "quarantine", **OPTION_TABLES}
    tables = {name: table for name, table in tables.items() if table not in at_nodes}
    if method := values.get("method", method):
        tables[method] = "hyper"
    hints = get_type_hints(strategy)
    objects = {name for name, hint in hints.items() if not {bool, int, float, str} & {hint, *get_args(hint)}}
    known = {"client_lr", "deadline", *hints, *keys()} - (objects - {"reserve", "validation"}) - set(tables.values())
    known -= at_nodes
    settings: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        table, _, option = name.partition(".")
        if option and table in tables:
            settings.setdefault(tables[table], {})[option] = value
        elif name in SWITCHES and value is False:
            settings[name] = False
        elif name in known and (name, value) != ("folder", ""):
            settings[name] = value
    return one_rate(settings, settings.pop("client_lr", None))


@dataclass(frozen=True)
class AppArguments:
    """What ``server_app`` and ``client_app`` need for an experiment: the same data, clients, model and seeds."""

    experiment: Experiment

    def model(self) -> nn.Module:
        """Return a copy of the network."""
        return copy.deepcopy(self.experiment.task.module)

    def data(self, client: int, clients: int) -> tuple[Any, Any]:
        """Return the samples and labels of one client."""
        mine, data = self.experiment.partition[client], self.experiment.data
        return data.x_train[mine], data.y_train[mine]

    def server(self) -> dict[str, Any]:
        """Return the arguments of ``strategy`` and ``server_app``, except the method.

        They give the numbers of the simulator, so what it does not have is off: the bound on norms, unless the
        experiment has one, and the quarantine.
        """
        experiment = self.experiment
        data, config = experiment.data, experiment.config
        # A network that measures statistics is refused anyway.
        at_nodes = (name for name, facts in keys().items() if facts.at_nodes)
        skip = ("method", "hyper", "buffers", *at_nodes, *EXECUTION_KEYS, *MAY_CHANGE)
        return {
            **{k: v for k, v in config.asdict().items() if k not in skip},
            "model": self.model(),
            **self.code(),
            "test": (data.x_test, data.y_test),
            "classes": data.classes,
            "target": data.target,
            "validation": (data.x_train[experiment.held_out], data.y_train[experiment.held_out])
            if len(experiment.held_out)
            else None,
            "reserve": Reserve.of(data.x_train, data.y_train, experiment.reserved_ids)
            if len(experiment.reserved_ids)
            else None,
            "scaler": experiment.task.scaler if config.scaling == "channel" else None,
            "samples": len(data.y_train),
            "quarantine": None,
        }

    def client(self) -> dict[str, Any]:
        """Return the arguments of ``client_app``."""
        return {"model": self.model, "data": self.data, **self.code()}

    def code(self) -> dict[str, Any]:
        """Return what the experiment was given as objects: task, loss, transform and metrics."""
        task, config = self.experiment.task, self.experiment.config
        parts: dict[str, Any] = {}
        if config.task not in TASKS.entries:
            parts["task"] = type(task)
        if config.loss not in LOSSES.entries and task.sample_loss is not None:
            parts["loss"] = task.sample_loss
        if task.transform is not None and config.transform not in TRANSFORMS.entries:
            parts["transform"] = task.transform
        if any(measure not in MEASURES.values() for measure in task.measures):
            parts["metrics"] = task.measures
        return parts


def app_arguments(experiment: Experiment) -> AppArguments:
    """Return an experiment of the simulator (from ``feddpc.build.build``) as the two halves of a federation."""
    return AppArguments(experiment)
