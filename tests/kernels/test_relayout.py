"""Parameters in the layout of matrix units: the same numbers, the same gradient, rounded where autocast rounds."""

import pytest
import torch
from torch import nn

from feddpc.models.layout import Layout
from feddpc.models.resnet import Halving
from support import DEVICE


class Tied(nn.Module):
    """An embedding whose weight is also that of the last layer, and a convolution of somebody else."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.own = type("Standardized", (nn.Conv2d,), {})(2, 3, 3)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.plain = nn.Conv2d(3, 4, (3, 5))
        self.last = nn.Linear(4, 5, bias=False)
        self.last.weight = self.embedding.weight


NETWORKS = {
    "tied": Tied,
    "no product": lambda: nn.GroupNorm(2, 4),
    "only products": lambda: nn.Linear(3, 2, bias=False),
    "library": lambda: nn.Sequential(Halving(3, 8, 7, 2, 3), nn.GroupNorm(2, 8), nn.ConvTranspose2d(8, 3, 2)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_numbers_and_gradients_are_those_of_views(name):
    network = NETWORKS[name]().to(DEVICE)
    trained = {n: p for n, p in network.named_parameters() if p.requires_grad}
    w = torch.cat([p.detach().reshape(-1) for p in trained.values()]).requires_grad_()
    layout = Layout(network, w.device)
    views = layout.parameters(w)
    assert views.keys() == trained.keys()
    slopes = {n: torch.randn_like(p) for n, p in trained.items()}
    for n, p in trained.items():
        assert torch.equal(views[n], p), n
        if n in layout.products and p.ndim == 4:
            assert views[n].is_contiguous(memory_format=torch.channels_last)
    (gradient,) = torch.autograd.grad(sum((views[n] * slopes[n]).sum() for n in trained), w)
    assert torch.equal(gradient, torch.cat([slope.reshape(-1) for slope in slopes.values()]))


def test_autocast_rounds_the_weights_of_products_only():
    network = Tied().to(DEVICE)
    w = torch.cat([p.detach().reshape(-1) for p in network.parameters() if p.requires_grad])
    layout = Layout(network, w.device)
    with torch.autocast(w.device.type, torch.bfloat16):
        views = layout.parameters(w)
    assert [n for n, p in views.items() if p.dtype == torch.bfloat16] == layout.products == ["plain.weight"]
    assert torch.equal(views["plain.weight"], network.plain.weight.to(torch.bfloat16))
