"""Runs: folders, records, checkpoints, resuming, repeating, trackers."""
