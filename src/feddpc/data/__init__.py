"""Data sets in memory: known ones by name, your own from arrays or files, and how clients share them.

``load`` returns a :class:`Dataset`. :mod:`feddpc.data.fetch` downloads the known data sets.
"""

from feddpc.data.dataset import Dataset
from feddpc.data.loading import load, names

__all__ = ["Dataset", "load", "names"]
