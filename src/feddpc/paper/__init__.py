"""The paper's tables and figures, run again: what to run, our results next to the reported ones, what holds."""
