"""Before round 1 with ``client_app``: quorums and numbers of rounds that cannot be, and what a method learns first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from feddpc.config import Config
from feddpc.errors import BadInputError
from feddpc.flower.client_registry import Ints
from feddpc.methods.base import Method, State
from feddpc.methods.federated_data import FederatedData, require_asking
from feddpc.policies import largest_cohort
from feddpc.runs import checkpoint
from feddpc.runs.record import LEARNED


def check_quorum(config: Config, min_replies: int, least: int) -> None:
    """Refuse a quorum of ``least`` clients that no round can reach."""
    cohort = config.cohort
    most = largest_cohort(config)
    if least > most:
        raise BadInputError(
            f"min_replies = {min_replies} with cohort = {cohort}: {least} clients must answer, and at most {most} are "
            "invited per round, so no round could count: lower min_replies or raise cohort"
        )


def check_rounds(config: Config, rounds: int) -> None:
    """Raise if the privacy budget or the schedule was made for another number of rounds."""
    if config.privacy and rounds > config.rounds:
        raise BadInputError(
            f"num_rounds = {rounds}, but the privacy budget is counted for rounds = {config.rounds}: give "
            f"rounds={rounds} to the strategy"
        )
    if config.lr_schedule_options.get("over") == config.rounds != rounds:
        raise BadInputError(
            f"num_rounds = {rounds}, but lr_schedule = {config.lr_schedule!r} is made for rounds = {config.rounds}: "
            f"give rounds={rounds} to the strategy"
        )


def learn_by_asking(
    method: Method, ask: Callable[..., dict[int, State]], data: FederatedData, sizes: Ints, folder: Path | None
) -> State:
    """Return what ``method`` learns by asking clients with ``ask``; a run that is continued has it in its folder."""
    path = None if folder is None else folder / LEARNED
    if path is not None and path.exists():
        return checkpoint.load_model(path)
    try:
        learned = require_asking(method, method.name).learn_by_asking(ask, data, sizes)
    except (ValueError, KeyError, IndexError, RuntimeError) as error:
        raise BadInputError(
            f"{method.name}: what the clients answered before round 1 does not fit together: {error}"
        ) from error
    learned = {key: value.detach().cpu().contiguous() for key, value in learned.items()}
    if path is not None and learned:
        checkpoint.save_model(path, learned)
    return learned
