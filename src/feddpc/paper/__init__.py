"""The paper's tables and figures, run again: what to run, what came out beside what was reported, and what it means."""
