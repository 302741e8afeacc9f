"""Faults of a configuration in a federation: replies of clients that are chosen to misbehave are changed on arrival."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch
from flwr.app import Message, RecordDict

from feddpc.flower.messages import RefusedError, pack
from feddpc.methods.base import State
from feddpc.robust.faults import Faults

#: Read an upload from a reply, and replace it there.
Read = Callable[[RecordDict], State]
Replace = Callable[[RecordDict, State], None]


def tamper(
    injected: Faults,
    t: int,
    replies: Iterable[Message],
    clients: Mapping[int, int],
    memory: State,
    read: Read,
    replace: Replace,
) -> tuple[State, dict[str, list[int]]]:
    """Change the replies of clients that misbehave in round ``t``; one that cannot be read stays unchanged.

    Return what attackers remember now, and the faults with the clients that had them.
    """
    sent: dict[int, tuple[RecordDict, State]] = {}
    for reply in replies:
        client = clients.get(reply.metadata.src_node_id)
        if client is None or client in sent or not reply.has_content():
            continue
        try:
            sent[client] = reply.content, read(reply.content)
        except RefusedError:
            continue
    if not sent:
        return memory, {}
    ids = np.array(sorted(sent), dtype=np.int64)
    honest = [sent[client][1] for client in ids.tolist()]
    up = {key: torch.stack([state[key] for state in honest]) for key in honest[0]}
    new, memory, who = injected.tamper(t, ids, up, memory)
    for row, client in enumerate(ids.tolist()):
        if any(client in members for members in who.values()):
            replace(sent[client][0], {key: stack[row] for key, stack in new.items()})
    return memory, who


def replace_uploads(content: RecordDict, state: State) -> None:
    """Replace the upload in a reply of :func:`feddpc.flower.client_app`."""
    content["up"] = pack(state)
