"""Compiling what a graph is captured from.

GroupNorm is written as single operations here, because torch's own does not return channels-last: every convolution
after it would have to convert the layout.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

#: The compiler that stands behind ``torch.compile``, and what it is told; without one, what was traced runs as it is.
BACKEND: str | None = "inductor"
#: Convolutions on matrix units want the channels of a pixel together.
OPTIONS: dict[str, Any] = {"force_layout_optimization": True}
#: Programs kept for later runs of this process.
KEPT = 64
_programs: OrderedDict[str, Callable[..., Any]] = OrderedDict()
#: What runs, and the form of what it returns.
Program = tuple[Callable[..., Any], Any]


def group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, c: int, size: int, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise over groups of channels, in the layout of ``x``; return mean and inverse deviation too."""
    parts, dims = _grouped(x, groups)
    variance, mean = torch.var_mean(parts, dims, correction=0, keepdim=True)
    inverse = (variance + eps).rsqrt()
    out = ((parts - mean) * inverse).view(x.shape)
    out = out if weight is None else out * _by_channel(weight, x)
    out = out if bias is None else out + _by_channel(bias, x)
    return out, mean.view(n, groups), inverse.view(n, groups)


def group_norm_backward(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    inverse: Tensor,
    weight: Tensor | None,
    n: int,
    c: int,
    size: int,
    groups: int,
    wanted: list[bool],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of input, weight and bias, as far as they are wanted."""
    parts, dims = _grouped(x, groups)
    mean, inverse = (t.view(n, groups, *(1 for _ in dims)) for t in (mean, inverse))
    normal = (parts - mean) * inverse
    slope, _ = _grouped(dy if weight is None else dy * _by_channel(weight, x), groups)
    dx = (slope - slope.mean(dims, keepdim=True) - normal * (slope * normal).mean(dims, keepdim=True)) * inverse
    rest = [0, *range(2, x.ndim)]
    by_weight = (dy * normal.view(x.shape)).sum(rest) if wanted[1] else None
    return dx.view(x.shape) if wanted[0] else None, by_weight, dy.sum(rest) if wanted[2] else None


def _grouped(x: Tensor, groups: int) -> tuple[Tensor, list[int]]:
    """Return ``x`` as ``[n, groups, channels / groups, ...]``, and the dimensions of one group."""
    return x.reshape(x.shape[0], groups, -1, *x.shape[2:]), list(range(2, x.ndim + 1))


def _by_channel(weight: Tensor, x: Tensor) -> Tensor:
    return weight.view(-1, *(1 for _ in x.shape[2:]))


APART: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.native_group_norm.default: group_norm,
    torch.ops.aten.native_group_norm_backward.default: group_norm_backward,
}


class Compiled:
    """A function that is traced and compiled when it meets new shapes.

    It is traced down to single operations first: compilers see into gradients and ``vmap`` only in part, and not at all
    into operations with gradients of their own. Whatever is not a tensor is taken as it is at the first call. What
    another one has compiled in this process is used again: a sweep compiles once for each local step, not for each run.

    ``traces`` are those of functions that compute the same from the same arguments, so that not even a trace is made
    twice. Where the function cannot be traced, ``otherwise``, which computes the same, takes its place.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        otherwise: Callable[..., Any] | None = None,
        *,
        traces: dict[Any, Any] | None = None,
    ) -> None:
        self.function, self.otherwise = function, otherwise
        self.traces: dict[Any, Program | None] = {} if traces is None else traces
        self._own: dict[Any, Program] = {}

    def __call__(self, *args: Any) -> Any:
        """Return what the function returns."""
        leaves, spec = tree_flatten(args)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        kinds = tuple(_kind(leaf) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
        program, out_spec = self._find((str(spec), kinds, _fast()), leaves, spec, tensors)
        return tree_unflatten(program(*tensors), out_spec)

    def _find(self, key: Any, *given: Any) -> Program:
        if key not in self.traces:
            try:
                self.traces[key] = _trace(self.function, *given)
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, TypeError, ValueError):
                if self.otherwise is None:
                    raise
                self.traces[key] = None
        if (found := self.traces[key]) is not None:
            return found
        if key not in self._own:
            assert self.otherwise is not None
            self._own[key] = _trace(self.otherwise, *given)
        return self._own[key]


