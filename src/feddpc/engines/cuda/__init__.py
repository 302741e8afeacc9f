"""The engine ``cuda``: whole rounds captured in CUDA graphs."""
