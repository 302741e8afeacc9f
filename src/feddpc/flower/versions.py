"""Which Flower this package was tested with."""

from __future__ import annotations

import re
from importlib import metadata

from feddpc.errors import BadInputError

#: From this release on, and below that one; the extra ``flower`` says the same.
SUPPORTED = ((1, 41), (1, 42))


def check_flwr(found: str | None = None) -> None:
    """Refuse to go on without Flower, or with one that was never tried; ``found`` is by default the installed one.

    >>> check_flwr("1.41.0")
    >>> check_flwr("1.5.0")
    Traceback (most recent call last):
    feddpc.errors.BadInputError: flwr 1.5.0 is not supported, 1.41 up to (not) 1.42 is: pip install 'feddpc[flower]'
    """
    install = "pip install 'feddpc[flower]'"
    if found is None:
        try:
            found = metadata.version("flwr")
        except metadata.PackageNotFoundError:
            raise BadInputError(f"feddpc.flower needs Flower, which is not installed: {install}") from None
    low, high = SUPPORTED
    if not low <= tuple(int(part) for part in re.findall(r"\d+", found)[:2]) < high:
        names = [".".join(map(str, bound)) for bound in SUPPORTED]
        raise BadInputError(f"flwr {found} is not supported, {names[0]} up to (not) {names[1]} is: {install}")
