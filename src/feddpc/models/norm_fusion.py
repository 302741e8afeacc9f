"""GroupNorm, an addition and a ReLU of the user's own network in one kernel, where a GPU has one.

The networks of this library ask for the kernel themselves. Another one is rewritten on a copy: its code is traced, and
where nothing but an addition or a ReLU uses what a GroupNorm returns, the layer does both. Code that cannot be traced,
because it branches on values, keeps its additions and has the kernel for GroupNorm alone.
"""

from __future__ import annotations

import copy
import operator
import warnings
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from feddpc.kernels.group_norm import normalized

_RELUS: set[object] = {F.relu, torch.relu, torch.relu_, "relu", "relu_"}
#: ``a += b`` is traced as ``a + b``; where that is not the same, the trial on samples finds out.
_SUMS: set[object] = {operator.add, torch.add, "add"}
#: How far results of the copy may be from the network's own, relative to the largest number.
TOLERANCE = 1e-3


class FusedNorm(nn.GroupNorm):
    """A GroupNorm that also adds a residual and applies a ReLU, in one kernel where there is one."""

    def forward(self, x: Tensor, residual: Tensor | None = None, relu: bool = False) -> Tensor:
        """Return ``relu(residual + norm(x))``, or what of it is asked for."""
        return normalized(self, x, residual, relu=relu)


def fused(module: nn.Module, x: Tensor) -> nn.Module:
    """Return a copy of ``module`` that uses the kernel and shares its parameters; itself, if it cannot gain from it.

    The copy has the same names of parameters. It is tried on the samples ``x``; where its outputs or gradients differ
    from those of ``module``, a line says so and ``module`` is used.
    """
    if type(module).__module__.startswith("feddpc.") or not any(map(_fusible, module.modules())):
        return module
    with suppress(Exception):  # there are as many reasons why code cannot be traced as ways to write a network
        twin = _sharing_copy(module)
        twin.__class__ = type(type(module).__name__, (type(module),), {"forward": _rewritten(twin)})
        if _difference(module, _with_kernel(twin), x) is None:
            return twin
    twin = _with_kernel(_sharing_copy(module))
    why = _difference(module, twin, x)
    if why is None:
        return twin
    warnings.warn(f"GroupNorm, additions and ReLU of the model are computed one by one: {why}", stacklevel=2)
    return module


def _with_kernel(module: nn.Module) -> nn.Module:
    """Let every GroupNorm of ``module`` use the kernel, and return ``module``."""
    for norm in filter(_fusible, list(module.modules())):
        norm.__class__ = FusedNorm
    return module


def _fusible(part: nn.Module) -> bool:
    return type(part) is nn.GroupNorm and not _hooked(part)


def _hooked(part: nn.Module) -> bool:
    return bool(part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks)


def _sharing_copy(module: nn.Module) -> nn.Module:
    """Return a copy whose parameters and buffers are those of ``module``."""
    held: list[Tensor] = [*module.parameters(), *module.buffers()]
    return copy.deepcopy(module, {id(t): t for t in held})


def _rewritten(module: nn.Module) -> Any:
    """Return the code of ``module`` as a function in which GroupNorms do what comes behind them."""
    if any(map(_hooked, module.modules())):
        raise ValueError("hooks would not be called")
    training = module.training
    try:
        graphs = [fx.Tracer().trace(module.train(mode)) for mode in (True, False)]
    finally:
        module.train(training)
    graph, code = graphs[0], [g.python_code("self").src for g in graphs]
    if code[0] != code[1]:
        raise ValueError("the network computes something else in training than in evaluation")
    parts = dict(module.named_modules())
    for node in list(graph.nodes):
        if node.op == "call_module" and _fusible(parts[node.target]) and len(node.args) == 1 and not node.kwargs:
            _fuse(graph, node, parts)
    graph.lint()
    return type(fx.GraphModule(module, graph)).forward


def _fuse(graph: fx.Graph, norm: fx.Node, parts: dict[str, nn.Module]) -> None:
    """Let ``norm`` do the addition and the ReLU behind it, if nothing else uses its result."""
    last, residual = norm, None
    user = _only_user(norm)
    if user is not None and (other := _added(user, norm)) is not None:
        last, residual = user, other
    user = _only_user(last)
    relu = user is not None and _is_relu(user, parts)
    if relu:
        assert user is not None
        last = user
    if last is norm:
        return
    with graph.inserting_before(last):
        whole = graph.call_module(str(norm.target), (norm.args[0], residual), {"relu": relu})
    last.replace_all_uses_with(whole)
    while last is not norm:  # from the last one on, so that nothing uses what is erased
        before = next(n for n in last.all_input_nodes if n is norm or norm in n.all_input_nodes)
        graph.erase_node(last)
        last = before
    graph.erase_node(norm)


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _added(node: fx.Node, norm: fx.Node) -> fx.Node | None:
    """Return what ``node`` adds to ``norm``, or None if it does something else."""
    if node.op not in ("call_function", "call_method") or len(node.args) != 2 or node.kwargs:
        return None
    others = [arg for arg in node.args if isinstance(arg, fx.Node) and arg is not norm]
    return others[0] if node.target in _SUMS and len(others) == 1 else None


def _is_relu(node: fx.Node, parts: dict[str, nn.Module]) -> bool:
    if node.op == "call_module":
        return type(parts[str(node.target)]) is nn.ReLU
    plain = not node.kwargs or set(node.kwargs) == {"inplace"}
    return node.op in ("call_function", "call_method") and node.target in _RELUS and plain


def _difference(module: nn.Module, twin: nn.Module, x: Tensor) -> str | None:
    """Say where outputs or gradients of ``twin`` differ from those of ``module``, or return None."""
    try:
        expected, found = (_values(copy.deepcopy(net), x) for net in (module, twin))
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    for name, value in expected.items():
        apart = float((value - found[name]).abs().max())
        if not apart <= TOLERANCE * max(float(value.abs().max()), 1e-6):
            return f"{name} would differ by {apart:.2g}"
    return None


def _values(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Return outputs and gradients by name."""
    trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
    with torch.enable_grad():
        output = module(x)
        gradients = torch.autograd.grad(output.square().mean(), list(trained.values()), allow_unused=True)
    values: dict[str, Any] = {"the output": output.detach()}
    values |= {f"the gradient of {n!r}": g for n, g in zip(trained, gradients, strict=True)}
    return {name: value for name, value in values.items() if value is not None and value.numel()}