def _trace(function: Callable[..., Any], leaves: list[Any], spec: Any, tensors: list[Tensor]) -> Program:
    """Return ``function`` as a program of ``tensors``, and the form of what it returns."""
    shape: list[Any] = []

    def flat(*given: Tensor) -> list[Tensor]:
        left = iter(given)
        full = [next(left) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        out, out_spec = tree_flatten(function(*tree_unflatten(full, spec)))
        shape.append(out_spec)
        return out

    traced = make_fx(flat, decomposition_table=APART)(*tensors)
    return _program(traced, tensors), shape[0]


def _program(traced: fx.GraphModule, tensors: Sequence[Tensor]) -> Callable[..., Any]:
    """Return what was traced, compiled; with what it closes over as arguments, so that other data can be given."""
    places = {t.untyped_storage().data_ptr() for t in tensors}
    held = [getattr(traced, str(node.target), None) for node in traced.graph.nodes if node.op == "get_attr"]
    if any(isinstance(t, Tensor) and t.untyped_storage().data_ptr() in places for t in held):
        return _compiled(traced)  # compilers take arguments for places apart
    used, constants = _lifted(traced)
    key = _words(traced.graph, [*(tensors[i] for i in used), *constants])
    if key not in _programs:
        _programs[key] = _compiled(traced)
        if len(_programs) > KEPT:
            _programs.popitem(last=False)
    _programs.move_to_end(key)
    program = _programs[key]
    return lambda *args: program(*(args[i] for i in used), *constants)


def _compiled(traced: fx.GraphModule) -> Callable[..., Any]:
    if BACKEND is None:
        return traced
    compiled: Callable[..., Any] = torch.compile(traced, dynamic=False, backend=BACKEND, options=OPTIONS)
    return compiled


def _lifted(traced: fx.GraphModule) -> tuple[list[int], list[Tensor]]:
    """Make the tensors that ``traced`` closes over its last arguments, and drop arguments that it does not use.

    Return which arguments are left, and those tensors.
    """
    graph = traced.graph
    places = [node for node in graph.nodes if node.op == "placeholder"]
    used = [i for i, node in enumerate(places) if node.users]
    lifted: dict[str, tuple[fx.Node, Tensor]] = {}
    last = places[-1]
    for node in [n for n in graph.nodes if n.op == "get_attr"]:
        name = str(node.target)
        if not isinstance(constant := getattr(traced, name, None), Tensor):
            continue  # a program within the program
        if name not in lifted:
            with graph.inserting_after(last):
                last = graph.placeholder(name)
            last.meta, lifted[name] = dict(node.meta), (last, constant.detach())
        node.replace_all_uses_with(lifted[name][0])
        graph.erase_node(node)
    for node in places:
        if not node.users:
            graph.erase_node(node)
    for name in lifted:
        delattr(traced, name)
    traced.recompile()
    return used, [constant for _, constant in lifted.values()]


def _words(graph: fx.Graph, given: Sequence[Tensor]) -> str:
    """Say what a program computes, the same for all that compute the same: without the names of its variables."""
    number = {node: f"%{i}" for i, node in enumerate(graph.nodes)}

    def words(node: fx.Node) -> str:
        if node.op == "get_attr":
            return f"what only {id(node)} holds"
        what = "given" if node.op == "placeholder" else str(node.target)
        return f"{what} {fx.map_arg((node.args, node.kwargs), number.__getitem__)}"

    lines = [words(node) for node in graph.nodes]
    return "\n".join([repr((BACKEND, OPTIONS, _fast(), [_kind(t) for t in given])), *lines])


def _kind(t: Tensor) -> tuple[Any, ...]:
    return tuple(t.shape), t.dtype, t.stride(), t.device


def _fast() -> tuple[bool, bool]:
    return torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
