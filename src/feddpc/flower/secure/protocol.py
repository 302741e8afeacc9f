"""One secure sum: Flower's SecAgg+ in its four stages, from which nodes may drop out at any time."""

from __future__ import annotations

from dataclasses import dataclass, field
from logging import WARNING
from typing import cast

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.common import FitIns, FitRes, Parameters, Scalar, parameters_to_ndarrays
from flwr.common.logger import log
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

from feddpc.flower.screening import Refusal
from feddpc.flower.secure.encoding import MODULUS, Encoding, Floats
from feddpc.flower.secure.masks import unmask_stage
from feddpc.flower.secure.replies import ScreenedGrid


@dataclass(frozen=True)
class Terms:
    """What a secure sum needs to know beside whom to ask."""

    round: int
    clients: dict[int, int]  #: node to client
    encoding: Encoding
    sizes: list[int]  #: lengths of the arrays that every client sends
    quorum: int  #: how many must be in the sum for it to be opened
    timeout: float | None = None  #: in seconds, for each of the four stages


@dataclass
class Summed:
    """What came of it: the mean over ``nodes`` in the encoding's units, None if it was not opened."""

    mean: list[Floats] | None = None
    nodes: list[int] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)


def secure_mean(grid: Grid, messages: list[Message], terms: Terms) -> Summed:
    """Send every node its message, let the nodes mask their answers, and open nothing but the mean of these."""
    summed, run = Summed(), grid.run.run_id
    proxies: list[ClientProxy] = [GridClientProxy(m.metadata.dst_node_id, grid, run) for m in messages]
    context = LegacyContext(
        Context(run_id=run, node_id=0, node_config={}, state=RecordDict(), run_config={}),
        strategy=Relay(proxies, summed),
    )
    for proxy in proxies:
        context.client_manager.register(proxy)
    context.state[MAIN_CONFIGS_RECORD] = ConfigRecord({WorkflowKey.CURRENT_ROUND: terms.round})
    context.state[MAIN_PARAMS_RECORD] = ArrayRecord()  # what clients need is in the messages
    screened = ScreenedGrid(grid, terms.round, terms.clients, [1, *terms.sizes])
    try:
        Workflow(messages, terms)(cast(Grid, screened), context)
    except ValueError as error:  # shares of keys that do not fit together
        log(WARNING, "round %d: the sum could not be opened: %s", terms.round, error)
    summed.refused = screened.refused
    return summed


class Workflow(SecAggPlusWorkflow):
    """Flower's workflow with four differences.

    * It sends ``messages`` as they are where Flower would send instructions of its older interface.
    * It survives a node that is lost in any of the four stages, not in the last two only. In the first two a node has
      masked nothing, and nobody holds shares of its keys: it is forgotten, as if it had not been invited. Flower would
      ask the others for its shares, and the round would fail.
    * Masks come from a stream cipher (``masks.py``).
    * All weights are one, since a weight is sent unmasked too.

    Every node shares its keys with every other.
    """

    def __init__(self, messages: list[Message], terms: Terms) -> None:
        super().__init__(
            num_shares=1.0,
            reconstruction_threshold=terms.quorum,
            max_weight=1.0,
            clipping_range=1.0,
            quantization_range=terms.encoding.levels,
            modulus_range=MODULUS,
            timeout=terms.timeout,
        )
        self.contents = {message.metadata.dst_node_id: message.content for message in messages}

    unmask_stage = unmask_stage

    def setup_stage(self, grid: Grid, context: LegacyContext, state: WorkflowState) -> bool:
        """Collect public keys."""
        going = super().setup_stage(grid, context, state)
        state.nid_to_fitins = {node: RecordDict(dict(content)) for node, content in self.contents.items()}
        return going and _forget_lost(state)

    def share_keys_stage(self, grid: Grid, context: LegacyContext, state: WorkflowState) -> bool:
        """Collect encrypted shares of secret keys."""
        return super().share_keys_stage(grid, context, state) and _forget_lost(state)


def _forget_lost(state: WorkflowState) -> bool:
    here = set(state.active_node_ids)
    state.sampled_node_ids = here
    state.nid_to_neighbours = {node: state.nid_to_neighbours[node] & here for node in here}
    return True


class Relay(FedAvg):
    """What the workflow asks of a strategy of Flower's older interface: whom to invite, and where the mean goes."""

    def __init__(self, proxies: list[ClientProxy], summed: Summed) -> None:
        super().__init__()
        self.proxies, self.summed = proxies, summed

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """Invite everybody."""
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
