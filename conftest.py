"""What the collection of doctests must leave out."""

import importlib.util

#: Kernels are compiled by Triton, which torch brings along where it brings CUDA.
collect_ignore = [] if importlib.util.find_spec("triton") else ["src/feddpc/models/kernels.py"]
