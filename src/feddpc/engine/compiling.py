"""Compiling what a graph is captured from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

#: The compiler that stands behind ``torch.compile``, and what it is told.
BACKEND = "inductor"
#: Convolutions on matrix units want the channels of a pixel together.
OPTIONS = {"force_layout_optimization": True}


class Compiled:
    """A function that is traced and compiled when it meets new shapes.

    It is traced down to single operations first: compilers see into gradients and ``vmap`` only in part, and not at all
    into operations with gradients of their own. Whatever is not a tensor is taken as it is at the first call.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._made: dict[tuple[Any, ...], tuple[Callable[..., Any], Any]] = {}

    def __call__(self, *args: Any) -> Any:
        """Return what the function returns."""
        leaves, spec = tree_flatten(args)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        key = tuple((t.shape, t.dtype, t.stride()) for t in tensors)
        if key not in self._made:
            self._made[key] = self._make(leaves, spec, tensors)
        program, out_spec = self._made[key]
        return tree_unflatten(program(*tensors), out_spec)

    def _make(self, leaves: list[Any], spec: Any, tensors: list[Tensor]) -> tuple[Callable[..., Any], Any]:
        shape: list[Any] = []

        def flat(*given: Tensor) -> list[Tensor]:
            left = iter(given)
            full = [next(left) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            out, out_spec = tree_flatten(self.function(*tree_unflatten(full, spec)))
            shape.append(out_spec)
            return out

        traced = make_fx(flat)(*tensors)
        options = OPTIONS if BACKEND == "inductor" else None
        return torch.compile(traced, dynamic=False, backend=BACKEND, options=options), shape[0]
