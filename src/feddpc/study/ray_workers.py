"""Workers on a Ray cluster: other machines, other GPUs. Needs the extra ``ray``, and feddpc on every machine.

A machine that has access to the study's folder writes there, and a run survives its worker up to the last checkpoint.
Other machines send finished runs back.
"""

from __future__ import annotations

import logging
import os
import socket
import warnings
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from feddpc.errors import BadInputError
from feddpc.runs.stop import Stop
from feddpc.study.workers import RunBatch, RunReport, Tick, WorkerPool, Workers, run_batch


@dataclass(frozen=True)
class RayWorkers(Workers):
    """Workers of the cluster at ``address``: ``auto`` finds the one of this machine, ``local`` starts one.

    Every batch gets ``cpus`` processors and ``gpus`` GPUs (0.25 lets four share one); without GPUs it runs on the CPU.
    """

    address: str = "auto"
    cpus: float = field(default=1.0, kw_only=True)
    gpus: float = field(default=0.0, kw_only=True)
    remote = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("cpus", self.cpus), ("gpus", self.gpus)):
            if not 0 <= value < float("inf"):
                raise BadInputError(f"{name} = {value!r}: must be a number of at least 0")
        if self.cpus == self.gpus == 0:
            raise BadInputError("cpus = gpus = 0: a worker needs one of them")

    def open(self, stop: Stop, tick: Tick) -> WorkerPool:
        """Connect to the cluster."""
        try:
            import ray
        except ImportError:
            raise BadInputError("workers on Ray need ray: pip install 'ray>=2.9'") from None
        connects = not ray.is_initialized()
        if connects:
            self._connect(ray)
        share = {name: value for name, value in (("CPU", self.cpus), ("GPU", self.gpus)) if value}
        resources = ray.cluster_resources()
        for name, value in share.items():
            if resources.get(name, 0.0) < value:
                if connects:
                    ray.shutdown()
                raise BadInputError(
                    f"a run needs {value:g} {name}, but the cluster has {resources.get(name, 0.0):g}: ask for less, or "
                    "start Ray with more"
                )
        return _RayPool(ray, share, connects)

    def _connect(self, ray: Any) -> None:
        address = None if self.address == "local" else self.address
        try:
            _check_address(self.address)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # about defaults that Ray will change
                ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, ValueError, RuntimeError) as error:
            raise BadInputError(
                f"there is no Ray cluster at {self.address!r} ({str(error).splitlines()[0]}): start one with "
                "`ray start --head`, or give `local` to start one for this sweep"
            ) from None


class _RayPool(WorkerPool):
    def __init__(self, ray: Any, share: dict[str, float], connected: bool) -> None:
        self.ray, self.share, self.connected = ray, share, connected
        self.deaths = (ray.exceptions.RayError,)
        needs = {"num_cpus": share.get("CPU", 0.0), "num_gpus": share.get("GPU", 0.0)}
        # The study handles a dead worker: another one continues from the checkpoint.
        self.remote = ray.remote(**needs, max_retries=0)(_run_on_ray)
        self.references: list[Any] = []

    @property
    def size(self) -> int:  # type: ignore[override]
        """As many as the cluster has room for now; machines may come and go."""
        resources = self.ray.cluster_resources()
        return max(1, min(int(resources.get(name, 0.0) / value + 1e-9) for name, value in self.share.items()))

    def submit(self, batch: RunBatch) -> Future[list[RunReport]]:
        self.references.append(self.remote.remote(batch))
        future: Future[list[RunReport]] = self.references[-1].future()
        return future

    def stop(self) -> None:
        for reference in self.references:  # those that are done do not mind
            self.ray.cancel(reference, force=True)

    def __exit__(self, *exc: object) -> None:
        self.stop()
        if self.connected:
            self.ray.shutdown()


def _check_address(address: str) -> None:
    """Raise if nothing answers at HOST:PORT: Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=5).close()


def _run_on_ray(batch: RunBatch) -> list[RunReport]:
    """Run a batch in a process of the cluster, which Ray may use again for the next one."""
    import torch

    torch.set_num_threads(1)
    if batch.working_folder.is_dir():
        os.chdir(batch.working_folder)
    where = f" (on {socket.gethostname()})"
    return [r._replace(message=r.message + where) if r.state == "failed" else r for r in run_batch(batch)]
