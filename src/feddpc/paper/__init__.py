"""Reproduction of the paper: which runs to make, our results next to the reported ones, and which claims hold."""
