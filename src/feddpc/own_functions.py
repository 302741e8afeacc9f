"""Functions of the user's own, described so that a resumed run notices when one of them has changed."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import hashlib
import inspect
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

#: Packages whose functions are known by their names; which version it was, a run folder notes elsewhere.
LIBRARIES = ("feddpc", "numpy", "scipy", "sklearn", "torch", "torchmetrics", "torchvision")
#: Attributes of functions that the library reads, of transforms and metrics.
ATTRIBUTES = ("uniforms", "direction")
#: What objects have that accumulate a metric over batches.
ACCUMULATES = ("update", "compute", "reset")
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def describe(fn: Callable[..., Any]) -> str:
    """Return the qualified name of ``fn`` and, unless it belongs to a library, a digest of what it computes.

    The digest is one of the source code, together with the values that defaults, a closure, a ``functools.partial`` or
    a callable object hold: plain ones, tensors, arrays, modules, data classes, other functions, and lists and tables of
    these. Of an object that accumulates (``update``, ``compute``, ``reset``, as torchmetrics has them), values are
    those after a reset. Of lambdas, and where there is no source code (``python -c``, ``exec``), the digest is one of
    the compiled code, which another version of Python compiles in another way. What a function calls by a global name
    is not part of it.

    >>> import math, torch.nn.functional as F
    >>> describe(math.sqrt), describe(F.relu)
    ('math.sqrt', 'torch.nn.functional.relu')
    >>> exec("def double(x): return 2 * x", own := {"__name__": "mine"})
    >>> describe(own["double"]).split()[0]
    'mine.double'
    """
    name = _name(fn)
    parts = list(_parts(fn))
    if not parts:
        return name
    return f"{name} {hashlib.blake2b(chr(0).join(parts).encode(), digest_size=8).hexdigest()}"


def without_module(description: str) -> str:
    """Return what `describe` says of a user's function without its module, whose name differs between programs.

    >>> without_module("mine.double 0123456789abcdef"), without_module("torch.nn.functional.relu")
    ('double 0123456789abcdef', 'torch.nn.functional.relu')
    """
    name, _, digest = description.rpartition(" ")
    return f"{name.rpartition('.')[2]} {digest}" if name else description


def _name(fn: Any) -> str:
    if isinstance(fn, functools.partial):
        return f"partial of {_name(fn.func)}"
    if not hasattr(fn, "__qualname__"):  # an object that can be called
        fn = type(fn)
    module = getattr(fn, "__module__", None)
    if module is None:  # a function of an extension, such as torch.sigmoid
        module = getattr(type(getattr(fn, "__self__", None)), "__module__", "builtins").partition(".")[0]
        return f"{module}.{fn.__name__}"
    return f"{module}.{fn.__qualname__}"


def _parts(fn: Any, seen: tuple[int, ...] = ()) -> list[str]:
    """Return the texts that change when what ``fn`` computes is changed; none for a plain function of a library.

    ``seen`` are the objects that hold it, one of which it may hold in turn.
    """
    if id(fn) in seen:
        return []
    seen = (*seen, id(fn))
    if isinstance(fn, functools.partial):
        given = _values([*enumerate(fn.args), *fn.keywords.items()], seen)
        return [*_parts(fn.func, seen), *given, *_attributes(fn, seen)]
    if isinstance(fn, types.MethodType):
        return [*_parts(fn.__func__, seen), *_values(getattr(fn.__self__, "__dict__", {}).items(), seen)]
    if isinstance(fn, types.FunctionType):
        if _of_library(fn):
            return _attributes(fn, seen)
        cells = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
        closed = [(name, cell.cell_contents) for name, cell in cells if _filled(cell)]
        defaults = [*enumerate(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).items()]
        return [*_source(fn), *_values(closed, seen), *_values(defaults, seen), *_attributes(fn, seen)]
    if inspect.isroutine(fn):  # a function of an extension
        return []
    if isinstance(fn, type):
        return [] if _of_library(fn) else _source(fn)
    values = _values(_state(fn).items(), seen)
    return values if _of_library(type(fn)) else [*_source(type(fn)), *values]


def _attributes(fn: Any, seen: tuple[int, ...]) -> list[str]:
    return _values([(name, vars(fn)[name]) for name in ATTRIBUTES if name in vars(fn)], seen)


def _state(thing: Any) -> dict[str, Any]:
    """Return the attributes of an object; of one that accumulates, those of a copy that was reset, if that works."""
    if not all(hasattr(thing, hook) for hook in ACCUMULATES):
        return dict(getattr(thing, "__dict__", {}))
    try:
        fresh = copy.deepcopy(thing)
        fresh.reset()
    except Exception:  # of the user's object: then its class alone tells it from others
        return {}
    return {name: value for name, value in vars(fresh).items() if name not in ACCUMULATES}


def _source(thing: Any) -> list[str]:
    if getattr(thing, "__name__", "") == "<lambda>":  # its source would be whole lines, with all else that stands there
        return _code(thing)
    try:
        return [inspect.cleandoc(inspect.getsource(thing))]
    except (OSError, TypeError):
        return _code(thing)


def _code(thing: Any) -> list[str]:
    """Return what compiled code consists of: instructions, names and constants, those of inner functions too."""
    if isinstance(thing, type):
        functions = [value for value in vars(thing).values() if isinstance(value, types.FunctionType)]
        return [part for function in functions for part in _code(function)]
    code = thing if isinstance(thing, types.CodeType) else thing.__code__
    inner = [part for const in code.co_consts if isinstance(const, types.CodeType) for part in _code(const)]
    plain = [repr(const) for const in code.co_consts if not isinstance(const, types.CodeType)]
    return [code.co_code.hex(), *code.co_names, *plain, *inner]


def _values(items: Iterable[tuple[Any, Any]], seen: tuple[int, ...]) -> list[str]:
    """Return names and values, as far as the latter can be told from others."""
    described = ((name, _content(value, seen)) for name, value in items)
    return [f"{name}={content}" for name, content in described if content is not None]


def _content(value: Any, seen: tuple[int, ...]) -> str | None:
    """Return a text that is equal for equal values, also in another process; None for values that have none."""
    import numpy as np
    import torch  # here, since the command line's help imports this module

    if isinstance(value, (*_PLAIN, enum.Enum, PurePath, torch.dtype)):
        return repr(value)
    if isinstance(value, torch.Tensor):
        plain = value.detach().cpu().to_dense().contiguous()
        return _digest(plain.dtype, plain.shape, plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        return _digest(
            array.dtype, array.shape, repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()
        )
    if id(value) in seen:
        return None
    inside = (*seen, id(value))
    if isinstance(value, Mapping):
        items = sorted((str(_content(key, inside)), str(_content(one, inside))) for key, one in value.items())
        return f"{type(value).__name__} {items}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} {[_content(one, inside) for one in value]}"
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__} {sorted(str(_content(one, inside)) for one in value)}"
    if callable(value) or dataclasses.is_dataclass(value):
        return "; ".join([_name(value), *_parts(value, seen)])
    return None


def _digest(kind: object, shape: Sequence[int], data: bytes) -> str:
    return f"{kind} {tuple(shape)} {hashlib.blake2b(data, digest_size=16).hexdigest()}"


def _filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _of_library(thing: Any) -> bool:
    name = str(getattr(thing, "__module__", None) or "builtins")
    root = name.partition(".")[0]
    if root in LIBRARIES:
        return True
    file = getattr(sys.modules.get(name), "__file__", None)  # a file of the user's may be called test.py
    inside = file is None or Path(file).is_relative_to(sysconfig.get_path("stdlib"))
    return root in sys.stdlib_module_names and root != "__main__" and inside
