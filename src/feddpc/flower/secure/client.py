"""The client app under secure aggregation: it trains, projects and scales, checks its update, and masks it."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable, Mod
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.compat.common.recorddict_compat import fitres_to_recorddict

from feddpc.checks import check_int
from feddpc.flower.client import Data, Model, client_app
from feddpc.flower.messages import REFUSED, REPLY, ExperimentSpec, RefusedError, arrays_of, only_record, unpack
from feddpc.flower.screening import Bounds
from feddpc.flower.secure.encoding import LOSS_BOUND, SECURE, Encoding, summable
from feddpc.flower.secure.protocol import masking_mod
from feddpc.methods.base import Method, State

T = TypeVar("T")


def secure_client_app(
    *,
    model: Model,
    data: Data,
    method: Method | None = None,
    min_cohort: int = 3,
    **more: Any,
) -> ClientApp:
    """Return the app of :func:`feddpc.flower.client_app`, whose updates leave the node under masks only.

    It answers :func:`feddpc.flower.secure_server_app`. An update that is not finite, or longer than agreed, does not
    leave the node, since the server could not recognize it under the masks: the node drops out of the round.

    Args:
        model: see ``client_app``.
        data: see there.
        method: the only method this node takes part in; by default any whose server needs only the sum.
        min_cohort: this node takes no part in a sum of fewer clients: a sum of few reveals much about each.
        more: what else ``client_app`` takes: ``device``, and code of your own.
    """
    check_int("min_cohort", min_cohort, 2)
    plain = client_app(model=model, data=data, method=None if method is None else summable(method), **more)
    app = ClientApp()
    app.query("hello")(hide_sample_count(plain))
    app.train(mods=[require_min_cohort(min_cohort), masking_mod])(masked_training(plain))
    return app


def hide_sample_count(plain: ClientAppCallable) -> ClientAppCallable:
    """Wrap enrollment: the node says which client it is, and always that it has one sample."""

    def hello(message: Message, context: Context) -> Message:
        reply = plain(message, context)
        for metrics in reply.content.metric_records.values():
            metrics["num-examples"] = 1
        return reply

    return hello


def require_min_cohort(min_cohort: int) -> Mod:
    """Return a modifier that refuses to answer without masks, or to take part in a sum of too few clients."""

    def check(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        asked = message.content.get(RECORD_KEY_CONFIGS)
        if not isinstance(asked, ConfigRecord):
            raise RefusedError("this node trains under secure aggregation only: use feddpc.flower.secure_server_app")
        summed = _check_stage(asked)
        if summed < min_cohort:
            raise RefusedError(f"this node takes no part in a sum of {summed}: it wants at least {min_cohort} in it")
        return call_next(message, context)

    return check


def _check_stage(asked: ConfigRecord) -> int:
    """Return how many nodes the sum still has, or refuse a request that would reveal a single update."""
    stage = asked.get(Key.STAGE)
    if stage == Stage.SETUP:
        threshold, shares, nodes = (
            _value(asked, key, int) for key in (Key.THRESHOLD, Key.SHARE_NUMBER, Key.SAMPLE_NUMBER)
        )
        if 2 * threshold <= shares:
            raise RefusedError("half of the cohort could open what this node sends: raise min_replies")
        return nodes
    if stage == Stage.SHARE_KEYS:
        return len(asked) - 1  # a pair of keys each, and the stage
    if stage == Stage.COLLECT_MASKED_VECTORS:
        return len(set(_value(asked, Key.SOURCE_LIST, list))) + 1
    if stage != Stage.UNMASK:
        raise RefusedError(f"the server is in a stage {stage!r} that the protocol does not have")
    active = set(_value(asked, Key.ACTIVE_NODE_ID_LIST, list))
    if active & set(_value(asked, Key.DEAD_NODE_ID_LIST, list)):
        raise RefusedError("the server asks for both secrets of a node, which would open its update")
    return len(active)


def _value(asked: ConfigRecord, key: str, kind: type[T]) -> T:
    """Return the server's value of ``key``, or refuse one of another type."""
    value = asked.get(key)
    if type(value) is not kind:
        raise RefusedError(f"the server's {key} is {value!r}, not {kind.__name__}")
    return value


def masked_training(plain: ClientAppCallable) -> ClientAppCallable:
    """Wrap training: the upload is screened and encoded for the masks, and nothing else leaves the node."""

    def train(message: Message, context: Context) -> Message:
        terms = message.content.get(SECURE)
        if not isinstance(terms, ConfigRecord):
            raise RefusedError(f"the message has no {SECURE}: use feddpc.flower.secure_server_app")
        encoding = Encoding.read(terms)
        summable(ExperimentSpec.read(message.content).build(None))
        up = check_bounds(_upload(plain(message, context).content), encoding)
        parameters = ndarrays_to_parameters(list(encoding.encode(up)))
        result = FitRes(Status(Code.OK, ""), parameters, num_examples=1, metrics={})
        return Message(fitres_to_recorddict(result, keep_input=False), reply_to=message)

    return train


def check_bounds(up: State, encoding: Encoding) -> State:
    """Return an upload that is within its bounds, or abstain. The reply, which is not masked, does not say why."""
    try:
        for name, value in up.items():
            Bounds(encoding.bound(name)).check(name, value)
    except RefusedError:
        raise RefusedError("this client abstains: its update is not finite, or longer than max_norm") from None
    return up


def _upload(reply: RecordDict) -> State:
    """Return the method's upload and the training loss."""
    about = cast(ConfigRecord, reply[REPLY])
    if REFUSED in about:
        raise RefusedError(str(about[REFUSED]))
    loss = min(float(cast(float, only_record(reply, MetricRecord)["loss"])), LOSS_BOUND)
    return unpack(arrays_of(reply, "up")) | {"loss": torch.tensor(loss, dtype=torch.float64)}
