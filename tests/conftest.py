"""Settings of the whole suite."""

import os

import torch

# The suite runs in one process per core; more threads than cores only get in each other's way, also in its children.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
