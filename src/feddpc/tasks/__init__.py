"""What is learned: the loss of a batch as a function of one parameter vector, and how a model is evaluated."""

from feddpc.tasks.base import Batch, Rows, Task
from feddpc.tasks.classification import Classification
from feddpc.tasks.metrics import Metric

__all__ = ["Batch", "Classification", "Metric", "Rows", "Task"]
