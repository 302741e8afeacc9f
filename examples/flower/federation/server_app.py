"""The server's half: draws clients, sends them the model, aggregates, evaluates, records."""

from feddpc.flower import server_app
from federation import task

app = server_app(model=task.model(), test=task.test(), classes=task.CLASSES)
