"""What the collection of doctests must leave out."""

import importlib.util

#: Kernels are compiled by Triton, which torch brings along where it brings CUDA.
KERNELS = ["src/feddpc/models/kernels.py", "src/feddpc/methods/kernels.py"]
collect_ignore = [] if importlib.util.find_spec("triton") else KERNELS
