"""What a client remembers between its rounds, at its node."""

from __future__ import annotations

from logging import WARNING
from pathlib import Path

from flwr.app import ArrayRecord, Context
from flwr.common.logger import log
from torch import Tensor

from feddpc.errors import RunFolderError
from feddpc.flower.messages import NEVER, arrays_of, pack, unpack
from feddpc.methods.base import Method, State
from feddpc.runs.checkpoint import load_model, save_model
from feddpc.storage import make_folder

#: The name of the record in a node's ``Context.state``.
MEMORY = "feddpc.memory"


class Memory:
    """What a client remembers between its rounds, in ``Context.state``; ``file`` keeps a copy for restarts.

    A client cannot know whether its reply counted: the server may have refused it, got it too late, or gone back to a
    checkpoint. So the memory after a round is pending until the next message of the server, which says which of the
    client's replies counted last. That memory is used, and any other is dropped.
    """

    def __init__(self, context: Context, file: Path | None) -> None:
        self.context, self.file = context, file

    def recall(self, method: Method, w: Tensor, accepted: int) -> State:
        """Return the memory after round ``accepted``; the initial one if there is none, or if it is lost."""
        fresh = method.init_client(w)
        if not fresh:
            return {}
        held = arrays_of(self.context.state, MEMORY)
        if not held and accepted != NEVER and self.file is not None and self.file.exists():
            held = pack(load_model(self.file))
            if foreign := [name for name in held if not name.partition(".")[0].isdecimal()]:  # no round, see `hold`
                raise RunFolderError(f"{self.file} is no memory of a client (it holds {foreign[0]!r}): remove it")
        prefix = f"{accepted}."
        kept = ArrayRecord({name: array for name, array in held.items() if name.startswith(prefix)})
        self.context.state[MEMORY] = kept
        if kept:
            return {name.removeprefix(prefix): value for name, value in unpack(kept, w.device).items()}
        if accepted != NEVER:
            log(WARNING, "this client's memory of round %d is lost: it starts from the initial one", accepted)
        return fresh

    def hold(self, round: int, state: State) -> None:
        """Keep the memory after ``round`` as pending, together with the one that was recalled."""
        if not state:
            return
        pending = pack({f"{round}.{key}": value for key, value in state.items()})
        kept = ArrayRecord({**arrays_of(self.context.state, MEMORY), **pending})
        self.context.state[MEMORY] = kept
        if self.file is not None:
            make_folder(self.file.parent)
            save_model(self.file, unpack(kept))
