"""Kernels for GPUs as operations of torch: whether they can be used, and how they are declared."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor


@cache
def usable(device: torch.device) -> bool:
    """Whether kernels run on ``device``: torch does not come with Triton everywhere, nor has every GPU what it wants.

    >>> usable(torch.device("cpu"))
    False
    """
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    try:
        from feddpc.kernels import conv_pool_triton

        with torch.cuda.device(device):
            return conv_pool_triton.works(device)
    except Exception as error:  # whatever it is, there is a slower way
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        warnings.warn(f"no kernels can be compiled for {device}, slower operations are used: {why}", stacklevel=2)
        return False


def declare(signatures: Mapping[str, str], module: str) -> None:
    """Declare operations ``feddpc::NAME``; on a GPU they are the functions of these names in ``module``.

    It is imported when one is first called, since it needs a compiler.
    """
    for name, signature in signatures.items():
        torch.library.define(f"feddpc::{name}", signature)
        launch: Callable[..., Any] = partial(_launch, module, name)
        torch.library.impl(f"feddpc::{name}", "CUDA", launch)


def _launch(module: str, name: str, *args: Any) -> Any:
    with torch.cuda.device(args[0].device):  # which need not be the present one
        return getattr(importlib.import_module(module), name)(*args)


def stacks(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule for ``vmap`` of an operation on stacks: what ``vmap`` stacks joins the stack that is there."""

    def rule(info: Any, dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        def joined(t: Any, dim: int | None) -> Any:
            if not isinstance(t, Tensor):
                return t
            t = t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
            return t.flatten(0, 1)

        out = operation(*(joined(t, dim) for t, dim in zip(args, dims, strict=True)))
        several = out if isinstance(out, tuple) else (out,)
        parted = [t.reshape(info.batch_size, len(t) // info.batch_size, *t.shape[1:]) for t in several]
        return (tuple(parted), (0,) * len(parted)) if isinstance(out, tuple) else (parted[0], 0)

    return rule
