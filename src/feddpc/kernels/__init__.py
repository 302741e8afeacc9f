"""Operations with hand-written GPU kernels (Triton), and what they compute on a CPU."""
