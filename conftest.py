"""What the collection of doctests must leave out."""

import importlib.util

#: Kernels are compiled by Triton, which torch brings along where it brings CUDA.
KERNELS = ["src/feddpc/kernels/conv_pool_triton.py", "src/feddpc/kernels/row_sums_triton.py"]
collect_ignore = [] if importlib.util.find_spec("triton") else KERNELS
