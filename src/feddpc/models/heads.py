"""Networks with layers of their own that a method adds to a body and its head."""

from __future__ import annotations

from torch import Tensor, nn


class WithProjection(nn.Module):
    """A body under a projection head, and the classifier on top of that: ``forward(x) == head(project(x))``.

    ``base`` keeps its ``features``; its own linear head goes.
    """

    def __init__(self, base: nn.Module, width: int) -> None:
        super().__init__()
        old: nn.Linear = base.head  # type: ignore[assignment]
        for parent in base.modules():
            for name, child in parent._modules.items():
                if child is old:
                    parent._modules[name] = nn.Identity()
        f = old.in_features
        self.base = base
        self.projection = nn.Sequential(nn.Linear(f, f), nn.ReLU(), nn.Linear(f, width))
        self.head = nn.Linear(width, old.out_features)

    def features(self, x: Tensor) -> Tensor:
        """Return the base's features."""
        out: Tensor = self.base.features(x)  # type: ignore[operator]
        return out

    def project(self, x: Tensor) -> Tensor:
        """Return the projections of the features, ``[batch, width]``."""
        out: Tensor = self.projection(self.features(x))
        return out

    def projections_and_logits(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return both from one pass."""
        z = self.project(x)
        return z, self.head(z)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return self.projections_and_logits(x)[1]


class WithProjector(nn.Module):
    """A network with a projector of its features next to its head; the logits are those of ``base``."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        f: int = base.head.in_features  # type: ignore[assignment, union-attr]
        self.base = base
        self.projector = nn.Sequential(
            nn.Linear(f, 2 * f), nn.ReLU(), nn.Linear(2 * f, 2 * f), nn.ReLU(), nn.Linear(2 * f, f)
        )

    def features(self, x: Tensor) -> Tensor:
        """Return the base's features."""
        out: Tensor = self.base.features(x)  # type: ignore[operator]
        return out

    def features_and_logits(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return both from one pass."""
        f = self.features(x)
        return f, self.base.head(f)  # type: ignore[operator]

    def project(self, f: Tensor) -> Tensor:
        """Return the projections of features ``f``, as wide as these."""
        out: Tensor = self.projector(f)
        return out

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return self.features_and_logits(x)[1]
