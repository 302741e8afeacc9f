"""Pictures and pages that cannot be made do not make a finished run fail: they are listed, with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from feddpc.errors import BadInputError, FeddpcError


@contextmanager
def noted(path: Path, failures: list[str] | None) -> Iterator[None]:
    """Add to ``failures`` why ``path`` could not be written; with None, a failure is raised.

    A missing package becomes an error that says how to get it.
    """
    try:
        yield
    except Exception as error:
        known = missing(error) if isinstance(error, ImportError) else error
        if failures is None:
            raise known from error
        text = str(known) if isinstance(known, FeddpcError) else f"{type(known).__name__}: {known}"
        failures.append(f"{path.name} was not written: {text.partition(chr(10))[0]}")


def missing(error: ImportError) -> BadInputError:
    """Build the error for a package that cannot be imported."""
    package = (error.name or "matplotlib").partition(".")[0]
    return BadInputError(f"{package} cannot be imported: pip install {package}")
