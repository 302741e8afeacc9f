"""Studies: many independent runs, and what is chosen from them. Comparisons and sweeps are studies."""

from feddpc.study.choose import Choice, choose
from feddpc.study.folder import RunResult
from feddpc.study.plan import StudyPlan
from feddpc.study.ray_workers import RayWorkers
from feddpc.study.runner import Progress, run_study
from feddpc.study.space import Space
from feddpc.study.spec import RunSpec
from feddpc.study.sweep import gather, run_sweep, scan
from feddpc.study.workers import InProcess, Processes

__all__ = [
    "Choice",
    "InProcess",
    "Processes",
    "Progress",
    "RayWorkers",
    "RunResult",
    "RunSpec",
    "Space",
    "StudyPlan",
    "choose",
    "gather",
    "run_study",
    "run_sweep",
    "scan",
]
