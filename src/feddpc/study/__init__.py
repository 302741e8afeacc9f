"""Sweeps: many runs that do not depend on each other, and what is chosen from them."""

from feddpc.study.choose import Choice, choose
from feddpc.study.item import Item
from feddpc.study.outcome import Outcome
from feddpc.study.plan import SweepPlan
from feddpc.study.ray_workers import RayWorkers
from feddpc.study.scheduler import Progress, execute
from feddpc.study.space import Space
from feddpc.study.tune import gather, scan, tune
from feddpc.study.workers import InProcess, Processes

__all__ = [
    "Choice",
    "InProcess",
    "Item",
    "Outcome",
    "Processes",
    "Progress",
    "RayWorkers",
    "Space",
    "SweepPlan",
    "choose",
    "execute",
    "gather",
    "scan",
    "tune",
]
