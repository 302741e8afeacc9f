"""Where a run stands: the model, what server and clients remember, and the last finished round."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from feddpc.methods.base import Method, State
from feddpc.round.client_table import ClientTable
from feddpc.round.meter import Meter
from feddpc.round.placement import ON_DEVICE, Placement
from feddpc.round.server_step import StepOutcome

Ints = NDArray[np.int64]


@dataclass
class RunState:
    """Where a run stands: the model, all memories, and the last finished round."""

    w: Tensor
    server: State
    slots: ClientTable
    clients: ClientTable
    round: int = 0
    meter: Meter = field(default_factory=Meter)
    watched: State = field(default_factory=dict)  #: what screening, and simulated attackers, remember of earlier rounds

    @classmethod
    def begin(cls, method: Method, w: Tensor, population: int, placement: Placement = ON_DEVICE) -> RunState:
        """Return the state before round 1; ``w`` itself is left as it is."""
        return cls(
            w=w.clone(),
            server=method.init_server(w, population),
            slots=ClientTable(
                lambda: method.init_slot(w),
                f"{method.name}: the server's memory of a client",
                population,
                placement,
                "slots",
            ),
            clients=ClientTable(
                lambda: method.init_client(w), f"{method.name}: a client's memory", population, placement, "clients"
            ),
        )

    def apply(self, method: Method, outcome: StepOutcome, ids: Ints) -> dict[str, float]:
        """Move the model by what came of the uploads of clients ``ids``; return the method's notes."""
        self.watched = outcome.watched
        step = outcome.step
        if step is None:
            self.server = method.on_empty_round(self.server)
            return {}
        step.apply_(self.w)
        self.server = step.server
        self.slots.write(ids, step.slots)
        return {name: float(value) for name, value in step.notes.items()}
