"""feddpc: federated learning when clients' data differ and few clients show up."""

from feddpc._version import __version__

__all__ = ["__version__"]
