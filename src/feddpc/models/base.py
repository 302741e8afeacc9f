"""What every network here has in common: a representation, and a linear layer on top of it."""

from __future__ import annotations

from torch import Tensor, nn


class BodyAndHead(nn.Module):
    """A network with ``forward(x) == head(features(x))``; subclasses set ``head``, and ``body`` or own features."""

    body: nn.Module
    head: nn.Linear

    def features(self, x: Tensor) -> Tensor:
        """Return what the last layer sees, ``[batch, head.in_features]``."""
        out: Tensor = self.body(x)
        return out

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, ``[batch, classes]``."""
        out: Tensor = self.head(self.features(x))
        return out
