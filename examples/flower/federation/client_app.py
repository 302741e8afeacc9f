"""A node's half: trains on its own samples, which never leave it."""

from feddpc.flower import client_app
from federation import task

# What a method remembers of a client goes to this folder of the node, so that it outlives a restart.
app = client_app(model=task.model, data=task.data, folder="feddpc-memory")
