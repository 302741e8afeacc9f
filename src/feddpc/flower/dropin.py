"""Drop-in replacements for Flower's FedAvg: methods whose clients run plain local SGD, with unchanged client apps."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args, get_type_hints

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from flwr.serverapp.strategy.strategy_utils import sample_nodes
from torch import Tensor

from feddpc import methods
from feddpc.checks import check_int, check_positive
from feddpc.config import Config
from feddpc.errors import BadInputError
from feddpc.flower.client_registry import Ints
from feddpc.flower.layout import POLICIES, BufferMean, Layout, Numbers, find_buffers, read_buffers
from feddpc.flower.messages import NEVER, RefusedError, ReplyTensors, only_record
from feddpc.flower.method_strategy import MethodStrategy, Received
from feddpc.flower.screening import Bounds, averageable, screen_replies
from feddpc.flower.templates import trial_cohort
from feddpc.methods._feddpc_forms import Stream
from feddpc.methods.base import DATA_HOOKS, ClientContext, Cohort, Method, overrides
from feddpc.policies import Policies, resolve_policies
from feddpc.round.server_step import StepOutcome

#: A population that is not counted.
MANY = 1 << 31
#: The hooks of a method's client half, except ``broadcast`` and ``finish``.
CLIENT_HOOKS = (
    *("start", "objective", "correct", "local_direction", "step", "init_client"),
    *("probes", "surveys", "probe_mask", "train_mask"),
)


class DropInStrategy(MethodStrategy):
    """A method in the place of Flower's ``FedAvg``; clients answer with weights, as they did before.

    Args of Flower's ``FedAvg`` come first and keep their names and order; further:
        server_lr: the server's rate over the clients', eta_g / eta_l; 1, the default of most methods, applies the
            method's step unchanged. Adaptive methods have 0.01.
        weighting: ``uniform``, as in the papers, or ``samples``, by the count that replies carry, as in Flower.
        population: how many clients there are; for methods that remember every client.
        min_replies, max_void_rounds, max_norm, max_examples, folder: see ``docs/flower.md``.
        rule, rule_options: a robust rule in the place of the mean, see ``docs/attacks.md``.
        screen: ``{"norm": 5}`` turns away updates longer than five times the recent median norm.
        buffers: what happens to arrays that are not trained, such as BatchNorm's statistics: ``average`` takes their
            mean over clients (of whole numbers the largest), ``local`` leaves them to the clients, ``refuse`` refuses
            models that have some.
        buffer_names: which float arrays are buffers, besides running means and variances: names or patterns, see
            :func:`feddpc.flower.buffer_names`.
        hyper: the method's hyper-parameters.
    """

    made_from: ClassVar[type[Method]]

    def __init__(
        self,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: Any = None,
        evaluate_metrics_aggr_fn: Any = None,
        *,
        server_lr: float | None = None,
        weighting: Literal["uniform", "samples"] = "uniform",
        population: int | None = None,
        min_replies: int = 1,
        max_void_rounds: int = 3,
        max_norm: float | None = None,
        max_examples: int = 10**9,
        folder: str | Path | None = None,
        rule: str = "mean",
        rule_options: Mapping[str, Any] | None = None,
        screen: Mapping[str, Any] | None = None,
        buffers: Literal["average", "local", "refuse"] = "average",
        buffer_names: Iterable[str] = (),
        **hyper: Any,
    ) -> None:
        given = locals()
        if "form" in get_type_hints(self.made_from) and streams(self.made_from):
            hyper.setdefault("form", "streaming")
        super().__init__(
            methods.create(self.made_from.name, **hyper),
            bounds=Bounds(max_norm, max_examples),
            min_replies=min_replies,
            max_void_rounds=max_void_rounds,
            folder=folder,
            **{name: given[name] for name in inspect.signature(FedAvg).parameters},
        )
        rate = (self.made_from.usual_server_lr or 1.0) if server_lr is None else server_lr
        self.server_lr, self.weighting = check_positive("server_lr", rate), weighting
        self.clients = None if population is None else check_int("population", population, 1)
        self.population = self.clients or MANY
        robust = Config(rule=rule, rule_options=dict(rule_options or {}), screen=dict(screen or {}))
        self.robust = resolve_policies(robust)
        self.policies, self.reports_empty_rounds = Policies.of(self.robust), False
        self.buffer_policy = buffers
        self.buffer_names = [buffer_names] if isinstance(buffer_names, str) else list(buffer_names)
        self.client_of: dict[int, int] = {}  #: client number of every node seen
        self._buffer_mean = BufferMean()
        self._stream: Stream | None = None
        self._examples: dict[int, int] = {}
        self._sampled = False  # whether a round has been sampled since the run began
        self._check_settings()

    def _check_settings(self) -> None:
        """Refuse methods and settings that do not work with an unchanged client app."""
        method = self.method
        if not sends_plain_updates(method):
            raise BadInputError(
                f"{method.name} with {method.hyper()} has a client half of its own: use feddpc.flower.strategy and "
                "client_app"
            )
        if self.buffer_policy not in POLICIES:
            raise BadInputError(f"buffers = {self.buffer_policy!r}: must be one of {', '.join(map(repr, POLICIES))}")
        if knows_clients(method) and self.clients is None:
            raise BadInputError(f"{method.name} remembers every client: say how many there are, population=...")
        if self.weighting not in ("uniform", "samples"):
            raise BadInputError(f"weighting = {self.weighting!r}: must be 'uniform' or 'samples'")
        if self.policies.defense is not None and self.policies.defense.rule is not None:
            method.check_rule()
        if self.weighting == "samples" and knows_clients(method):
            raise BadInputError(
                f"{method.name} with weighting='samples' needs the sizes of clients that never came: use 'uniform'"
            )
        if counts_steps(method, self.clients or 2):
            raise BadInputError(
                f"{method.name} with {method.hyper()} needs every client's number of local steps, which a client app "
                "of Flower does not tell: use feddpc.flower.strategy and client_app"
            )

    # Before the first round.

    def describe(self, rounds: int) -> Config:
        """Return what is known; the clients' own settings are not."""
        known = {"method": self.method.name, "hyper": self.method.hyper(), "weighting": self.weighting}
        rates = {"lr": 1.0, "server_lr": self.server_lr}  # updates are taken as they come
        clients = {"clients": self.clients or 1, "cohort": 1}
        robust = {key: getattr(self.robust, key) for key in ("rule", "rule_options", "screen")}
        names = dict.fromkeys(("engine", "data", "model"), "flower")
        return Config.read({**known, **rates, **clients, **robust, **names, "rounds": rounds})

    def make_layout(self, arrays: ArrayRecord) -> Layout:
        """Return which arrays are parameters and how they map to a vector; the others are buffers."""
        self._sampled = False
        names = find_buffers(arrays, self.buffer_names)
        if names:
            self._check_buffers(names)
        if len(names) == len(arrays):
            raise BadInputError("the model has no parameters, only buffers: give the arrays of a whole state dict")
        return Layout(arrays, names, optional=self.buffer_policy == "local")

    def _check_buffers(self, names: list[str]) -> None:
        """Refuse buffers where they are not wanted, and where averaging them would bypass a defense."""
        groups = "convert the model with feddpc.models.to_groupnorm"
        if self.buffer_policy == "refuse":
            raise BadInputError(f"buffers = 'refuse', and array {names[0]!r} of the model is one: {groups}")
        robust, max_norm = self.robust, self.bounds.max_norm
        bounds = {"rule": robust.rule != "mean", "screen": robust.screen, "max_norm": max_norm}
        if self.buffer_policy == "average" and (given := [name for name, value in bounds.items() if value]):
            raise BadInputError(
                f"buffers = 'average' with {' and '.join(given)}: these judge updates and do not see buffers such as "
                f"{names[0]!r}, so that one client could set them at will. Use buffers = 'local', or {groups}"
            )

    def read_model(self, arrays: ArrayRecord) -> Tensor:
        """Return a whole model as a vector, and take its buffers."""
        w = super().read_model(arrays)
        if self.buffer_policy == "average":
            try:
                read_buffers(self.layout, arrays)
            except RefusedError as error:
                raise BadInputError(
                    f"buffer of the model: {error}; give a finite model, or buffers = 'local'"
                ) from None
        self.buffers = {name: arrays[name] for name in self.layout.buffers}
        return w

    def begin(self, arrays: ArrayRecord, num_rounds: int) -> None:
        """Set the first model; a checkpoint also says which node is which client, and has the buffers."""
        super().begin(arrays, num_rounds)
        ids, table = self.now.clients.export()
        nodes = table["node"].tolist() if len(ids) else []
        self.client_of = {int(n) % (1 << 64): int(c) for c, n in zip(ids.tolist(), nodes, strict=True)}
        if self.buffer_policy == "average":
            stored = {n: self.now.watched.get(_key(n)) for n in self.layout.buffers}
            self.buffers |= {n: Array(values.numpy()) for n, values in stored.items() if values is not None}

    # Every round.

    def invite(self, t: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> list[Message]:
        """Sample nodes as Flower does and send them the model."""
        if self.state is None:
            self.begin(arrays, t)
        else:
            self.set_model(arrays)
        if self.fraction_train:
            sample_nodes(grid, self.min_available_nodes, 0)  # wait for the nodes before a fraction is taken of them
        connected = list(grid.get_node_ids())
        self._number(connected)
        self._refuse_unknown_nodes(grid)
        sent = list(FedAvg.configure_train(self, t, arrays, config, grid))
        if not self._sampled and self.fraction_train:
            self._refuse_small_sample(len(sent), len(connected))
        self._sampled = True
        return sent

    def receive(self, t: int, replies: Iterable[Message]) -> Received:
        """Screen the replies. If they arrive one by one, a streaming method takes each at once and forgets it."""
        sent = self.sent
        sampled = [message.metadata.dst_node_id for message in sent]
        self._number(sampled)
        clients = {node: self.client_of[node] for node in sampled}
        # Flower hands over a list; a grid may hand over an iterator.
        arriving = self.streams and not isinstance(replies, list)
        self._stream = Stream(self.method, self.now.server["delta"]) if arriving else None  # type: ignore[arg-type]
        self._buffer_mean, self._examples = BufferMean(), {}
        good, refused = screen_replies(replies, sent, clients, t, self._read)
        return Received(
            ids=np.array(list(good), dtype=np.int64),
            nodes={client: node for node, client in clients.items()},
            refused=refused,
            dropped=set(clients.values()) - set(good) - {r.client for r in refused},
            uploads=list(good.values()),
            expected=bool(self.fraction_train),
        )

    def cohort(self, t: int, ids: Ints) -> Cohort:
        """Return what replies say about clients ``ids``; the numbers of their local steps are unknown."""
        counts = np.array([self._examples[client] for client in ids.tolist()], dtype=np.float64)
        weights = counts / counts.sum() if self.weighting == "samples" else np.full(len(ids), 1 / max(len(ids), 1))
        return Cohort(
            round=t,
            clients=torch.from_numpy(ids),
            population=self.clients or len(ids),
            weights=torch.from_numpy(weights),
            steps=torch.full((len(ids),), torch.nan, dtype=torch.float64),
            client_lr=1.0,
            server_lr=self.server_lr,
            slots=self.now.slots.read(ids),
            samples=torch.from_numpy(counts) if self.weighting == "samples" else None,
        )

    def rows(self, received: Received) -> Mapping[str, ReplyTensors]:
        """Return the updates; in a stream, each in the memory of the one before."""
        w, layout, into = self.now.w, self.layout, self._workspace if self.streams else None
        return {
            "delta": ReplyTensors(
                received.uploads, lambda reply: layout.update(w, only_record(reply, ArrayRecord), into)
            )
        }

    def step(self, t: int, received: Received) -> StepOutcome:
        """Return the server's step, for a stream from the updates that it has already taken."""
        if self._stream is None or not len(received.ids):
            return super().step(t, received)
        good = torch.ones(len(received.ids), dtype=torch.bool)
        step = self._stream.step(self.server_lr)
        return StepOutcome(good, self.cohort(t, received.ids), step, self.now.watched)

    def summarize(self, received: Received, ids: Ints, outcome: StepOutcome) -> tuple[float, Mapping[str, Any]]:
        """Average the buffers and the metrics of the clients that count."""
        replies = dict(zip(received.ids.tolist(), received.uploads, strict=True))
        if self._stream is None:
            for client, weight in zip(ids.tolist(), outcome.cohort.weights.tolist(), strict=True):
                self._buffer_mean.add(self._read_buffers(replies[client]), weight)
        mean = self._buffer_mean
        self.buffers |= mean.arrays(self.layout)
        kept = {_key(n): torch.from_numpy(np.array(self.buffers[n].numpy())) for n in mean.values}
        self.now.watched = {**self.now.watched, **kept}  # so that a checkpoint has them
        self._stream, self._buffer_mean = None, BufferMean()  # free their memory until the next round
        usable = averageable([replies[client] for client in ids.tolist()])
        return float("nan"), (self.train_metrics_aggr_fn(usable, self.weighted_by_key) or {}) if usable else {}

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample nodes as Flower does and send them the model that the method's authors evaluate."""
        t = self.offset + server_round
        self.sent = list(FedAvg.configure_evaluate(self, t, self.evaluated(arrays), config, grid))
        return self.sent

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average metrics as Flower does; a reply whose metrics cannot be averaged is left out."""

        def read(_: int, content: RecordDict) -> RecordDict:
            self.bounds.examples(only_record(content, MetricRecord).get(self.weighted_by_key))
            return content

        good, refused = screen_replies(replies, self.sent, None, self.offset + server_round, read)
        self.pending += refused
        usable = averageable(list(good.values()))
        return self.evaluate_metrics_aggr_fn(usable, self.weighted_by_key) if usable else None

    @functools.cached_property
    def _workspace(self) -> Tensor:
        """Memory for one update, used for all: new memory costs as much time as the arithmetic."""
        return torch.empty_like(self.now.w)

    def _read_buffers(self, reply: RecordDict) -> dict[str, Numbers]:
        if self.buffer_policy != "average":
            return {}
        return read_buffers(self.layout, only_record(reply, ArrayRecord))

    def _read(self, client: int, content: RecordDict) -> RecordDict:
        """Check a reply; with a stream, the update and the buffers go there, and the arrays are forgotten."""
        if self.clients is not None and client >= self.clients:
            raise RefusedError(f"there are {self.clients} clients already: begin again with a larger population")
        arrays = only_record(content, ArrayRecord)
        self.bounds.check("the update", self.layout.update(self.now.w, arrays, self._workspace))
        examples = self.bounds.examples(only_record(content, MetricRecord).get(self.weighted_by_key))
        buffers = self._read_buffers(content)
        self.log_cast(arrays, self.layout.dtypes)
        self._examples[client] = examples
        if self._stream is None:
            return content
        weight = float(examples) if self.weighting == "samples" else 1.0
        self._stream.add(self._workspace, weight)
        self._buffer_mean.add(buffers, weight)
        return RecordDict({key: record for key, record in content.items() if isinstance(record, MetricRecord)})

    # Nodes and clients.

    def _number(self, nodes: Iterable[int]) -> None:
        """Give new nodes client numbers; a checkpoint keeps them."""
        new = sorted(set(nodes) - self.client_of.keys())
        ids = np.arange(len(self.client_of), len(self.client_of) + len(new))
        self.client_of |= dict(zip(new, ids.tolist(), strict=True))
        self.mark_accepted(NEVER, ids, dict(zip(ids.tolist(), new, strict=True)))

    def _refuse_small_sample(self, sampled: int, nodes: int) -> None:
        """Raise if fewer nodes are sampled than must answer."""
        least = self.min_replies
        if sampled >= least:
            return
        raised = f"fraction_train to at least {least / nodes:.3g} or min_train_nodes to {least}"
        more = raised if least <= nodes else f"the number of nodes to {least}"
        raise BadInputError(
            f"min_replies = {least}, but {sampled} of {nodes} nodes are sampled per round (fraction_train = "
            f"{self.fraction_train}, min_train_nodes = {self.min_train_nodes}), so no round could count: lower "
            f"min_replies to at most {sampled}, or raise {more}"
        )

    def _refuse_unknown_nodes(self, grid: Grid) -> None:
        """Raise if no connected node can be one of the clients that this run remembers."""
        connected, n = {self.client_of[node] for node in grid.get_node_ids()}, self.clients
        if n is not None and connected and min(connected) >= n:
            raise BadInputError(
                f"this run knows {n} clients by the ids of their nodes, and all connected nodes have other ids: start "
                "nodes with keys of their own and the SuperLink with --database, so that ids stay, or begin a new run"
            )


def _key(name: str) -> str:
    """Return the name of a buffer in a checkpoint."""
    return f"buffers/{name}"


def sends_plain_updates(method: Method) -> bool:
    """Return whether clients of ``method`` run plain local SGD and send only their update.

    >>> [sends_plain_updates(methods.create(name)) for name in ("feddpc", "fedprox", "mifa")]
    [True, False, True]
    >>> sends_plain_updates(methods.create("feddpc", form="client"))
    False
    """
    if any(overrides(method, hook) for hook in (*CLIENT_HOOKS, *DATA_HOOKS)):
        return False
    w, y = torch.tensor([1.0, 2.0]), torch.tensor([0.5, 3.0])
    # Whether these two do something of their own may depend on hyper-parameters: call them.
    if overrides(method, "broadcast") and method.broadcast(w, method.init_server(w, 2), {}, trial_cohort(2)):
        return False
    up, own = method.finish(y, ClientContext(w, {}, {}, 0.1, torch.tensor(1.0)))
    return not own and up.keys() == {"delta"} and torch.equal(up["delta"], w - y)


def knows_clients(method: Method) -> bool:
    """Return whether the server of ``method`` stores something per client, so that it must know how many there are."""
    w = torch.zeros(2)
    try:
        few, many = ({k: v.shape for k, v in method.init_server(w, n).items()} for n in (10_000, 10_001))
    except BadInputError:  # it asks for one particular number of clients
        return True
    return few != many or bool(method.init_slot(w))


def counts_steps(method: Method, population: int) -> bool:
    """Return whether the server of ``method`` must know how many local steps each client made."""
    w = torch.ones(2)
    cohort = trial_cohort(1, population, method.init_slot(w))
    step = method.aggregate(w, method.init_server(w, population), {"delta": torch.eye(2)[:1]}, cohort)
    return not bool(step.update.isfinite().all())


def streams(cls: type[Method]) -> bool:
    """Return whether a method's server can take updates one at a time."""
    return "streaming" in get_args(get_type_hints(cls)["form"])


@functools.cache
def dropins() -> dict[str, type[DropInStrategy]]:
    """Return the strategies by class name, one for every registered method that an unchanged client app can serve.

    >>> sorted(dropins())
    ['ClusterFedVARP', 'FedAdagrad', 'FedAdam', 'FedAvg', 'FedAvgM', 'FedDPC', 'FedExP', 'FedVARP', 'FedYogi', 'MIFA']
    """
    instances = [methods.create(name) for name in methods.names()]
    plain = [method for method in instances if sends_plain_updates(method)]
    served = [type(method) for method in plain if knows_clients(method) or not counts_steps(method, 2)]
    return {cls.__name__: _make_strategy(cls) for cls in served}


def _make_strategy(cls: type[Method]) -> type[DropInStrategy]:
    own = [p for n, p in inspect.signature(DropInStrategy.__init__).parameters.items() if n not in ("self", "hyper")]
    kind = inspect.Parameter.KEYWORD_ONLY
    hyper = [inspect.Parameter(f.name, kind, default=f.default, annotation=f.type) for f in fields(cls)]
    doc = f"{cls.title} in the place of Flower's FedAvg.\n\n{inspect.cleandoc(DropInStrategy.__doc__ or '')}"
    about = {"made_from": cls, "__doc__": doc, "__module__": "feddpc.flower"}
    return type(cls.__name__, (DropInStrategy,), about | {"__signature__": inspect.Signature([*own, *hyper])})
