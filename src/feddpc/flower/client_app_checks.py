"""What a strategy for ``client_app`` refuses before round 1: quorums and numbers of rounds that cannot be."""

from __future__ import annotations

from feddpc.config import Config
from feddpc.errors import BadInputError
from feddpc.policies import largest_cohort


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
