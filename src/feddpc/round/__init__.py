"""One communication round: client work, screening, the server's step, and the state it changes."""
