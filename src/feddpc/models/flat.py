"""The map between a module's trainable parameters and one vector."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from feddpc.kernels.launch import usable
from feddpc.models.layout import Layout


class Flat:
    """One vector for all trainable parameters of ``module``, in the order of ``named_parameters``.

    Every method of this library is row algebra on such vectors: projections, norms, memories, messages, checkpoints.
    A model that is evaluated or stored may have the module's statistics, such as BatchNorm's, behind its parameters.

    >>> flat = Flat(nn.Linear(3, 2))
    >>> flat.d
    8
    >>> flat.state_dict(flat.vector())["bias"].shape
    torch.Size([2])
    """

    def __init__(self, module: nn.Module, statistics: Sequence[str] = ()) -> None:
        self.module = module
        self.statistics = tuple(statistics)  #: names of the buffers that training changes
        trainable = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        self.names = [n for n, _ in trainable]
        self.shapes = [p.shape for _, p in trainable]
        self.sizes = [p.numel() for _, p in trainable]
        self.d = sum(self.sizes)
        self._whole = _Whole(module)
        self.together = False  #: whether kernels of convolutions get the channels of a pixel together
        self._layout: Layout | None = None

    def of_copy(self, module: nn.Module) -> Flat:
        """Return the same map for a copy of the module."""
        twin = copy.copy(self)
        twin.module, twin._whole = module, _Whole(module)
        return twin

    def vector(self) -> Tensor:
        """Return the module's present parameters as a new vector."""
        parameters = dict(self.module.named_parameters())
        return torch.cat([parameters[n].detach().reshape(-1) for n in self.names])

    def frozen(self) -> dict[str, Tensor]:
        """Return the constants of the network by name: parameters and buffers that training does not change."""
        parameters = {n: p for n, p in self.module.named_parameters() if not p.requires_grad}
        return parameters | {n: b for n, b in self.module.named_buffers() if n not in self.statistics}

    def parameters(self, w: Tensor) -> dict[str, Tensor]:
        """Return views of ``w`` by parameter name (``split``: the backward of slices would zero-fill every leaf)."""
        if len(w) > self.d:
            return self.parameters(w[: self.d]) | self.buffers(w[self.d :])
        if self.together and usable(w.device) and not torch._C._functorch.is_batchedtensor(w):
            return self._laid_out(w)
        adds_up = w.requires_grad and w.is_leaf and w.grad is not None
        views = self._leaves(w) if adds_up else self._views(w)
        if not self.together:
            return views
        return {n: p.contiguous(memory_format=torch.channels_last) if p.ndim == 4 else p for n, p in views.items()}

    def _views(self, w: Tensor) -> dict[str, Tensor]:
        parts = torch.split(w, self.sizes)
        return {n: part.view(s) for n, part, s in zip(self.names, parts, self.shapes, strict=True)}

    def _leaves(self, w: Tensor) -> dict[str, Tensor]:
        """Return views of ``w`` whose gradients are added to that of ``w`` in place, and not kept."""
        assert w.grad is not None
        gradients, leaves = self._views(w.grad), self._views(w.detach())
        for name, leaf in leaves.items():
            leaf.requires_grad_(True).grad = gradients[name]
        return leaves

    def share(self, w: Tensor) -> None:
        """Let the module's own parameters be parts of ``w``, which has their values."""
        parameters = dict(self.module.named_parameters())
        for name, view in self._views(w).items():
            parameters[name].data = view

    def _laid_out(self, w: Tensor) -> dict[str, Tensor]:
        """Return the parameters, those of convolutions and linear layers as matrix units want them."""
        if self._layout is None or self._layout.order.device != w.device:
            self._layout = Layout(self.module, w.device)
        return self._layout.parameters(w)

    def read_statistics(self) -> Tensor:
        """Return the module's present statistics as a new vector of the parameters' type."""
        held, like = dict(self.module.named_buffers()), next(self.module.parameters())
        return torch.cat([like.new_zeros(0), *(held[n].detach().to(like.dtype).reshape(-1) for n in self.statistics)])

    def write_statistics(self, values: Tensor) -> None:
        """Put statistics into the module."""
        held = dict(self.module.named_buffers())
        for name, value in self.buffers(values).items():
            held[name].copy_(value)

    def buffers(self, values: Tensor) -> dict[str, Tensor]:
        """Return statistics by the names of their buffers, in the buffers' types."""
        held = [(n, b) for n, b in self.module.named_buffers() if n in self.statistics]
        parts = torch.split(values, [b.numel() for _, b in held])
        return {n: part.view(b.shape).to(b.dtype) for (n, b), part in zip(held, parts, strict=True)}

    def state_dict(self, w: Tensor) -> dict[str, Tensor]:
        """Return a state_dict for ``module.load_state_dict``: copies, on the CPU, frozen parameters included."""
        measured = self.buffers(w[self.d :]) if len(w) > self.d else {}
        trained = self.parameters(w[: self.d])
        names = {id(p): n for n, p in self.module.named_parameters() if n in trained}
        # Under every name it has: a module may use one parameter in two places.
        every = {n: names[id(p)] for n, p in self.module.named_parameters(remove_duplicate=False) if id(p) in names}
        state = self.module.state_dict() | {n: trained[first] for n, first in every.items()}
        state |= {n: b for n, b in measured.items() if n in state}
        return {n: p.detach().cpu().clone() for n, p in state.items()}

    def __call__(self, w: Tensor, x: Tensor) -> Tensor:
        """Apply the module with the parameters in ``w``."""
        output: Tensor = functional_call(self.module, self.parameters(w), (x,))
        return output

    def part(self, w: Tensor, name: str | Callable[..., Any], *args: Any) -> Any:
        """Call the module's method ``name``, or a function of the module and ``args``, with the parameters in ``w``.

        A function may use several methods: one call, and one way back to ``w`` for the gradient.
        """
        parameters = {f"module.{n}": p for n, p in self.parameters(w).items()}
        return functional_call(self._whole, parameters, (name, *args))

    def mask(self, prefix: str) -> Tensor:
        """Return a vector that is 1 where a parameter's name starts with ``prefix``, else 0.

        >>> Flat(nn.Linear(3, 2)).mask("bias")
        tensor([0., 0., 0., 0., 0., 0., 1., 1.])
        """
        ones = [float(name.startswith(prefix)) for name in self.names]
        return torch.cat([torch.full((n,), one) for one, n in zip(ones, self.sizes, strict=True)])


def with_weights(module: nn.Module, state_dict: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of ``module`` with these weights, on the CPU and in evaluation mode.

    >>> layer = nn.Linear(3, 2)
    >>> bool((with_weights(layer, {k: v * 0 for k, v in layer.state_dict().items()}).weight == 0).all())
    True
    """
    twin = copy.deepcopy(module).cpu()
    twin.load_state_dict(state_dict)
    return twin.eval()


class _Whole(nn.Module):
    """Lets ``functional_call`` reach any method of a module, not only ``forward``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, name: str | Callable[..., Any], *args: Any) -> Any:
        return getattr(self.module, name)(*args) if isinstance(name, str) else name(self.module, *args)
