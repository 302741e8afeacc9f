"""What this machine can do: engines and precisions on the paper's workloads, and the server step against memory."""
