"""``feddpc federate demo``: a whole federation on one machine, from keys to curves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from feddpc import methods
from feddpc.config import Config as Experiment
from feddpc.config import read_toml
from feddpc.errors import BadInputError, RunFolderError
from feddpc.federate import app_template
from feddpc.federate.deployment import Config, Deployment
from feddpc.flower import check_flwr
from feddpc.runs.record import read_records
from feddpc.runs.resumable import check_resumable
from feddpc.runs.stop import Stop

#: Shows a line of progress.
Tell = Callable[[str], None]
KEYS = ("method", "rounds", "clients", "cohort", "seed", "folder")


@dataclass(frozen=True)
class Demo:
    """The settings of a demo.

    Args:
        folder: where all files go; must be new, unless an earlier demo is continued.
        nodes: how many SuperNodes, by default the number in the app's configuration.
        tls: whether connections are encrypted and nodes authenticated.
        app: the app, by default the one that ``feddpc federate init`` writes.
        config: keys of the app's configuration to override.
        port: the SuperLink's port, by default a free one.
        resume: whether to continue what is in ``folder``.
        stop: a request to stop.
    """

    folder: Path
    nodes: int | None = None
    tls: bool = False
    app: Path | None = None
    config: Config | None = None
    port: int | None = None
    resume: bool = False
    stop: Stop = field(default_factory=Stop)

    @property
    def run(self) -> Path:
        """The run folder, with records, checkpoint and model."""
        return self.folder / "run"

    def prepare(self) -> tuple[Path, dict[str, Any]]:
        """Return the app and its configuration with the overrides; start no process."""
        check_flwr()
        overrides = dict(self.config or {})
        if "method" in overrides:
            methods.get(str(overrides["method"]))
        if self.resume:
            check_resumable(self.folder, "demo")
        elif self.folder.exists() and any(self.folder.iterdir()):
            raise RunFolderError(
                f"{self.folder} is not empty: add --resume to continue a demo, or choose another --out"
            )
        app = self.app or self.folder / "app"
        if self.app is None and not app.exists():
            app_template.write(app)
        config = configuration(app)
        if missing := overrides.keys() - config.keys():  # Flower overrides only what is there
            raise BadInputError(
                f"{app / 'pyproject.toml'} has no {min(missing)} in [tool.flwr.app.config]: add it there, such as "
                f'{min(missing)} = ""'
            )
        config |= {**overrides, "folder": str(self.run.resolve())}
        if self.nodes is not None:
            config |= {"clients": self.nodes, "cohort": min(config["cohort"], self.nodes)}
        return app, config

    @contextmanager
    def start(self, app: Path, config: dict[str, Any], tell: Tell) -> Iterator[Iterator[dict[str, Any]]]:
        """Start all processes, and yield the rounds' records as they are written; at the end no process is left."""
        deployment = Deployment(self.folder, config["clients"], tls=self.tls, port=self.port, stop=self.stop)
        try:
            with deployment:
                deployment.start(tell)
                yield self._records(deployment, app, config)
        finally:
            tell("no process is left")

    def _records(self, deployment: Deployment, app: Path, config: dict[str, Any]) -> Iterator[dict[str, Any]]:
        seen = 0
        for _ in deployment.submit(app, config).wait():
            records = read_records(self.run / "rounds.jsonl")
            yield from records[seen:]
            seen = max(seen, len(records))


def configuration(app: Path) -> dict[str, Any]:
    """Return the configuration of a Flower app, which must have the keys that a demo changes or shows."""
    path = app / "pyproject.toml"
    if not path.is_file():
        raise BadInputError(f"{app} is no Flower app: it has no pyproject.toml; `feddpc federate init` writes one")
    value: Any = read_toml(path)
    for name in ("tool", "flwr", "app", "config"):
        value = value.get(name, {}) if isinstance(value, dict) else {}
    if missing := [key for key in KEYS if key not in value]:
        raise BadInputError(
            f"{path} is not an app like those of `feddpc federate init`: [tool.flwr.app.config] lacks "
            f"{', '.join(missing)}"
        )
    Experiment.read({key: value[key] for key in KEYS if key != "folder"})
    return dict(value)
