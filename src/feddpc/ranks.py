"""The processes that share one run, as torchrun, SLURM or ``--ranks`` start them, and how they tell each other things.

Every process is called a rank. All ranks run the same code on the same configuration; what one of them computes alone
reaches the others through the calls of `Ranks`, which every rank makes in the same order.
"""

from __future__ import annotations

import atexit
import gc
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddpc.errors import BadInputError, FeddpcError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Ints = NDArray[np.int64]
#: Tensors with at most this many numbers travel together.
SMALL = 1 << 12
#: Seconds to wait for a rank that has failed to say why, and for the others to say that they have not.
GRACE = 3.0


class RankError(FeddpcError):
    """A rank failed, hangs, or computes something else than the others; the message names it.

    All ranks that are left raise it; on the command line the ``speaker`` prints it.
    """

    def __init__(self, text: str, speaker: int = 0) -> None:
        super().__init__(text)
        self.speaker = speaker


@dataclass(frozen=True)
class Place:
    """Which process this is, among all and among those of its machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def place() -> Place | None:
    """Return the place of this process if torchrun, ``--ranks`` or SLURM's ``srun`` has started it, else None."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank, size = _number("RANK"), _number("WORLD_SIZE")
        return Place(rank, size, _number("LOCAL_RANK", rank), _number("LOCAL_WORLD_SIZE", size))
    # Not SLURM_NTASKS, which a batch script has too, and its programs when no srun starts them.
    if int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        rank, size = _number("SLURM_PROCID"), _number("SLURM_STEP_NUM_TASKS")
        here = re.match(r"\d+", os.environ.get("SLURM_STEP_TASKS_PER_NODE", str(size)))
        return Place(rank, size, _number("SLURM_LOCALID", 0), int(here[0]) if here else size)
    return None


