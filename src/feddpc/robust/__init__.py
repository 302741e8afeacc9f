"""Faulty and hostile clients: what they do in a simulation, and what a server can do about it."""
