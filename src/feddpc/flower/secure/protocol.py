"""One secure sum with Flower's SecAgg+: masks, screening, and the four stages.

Flower 1.41 draws masks from NumPy's Mersenne Twister with a seed of 32 bits, into which it folds the secret;
of a key that two nodes agreed on, 28 bits are left. An attacker with the masked vectors could try them all. Here the
secret is hashed to a key of ChaCha20, and the key stream is the mask. Flower has no option for that. Its functions are
therefore copied with another generator under the name that they call; Flower's own modules are not changed.
"""

from __future__ import annotations

import hashlib
import math
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from logging import WARNING
from typing import Any, TypeVar, cast

import numpy as np
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, EllipticCurvePublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.client.mod.secure_aggregation.secaggplus_mod import _collect_masked_vectors, secaggplus_mod
from flwr.common import FitIns, FitRes, Parameters, Scalar, parameters_to_ndarrays
from flwr.common.logger import log
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.compat.common.recorddict_compat import recorddict_to_fitres
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.compat.grid_client_proxy import GridClientProxy
from flwr.server.compat.legacy_context import LegacyContext
from flwr.server.strategy import FedAvg
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
from flwr.server.workflow.constant import Key as WorkflowKey
from flwr.server.workflow.secure_aggregation.secaggplus_workflow import WorkflowState
from flwr.serverapp import Grid
from flwr.supercore.primitives.asymmetric import bytes_to_public_key
from numpy.typing import NDArray

from feddpc.errors import BadInputError
from feddpc.flower.messages import RefusedError, peek
from feddpc.flower.screening import Refusal, screen_replies
from feddpc.flower.secure.encoding import MODULUS, Encoding, Floats

F = TypeVar("F", bound=Callable[..., Any])


