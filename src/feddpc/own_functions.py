"""Functions of the user's own, described so that a resumed run notices when one of them has changed."""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
import sysconfig
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Packages whose functions are known by their names; which version it was, a run folder notes elsewhere.
LIBRARIES = ("feddpc", "numpy", "scipy", "sklearn", "torch", "torchvision")
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def describe(fn: Callable[..., Any]) -> str:
    """Return the qualified name of ``fn`` and, unless it belongs to a library, a digest of what it computes.

    The digest is one of the source code, together with the plain values that defaults, a closure, a
    ``functools.partial`` or a callable object hold. Of lambdas, and where there is no source code (``python -c``,
    ``exec``), it is one of the compiled code, which another version of Python compiles in another way. What a function
    calls is not part of it.

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


def _parts(fn: Any) -> list[str]:
    """Return the texts that change when what ``fn`` computes is changed; none for a function of a library."""
    if isinstance(fn, functools.partial):
        return [*_parts(fn.func), *_values(enumerate(fn.args)), *_values(fn.keywords.items())]
    if isinstance(fn, types.MethodType):
        return [*_parts(fn.__func__), *_values(getattr(fn.__self__, "__dict__", {}).items())]
    if isinstance(fn, types.FunctionType):
        cells = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
        held = [(name, cell.cell_contents) for name, cell in cells if _filled(cell)]
        nested = [part for _, value in held if isinstance(value, types.FunctionType) for part in _parts(value)]
        defaults = [*enumerate(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).items()]
        return [] if _of_library(fn) else [*_source(fn), *nested, *_values(held), *_values(defaults)]
    if inspect.isroutine(fn):  # a function of an extension
        return []
    cls = fn if isinstance(fn, type) else type(fn)
    values = [] if isinstance(fn, type) else _values(getattr(fn, "__dict__", {}).items())
    return values if _of_library(cls) else [*_source(cls), *values]


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


def _values(items: Any) -> list[str]:
    """Return names and values where the latter are plain, or lists and tables of such."""
    return [f"{name}={value!r}" for name, value in items if _is_plain(value)]


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(_is_plain(k) and _is_plain(v) for k, v in value.items())
    return isinstance(value, _PLAIN)


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
