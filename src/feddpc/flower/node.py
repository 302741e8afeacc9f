"""One client's side of an experiment: samples, network, what the server sent once, and what it remembers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from logging import WARNING
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, Context
from flwr.common.logger import log
from numpy.typing import NDArray
from torch import Tensor, nn

from feddpc.build import dtype_of, make_planner, make_task
from feddpc.checks import check_int
from feddpc.data import Dataset
from feddpc.data.batches import Planner
from feddpc.data.partition import Partition
from feddpc.data.scaling import Scaler
from feddpc.errors import RunFolderError
from feddpc.flower.messages import MOST_SAMPLES, NEVER, ExperimentSpec, RefusedError, arrays_of, model_tag, pack, unpack
from feddpc.method_changes import adapt_module, cast_like, federated_data
from feddpc.methods.base import Method, State
from feddpc.methods.federated_data import FederatedData
from feddpc.methods.local_steps import with_optimizer
from feddpc.models import check_supported
from feddpc.models.flat import Flat
from feddpc.policies import client_optimizer
from feddpc.runs.checkpoint import load_model, save_model
from feddpc.storage import make_folder
from feddpc.task_parts import TaskParts
from feddpc.tasks.network import NetworkTask

#: The name of the record in a node's ``Context.state``.
MEMORY = "feddpc.memory"


@dataclass(frozen=True)
class Node:
    """One client's side of an experiment: its samples in the places that the simulator gives them."""

    spec: ExperimentSpec
    client: int
    method: Method
    local: Method  #: with the local steps of the experiment's optimizer
    world: FederatedData
    task: NetworkTask
    planner: Planner
    payload: State  #: tensors that the server sent once

    @property
    def ids(self) -> NDArray[np.int64]:
        """The client, as engines want it."""
        return np.array([self.client])

    @property
    def samples(self) -> int:
        """How many samples it trains on."""
        return len(self.planner.partition[self.client])

    @functools.cached_property
    def size(self) -> int:
        """How many bytes its samples and network take."""
        data, module = self.world.data, self.task.module
        samples = sum(array.nbytes for array in (data.x_train, data.y_train, data.x_test, data.y_test))
        return samples + sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def local_data(spec: ExperimentSpec, client: int, data: Dataset, given: Mapping[str, Tensor]) -> FederatedData:
    """Return a data set in which this client holds its own samples and the other clients hold none.

    ``given`` is the one-time payload, with samples of the server's reserve. Samples keep their order, and only that
    matters: the batch of a sample depends on its place among the client's samples, not on its index.
    """
    mine = len(data.y_train)
    reserve = np.zeros(0, np.int64)
    if "reserve.y" in given:
        y, at = given["reserve.y"].numpy(), given["reserve.at"].numpy()
        elsewhere = check_int("samples", int(given["reserve.samples"]), mine + len(y), MOST_SAMPLES) - mine - len(y)
        reserve = mine + given["reserve.order"].numpy()
        x = np.zeros((len(y), *data.sample_shape), data.x_train.dtype)  # zeros except for its own share
        x[at] = given["reserve.x"].numpy()
        # Labels for all samples of the experiment, since methods count shares of the whole; the last are placeholders.
        rest = np.zeros((elsewhere, *y.shape[1:]), y.dtype)
        data = dataclasses.replace(
            data, x_train=np.concatenate([data.x_train, x]), y_train=np.concatenate([data.y_train, y, rest])
        )
    starts = np.where(np.arange(spec.config.clients + 1) > client, mine, 0)
    return federated_data(spec.config, data, Partition(np.arange(mine), starts), reserve)


def build_node(
    spec: ExperimentSpec,
    method: Method,
    client: int,
    data: Dataset,
    module: nn.Module,
    given: State,
    own: TaskParts,
    device: str,
) -> Node:
    """Return what client ``client`` works with; ``given`` is its one-time payload, ``own`` the user's code."""
    check_supported(module, statistics=False)
    config = spec.config
    network = (adapt_module(method, module, config.seed) or module).to(dtype_of(config.precision))
    check_model(network, spec.layout)
    learned = {k.removeprefix("learned."): v for k, v in given.items() if k.startswith("learned.")}
    world = local_data(spec, client, data, given)
    if any(k.startswith(("learned.", "reserve.")) for k in given):
        world = method.extend_data(world, learned)
    scaler = None
    if "scaler.mean" in given:
        scaler = Scaler((given["scaler.mean"], given["scaler.deviation"]), torch.float64)
    task = make_task(config, own, network, world.data, scaler, device=device)
    if changing := task.traits.statistics:
        raise RefusedError(
            f"training changes buffer {changing[0]!r} of this node's model, which is neither sent nor kept"
        )
    planner = make_planner(config, task, world.partition)
    like = torch.zeros((), dtype=dtype_of(config.precision), device=device)
    payload = {k: cast_like(v, like) for k, v in world.one_time_payload.items()}
    return Node(spec, client, method, with_optimizer(method, client_optimizer(config)), world, task, planner, payload)


def check_model(network: nn.Module, layout: str) -> None:
    """Refuse an experiment with another model than this node's, or with other values of frozen parameters."""
    flat = Flat(network)
    tag = model_tag(flat)
    if tag.partition("+")[0] != layout.partition("+")[0]:
        raise RefusedError(
            f"this node's model {type(network).__name__} has {flat.d} parameters in {len(flat.names)} arrays, which "
            "are not those of the server's: use the same model on both"
        )
    if tag != layout:
        frozen = ", ".join(list(flat.frozen())[:3]) or "none"
        raise RefusedError(
            f"this node's frozen parameters ({frozen}) are not those of the server: load the same values on both"
        )


class Memory:
    """What a client remembers between its rounds, in ``Context.state``; ``file`` keeps a copy for restarts.

    A client cannot know whether its reply counted: the server may have refused it, got it too late, or gone back to a
    checkpoint. So the memory after a round is pending until the next message of the server, which says which of the
    client's replies counted last. That memory is used, and any other is dropped.
    """

    def __init__(self, context: Context, file: Path | None) -> None:
        self.context, self.file = context, file

    def recall(self, method: Method, w: Tensor, accepted: int) -> State:
        """Return the memory after round ``accepted``; the initial one if there is none, or if it is lost."""
        fresh = method.init_client(w)
        if not fresh:
            return {}
        held = arrays_of(self.context.state, MEMORY)
        if not held and accepted != NEVER and self.file is not None and self.file.exists():
            held = pack(load_model(self.file))
            if foreign := [name for name in held if not name.partition(".")[0].isdecimal()]:  # no round, see `hold`
                raise RunFolderError(f"{self.file} is no memory of a client (it holds {foreign[0]!r}): remove it")
        prefix = f"{accepted}."
        kept = ArrayRecord({name: array for name, array in held.items() if name.startswith(prefix)})
        self.context.state[MEMORY] = kept
        if kept:
            return {name.removeprefix(prefix): value for name, value in unpack(kept, w.device).items()}
        if accepted != NEVER:
            log(WARNING, "this client's memory of round %d is lost: it starts from the initial one", accepted)
        return fresh

    def hold(self, round: int, state: State) -> None:
        """Keep the memory after ``round`` as pending, together with the one that was recalled."""
        if not state:
            return
        pending = pack({f"{round}.{key}": value for key, value in state.items()})
        kept = ArrayRecord({**arrays_of(self.context.state, MEMORY), **pending})
        self.context.state[MEMORY] = kept
        if self.file is not None:
            make_folder(self.file.parent)
            save_model(self.file, unpack(kept))
