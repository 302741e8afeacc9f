"""How the processes of a run meet, and how they part."""

from __future__ import annotations

import atexit
import gc
import os
from contextlib import suppress
from datetime import timedelta

import torch

from feddpc.errors import BadInputError
from feddpc.ranks.exchange import RankError, Ranks, first_line
from feddpc.ranks.place import Place, first_host, place

#: A process that shares its run with no other.
ALONE = Ranks(Place())
_joined: Ranks | None = None


def have_met() -> bool:
    """Return whether this process knows the other ranks."""
    return _joined is not None


def join(device: str, timeout: float) -> Ranks:
    """Return the ranks that this process belongs to; the first call meets the others, as ``device`` needs it."""
    global _joined
    where = place()
    if where is None or where.size == 1:
        return ALONE
    if _joined is None:
        _joined = _meet(where, device, timeout)
    return _joined


def _meet(where: Place, device: str, timeout: float) -> Ranks:
    if not torch.distributed.is_available():
        raise BadInputError("this build of torch has no torch.distributed: install another one, or use one process")
    limit = timedelta(seconds=timeout)
    if "MASTER_ADDR" not in os.environ and "SLURM_JOB_ID" in os.environ:
        os.environ["MASTER_ADDR"] = first_host(os.environ.get("SLURM_STEP_NODELIST", ""))
        os.environ.setdefault("MASTER_PORT", str(20000 + int(os.environ["SLURM_JOB_ID"]) % 20000))
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]
    from torch.distributed.rendezvous import rendezvous

    try:
        store, _, _ = next(rendezvous(f"env://?rank={where.rank}&world_size={where.size}", timeout=limit))
    except (RuntimeError, ValueError) as error:
        text = f"rank {where.rank} cannot meet the others: {first_line(str(error))}"
        raise RankError(text, where.rank) from error
    # torchrun's store may still hold the addresses of ranks that it has replaced.
    store = PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    ranks = Ranks(where, PrefixStore("feddpc/", store), timeout)
    with ranks._naming():
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group(
                backend(where, device), store=store, rank=where.rank, world_size=where.size, timeout=limit
            )
            atexit.register(_part)
        ranks._group = torch.distributed.new_group(backend="gloo", timeout=limit)
    return ranks


def backend(where: Place, device: str) -> str:
    """Return the library that carries tensors: NCCL where every rank of a machine has a GPU of its own, else gloo."""
    own_gpu = device.startswith("cuda") and where.local_size <= torch.cuda.device_count()
    return "cpu:gloo,cuda:nccl" if own_gpu and torch.distributed.is_nccl_available() else "gloo"


def _part() -> None:
    """End the threads of the exchange: one that is left when the interpreter ends would abort it."""
    if _joined is not None:
        _joined._group = _joined._store = None
    with suppress(Exception):
        torch.distributed.destroy_process_group()
    gc.collect()
