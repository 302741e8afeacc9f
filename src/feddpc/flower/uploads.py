"""What clients sent, checked and still in their messages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from flwr.app import ArrayRecord
from torch import Tensor

from feddpc.flower.wire import tensor


class Upload(NamedTuple):
    """What a client sent."""

    arrays: ArrayRecord
    loss: float


@dataclass(frozen=True)
class Rows:
    """One tensor of every upload, each made when it is asked for: a server that takes them one by one holds one."""

    uploads: list[Upload]
    key: str
    look: Tensor

    def __iter__(self) -> Iterator[Tensor]:
        return (tensor(upload.arrays[self.key], self.key, self.look) for upload in self.uploads)
