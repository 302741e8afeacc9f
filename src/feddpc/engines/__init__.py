"""Who takes part, and the machines that run the rounds."""
