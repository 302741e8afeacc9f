"""What every network of this library offers besides its logits: the features before its last layer, and its stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from feddpc.models.fast_cpu import through
from feddpc.models.narrow import misfit, narrowed, reduced


class Sections(NamedTuple):
    """The layers of a body before, in and after its last stage."""

    before: Sequence[nn.Module]
    stage: Sequence[nn.Module]
    after: Sequence[nn.Module]


class BodyAndHead(nn.Module):
    """A network with ``forward(x) == head(features(x)) == top(last_stage(trunk(x)))``.

    Subclasses set ``head``, and either ``body``, a Sequential, with the place of its last ``stage``, or have their own
    ``features`` and ``sections``. ``lacks`` names parts that a particular network has no layers for.
    """

    body: nn.Sequential
    head: nn.Linear
    stage: slice
    lacks: tuple[str, ...] = ()

    def features(self, x: Tensor) -> Tensor:
        """Return what the last layer sees, ``[batch, head.in_features]``."""
        return through(self.body, x)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, ``[batch, classes]``."""
        out: Tensor = self.head(self.features(x))
        return out

    def sections(self) -> Sections:
        """Return the layers below the head in three parts."""
        layers = list(self.body)
        first, end, _ = self.stage.indices(len(layers))
        return Sections(layers[:first], layers[first:end], layers[end:])

    def trunk(self, x: Tensor) -> Tensor:
        """Return what enters the last stage."""
        return through(self.sections().before, x)

    def last_stage(self, h: Tensor, width: float = 1.0) -> Tensor:
        """Return what leaves the last stage, or what its first ``width`` of the channels make of those of ``h``."""
        stage = self.sections().stage
        if width == 1:
            return through(stage, h)
        h = h[:, : reduced(h.shape[1], width)]
        for layer in stage:
            h = narrowed(layer, h, width)
        return h

    def top(self, o: Tensor) -> Tensor:
        """Return the logits that follow from the last stage's output."""
        out: Tensor = self.head(through(self.sections().after, o))
        return out

    def too_narrow(self, width: float) -> str | None:
        """Say why the last stage cannot run at ``width``, or return None."""
        inside = {id(m) for layer in self.sections().stage for m in layer.modules()}
        return misfit(((name, m) for name, m in self.named_modules() if id(m) in inside), width)
