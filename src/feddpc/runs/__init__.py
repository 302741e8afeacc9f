"""Runs: configuration, what it builds, records, checkpoints, comparison."""
