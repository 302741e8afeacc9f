"""What a client remembers between its participations: in ``Context.state``, and on its disk where it has a folder.

A client cannot know whether its reply counted: it may have been refused, come too late, or the server may have gone
back to a checkpoint. So what it would remember after a round is pending until the server, the next time it asks, says
which of the client's replies counted last. Pending memory of another round is forgotten.
"""

from __future__ import annotations

from logging import WARNING
from pathlib import Path

from flwr.app import ConfigRecord, Context
from flwr.common.logger import log
from torch import Tensor

from feddpc.errors import RunFolderError
from feddpc.flower.base import NEVER
from feddpc.flower.wire import arrays_of, pack, unpack
from feddpc.methods.base import Method, State
from feddpc.runs.checkpoint import load_model, save_model
from feddpc.storage import make_folder

KINDS = ("settled", "pending")


class Memory:
    """The memory of one client in one run; ``file`` keeps a copy that outlives the run."""

    def __init__(self, context: Context, file: Path | None) -> None:
        self.context, self.file = context, file

    def recall(self, method: Method, w: Tensor, accepted: int) -> State:
        """Return the memory after round ``accepted``; that of a client never seen, if there is none or it is lost."""
        fresh = method.init_client(w)
        if not fresh:
            return {}
        kept = self._rounds()
        if not kept and accepted != NEVER and self.file is not None and self.file.exists():
            self._load()
            kept = self._rounds()
        for kind in reversed(KINDS):
            if accepted != NEVER and kept.get(kind) == accepted:
                state = unpack(arrays_of(self.context.state, f"feddpc.{kind}"), w.device)
                self._put("settled", accepted, state)
                return state
        if accepted != NEVER:
            log(WARNING, "this client's memory of round %d is lost: it begins anew", accepted)
        return fresh

    def hold(self, round: int, state: State) -> None:
        """Keep what will be the memory if the reply of ``round`` counts."""
        if not state:
            return
        self._put("pending", round, state)
        if self.file is None:
            return
        make_folder(self.file.parent)
        kept = self._rounds()
        save_model(
            self.file,
            {
                f"{kept[kind]}.{key}": value
                for kind in KINDS
                if kind in kept
                for key, value in unpack(arrays_of(self.context.state, f"feddpc.{kind}")).items()
            },
        )

    def _load(self) -> None:
        assert self.file is not None
        by_round: dict[int, State] = {}
        for name, value in load_model(self.file).items():
            tag, _, key = name.partition(".")
            if not (tag.isascii() and tag.isdecimal() and len(tag) < 19):  # a round, as `hold` writes it
                raise RunFolderError(f"{self.file} is no memory of a client (it holds {name!r}): remove it")
            by_round.setdefault(int(tag), {})[key] = value
        for kind, round in zip(reversed(KINDS), sorted(by_round, reverse=True), strict=False):
            self._put(kind, round, by_round[round])

    def _rounds(self) -> dict[str, int]:
        found = self.context.state.get("feddpc.rounds")
        return {k: int(v) for k, v in found.items()} if isinstance(found, ConfigRecord) else {}  # type: ignore[arg-type]

    def _put(self, kind: str, round: int, state: State) -> None:
        self.context.state[f"feddpc.{kind}"] = pack(state)
        self.context.state["feddpc.rounds"] = ConfigRecord({**self._rounds(), kind: round})
