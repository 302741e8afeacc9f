"""What is learned: the loss of one client and how a model is evaluated."""

from feddpc.tasks.base import Batch, BatchIndices, Task
from feddpc.tasks.kinds import TASKS, Classification, MultiLabel, NextToken, Regression
from feddpc.tasks.metrics import Metric
from feddpc.tasks.network import NetworkTask

__all__ = [
    "TASKS",
    "Batch",
    "BatchIndices",
    "Classification",
    "Metric",
    "MultiLabel",
    "NetworkTask",
    "NextToken",
    "Regression",
    "Task",
]
