"""Making strategies and server apps for any method, and what the server needs for them."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result
from numpy.typing import NDArray
from torch import Tensor, nn

from feddpc import methods
from feddpc.build import adapt_module
from feddpc.config import EXECUTION_KEYS, MAY_CHANGE, OPTION_TABLES, Config, keys
from feddpc.data import Dataset
from feddpc.data.partition import Partition
from feddpc.data.scaling import Scaler
from feddpc.errors import BadInputError
from feddpc.experiment import Experiment
from feddpc.flower.exchange import ClientAppExchange
from feddpc.flower.messages import ExperimentSpec, dtype_of
from feddpc.flower.method_strategy import MethodStrategy
from feddpc.flower.screening import Bounds
from feddpc.methods.base import Method, State
from feddpc.methods.federated_data import FederatedData
from feddpc.methods.local_steps import check_local_steps
from feddpc.models import check_supported
from feddpc.models.flat import Flat
from feddpc.policies import client_optimizer, resolve_policies
from feddpc.privacy.mechanism import check

Array = NDArray[Any]
#: Seconds that a server waits for its clients to come.
WAIT = 600.0


def strategy(
    method: Method | str = "feddpc",
    *,
    model: nn.Module,
    test: tuple[Any, Any] | None = None,
    classes: int | None = None,
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
    wait: float = WAIT,
    reproducible: bool = False,
    **config: Any,
) -> MethodStrategy:
    """Return a Flower strategy for any method, for nodes that run :func:`feddpc.flower.client_app`.

    Args:
        method: a method, or its name (hyper-parameters then through ``hyper={...}``).
        model: the network; its weights are the first model.
        test: samples and labels on which the server evaluates every round.
        classes: how many there are, by default those of ``test``.
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
        wait: seconds to wait for clients.
        reproducible: with differential privacy, draw participants and noise from the experiment's seed, as the
            simulator does. Clients know that seed, and could take the noise away: only for comparisons.
        config: keys of the configuration: ``clients``, ``cohort``, ``client_lr``, ``server_lr``, ``batch_size``, ...
    """
    if "client_lr" in config:
        config["lr"] = config.pop("client_lr")
    if isinstance(method, str):
        method = methods.create(method, **config.get("hyper", {}))
    settings = Config.read({**config, "method": method.name, "hyper": method.hyper()})
    _refuse_simulator_only(settings)
    check_local_steps(method, client_optimizer(settings))
    if settings.privacy:
        check(method)
        if min_replies > 1:
            raise BadInputError(
                f"min_replies = {min_replies} cannot be run with privacy: one client more or less would decide whether "
                "all the others count, and the budget is counted for one: leave it out"
            )
    settings = resolve_policies(settings, method.usual_server_lr)
    tested = None
    if test is not None:
        data = Dataset.from_arrays(*test, *test, classes=classes)
        tested, classes = (data.x_test, data.y_test), data.classes
    if classes is None:
        raise BadInputError("how many classes there are is unknown: give classes=, or a test set")
    assets = ServerAssets(settings, method, copy.deepcopy(model), classes, tested, reserve, scaler, samples)
    flower = {
        "min_available_nodes": settings.clients if min_available_nodes is None else min_available_nodes,
        "fraction_evaluate": fraction_evaluate,
        "min_evaluate_nodes": 1,
    }
    return MethodStrategy(
        method,
        ClientAppExchange(assets, wait=wait, secret=None if reproducible else secrets.randbits(128)),
        bounds=Bounds(max_norm, max_examples),
        min_replies=min_replies,
        max_void_rounds=max_void_rounds,
        folder=folder,
        flower=flower,
    )


def _refuse_simulator_only(settings: Config) -> None:
    """Raise if a setting asks for something that only the simulator has: in a federation it would do nothing."""
    usual = {"task": "classification", "loss": "cross-entropy", "metrics": "accuracy"}
    for name, facts in keys().items():
        value = getattr(settings, name)
        if facts.simulator_only and value not in (getattr(Config(), name), usual.get(name)):
            raise BadInputError(f"{name} = {value!r} works in the simulator only, not in a federation: leave it out")


def server_app(
    method: Method | str = "feddpc",
    *,
    rounds: int = 100,
    deadline: float = 3600.0,
    on_result: Callable[[MethodStrategy, Result], object] | None = None,
    make: Callable[..., MethodStrategy] = strategy,
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
        named = method if isinstance(method, str) else None
        for key, value in from_run_config(context.run_config, named).items():
            values[key] = {**values.get(key, {}), **value} if isinstance(value, dict) else value
        if not isinstance(values["method"], str) and values.get("hyper"):
            raise BadInputError("hyper is for a method given by name: set the hyper-parameters of the method you pass")
        timeout = values.pop("deadline")
        made = make(**values)
        result = made.start(grid, made.initial_arrays(), num_rounds=values["rounds"], timeout=timeout)
        if on_result is not None:
            on_result(made, result)

    return app


def from_run_config(values: Any, method: str | None = None) -> dict[str, Any]:
    """Return what an app's configuration says about the experiment; other keys are the app's own.

    ``method`` is the name of the method that runs, unless the configuration names another.

    >>> from_run_config({"client-lr": 0.1, "hyper.lam": 0.5, "screen.norm": 5.0, "folder": "", "greeting": "hello"})
    {'client_lr': 0.1, 'hyper': {'lam': 0.5}, 'screen': {'norm': 5.0}}
    >>> from_run_config({"method": "fedprox", "fedprox.mu": 0.1, "feddpc.lam": 0.5})
    {'method': 'fedprox', 'hyper': {'mu': 0.1}}
    """
    tables = {"hyper": "hyper", **OPTION_TABLES}
    if method := values.get("method", method):
        tables[method] = "hyper"
    hints = get_type_hints(strategy)
    objects = {name for name, hint in hints.items() if not {bool, int, float, str} & {hint, *get_args(hint)}}
    known = {"client_lr", "deadline", *hints, *keys()} - objects - set(tables.values())
    settings: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        table, _, option = name.partition(".")
        if option and table in tables:
            settings.setdefault(tables[table], {})[option] = value
        elif name in known and (name, value) != ("folder", ""):
            settings[name] = value
    return settings


@dataclass(frozen=True)
class Reserve:
    """Samples that no client holds, by rising number, and the order in which the server drew them."""

    x: Array
    y: Array
    order: Array

    @classmethod
    def of(cls, x: Array, y: Array, drawn: Array) -> Reserve:
        """Return those of the samples ``x``, ``y`` whose numbers are ``drawn``."""
        rising = np.sort(drawn)
        return cls(x[rising], y[rising], np.searchsorted(rising, drawn))


@dataclass(frozen=True)
class ServerAssets:
    """What the server itself has; ``samples`` counts the samples of all clients and of the reserve."""

    config: Config
    method: Method
    module: nn.Module
    classes: int
    test: tuple[Array, Array] | None = None
    reserve: Reserve | None = None
    scaler: Scaler | None = None
    samples: int | None = None

    def __post_init__(self) -> None:
        check_supported(self.module)
        if self.method.reserve and self.reserve is None:
            raise BadInputError(
                f"{self.method.name} hands samples of the server to the clients, but the server has none: give reserve="
            )
        if self.config.scaling == "channel" and self.scaler is None:
            raise BadInputError("scaling = 'channel' needs the mean of all clients' data: use 'half', 'unit' or 'none'")

    @property
    def reserved(self) -> int:
        """How many samples the server has."""
        return 0 if self.reserve is None else len(self.reserve.y)

    @cached_property
    def network(self) -> nn.Module:
        """The network that is trained."""
        network = adapt_module(self.method, self.module, self.config.seed) or self.module
        return network.to(dtype_of(self.config.precision))

    @cached_property
    def flat(self) -> Flat:
        """The map between network and vector."""
        return Flat(self.network)

    def state_dict(self) -> State:
        """Return the first model, by parameter, in the order of its vector."""
        return self.flat.parameters(self.flat.vector())

    def data(self, elsewhere: int) -> Dataset | None:
        """Return the server's samples as a data set, and placeholder labels for ``elsewhere`` samples of clients."""
        if self.reserve is None and self.test is None:
            return None
        x_test, y_test = self.test or (self.reserve.x[:0], self.reserve.y[:0])  # type: ignore[union-attr]
        # A network is tried out on one sample, so there must be one.
        x, y = (self.reserve.x, self.reserve.y) if self.reserve is not None else (x_test[:1], y_test[:1])
        y = np.concatenate([y, np.zeros(elsewhere, np.int64)])
        return Dataset("server", x, y, x_test, y_test, self.classes)

    def federated_data(self, spec: ExperimentSpec) -> FederatedData:
        """Return a data set in which all samples except the server's are with the clients, only counted."""
        data = self.data(max(spec.samples - max(self.reserved, 1), 0))
        if data is None:
            raise BadInputError(
                f"{self.method.name} must know what a sample looks like before round 1: give the server a test set"
            )
        with_clients = Partition(np.zeros(0, np.int64), np.zeros(spec.clients + 1, np.int64))
        reserve = np.zeros(0, np.int64) if self.reserve is None else self.reserve.order
        return spec.federated_data(data, with_clients, reserve)

    def payload(self, client: int, extended: FederatedData | None, learned: Mapping[str, Tensor]) -> State:
        """Return what client ``client`` is sent once, before its first round."""
        given: State = {f"learned.{key}": value for key, value in learned.items()}
        if self.reserve is not None and extended is not None:
            mine = extended.partition[client]
            at = np.unique(mine[mine < len(self.reserve.y)])
            parts = {"x": self.reserve.x[at], "at": at, "y": self.reserve.y, "order": self.reserve.order}
            given |= {f"reserve.{key}": torch.from_numpy(np.ascontiguousarray(part)) for key, part in parts.items()}
        if self.config.scaling == "channel" and self.scaler is not None and self.scaler.terms is not None:
            given |= dict(zip(("scaler.mean", "scaler.deviation"), self.scaler.terms, strict=True))
        return given


@dataclass(frozen=True)
class Dealt:
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
        """Return the arguments of ``strategy`` and ``server_app``, except the method."""
        experiment = self.experiment
        data, config = experiment.data, experiment.config
        skip = ("method", "hyper", *EXECUTION_KEYS, *MAY_CHANGE)
        return {
            **{k: v for k, v in config.asdict().items() if k not in skip},
            "model": self.model(),
            "test": (data.x_test, data.y_test),
            "classes": data.classes,
            "reserve": Reserve.of(data.x_train, data.y_train, experiment.reserve) if len(experiment.reserve) else None,
            "scaler": experiment.task.scaler if config.scaling == "channel" else None,
            "samples": len(data.y_train),
        }

    def client(self) -> dict[str, Any]:
        """Return the arguments of ``client_app``."""
        return {"model": self.model, "data": self.data}


def dealt(experiment: Experiment) -> Dealt:
    """Return an experiment of the simulator (from ``feddpc.build.build``) as the two halves of a federation."""
    return Dealt(experiment)
