"""Registries: things chosen by name (a model, a partition, a sampler), each with options that have names and defaults.

An option is a parameter of the function that builds the thing, so the signature is the only list of options, and the
configuration, the command line and the error messages all read it from there. Where a registry ``accepts``
objects of files, a name may also be ``FILE.py:NAME``, code of the user's own, which runs when it is looked up.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from feddpc.errors import BadInputError, unknown

T = TypeVar("T")
Thing = TypeVar("Thing", bound=Callable[..., Any])
_CODE = re.compile(r".*\.py(:\w+)?")
_PLAIN = (bool, int, float, str, list, tuple, type(None))


@dataclass(frozen=True)
class Registry(Generic[T]):
    """Builders by name; ``kind`` is what the error messages call an entry.

    >>> def rope(meters, *, color="red"):
    ...     return f"{meters} m of {color} rope"
    >>> goods = Registry("good", {"rope": rope})
    >>> goods.options("rope")
    {'color': 'red'}
    >>> goods.builder("rope", {"color": "blue"})(3, color="blue")
    '3 m of blue rope'
    >>> goods.builder("rope", {"colour": "blue"})
    Traceback (most recent call last):
    feddpc.errors.BadInputError: unknown option of good 'rope' 'colour': did you mean 'color'? Valid: color
    >>> @goods.register("string")
    ... def string(meters):
    ...     return f"{meters} m of string"
    >>> goods.names()
    ['rope', 'string']
    """

    kind: str
    entries: dict[str, Callable[..., T]]
    #: What the library passes to an entry; an entry of the user's own takes those of them that it names.
    arguments: tuple[str, ...] = ()
    #: Whether an object of a user's file may be an entry; None: no entry comes from a file.
    accepts: Callable[[object], bool] | None = None

    def names(self) -> list[str]:
        """Return the registered names, in the order of registration."""
        return list(self.entries)

    def register(self, name: str, thing: Thing | None = None) -> Any:
        """Add ``thing`` under ``name``; without ``thing``, return a decorator that does."""
        if thing is None:
            return functools.partial(self.register, name)
        if not name or is_code(name):
            raise BadInputError(f"{self.kind} name {name!r}: must be text that does not end with .py")
        if not callable(thing):
            raise BadInputError(f"{self.kind} {name!r} is of type {type(thing).__name__}: give a function or a class")
        before = self.entries.get(name, thing)
        if _origin(before) != _origin(thing):
            raise BadInputError(f"{self.kind} name {name!r} is taken by {_origin(before)}: choose another")
        self.entries[name] = thing
        return thing

    def get(self, name: str) -> Callable[..., T]:
        """Return the entry ``name``, or the object that ``FILE.py:NAME`` names."""
        if name in self.entries:
            return self.entries[name]
        if self.accepts is not None and is_code(name):
            return self._from_file(name)
        if not self.entries and self.accepts is not None:
            raise BadInputError(f"unknown {self.kind} {name!r}: give FILE.py:NAME, or register it under this name")
        raise unknown(self.kind, str(name), self.entries)

    def options(self, name: str) -> dict[str, object]:
        """Return the options of ``name`` with their defaults; only plain values can be options."""
        return {
            p.name: p.default
            for p in inspect.signature(self.get(name)).parameters.values()
            if p.name not in self.arguments
            and (p.kind is p.KEYWORD_ONLY or (p.kind is p.POSITIONAL_OR_KEYWORD and p.default is not p.empty))
            and (p.default is p.empty or isinstance(p.default, _PLAIN))
        }

    def builder(self, name: str, given: Mapping[str, object]) -> Callable[..., T]:
        """Return the entry ``name`` after checking that every option in ``given`` is one of its options."""
        valid = self.options(name)
        for option in given:
            if option not in valid and not valid:
                raise BadInputError(f"{self.kind} {name!r} has no options, but {option!r} was given: leave it out")
            if option not in valid:
                raise unknown(f"option of {self.kind} {name!r}", option, valid)
        return self.get(name)

    def build(self, name: str, available: Mapping[str, object], options: Mapping[str, object]) -> T:
        """Call the entry ``name`` with its ``options`` and with what it takes of the ``available`` arguments."""
        build = self.builder(name, options)
        parameters = inspect.signature(build).parameters
        missing = [
            p.name
            for p in parameters.values()
            if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
            if p.name not in {*available, *options}
        ]
        if missing:
            raise BadInputError(
                f"{self.kind} {name!r} needs {', '.join(missing)}, which is neither an option that was given nor one "
                f"of {', '.join(available)}: give it a default"
            )
        return build(**{k: v for k, v in available.items() if k in parameters}, **options)

    def _from_file(self, name: str) -> Callable[..., T]:
        """Load ``FILE.py:NAME``, or ``FILE.py`` where the file defines just one such object."""
        file, _, wanted = name.partition(":")
        path = _file(name)
        if not path.is_file():
            raise BadInputError(f"{self.kind} {name!r}: there is no file {file}")
        module = _load(path.resolve(), code_digest(name))
        assert self.accepts is not None
        builders: dict[str, Callable[..., T]] = {
            n: thing
            for n, thing in vars(module).items()
            if getattr(thing, "__module__", None) == module.__name__ and self.accepts(thing)
        }
        if wanted and not builders:
            others = _defined(module)
            what = f"what {file} defines as {wanted!r} is none" if wanted in others else f"{file} defines no {wanted!r}"
            raise BadInputError(
                f"{self.kind} {name!r}: {what} (it defines {', '.join(others) or 'nothing'}): correct the name, or add "
                f"a function or class that is a {self.kind}"
            )
        if wanted and wanted not in builders:
            raise unknown(f"{self.kind} in {file}", wanted, builders)
        if not wanted and len(builders) != 1:
            raise BadInputError(
                f"{self.kind} {name!r}: {file} defines {len(builders)} ({', '.join(builders)}): name one, FILE.py:NAME"
            )
        return builders[wanted] if wanted else next(iter(builders.values()))


def is_code(name: str) -> bool:
    """Say whether ``name`` names an object in a Python file, which runs when it is looked up.

    >>> is_code("mine.py:Net"), is_code("mine.py"), is_code("data.npz")
    (True, True, False)
    """
    return _CODE.fullmatch(name) is not None


def code_names(value: Any) -> list[str]:
    """Return every ``FILE.py:NAME`` that stands anywhere in texts, lists and tables.

    >>> code_names({"methods": ["a.py:M"], "set": ["metrics=accuracy,b.py:f"], "rounds": 3})
    ['a.py:M', 'b.py:f']
    """
    if isinstance(value, str):
        return [part.strip() for part in re.split(r"[,=]", value) if is_code(part.strip())]
    if isinstance(value, Mapping):
        return [name for key, one in value.items() for name in [*code_names(key), *code_names(one)]]
    if isinstance(value, list | tuple | set | frozenset):
        return [name for one in value for name in code_names(one)]
    return []


def short_name(name: str) -> str:
    """Return what tables call a thing: its name, without the file of a user's own.

    >>> short_name("work/mine.py:Net"), short_name("work/mine.py"), short_name("lenet5")
    ('Net', 'mine', 'lenet5')
    """
    if not is_code(name):
        return name
    file, _, wanted = name.partition(":")
    return wanted or Path(file).stem


def refuse_code(folder: Path, names: Iterable[str], asked: Iterable[str]) -> None:
    """Raise if a folder, which may come from anybody, names code that the user does not name."""
    named = set(asked)
    for name in names:
        if is_code(name) and name not in named:
            raise BadInputError(
                f"{folder} names code, {name}, which would be run: read it first, and if you want to run it, name it "
                "yourself with the flag of that key, such as --method, --model or --loss"
            )


def _defined(module: types.ModuleType) -> list[str]:
    """Return the public names that a file gives to things of its own; imported ones are not among them."""
    return [
        name
        for name, thing in vars(module).items()
        if not name.startswith("_")
        and not isinstance(thing, types.ModuleType)
        and getattr(thing, "__module__", module.__name__) == module.__name__
    ]


def _origin(thing: object) -> str:
    return str(getattr(thing, "__qualname__", thing))


def code_digest(name: str) -> str:
    """Return a hash of the file in ``FILE.py:NAME``, so that changed code is recognized."""
    return hashlib.blake2b(_file(name).read_bytes(), digest_size=16).hexdigest()


def _file(name: str) -> Path:
    return Path(name.partition(":")[0]).expanduser()


class _SourceOnly(importlib.machinery.SourceFileLoader):
    """Loads a file without Python's bytecode, which is taken for the file after a quick change that keeps its size."""

    def get_code(self, fullname: str) -> types.CodeType:
        """Compile the source as it is now."""
        return self.source_to_code(self.get_data(self.path), self.path)


@functools.cache
def _load(path: Path, _digest: str) -> types.ModuleType:
    """Import a file once per content, under a name of its own; annotations and dataclasses look themselves up there."""
    name = f"feddpc_own_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    loader = _SourceOnly(name, str(path))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise BadInputError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
    return module
