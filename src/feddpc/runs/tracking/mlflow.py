"""MLflow: a run in the store of MLFLOW_TRACKING_URI, or in ``mlflow.db`` in the working folder, as MLflow has it."""

from __future__ import annotations

import json
import logging
import os
import time
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from feddpc._version import __version__
from feddpc.config import MAY_CHANGE, Config
from feddpc.runs.record import read_json
from feddpc.runs.tracking.base import SECONDS, Tracker, dated, values
from feddpc.storage import replace_text

# Before the library is loaded: it must not send usage data, nor let a run wait for minutes if a server is gone.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "15")

import mlflow
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException

#: The most metrics that MLflow takes at once.
_BATCH = 1000
_STATUS = {"finished": "FINISHED", "diverged": "FAILED", "interrupted": "KILLED", "stopped": "FINISHED"}


def make() -> Tracker:
    """Return the tracker."""
    return MLflow()


class MLflow:
    """Sends the rounds in batches, every few seconds.

    ``mlflow.json`` in the run folder holds the id of the tracked run. A resumed run goes on with that one, and first
    sends the rounds that it lacks; where the store no longer knows it, a new one takes its place.
    """

    name = "mlflow"

    def __init__(self) -> None:
        self._uri = mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else ""
        if not self._uri:
            self._uri = f"sqlite:///{Path('mlflow.db').resolve()}"
            for needed in ("sqlalchemy", "alembic"):  # which mlflow-skinny does not bring along
                import_module(needed)

    def begin(self, config: Config, folder: Path, past: Sequence[dict[str, Any]]) -> None:
        """Find or make the tracked run, and bring it up to date."""
        logging.getLogger("mlflow").setLevel(logging.WARNING)  # it tells how it sets up its tables
        logging.getLogger("alembic").setLevel(logging.WARNING)
        self._waiting: list[list[Metric]] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of libraries about each other
            self._client = mlflow.MlflowClient(self._uri)
            known = self._resumed(folder)
            self._id = known or self._create(config, folder)
            self._client.log_batch(self._id, tags=[RunTag(key, str(getattr(config, key))) for key in MAY_CHANGE])
            # Also of rounds behind the last checkpoint, which will be computed again.
            self._there = {m.step for m in self._client.get_metric_history(self._id, "seconds")} if known else set()
        for record, when in dated(past, time.time()):
            self._add(record, when)
        self._send()

    def round(self, record: dict[str, Any]) -> None:
        """Keep a round; send all that are kept every few seconds."""
        self._add(record, time.time())
        if time.monotonic() >= self._due:
            self._send()

    def end(self, summary: dict[str, Any] | None) -> None:
        """Send what is left, what came out of the run, and how it ended."""
        self._send()
        if summary and all(m.step != summary["rounds"] for m in self._client.get_metric_history(self._id, "rounds")):
            metrics = values({k: v for k, v in summary.items() if k != "seed"})
            now = int(1000 * time.time())
            self._client.log_batch(self._id, [Metric(k, v, now, summary["rounds"]) for k, v in metrics.items()])
        self._client.set_terminated(self._id, _STATUS[summary["status"]] if summary else "KILLED")

    def _resumed(self, folder: Path) -> str | None:
        """Return the id of the run that tracked the folder until now, if the store still has it."""
        run_id = read_json(folder / "mlflow.json").get("run_id")
        if run_id is None:
            return None
        try:
            self._client.update_run(run_id, status="RUNNING")
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        return str(run_id)

    def _create(self, config: Config, folder: Path) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "feddpc")
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        run = self._client.create_run(experiment, run_name=folder.name, tags={"feddpc": __version__})
        run_id = str(run.info.run_id)
        fixed = {k: v for k, v in config.asdict().items() if k not in MAY_CHANGE}
        plain = {k: v for k, v in fixed.items() if not isinstance(v, dict)}
        plain |= {f"{k}.{inner}": v for k, t in fixed.items() if isinstance(t, dict) for inner, v in t.items()}
        self._client.log_batch(run_id, params=[Param(k, str(v)[:500]) for k, v in plain.items()])
        replace_text(folder / "mlflow.json", json.dumps({"run_id": run_id}) + "\n")
        return run_id

    def _add(self, record: dict[str, Any], when: float) -> None:
        if record["round"] in self._there:
            return
        stamp = int(1000 * when)
        self._waiting.append([Metric(k, v, stamp, record["round"]) for k, v in values(record).items()])

    def _send(self) -> None:
        """Send whole rounds, as many at once as MLflow takes, so that none can be there in part."""
        while self._waiting:
            count = max(1, _BATCH // max(map(len, self._waiting)))
            self._client.log_batch(self._id, [metric for some in self._waiting[:count] for metric in some])
            del self._waiting[:count]
        self._due = time.monotonic() + SECONDS
