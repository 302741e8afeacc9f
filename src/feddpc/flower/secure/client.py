"""The client app under secure aggregation: it trains, projects and scales, screens itself, and masks what it sends."""

from __future__ import annotations

from typing import TypeVar, cast

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable, Mod
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.compat.common.recorddict_compat import fitres_to_recorddict

from feddpc.checks import check_int
from feddpc.flower.client import Data, Model, client_app
from feddpc.flower.orders import Orders
from feddpc.flower.screening import Bounds
from feddpc.flower.secure.encoding import LOSS_BOUND, SECURE, Encoding
from feddpc.flower.secure.masks import masking_mod
from feddpc.flower.secure.rules import summable
from feddpc.flower.wire import REFUSED, REPLY, RefusedError, arrays_of, only_record, unpack
from feddpc.methods.base import Method, State

T = TypeVar("T")


def secure_client_app(
    *,
    model: Model,
    data: Data,
    method: Method | None = None,
    device: str = "cpu",
    min_cohort: int = 3,
) -> ClientApp:
    """Return the app of :func:`feddpc.flower.client_app`, whose updates leave the node under masks only.

    It answers :func:`feddpc.flower.secure_server_app`. An update that is not finite, or longer than agreed, does not
    leave the node at all, since under the masks nobody could sort it out: the node drops out of the round.

    Args:
        model: see ``client_app``.
        data: see there.
        method: the only method this node takes part in; by default any whose server needs only the sum.
        device: where it trains.
        min_cohort: this node takes no part in the sum of fewer: the fewer are in it, the more it says of each.
    """
    check_int("min_cohort", min_cohort, 2)
    plain = client_app(model=model, data=data, method=None if method is None else summable(method), device=device)
    app = ClientApp()
    app.query("hello")(reticent(plain))
    app.train(mods=[wary(min_cohort), masking_mod])(sealed(plain))
    return app


def reticent(plain: ClientAppCallable) -> ClientAppCallable:
    """Let a node say who it is, but not how many samples it has: one, as far as the server knows."""

    def hello(message: Message, context: Context) -> Message:
        reply = plain(message, context)
        for metrics in reply.content.metric_records.values():
            metrics["num-examples"] = 1
        return reply

    return hello


def wary(min_cohort: int) -> Mod:
    """Return a modifier that keeps a node from answering without masks, and from taking part in a sum of too few."""

    def check(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        asked = message.content.get(RECORD_KEY_CONFIGS)
        if not isinstance(asked, ConfigRecord):
            raise RefusedError("this node trains under secure aggregation only: use feddpc.flower.secure_server_app")
        there = _in_the_sum(asked)
        if there < min_cohort:
            raise RefusedError(f"this node takes no part in a sum of {there}: it wants at least {min_cohort} in it")
        return call_next(message, context)

    return check


def _in_the_sum(asked: ConfigRecord) -> int:
    """Return how many nodes are still in the sum, as the server says, or refuse what would open a single update."""
    stage = asked.get(Key.STAGE)
    if stage == Stage.SETUP:
        threshold, shares, nodes = (
            _told(asked, key, int) for key in (Key.THRESHOLD, Key.SHARE_NUMBER, Key.SAMPLE_NUMBER)
        )
        if 2 * threshold <= shares:
            raise RefusedError("half of the cohort could open what this node sends: raise min_replies")
        return nodes
    if stage == Stage.SHARE_KEYS:
        return len(asked) - 1  # a pair of keys each, and the stage
    if stage == Stage.COLLECT_MASKED_VECTORS:
        return len(set(_told(asked, Key.SOURCE_LIST, list))) + 1
    if stage != Stage.UNMASK:
        raise RefusedError(f"the server is in a stage {stage!r} that the protocol does not have")
    active = set(_told(asked, Key.ACTIVE_NODE_ID_LIST, list))
    if active & set(_told(asked, Key.DEAD_NODE_ID_LIST, list)):
        raise RefusedError("the server asks for both secrets of a node, which would open its update")
    return len(active)


def _told(asked: ConfigRecord, key: str, kind: type[T]) -> T:
    """Return what the server says under ``key``, if it is of the right kind."""
    found = asked.get(key)
    if type(found) is not kind:
        raise RefusedError(f"the server's {key} is {found!r}, not {kind.__name__}")
    return found


def sealed(plain: ClientAppCallable) -> ClientAppCallable:
    """Wrap training: what the method sends is screened and made ready for the masks, and nothing else leaves."""

    def train(message: Message, context: Context) -> Message:
        terms = message.content.get(SECURE)
        if not isinstance(terms, ConfigRecord):
            raise RefusedError(f"the message has no {SECURE}: use feddpc.flower.secure_server_app")
        encoding = Encoding.read(terms)
        orders = Orders.read(message.content)
        summable(orders.build(None))
        up = screened(_sent(plain(message, context).content), encoding)
        parameters = ndarrays_to_parameters(list(encoding.encode(up)))
        result = FitRes(Status(Code.OK, ""), parameters, num_examples=1, metrics={})
        return Message(fitres_to_recorddict(result, keep_input=False), reply_to=message)

    return train


def screened(up: State, encoding: Encoding) -> State:
    """Return what may go under the masks, or abstain. Which number was wrong is not told: it would be told unmasked."""
    try:
        for name, value in up.items():
            Bounds(encoding.bound(name)).check(name, value)
    except RefusedError:
        raise RefusedError("this client abstains: its update is not finite, or longer than max_norm") from None
    return up


def _sent(reply: RecordDict) -> State:
    """Return what the method sends, and the training loss."""
    about = cast(ConfigRecord, reply[REPLY])
    if REFUSED in about:
        raise RefusedError(str(about[REFUSED]))
    loss = min(float(cast(float, only_record(reply, MetricRecord)["loss"])), LOSS_BOUND)
    return unpack(arrays_of(reply, "up")) | {"loss": torch.tensor(loss, dtype=torch.float64)}
