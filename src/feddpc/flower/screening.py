"""Every reply is looked at on its own before any arithmetic: one that cannot be used costs its sender a vote."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from logging import WARNING
from typing import TypeVar

import torch
from flwr.app import Message, Metadata, MetricRecord, RecordDict
from flwr.common.logger import log
from torch import Tensor

from feddpc.flower.wire import REFUSED, REPLY, RefusedError, only_record
from feddpc.methods.algebra import square
from feddpc.options import positive, whole

T = TypeVar("T")


@dataclass(frozen=True)
class Refusal:
    """A reply that did not count: in which round, from which node and client (None if unknown), and why."""

    round: int
    node: int
    client: int | None
    reason: str


@dataclass(frozen=True)
class Bounds:
    """What a reply may say: the longest vector (None: what its type can square), and the most examples."""

    max_norm: float | None = None
    max_examples: int = 10**9

    def __post_init__(self) -> None:
        whole("max_examples", self.max_examples, 1)
        if self.max_norm is not None:
            positive("max_norm", self.max_norm)

    def check(self, name: str, value: Tensor) -> None:
        """Refuse a tensor that is not finite or too long.

        >>> Bounds(max_norm=1.0).check("delta", torch.tensor([3.0, 4.0]))
        Traceback (most recent call last):
        feddpc.flower.wire.RefusedError: delta has norm 5, more than 1
        """
        if not value.is_floating_point():
            return
        norm = math.sqrt(float(square(value.reshape(-1))))  # a sum of squares is finite only if all its terms are
        if not math.isfinite(norm):
            raise RefusedError(f"{name} is not finite")
        most = math.sqrt(torch.finfo(value.dtype).max) if self.max_norm is None else self.max_norm
        if norm > most:
            raise RefusedError(f"{name} has norm {norm:.6g}, more than {most:.6g}")

    def examples(self, count: object) -> int:
        """Return how many examples a reply stands for, or refuse it."""
        number = count if isinstance(count, int | float) and not isinstance(count, bool) else math.nan
        if not (1 <= number <= self.max_examples and number == int(number)):
            raise RefusedError(f"it counts {count!r} examples: a whole number from 1 to {self.max_examples} is needed")
        return int(number)


def sift(
    replies: Iterable[Message],
    sent: Iterable[Message],
    clients: Mapping[int, int],
    round: int,
    read: Callable[[int, RecordDict], T],
) -> tuple[dict[int, T], list[Refusal]]:
    """Return what ``read`` makes of the replies that can be used, by client in rising order, and the others.

    ``clients`` maps nodes to clients, and ``sent`` are the messages to answer. A reply must come from the node that was
    asked, in the round in which it was asked, and once. Errors name no node when that node is gone: then the message
    that they answer tells.
    """
    good: dict[int, T] = {}
    refused: list[Refusal] = []
    sent = list(sent)
    nodes = {message.metadata.dst_node_id for message in sent}
    for reply in replies:
        about = reply.metadata
        node = _addressee(about, sent) if reply.has_error() else about.src_node_id
        client = clients.get(node)
        try:
            if reply.has_error():
                raise RefusedError(f"error {reply.error.code}: {str(reply.error.reason).strip()[-500:]}")
            if client is None or node not in nodes:
                raise RefusedError("it was not asked")
            if about.group_id != str(round):
                raise RefusedError(f"it answers for round {about.group_id or 'none'}, not {round}")
            if client in good:
                raise RefusedError("it answered already")
            told = reply.content.get(REPLY)
            if told is not None and REFUSED in told:
                raise RefusedError(f"the node says: {told[REFUSED]!s}")
            good[client] = read(client, reply.content)
        except RefusedError as error:
            refused.append(Refusal(round, node, client, str(error)))
            log(WARNING, "round %d: the reply of node %d (client %s) does not count: %s", round, node, client, error)
    return dict(sorted(good.items())), refused


def _addressee(about: Metadata, sent: list[Message]) -> int:
    """Return the node that was sent the message which this one answers."""
    asked = {message.metadata.message_id: message.metadata.dst_node_id for message in sent}
    return asked.get(about.reply_to_message_id, about.src_node_id)


def alike(contents: list[RecordDict]) -> list[RecordDict]:
    """Return the replies whose metrics have the most common names and kinds: only these can be averaged."""
    kinds = [
        tuple(sorted((k, len(v) if isinstance(v, list) else 0) for k, v in only_record(content, MetricRecord).items()))
        for content in contents
    ]
    common = Counter(kinds).most_common(1)
    return [content for content, kind in zip(contents, kinds, strict=True) if kind == common[0][0]]
