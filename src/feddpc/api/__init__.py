"""The Python interface: one run (`simulate`, `rerun`), several (`compare`), and parts of your own (`register`)."""

from feddpc.api.comparison import compare
from feddpc.api.registries import REGISTRIES, register
from feddpc.api.results import Comparison, Rerun, Result
from feddpc.api.simulation import rerun, simulate

__all__ = ["REGISTRIES", "Comparison", "Rerun", "Result", "compare", "register", "rerun", "simulate"]
