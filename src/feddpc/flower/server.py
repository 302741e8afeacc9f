"""Making strategies and server apps for any method."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result
from torch import nn

from feddpc import methods
from feddpc.config import PARTS, Config
from feddpc.data import Dataset
from feddpc.data.scaling import Scaler
from feddpc.errors import BadInputError
from feddpc.flower.federated import FederatedStrategy
from feddpc.flower.holdings import Holdings, Reserve
from feddpc.flower.screening import Bounds
from feddpc.methods.base import Method
from feddpc.privacy.config import complete_privacy
from feddpc.privacy.mechanism import check
from feddpc.robust.config import complete_policies

S = TypeVar("S", bound=FederatedStrategy)
#: Arguments of a strategy that no configuration file can hold.
OBJECTS = ("model", "test", "reserve", "scaler", "config")
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
) -> FederatedStrategy:
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
    settings = complete_policies(settings)
    if settings.privacy:
        check(method)
        settings = dataclasses.replace(settings, privacy=complete_privacy(settings))
        if min_replies > 1:
            raise BadInputError(
                f"min_replies = {min_replies} cannot be run with privacy: one client more or less would decide whether "
                "all the others count, and the budget is counted for one: leave it out"
            )
    tested = None
    if test is not None:
        data = Dataset.from_arrays(*test, *test, classes=classes)
        tested, classes = (data.x_test, data.y_test), data.classes
    if classes is None:
        raise BadInputError("how many classes there are is unknown: give classes=, or a test set")
    holdings = Holdings(settings, method, copy.deepcopy(model), classes, tested, reserve, scaler, samples)
    flower = {
        "min_available_nodes": settings.clients if min_available_nodes is None else min_available_nodes,
        "fraction_evaluate": fraction_evaluate,
        "min_evaluate_nodes": 1,
    }
    bounds = Bounds(max_norm, max_examples)
    replies = {"bounds": bounds, "min_replies": min_replies, "max_void_rounds": max_void_rounds}
    rest = {**replies, "folder": folder, "flower": flower}
    return FederatedStrategy(holdings, wait=wait, secret=None if reproducible else secrets.randbits(128), **rest)


def server_app(
    method: Method | str = "feddpc",
    *,
    rounds: int = 100,
    deadline: float = 3600.0,
    on_result: Callable[[FederatedStrategy, Result], object] | None = None,
    **settings: Any,
) -> ServerApp:
    """Return a server app that runs ``rounds`` rounds of :func:`strategy`; ``settings`` are that function's.

    The app's configuration (``[tool.flwr.app.config]``, or ``flwr run -c "rounds=5 hyper.lam=0.5"``) comes before what
    is given here: its keys are those of the configuration, with - or _, ``hyper.NAME`` for hyper-parameters of whatever
    method runs, ``feddpc.NAME`` for those of one method, which are left out when another runs, and ``privacy.clip``,
    ``screen.norm``, ``faults.sign_flip`` for the options of a part.

    Args:
        method: a method, or its name.
        rounds: communication rounds.
        deadline: seconds after which a round goes on without the replies that are missing.
        on_result: called with the strategy and Flower's result at the end.
        settings: everything else.
    """
    return app_of(strategy, method, rounds, deadline, on_result, settings)


def app_of(
    make: Callable[..., S],
    method: Method | str,
    rounds: int,
    deadline: float,
    on_result: Callable[[S, Result], object] | None,
    settings: Mapping[str, Any],
) -> ServerApp:
    """Return a server app that runs what ``make`` makes of a method, the settings and the app's configuration."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        told: dict[str, Any] = {"method": method, "rounds": rounds, "deadline": deadline, **settings}
        named = method if isinstance(method, str) else None
        for key, value in from_run_config(context.run_config, named).items():
            told[key] = {**told.get(key, {}), **value} if isinstance(value, dict) else value
        if not isinstance(told["method"], str) and told.get("hyper"):
            raise BadInputError("hyper is for a method given by name: set the hyper-parameters of the method you pass")
        timeout = told.pop("deadline")
        made = make(**told)
        result = made.start(grid, made.initial_arrays(), num_rounds=told["rounds"], timeout=timeout)
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
    tables = {"hyper": "hyper", **PARTS}
    if method := values.get("method", method):
        tables[method] = "hyper"
    known = {"client_lr", "deadline", *inspect.signature(strategy).parameters, *Config.__dataclass_fields__}
    known -= {*OBJECTS, *tables.values()}
    told: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        table, _, option = name.partition(".")
        if option and table in tables:
            told.setdefault(tables[table], {})[option] = value
        elif name in known and (name, value) != ("folder", ""):
            told[name] = value
    return told
