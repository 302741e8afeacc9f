"""What the collection of doctests must leave out."""

import importlib.util

#: Kernels are compiled by Triton, which torch brings along where it brings CUDA.
KERNELS = [f"src/feddpc/kernels/{name}_triton.py" for name in ("conv_pool", "group_norm", "relayout", "row_sums")]
collect_ignore = [] if importlib.util.find_spec("triton") else KERNELS