def masks(seed: bytes, num_range: int, shapes: list[tuple[int, ...]]) -> list[NDArray[np.int64]]:
    """Return arrays of uniform integers below ``num_range``, a power of two of at most 2^32, that ``seed`` determines.

    >>> masks(b"secret", 1 << 32, [(2,), (1,)])
    [array([3223788683, 1970857441]), array([3017614002])]
    """
    key = hashlib.sha256(b"feddpc secure aggregation, masks" + seed).digest()
    stream = Cipher(ChaCha20(key, nonce=bytes(16)), mode=None).encryptor()  # every round has new keys
    sizes = [int(np.prod(shape)) for shape in shapes]
    words = np.frombuffer(stream.update(bytes(4 * sum(sizes))), "<u4").astype(np.int64) & (num_range - 1)
    parts = np.split(words, np.cumsum(sizes)[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def rebound(function: F, **names: object) -> F:
    """Return a copy of a function that finds other objects under some names of its module.

    >>> import statistics
    >>> rebound(statistics.fmean, fsum=max)([1.0, 4.0])  # the largest over how many there are
    2.0
    """
    for name in names:
        if name not in function.__code__.co_names:
            raise BadInputError(f"this Flower's {function.__name__} does not use {name}: install another release")
    made = types.FunctionType(
        function.__code__, {**function.__globals__, **names}, function.__name__, function.__defaults__
    )
    return made  # type: ignore[return-value]


#: Flower's modifier of client apps, with these masks.
masking_mod = rebound(secaggplus_mod, _collect_masked_vectors=rebound(_collect_masked_vectors, pseudo_rand_gen=masks))
#: Flower's last stage at the server, with these masks.
unmask_stage = rebound(SecAggPlusWorkflow.unmask_stage, pseudo_rand_gen=masks)


#: What a reply holds in every stage of the protocol: a value, or a list of values, of one kind.
FORMS: dict[str, dict[str, tuple[type, type]]] = {
    Stage.SETUP: {Key.PUBLIC_KEY_1: (bytes, bytes), Key.PUBLIC_KEY_2: (bytes, bytes)},
    Stage.SHARE_KEYS: {Key.DESTINATION_LIST: (list, int), Key.CIPHERTEXT_LIST: (list, bytes)},
    Stage.COLLECT_MASKED_VECTORS: {Key.MASKED_PARAMETERS: (list, bytes)},
    Stage.UNMASK: {Key.NODE_ID_LIST: (list, int), Key.SHARE_LIST: (list, bytes)},
}


class ScreenedGrid:
    """A grid for the protocol that drops replies without the form of the stage.

    For the protocol, the sender has dropped out, which it tolerates; unscreened, one such reply would end the run.
    ``clients`` maps nodes to clients, ``shapes`` are those of the arrays that every client sends, ``refused`` lists the
    dropped replies.
    """

    def __init__(self, grid: Grid, round: int, clients: dict[int, int], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.grid, self.round, self.clients = grid, round, clients
        self.sizes = [1, *(math.prod(shape) for shape in shapes.values())]  # Flower sends a weight first
        self.refused: list[Refusal] = []

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Send the messages of one stage, and return the replies that can be used."""
        sent = list(messages)
        replies = list(self.grid.send_and_receive(sent, timeout=timeout))
        asked = {self.clients[m.metadata.dst_node_id]: m.content[RECORD_KEY_CONFIGS] for m in sent}

        def read(client: int, content: RecordDict) -> RecordDict:
            check_reply(asked[client], content, self.sizes)  # type: ignore[arg-type]
            return content

        good, refused = screen_replies(replies, sent, self.clients, self.round, read)
        self.refused += refused
        by_content = {id(reply.content): reply for reply in replies if reply.has_content()}
        return [by_content[id(content)] for content in good.values()]


def check_reply(asked: ConfigRecord, content: RecordDict, sizes: list[int]) -> None:
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
            found: object = bytes_to_public_key(key)  # annotated as elliptic, but any kind of key is read
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise RefusedError(f"{Stage.SETUP}: a public key cannot be read: {error}") from None
        # No other node could agree on a key with this one, and all would drop out.
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
    """Refuse a reply that the workflow cannot also read as a reply of Flower's older interface."""
    try:
        recorddict_to_fitres(content, keep_input=True)
    except (KeyError, TypeError, ValueError) as error:
        raise RefusedError(f"it lacks a record of Flower's older interface: {error}") from None


@dataclass
class Summed:
    """The result: the mean over ``nodes`` in the encoding's units, None if the sum was not opened."""

    mean: list[Floats] | None = None
    nodes: list[int] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)


def secure_mean(
    screened: ScreenedGrid, messages: list[Message], encoding: Encoding, quorum: int, timeout: float | None
) -> Summed:
    """Send every node its message, let the nodes mask their answers, and open only the mean of the answers.

    The sum is opened if ``quorum`` clients are in it. Each of the four stages waits ``timeout`` seconds.
    """
    summed, grid = Summed(), screened.grid
    run = grid.run.run_id
    proxies: list[ClientProxy] = [GridClientProxy(m.metadata.dst_node_id, grid, run) for m in messages]
    context = LegacyContext(
        Context(run_id=run, node_id=0, node_config={}, state=RecordDict(), run_config={}),
        strategy=Relay(proxies, summed),
    )
    for proxy in proxies:
        context.client_manager.register(proxy)
    context.state[MAIN_CONFIGS_RECORD] = ConfigRecord({WorkflowKey.CURRENT_ROUND: screened.round})
    context.state[MAIN_PARAMS_RECORD] = ArrayRecord()  # what clients need is in the messages
    try:
        Workflow(messages, encoding.levels, quorum, timeout)(cast(Grid, screened), context)
    except ValueError as error:  # shares of keys that do not fit together
        log(WARNING, "round %d: the sum could not be opened: %s", screened.round, error)
    summed.refused = screened.refused
    return summed


class Workflow(SecAggPlusWorkflow):
    """Flower's workflow with four differences.

    * It sends ``messages`` as they are where Flower would send instructions of its older interface.
    * It tolerates the loss of a node in any of the four stages, not only in the last two. In the first two a node has
      masked nothing, and no other node has shares of its keys: it is removed, as if it had not been invited. Flower
      would ask the others for its shares, and the round would fail.
    * Masks come from a stream cipher.
    * All weights are one, since a weight is sent unmasked too.

    Every node shares its keys with every other.
    """

    def __init__(self, messages: list[Message], levels: int, quorum: int, timeout: float | None) -> None:
        super().__init__(
            num_shares=1.0,
            reconstruction_threshold=quorum,
            max_weight=1.0,
            clipping_range=1.0,
            quantization_range=levels,
            modulus_range=MODULUS,
            timeout=timeout,
        )
        self.contents = {message.metadata.dst_node_id: message.content for message in messages}

    unmask_stage = unmask_stage

    def setup_stage(self, grid: Grid, context: LegacyContext, state: WorkflowState) -> bool:
        """Collect public keys."""
        going = super().setup_stage(grid, context, state)
        state.nid_to_fitins = {node: RecordDict(dict(content)) for node, content in self.contents.items()}
        return going and _remove_lost(state)

    def share_keys_stage(self, grid: Grid, context: LegacyContext, state: WorkflowState) -> bool:
        """Collect encrypted shares of secret keys."""
        return super().share_keys_stage(grid, context, state) and _remove_lost(state)


def _remove_lost(state: WorkflowState) -> bool:
    active = set(state.active_node_ids)
    state.sampled_node_ids = active
    state.nid_to_neighbours = {node: state.nid_to_neighbours[node] & active for node in active}
    return True


class Relay(FedAvg):
    """The strategy of Flower's older interface that the workflow needs: it invites all nodes and stores the mean."""

    def __init__(self, proxies: list[ClientProxy], summed: Summed) -> None:
        super().__init__()
        self.proxies, self.summed = proxies, summed

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """Invite all nodes."""
        return [(proxy, FitIns(parameters, {})) for proxy in self.proxies]

    def aggregate_fit(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, FitRes]],
        failures: list[tuple[ClientProxy, FitRes] | BaseException],
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        """Keep the mean, which the workflow puts in the place of every single answer."""
        self.summed.nodes = [proxy.node_id for proxy, _ in results]
        self.summed.mean = parameters_to_ndarrays(results[0][1].parameters)
        return None, {}
