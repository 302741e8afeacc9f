"""One client's side of an experiment: its samples and nobody else's, in the places that the simulator gives them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from feddpc.data import Dataset
from feddpc.data.batches import Planner
from feddpc.data.partition import Partition
from feddpc.data.scaling import Scaler, make_scaler
from feddpc.experiment import largest_shift
from feddpc.flower.orders import Orders
from feddpc.flower.wire import RefusedError, layout_tag
from feddpc.method_setup import adapt_module, placed
from feddpc.methods.base import Method, State
from feddpc.methods.federated_data import FederatedData
from feddpc.models import check_supported
from feddpc.models.flat import Flat
from feddpc.tasks.classification import Classification


@dataclass(frozen=True)
class Node:
    """What a client works with."""

    client: int
    method: Method
    world: FederatedData
    task: Classification
    planner: Planner
    kit: State

    @property
    def ids(self) -> NDArray[np.int64]:
        """The client, as engines want it."""
        return np.array([self.client])

    @property
    def samples(self) -> int:
        """How many samples it trains on."""
        return len(self.planner.partition[self.client])


def alone(orders: Orders, client: int, data: Dataset, given: Mapping[str, Tensor]) -> FederatedData:
    """Return a world in which this client holds its own samples and the others, who are elsewhere, hold none.

    ``given`` is what the server handed out of its reserve. Samples keep their order, and only that counts: which batch
    a sample is in depends on its place among the client's samples, not on its number.
    """
    mine = len(data.y_train)
    reserve = np.zeros(0, np.int64)
    if "reserve.y" in given:
        y, at = given["reserve.y"].numpy(), given["reserve.at"].numpy()
        reserve = mine + given["reserve.order"].numpy()
        x = np.zeros((len(y), *data.sample_shape), data.x_train.dtype)  # but for its share, others' business
        x[at] = given["reserve.x"].numpy()
        # Labels for all samples there are, since shares of the whole are counted; the last ones are nobody's.
        rest = np.zeros(orders.samples - mine - len(y), np.int64)
        data = dataclasses.replace(
            data, x_train=np.concatenate([data.x_train, x]), y_train=np.concatenate([data.y_train, y, rest])
        )
    starts = np.where(np.arange(orders.clients + 1) > client, mine, 0)
    return FederatedData(
        data=data,
        partition=Partition(np.arange(mine), starts),
        seed=orders.seed,
        client_lr=orders.lr,
        batch_size=orders.batch_size,
        device=torch.device("cpu"),
        reserve=reserve,
    )


def build(
    orders: Orders, method: Method, client: int, data: Dataset, module: nn.Module, given: State, device: str
) -> Node:
    """Return what client ``client`` works with; ``given`` is what the server handed out before round 1."""
    check_supported(module)
    network = adapt_module(method, module, orders.seed) or module
    flat = Flat(network)
    found = layout_tag(dict(zip(flat.names, flat.shapes, strict=True)))
    if found != orders.layout:
        raise RefusedError(
            f"this node's model {type(module).__name__} has {flat.d} parameters in {len(flat.names)} arrays, which are "
            "not those of the server's: use the same model on both"
        )
    learned = {k.removeprefix("learned."): v for k, v in given.items() if k.startswith("learned.")}
    world = alone(orders, client, data, given)
    if any(k.startswith(("learned.", "reserve.")) for k in given):
        world = method.extend_data(world, learned)
    shift = largest_shift(data) if orders.augment else 0
    dtype = torch.float64 if orders.precision == "float64" else torch.float32
    task = Classification(
        network,
        world.data,
        _scaler(orders, data, given),
        device=device,
        dtype=dtype,
        half=orders.precision == "bf16",
        shift=shift,
    )
    planner = Planner(world.partition, orders.batch_size, orders.epochs, orders.seed, shift)
    like = torch.zeros((), dtype=dtype, device=device)
    return Node(client, method, world, task, planner, {k: placed(v, like) for k, v in world.kit.items()})


def _scaler(orders: Orders, data: Dataset, given: State) -> Scaler:
    if "scaler.mean" in given:
        return Scaler((given["scaler.mean"], given["scaler.deviation"]), torch.float64)
    auto = "half" if data.is_image else "none"
    return make_scaler(auto if orders.scaling == "auto" else orders.scaling, data)
