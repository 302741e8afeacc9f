"""Data sets: known ones by name, your own from arrays or files.

``load`` returns a :class:`Dataset`; ``get`` brings a known one to this machine; ``check`` verifies it byte by byte.
"""

from feddpc.data.dataset import Dataset
from feddpc.data.sources import Entry, Fetched, check, entries, get, load, names

__all__ = ["Dataset", "Entry", "Fetched", "check", "entries", "get", "load", "names"]