def restarted() -> bool:
    """Return whether torchrun has started the ranks again after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def refuse_ranks(what: str) -> None:
    """Raise if several ranks were started for something that one process does."""
    where = place()
    if where is not None and where.size > 1:
        raise BadInputError(
            f"{where.size} ranks were started, but {what} is for one process: ranks are for `feddpc run` and "
            "feddpc.simulate; `feddpc sweep --ranks` gives each of its runs several"
        )


def _number(name: str, usual: int | None = None) -> int:
    text = os.environ.get(name, "" if usual is None else str(usual))
    if not text.isdecimal():
        raise BadInputError(f"the environment variable {name} = {text!r} is no number: start ranks with torchrun")
    return int(text)


def first_host(nodes: str) -> str:
    """Return the first host of a list as SLURM writes it.

    >>> first_host("gpu[07-09,12],login1"), first_host("a1,a2")
    ('gpu07', 'a1')
    """
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+))?", nodes)
    return (match[1] + (match[2] or "")) if match else "127.0.0.1"


class Ranks:
    """What this process shares with the others; with one process all calls return what they are given."""

    def __init__(self, where: Place, store: Any = None, timeout: float = 0.0) -> None:
        self.rank, self.size, self.timeout = where.rank, where.size, timeout
        self._store = store
        self._group: ProcessGroup | None = None  #: for what lies in host memory
        self._at = (0, "start")

    def __repr__(self) -> str:
        return f"<rank {self.rank} of {self.size}>"

    # What is known to be alike everywhere.

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks; for what is small."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self._naming():
            torch.distributed.all_gather_object(values, value, group=self._group)
        return values

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Do something on all ranks, without any exchange; if it fails on one, all of them raise an error."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        self._settle(doing, error)

    def _settle(self, doing: str, error: Exception | None) -> None:
        """Raise if what was done failed here or on another rank."""
        said = self.gather(None if error is None else f"{_kind(error)}{error}")
        if error is not None and len(set(said)) == 1:  # a mistake of the user's, not the fault of a rank
            raise error
        if self.size > 1 and isinstance(error, FeddpcError):
            raise RankError(f"rank {self.rank}, {doing}: {error}") from error
        if error is not None:
            raise error
        failed = {rank: text for rank, text in enumerate(said) if text is not None}
        if failed:
            raise RankError("; ".join(f"rank {rank}, {doing}: {text}" for rank, text in failed.items()))

    def compare(self, mine: dict[str, Any], what: str) -> None:
        """Raise unless all ranks have the same values."""
        all_values = self.gather(mine)
        for rank, theirs in enumerate(all_values):
            different = sorted(key for key in all_values[0] if theirs.get(key) != all_values[0][key])
            if different:
                pairs = ", ".join(f"{key} {theirs.get(key)!r}, rank 0 has {all_values[0][key]!r}" for key in different)
                raise RankError(f"rank {rank} has another {what} than rank 0: {pairs}")

    # Numbers.

    def add(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the sums over all ranks, the same bits everywhere; small tensors travel together."""
        if self.size == 1:
            return list(tensors)
        sums = list(tensors)
        packs: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for i, x in enumerate(tensors):
            if x.numel() <= SMALL:
                packs.setdefault((x.dtype, x.device), []).append(i)
            else:
                sums[i] = self._add(x.contiguous())
        for members in packs.values():
            flat = self._add(torch.cat([tensors[i].reshape(-1) for i in members]))
            for i, part in zip(members, torch.split(flat, [tensors[i].numel() for i in members]), strict=True):
                sums[i] = part.view(tensors[i].shape)
        return sums

    def _add(self, x: Tensor) -> Tensor:
        with self._naming():
            torch.distributed.all_reduce(x)
        return x

    def numbers(self, mine: Sequence[int]) -> list[list[int]]:
        """Return some whole numbers of every rank, as many of each."""
        if self.size == 1:
            return [list(mine)]
        sent = torch.tensor(list(mine), dtype=torch.int64)
        said = [torch.empty_like(sent) for _ in range(self.size)]
        with self._naming():
            torch.distributed.all_gather(said, sent, group=self._group)
        return [numbers.tolist() for numbers in said]

    def total(self, mine: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the sums of tensors by name, of which a rank may have none."""
        if self.size == 1:
            return mine
        known = self.alike({key: x[None] for key, x in mine.items()})
        parts = mine or {key: x.new_zeros(x.shape[1:]) for key, x in known.items()}
        return dict(zip(sorted(parts), self.add([parts[key] for key in sorted(parts)]), strict=True))

    def columns(self, mine: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """Return a table of float64 numbers ``[counts[rank], k]`` of every rank, in host memory."""
        mine = mine.detach().to("cpu", torch.float64)
        if self.size == 1:
            return [mine]
        padded = mine.new_zeros(max(counts), mine.shape[1])
        padded[: len(mine)] = mine
        tables = [torch.empty_like(padded) for _ in range(self.size)]
        with self._naming():
            torch.distributed.all_gather(tables, padded, group=self._group)
        return [table[:count] for table, count in zip(tables, counts, strict=True)]

    def rows(self, mine: Tensor, places: Sequence[Ints]) -> Tensor:
        """Return the stack of all rows: those of each rank go to its ``places``."""
        if self.size == 1:
            return mine
        whole = mine.new_empty((sum(map(len, places)), *mine.shape[1:]))
        for rank, at in enumerate(places):
            if not len(at):
                continue
            part = mine.contiguous() if rank == self.rank else mine.new_empty((len(at), *mine.shape[1:]))
            with self._naming():
                torch.distributed.broadcast(_sent(part), rank)
            whole[torch.from_numpy(at).to(whole.device)] = part
        return whole

    def alike(self, shapes: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return empty stacks with the names, shapes and types that stacks of other ranks have."""
        mine = {key: (tuple(x.shape[1:]), x.dtype) for key, x in shapes.items()}
        known: dict[str, Any] = next((theirs for theirs in self.gather(mine) if theirs), {})
        device = next((x.device for x in shapes.values()), torch.device("cpu"))
        return {key: torch.empty((0, *shape), dtype=dtype, device=device) for key, (shape, dtype) in known.items()}

    def move(self, sent: Sequence[tuple[int, Tensor]], expected: Sequence[tuple[int, Tensor]]) -> None:
        """Send tensors in host memory to other ranks and receive others into place, all of them at the same time."""
        with self._naming():
            work = [torch.distributed.irecv(x, rank, group=self._group) for rank, x in expected]
            work += [torch.distributed.isend(x, rank, group=self._group) for rank, x in sent]
            for part in work:
                if part is not None:
                    part.wait()

    # Faults.

    def mark(self, round: int, doing: str) -> None:
        """Note how far this rank is, for the others to read when it no longer answers."""
        self._at = round, doing
        if self._store is not None:
            with suppress(RuntimeError):
                self._store.set(f"at/{self.rank}", f"round {round} ({doing})")

    def failed(self, error: BaseException) -> None:
        """Tell the others why this rank ends."""
        if self._store is not None and not isinstance(error, RankError):
            with suppress(RuntimeError):
                self._store.set(f"failed/{self.rank}", f"{_kind(error)}{error}")

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Name the rank that makes an exchange fail."""
        try:
            yield
        except RuntimeError as error:
            raise RankError(*self._diagnosis(str(error))) from error

    def _diagnosis(self, text: str) -> tuple[str, int]:
        """Say which rank failed, ended or hangs, from what each has noted; and name the rank that is to print it."""
        store, others = self._store, [rank for rank in range(self.size) if rank != self.rank]
        assert store is not None
        round, doing = self._at
        where = f"round {round} ({doing})"
        try:
            store.set(f"waits/{self.rank}", "yes")
            until = time.monotonic() + GRACE
            while time.monotonic() < until:
                time.sleep(0.1)
                for rank in others:
                    if store.check([f"failed/{rank}"]):
                        return f"rank {rank} has failed: {store.get(f'failed/{rank}').decode()}", 0
            silent = [rank for rank in others if not store.check([f"waits/{rank}"])]
            seen = {rank: store.get(f"at/{rank}").decode() if store.check([f"at/{rank}"]) else None for rank in silent}
        except (RuntimeError, ValueError):
            return f"rank 0, which the ranks meet at, has ended in {where}; see what it printed", 1
        if not silent:
            return f"the ranks cannot reach each other in {where}: {_first_line(text)}", 0
        told = [f"rank {r}" + (f", last seen in {at}" if at else "") for r, at in seen.items()]
        timed_out = "timed out" in text.lower() or "timeout" in text.lower()
        why = f"did not answer within {self.timeout:g} s" if timed_out else "ended"
        speaker = min(rank for rank in range(self.size) if rank not in silent)
        return f"{'; '.join(told)}: {why}, while rank {self.rank} waited in {where}", speaker


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
        text = f"rank {where.rank} cannot meet the others: {_first_line(str(error))}"
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


def _sent(x: Tensor) -> Tensor:
    """Return a view that every library can carry."""
    return x.view(torch.uint8) if x.dtype == torch.bool else x


def _kind(error: BaseException) -> str:
    return "" if isinstance(error, FeddpcError) else f"{type(error).__name__}: "


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0][:200] if text.strip() else "no reason given"
