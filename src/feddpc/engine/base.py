"""What an engine is: it runs the client half of a method for a whole cohort."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from feddpc.data.batches import Plan
from feddpc.methods.base import Method, State
from feddpc.task import Task


class Trained(NamedTuple):
    """What came out of local training, stacked over the cohort."""

    up: State  #: what the clients send
    own: State  #: their new memories
    loss: Tensor  #: mean over a client's steps of the objective during training, ``[m]``


class Engine(ABC):
    """Runs the client half of a method for every client of a plan. All engines give the same numbers."""

    name: ClassVar[str]

    def refuses(self, task: Task) -> str | None:
        """Say why this engine cannot run ``task``, or return None."""
        return None

    @abstractmethod
    def probe(self, method: Method, task: Task, w: Tensor, plan: Plan) -> State:
        """Return what the clients answer to the method's probe, stacked; ``plan`` is one pass over their data."""

    @abstractmethod
    def train(self, method: Method, task: Task, w: Tensor, down: State, own: State, plan: Plan, lr: float) -> Trained:
        """Train every client of ``plan`` from ``w``."""


def stack(states: list[State]) -> State:
    """Stack the states of single clients."""
    return {key: torch.stack([s[key] for s in states]) for key in states[0]}
