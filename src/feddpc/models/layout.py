"""Parameters in the order and precision in which matrix units want them, taken from one vector in one pass."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from feddpc.kernels.relayout import lay_out

#: Layers whose weights autocast rounds, and whose kernels want the channels of a pixel together.
_PRODUCTS = (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)


class Layout:
    """Where every number of the vector of a module's trainable parameters goes.

    The weights of convolutions and linear layers come first, then all else.

    >>> layout = Layout(nn.Sequential(nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2)), torch.device("cpu"))
    >>> {name: tuple(p.shape) for name, p in layout.parameters(torch.arange(24.0)).items()}
    {'0.weight': (2, 1, 3, 3), '0.bias': (2,), '1.weight': (2,), '1.bias': (2,)}
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        products = _weights_of_products(module)
        self.products = [n for n in trained if n in products]
        self.names = self.products + [n for n in trained if n not in products]
        self.shapes = [trained[n].shape for n in self.names]
        self.sizes = [shape.numel() for shape in self.shapes]
        numbers = torch.arange(sum(self.sizes), dtype=torch.int32, device=device)
        parts = torch.split(numbers, [p.numel() for p in trained.values()])
        places = {n: part.view(p.shape) for part, (n, p) in zip(parts, trained.items(), strict=True)}
        wide = [_together(places[n]).reshape(-1) for n in self.products]
        rest = [places[n].reshape(-1) for n in self.names[len(wide) :]]
        self.order, self.rest = (torch.cat([numbers[:0], *parts]) for parts in (wide, rest))
        self.inverse = torch.cat([self.order, self.rest]).argsort().to(torch.int32)

    def parameters(self, w: Tensor) -> dict[str, Tensor]:
        """Return the parameters by name; under autocast those of products are rounded, as it would do."""
        kind, k = w.device.type, len(self.products)
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else w.dtype
        wide, rest = lay_out(w, self.order, self.rest, self.inverse, dtype)
        pieces = [*torch.split(wide, self.sizes[:k]), *torch.split(rest, self.sizes[k:])]
        views = [_apart(piece, shape) for piece, shape in zip(pieces[:k], self.shapes[:k], strict=True)]
        views += [piece.view(shape) for piece, shape in zip(pieces[k:], self.shapes[k:], strict=True)]
        return dict(zip(self.names, views, strict=True))


def _together(weight: Tensor) -> Tensor:
    """Return a weight with the channels of a pixel together."""
    return weight.permute(0, 2, 3, 1) if weight.ndim == 4 else weight


def _apart(numbers: Tensor, shape: torch.Size) -> Tensor:
    """Return a weight of the usual ``shape`` whose numbers lie with the channels of a pixel together."""
    if len(shape) != 4:
        return numbers.view(shape)
    out, ins, high, wide = shape
    return numbers.view(out, high, wide, ins).permute(0, 3, 1, 2)


def _weights_of_products(module: nn.Module) -> set[str]:
    """Return the names of parameters that only convolutions and linear layers use, as their weights."""
    named = {id(p): n for n, p in module.named_parameters()}
    able, other = set[int](), set[int]()
    for part in module.modules():
        known = type(part) in _PRODUCTS or type(part).__module__.startswith("feddpc.models.")
        for name, parameter in part.named_parameters(recurse=False):
            product = known and isinstance(part, _PRODUCTS) and name == "weight"
            (able if product else other).add(id(parameter))
    return {named[i] for i in able - other}
