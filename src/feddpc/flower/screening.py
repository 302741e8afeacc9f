"""Screening of replies: each one is checked on its own before any arithmetic, and a bad one costs only its sender."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from logging import WARNING
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import Message, Metadata, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.common.logger import log
from numpy.typing import NDArray
from torch import Tensor

from feddpc.checks import check_int, check_positive
from feddpc.errors import FeddpcError
from feddpc.flower.messages import REFUSED, REPLY, RefusedError, TooManyClientsError, expect, only_record
from feddpc.methods._algebra import square
from feddpc.methods.base import State
from feddpc.tasks.metrics import LOSS, Metric

T = TypeVar("T")
#: The number of test samples of a client, and its metrics by name.
Evaluation = tuple[int, dict[str, float]]
#: How many characters of a text from another node are kept.
SHORT = 500
#: By how much the largest number of a type exceeds what a reply may state, so that sums over clients stay finite.
ROOM = 2.0**20
#: The largest weight of a reply, with which sums over clients stay finite.
LARGEST_WEIGHT = torch.finfo(torch.float64).max / ROOM
#: How many metrics a reply may have, and how long their names may be.
MOST_METRICS, LONGEST_NAME = 500, 100
#: How many reasons of a void round, and names of nodes per reason, an error lists.
LISTED = 20
#: The norm that a reason states.
_NORM = re.compile(r"(?<=has norm )\d+(?:\.\d+)?(?:e[+-]?\d+)?")
#: Errors that say that a node cannot be reached, which is no fault in a reply.
UNREACHABLE = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE, ErrorCode.NODE_UNAVAILABLE)


class VoidRoundsError(FeddpcError):
    """Several rounds in a row in which no reply could be used."""


@dataclass(frozen=True)
class Refusal:
    """A reply that did not count: in which round, from which node and client (None if unknown), and why."""

    round: int
    node: int
    client: int | None
    reason: str
    faulty: bool = True  #: whether the node is to blame, and not the network or the other replies

    def as_dict(self) -> dict[str, Any]:
        """Return the refusal for the list in a run folder."""
        return {"round": self.round, "node": self.node, "client": self.client, "reason": self.reason}


@dataclass(frozen=True)
class Bounds:
    """Limits for a reply: the largest norm of a vector (None: what its type can square), and the most examples."""

    max_norm: float | None = None
    max_examples: int | None = 10**9

    def __post_init__(self) -> None:
        if self.max_examples is not None:
            check_int("max_examples", self.max_examples, 1)
        if self.max_norm is not None:
            check_positive("max_norm", self.max_norm)

    def check(self, name: str, value: Tensor) -> float:
        """Return the norm of a tensor; refuse one that is not finite or too long.

        >>> Bounds(max_norm=1.0).check("delta", torch.tensor([3.0, 4.0]))
        Traceback (most recent call last):
        feddpc.flower.messages.RefusedError: delta has norm 5, more than 1
        """
        if not value.is_floating_point():
            return 0.0
        norm = math.sqrt(float(square(value.reshape(-1))))  # a sum of squares is finite only if all its terms are
        if not math.isfinite(norm):
            raise RefusedError(f"{name} is not finite")
        most = math.sqrt(torch.finfo(value.dtype).max) if self.max_norm is None else self.max_norm
        if norm > most:
            raise RefusedError(f"{name} has norm {norm:.6g}, more than {most:.6g}")
        return norm

    def checked(self, state: State) -> State:
        """Return tensors, or refuse them if one is not finite or too long."""
        for name, value in state.items():
            self.check(name, value)
        return state

    def examples(self, count: object) -> int:
        """Return how many examples a reply stands for, or refuse it."""
        most = math.inf if self.max_examples is None else self.max_examples
        number = count if isinstance(count, int | float) and not isinstance(count, bool) else math.nan
        if not (1 <= number <= most and number < math.inf and number == int(number)):
            raise RefusedError(f"it counts {count!r} examples: a whole number from 1 to {most} is needed")
        return int(number)

    def weight(self, name: str, value: object) -> float:
        """Return the weight that a reply states under ``name``, any positive number, or refuse it.

        >>> Bounds(max_examples=None).weight("num-tokens", 2.5e12)
        2500000000000.0
        """
        most = LARGEST_WEIGHT if self.max_examples is None else self.max_examples
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= most:
            return float(value)
        raise RefusedError(f"its weight {name!r} is {value!r}: a positive number of at most {most:.6g} is needed")


def check_number(name: str, value: object, dtype: torch.dtype) -> float:
    """Return a loss or a metric that a reply states, or refuse it; sums over many clients have the type ``dtype``.

    >>> check_number("loss", float("nan"), torch.float32)
    Traceback (most recent call last):
    feddpc.flower.messages.RefusedError: its loss is nan, not a number of at most 3e+32
    """
    most = torch.finfo(dtype).max / ROOM
    if not isinstance(value, float) or not abs(value) <= most:
        raise RefusedError(f"its {name} is {value!r}, not a number of at most {most:.0e}")
    return value


def screen_replies(
    replies: Iterable[Message],
    sent: Iterable[Message],
    clients: Mapping[int, int] | None,
    round: int,
    read: Callable[[int, RecordDict], T],
) -> tuple[dict[int, T], list[Refusal]]:
    """Return what ``read`` returns for usable replies, by client in rising order, and the other replies as refusals.

    ``clients`` maps nodes to clients; without it, which client a node is does not matter, and replies go by node.
    ``sent`` are the messages to answer. A reply must come from a node that was asked, in the round in which it was
    asked, and once. An error reply for a node that is gone does not name the node; the message that it answers does.
    """
    good: dict[int, T] = {}
    refused: list[Refusal] = []
    sent = list(sent)
    nodes = {message.metadata.dst_node_id for message in sent}
    for reply in replies:
        about = reply.metadata
        node = _addressee(about, sent) if reply.has_error() else about.src_node_id
        client = None if clients is None else clients.get(node)
        key = node if clients is None else client
        try:
            if reply.has_error():
                raise RefusedError(f"error {reply.error.code}: {str(reply.error.reason).strip()[-SHORT:]}")
            if key is None or node not in nodes:
                raise RefusedError("it was not asked")
            if about.group_id != str(round):
                raise RefusedError(f"it answers for round {about.group_id or 'none'}, not {round}")
            if key in good:
                raise RefusedError("it answered already")
            header = reply.content.get(REPLY)
            if header is not None and REFUSED in header:
                raise RefusedError(f"the node says: {header[REFUSED]!s}")
            good[key] = read(key, reply.content)
        except RefusedError as error:
            reason = shorten(str(error))
            reachable = not (reply.has_error() and reply.error.code in UNREACHABLE)
            faulty = reachable and node in nodes and key not in good and not isinstance(error, TooManyClientsError)
            refused.append(Refusal(round, node, client, reason, faulty=faulty))
            log(WARNING, "round %d: the reply of node %d (client %s) does not count: %s", round, node, client, reason)
    return dict(sorted(good.items())), refused


def _addressee(about: Metadata, sent: list[Message]) -> int:
    """Return the node that was sent the message which this one answers."""
    asked = {message.metadata.message_id: message.metadata.dst_node_id for message in sent}
    return asked.get(about.reply_to_message_id, about.src_node_id)


def describe_void_round(refused: Iterable[Refusal], silent: Iterable[int]) -> str:
    """Return why no reply of a round could be used: every reason with its nodes, and the clients without a reply.

    Reasons that differ in the norm of an update stand once, with the smallest and the largest norm.

    >>> describe_void_round([Refusal(1, 7, 0, "a is not finite"), Refusal(1, 9, 1, "a is not finite")], [3, 4])
    'nodes 7, 9: a is not finite; no reply from clients 3, 4'
    >>> describe_void_round([Refusal(1, i, i, f"a has norm {i + 0.5}, more than 1") for i in range(1, 4)], [])
    'nodes 1, 2, 3: a has norm 1.5 to 3.5, more than 1'
    """
    nodes: dict[str, list[int]] = {}
    norms: dict[str, list[str]] = {}
    for refusal in refused:
        kind = _NORM.sub("...", refusal.reason, count=1)
        nodes.setdefault(kind, []).append(refusal.node)
        norms.setdefault(kind, []).extend(_NORM.findall(refusal.reason)[:1])
    parts = []
    for kind, found in nodes.items():
        ends = [min(known, key=float), max(known, key=float)] if (known := norms[kind]) else ["..."]
        reason = kind.replace("has norm ...", f"has norm {' to '.join(dict.fromkeys(ends))}", 1)
        parts.append(f"node{'s' * (len(found) > 1)} {listed(found)}: {reason}")
    left_out = [f"{len(parts) - LISTED} further reasons"] if len(parts) > LISTED else []
    silent = list(silent)
    missing = [f"no reply from client{'s' * (len(silent) > 1)} {listed(silent)}"] if silent else []
    return "; ".join([*parts[:LISTED], *left_out, *missing]) or "no client was asked"


def listed(numbers: Sequence[int] | NDArray[np.int64]) -> str:
    """Return numbers with commas, the first of many.

    >>> listed(range(100, 122))
    '100, 101, 102, 103, 104, 105, 106, 107, 108, 109, 110, 111, 112, 113, 114, 115, 116, 117, 118, 119 and 2 more'
    """
    more = f" and {len(numbers) - LISTED} more" if len(numbers) > LISTED else ""
    return ", ".join(map(str, numbers[:LISTED])) + more


def shorten(text: str) -> str:
    """Return a text from another node in a form that can be logged: not long, without control characters.

    >>> shorten("a\\nb"), len(shorten("c" * 10_000))
    ('a b', 605)
    """
    text = text if len(text) <= 2 * SHORT else f"{text[:SHORT]} ... {text[-SHORT // 5 :]}"
    return "".join(c if c.isprintable() else " " for c in text)


def averageable(contents: list[RecordDict], weighted_by: str) -> list[RecordDict]:
    """Return the replies whose metrics can be averaged: finite, with the most common names and lengths, and a weight.

    Names must be printable and not long, because records, tables and the metrics endpoint show them.

    A reply with other metrics is left out of their mean; its update counts.
    """
    metrics = [only_record(content, MetricRecord) for content in contents]
    kinds = [
        tuple(sorted((k, len(v) if isinstance(v, list) else -1) for k, v in m.items()))
        if _finite(m) and _is_weight(m.get(weighted_by)) and _named(m)
        else None
        for m in metrics
    ]
    common = Counter(kind for kind in kinds if kind is not None).most_common(1)
    return [content for content, kind in zip(contents, kinds, strict=True) if common and kind == common[0][0]]


def _finite(metrics: MetricRecord) -> bool:
    return all(math.isfinite(x) for v in metrics.values() for x in (v if isinstance(v, list) else [v]))


def _named(metrics: MetricRecord) -> bool:
    return len(metrics) <= MOST_METRICS and all(len(name) <= LONGEST_NAME and name.isprintable() for name in metrics)


def _is_weight(value: object) -> bool:
    return isinstance(value, int | float) and 0 < value <= LARGEST_WEIGHT


def read_evaluation(content: RecordDict, bounds: Bounds, known: Sequence[Metric]) -> Evaluation:
    """Return the number of test samples and the metrics of a client; only the loss is always defined."""
    metrics = dict(only_record(content, MetricRecord))
    examples = bounds.examples(metrics.pop("num-examples", None))
    expect(metrics, [LOSS.name], "the evaluation", [metric.name for metric in known])
    return examples, {name: check_number(name, value, torch.float64) for name, value in metrics.items()}


def average_evaluations(evaluations: Iterable[Evaluation], known: Sequence[Metric]) -> dict[str, float]:
    """Average every metric over the clients that have it, by their numbers of test samples.

    >>> average_evaluations([(1, {"loss": 0.5}), (3, {"loss": 0.1})], [LOSS])
    {'loss': 0.2}
    """
    evaluations, means = list(evaluations), {}
    for name in (metric.name for metric in known):
        measured = [(metrics[name], count) for count, metrics in evaluations if name in metrics]
        if total := sum(count for _, count in measured):
            means[name] = sum(value * (count / total) for value, count in measured)
    return means
