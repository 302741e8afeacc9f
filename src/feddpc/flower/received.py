"""The replies of a round after screening, and void rounds in a row, which end a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flwr.app import RecordDict

from feddpc.checks import check_int
from feddpc.flower.client_registry import Ints
from feddpc.flower.screening import Refusal, VoidRoundsError
from feddpc.round.server_step import StepOutcome

#: Why a reply does not count whose update is beyond the adaptive bound on norms.
TOO_LONG = "its update is much longer than usual"
#: What to do when replies were beyond the adaptive bound on norms.
BOUND = (
    ". If the updates that are much longer than usual are honest, as after a warm-up of the clients' rate: the bound "
    "follows when most of the last replies are as long, so start again until then; or begin a run in another folder "
    "with a larger bound, screen={'norm': ...}, one that follows sooner, screen={'norm': ..., 'window': ...}, or "
    "screen=None"
)


@dataclass
class Received:
    """Which replies can be used, and what is wrong with the others."""

    ids: Ints  #: clients whose replies can be used, in rising order
    nodes: Mapping[int, int]  #: node of every client
    refused: list[Refusal]
    dropped: set[int]  #: invited clients without a reply
    uploads: list[RecordDict]  #: of ``ids``, checked; empty if only their mean is known
    expected: bool = True  #: whether a round without replies is an error, and not a draw of no clients
    void: str | None = None  #: why the round does not count, if that is known already
    faults: dict[str, list[int]] = field(default_factory=dict)  #: simulated faults, and the clients that had them
    notes: dict[str, float] = field(default_factory=dict)  #: what else is reported about the round, in numbers
    facts: dict[str, object] = field(default_factory=dict)  #: what else a record says

    def refuse(self, t: int, clients: Ints, reason: str, *, faulty: bool = False) -> None:
        """List replies of round ``t`` that could be read, but do not count."""
        self.refused += [Refusal(t, self.nodes.get(c, 0), c, reason, faulty) for c in clients.tolist()]

    def refuse_rejected(self, t: int, outcome: StepOutcome, minimum: int, excess: Mapping[int, str]) -> str | None:
        """List the replies that the server step left out; return why the round is void, if it is for that reason.

        ``excess`` says how far replies are beyond the bound on norms, by their place in the cohort. If most replies of
        a round are, that is no fault of their nodes: all may be longer now, as after a warm-up.
        """
        kept = outcome.kept.numpy()
        if kept.all():
            return None
        long = (~outcome.kept if outcome.screened is None else outcome.screened).numpy()
        few = f"fewer than {minimum} updates are within the bound on norms" if outcome.step is None else None
        for i in long.nonzero()[0].tolist():
            reason = f"{TOO_LONG}: {excess[i]}" if i in excess else TOO_LONG
            self.refuse(t, self.ids[i : i + 1], reason, faulty=2 * long.sum() <= len(long))
        self.refuse(t, self.ids[~kept & ~long], few or "the rule did not choose it")
        return few

    def asked_nodes(self, *clients: list[int]) -> dict[str, int]:
        """Return the nodes of some lists of clients, for a record."""
        every = sorted({client for part in clients for client in part})
        return {str(client): self.nodes[client] for client in every if client in self.nodes}


class VoidRounds:
    """The void rounds since the last round that counted, each with the reason of every reply."""

    def __init__(self, most: int) -> None:
        self.most = check_int("max_void_rounds", most, 1)
        self.reasons: list[str] = []

    def add(self, reason: str) -> None:
        """Add a void round."""
        self.reasons.append(reason)

    def forget(self) -> None:
        """Start counting again: a round counted, or a run begins."""
        self.reasons = []

    def check(self, folder: Path | None) -> None:
        """Raise after too many in a row; ``folder`` is where the run is stored."""
        if len(self.reasons) < self.most:
            return
        reasons = " | ".join(self.reasons)
        begin = "start again" if folder is None else f"start again with folder = {str(folder)!r} to continue"
        raise VoidRoundsError(
            f"no reply counted in {len(self.reasons)} rounds in a row (max_void_rounds = {self.most}): "
            f"{reasons}. Remove the cause and {begin}, or raise max_void_rounds{BOUND if TOO_LONG in reasons else ''}"
        )
