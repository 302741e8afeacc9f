"""What the server can check about a reply that it cannot read: who sent it, for which round, and its form."""

from __future__ import annotations

from collections.abc import Iterable

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, EllipticCurvePublicKey
from flwr.app import Array, ConfigRecord, Message, RecordDict
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.compat.common.recorddict_compat import recorddict_to_fitres
from flwr.serverapp import Grid
from flwr.supercore.primitives.asymmetric import bytes_to_public_key

from feddpc.flower.screening import Refusal, sift
from feddpc.flower.secure.encoding import MODULUS
from feddpc.flower.wire import RefusedError, peek

#: What a reply holds in every stage of the protocol: a value, or a list of values, of one kind.
FORMS: dict[str, dict[str, tuple[type, type]]] = {
    Stage.SETUP: {Key.PUBLIC_KEY_1: (bytes, bytes), Key.PUBLIC_KEY_2: (bytes, bytes)},
    Stage.SHARE_KEYS: {Key.DESTINATION_LIST: (list, int), Key.CIPHERTEXT_LIST: (list, bytes)},
    Stage.COLLECT_MASKED_VECTORS: {Key.MASKED_PARAMETERS: (list, bytes)},
    Stage.UNMASK: {Key.NODE_ID_LIST: (list, int), Key.SHARE_LIST: (list, bytes)},
}


class ScreenedGrid:
    """Stands between the protocol and the nodes: a reply that has not the form of the stage does not get through.

    To the protocol its sender has dropped out, which it survives; unscreened, one such reply would end the run.
    ``sizes`` are the lengths of the masked arrays, ``clients`` maps nodes to clients, ``refused`` says who sent what.
    """

    def __init__(self, grid: Grid, round: int, clients: dict[int, int], sizes: list[int]) -> None:
        self.grid, self.round, self.clients, self.sizes = grid, round, clients, sizes
        self.refused: list[Refusal] = []

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Send the messages of one stage, and return the replies that can be used."""
        sent = list(messages)
        replies = list(self.grid.send_and_receive(sent, timeout=timeout))
        asked = {self.clients[m.metadata.dst_node_id]: m.content[RECORD_KEY_CONFIGS] for m in sent}

        def read(client: int, content: RecordDict) -> RecordDict:
            check(asked[client], content, self.sizes)  # type: ignore[arg-type]
            return content

        good, refused = sift(replies, sent, self.clients, self.round, read)
        self.refused += refused
        by_content = {id(reply.content): reply for reply in replies if reply.has_content()}
        return [by_content[id(content)] for content in good.values()]


def check(asked: ConfigRecord, content: RecordDict, sizes: list[int]) -> None:
    """Refuse the reply ``content`` if it does not have the form that the stage of ``asked`` calls for."""
    stage = str(asked[Key.STAGE])
    record = content.get(RECORD_KEY_CONFIGS)
    if not isinstance(record, ConfigRecord):
        raise RefusedError("it does not follow the protocol: its client app lacks SecAgg+")
    values = [record.get(name) for name in FORMS[stage]]
    for name, value, (outer, inner) in zip(FORMS[stage], values, FORMS[stage].values(), strict=True):
        listed = value if isinstance(value, list) else [value]
        if not isinstance(value, outer) or not all(type(v) is inner for v in listed):
            raise RefusedError(f"{stage}: {name} is not {'a list of ' if outer is list else ''}{inner.__name__}")
    if stage == Stage.SETUP:
        _keys(values)  # type: ignore[arg-type]
    elif stage == Stage.COLLECT_MASKED_VECTORS:
        _masked(values[0], sizes)  # type: ignore[arg-type]
        _legacy(content)
    elif len(values[0]) != len(values[1]):  # type: ignore[arg-type]
        raise RefusedError(f"{stage}: {len(values[0])} receivers, but {len(values[1])} secrets")  # type: ignore[arg-type]
    elif stage == Stage.UNMASK and values[0] != [*asked[Key.ACTIVE_NODE_ID_LIST], *asked[Key.DEAD_NODE_ID_LIST]]:  # type: ignore[misc]
        raise RefusedError(f"{stage}: it gave shares of other nodes than it was asked for")


def _keys(keys: list[bytes]) -> None:
    for key in keys:
        try:
            found: object = bytes_to_public_key(key)  # of any kind, whatever it says
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise RefusedError(f"{Stage.SETUP}: a public key cannot be read: {error}") from None
        # All others would fail to agree on a key with this one, and drop out.
        if not isinstance(found, EllipticCurvePublicKey) or not isinstance(found.curve, SECP384R1):
            raise RefusedError(f"{Stage.SETUP}: a public key is not on the curve that the protocol uses")


def _masked(arrays: list[bytes], sizes: list[int]) -> None:
    if len(arrays) != len(sizes):
        raise RefusedError(f"it sent {len(arrays)} masked arrays, not {len(sizes)}")
    for i, (data, size) in enumerate(zip(arrays, sizes, strict=True)):
        array = Array(dtype="int64", shape=(size,), stype="numpy.ndarray", data=data)
        values = peek(array, f"masked array {i}", (size,), "int64")
        if size and not 0 <= int(values.min()) <= int(values.max()) < MODULUS:
            raise RefusedError(f"masked array {i} is not within 0 and {MODULUS}")


def _legacy(content: RecordDict) -> None:
    """The workflow reads a reply as an answer of Flower's older interface too."""
    try:
        recorddict_to_fitres(content, keep_input=True)
    except (KeyError, TypeError, ValueError) as error:
        raise RefusedError(f"it lacks a record of Flower's older interface: {error}") from None
