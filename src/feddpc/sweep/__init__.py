"""Sweeps: many runs that do not depend on each other, and what is chosen from them."""

from feddpc.sweep.choose import Choice, choose
from feddpc.sweep.item import Item
from feddpc.sweep.outcome import Outcome
from feddpc.sweep.plan import Plan
from feddpc.sweep.ray_workers import RayWorkers
from feddpc.sweep.scheduler import Progress, execute
from feddpc.sweep.space import Space
from feddpc.sweep.tune import gather, scan, tune
from feddpc.sweep.workers import InProcess, Processes

__all__ = [
    "Choice",
    "InProcess",
    "Item",
    "Outcome",
    "Plan",
    "Processes",
    "Progress",
    "RayWorkers",
    "Space",
    "choose",
    "execute",
    "gather",
    "scan",
    "tune",
]
