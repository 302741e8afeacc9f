"""Engines that capture whole rounds in CUDA graphs."""
