"""What is learned: the loss of a batch as a function of one parameter vector, and how a model is evaluated."""

from feddpc.tasks.base import Batch, Rows, Task
from feddpc.tasks.classification import Classification

__all__ = ["Batch", "Classification", "Rows", "Task"]
