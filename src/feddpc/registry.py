"""Menus: things chosen by name (a partition, a sampler, a model), each with options that have names and defaults.

An option is a keyword-only parameter of the function that builds the thing, so the signature is the only list of
options, and the configuration, the command line and the error messages all read it from there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from feddpc.errors import BadInputError, unknown

T = TypeVar("T")


@dataclass(frozen=True)
class Registry(Generic[T]):
    """Builders by name; ``kind`` is what the error messages call an entry.

    >>> def rope(metres, *, colour="red"):
    ...     return f"{metres} m of {colour} rope"
    >>> menu = Registry("good", {"rope": rope})
    >>> menu.options("rope")
    {'colour': 'red'}
    >>> menu.builder("rope", {"colour": "blue"})(3, colour="blue")
    '3 m of blue rope'
    >>> menu.builder("rope", {"color": "blue"})
    Traceback (most recent call last):
    feddpc.errors.BadInputError: unknown option of good 'rope' 'color': did you mean 'colour'? Valid: colour
    """

    kind: str
    entries: Mapping[str, Callable[..., T]]

    def names(self) -> list[str]:
        """Return the valid names, in the order of the menu."""
        return list(self.entries)

    def options(self, name: str) -> dict[str, object]:
        """Return the options of ``name`` with their defaults."""
        parameters = inspect.signature(self._find(name)).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}

    def builder(self, name: str, given: Mapping[str, object]) -> Callable[..., T]:
        """Return the builder of ``name`` after checking that every option in ``given`` is one of its options."""
        valid = self.options(name)
        for option in given:
            if option not in valid and not valid:
                raise BadInputError(f"{self.kind} {name!r} has no options, but {option!r} was given: leave it out")
            if option not in valid:
                raise unknown(f"option of {self.kind} {name!r}", option, valid)
        return self._find(name)

    def _find(self, name: str) -> Callable[..., T]:
        if name not in self.entries:
            raise unknown(self.kind, str(name), self.entries)
        return self.entries[name]
