"""Which nodes take part in a round of a drop-in strategy: a sample of fixed size, as in Flower, or by coins."""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence
from logging import INFO

from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy.strategy_utils import sample_nodes

from feddpc.errors import BadInputError


def wait_for_nodes(grid: Grid, available: int, fraction: float, least: int) -> list[int]:
    """Return the connected nodes, as soon as there are ``available``, and enough for the sample that is taken of them.

    Flower waits for the sample that it takes of all nodes; here a fraction may be taken of fewer.
    """
    connected = len(sample_nodes(grid, available, 0)[1])
    return list(sample_nodes(grid, max(int(connected * fraction), least), 0)[1])


def sample_share(eligible: Sequence[int], connected: int, fraction: float, least: int, purpose: str) -> list[int]:
    """Return a sample of nodes: that fraction of the connected ones, but at least ``least``, if so many are eligible.

    The numbers come from Python's generator, as in Flower, so that the same seed draws the same nodes.
    """
    size = min(max(int(connected * fraction), least), len(eligible))
    chosen = random.sample(eligible, size)
    log(INFO, "%s: sampled %s nodes (out of %s)", purpose, len(chosen), connected)
    return chosen


def sample_by_coins(nodes: Sequence[int], probability: float) -> list[int]:
    """Return the nodes whose independent coins say so, perhaps none.

    The coins come from the operating system, since the promise of differential privacy counts on their being secret.
    """
    coin = secrets.SystemRandom()
    return [node for node in nodes if coin.random() < probability]


def refuse_small_sample(sampled: int, nodes: int, least: int, fraction: float, min_nodes: int) -> None:
    """Raise if fewer nodes are sampled than must answer."""
    if sampled >= least:
        return
    raised = f"fraction_train to at least {least / nodes:.3g} or min_train_nodes to {least}"
    more = raised if least <= nodes else f"the number of nodes to {least}"
    raise BadInputError(
        f"min_replies = {least}, but {sampled} of {nodes} nodes are sampled per round (fraction_train = {fraction}, "
        f"min_train_nodes = {min_nodes}), so no round could count: lower min_replies to at most {sampled}, or raise "
        f"{more}"
    )
