"""Settings of the whole suite."""

import torch

# The suite runs in one process a core; more threads than cores only get in each other's way.
torch.set_num_threads(1)
