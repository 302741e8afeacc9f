"""What is known about a method without running it: name, reference, costs, hyper-parameters, what it needs."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from feddpc.errors import BadInputError


@dataclass(frozen=True)
class Costs:
    """Costs per participant and round in multiples of ``d``; states do not include the model itself."""

    down: str = "1"
    up: str = "1"
    client_state: str = "0"
    server_state: str = "0"
    client_work: str = "-"
    server_work: str = "-"


@dataclass(frozen=True, kw_only=True)
class Described:
    """What a method says about itself. Hyper-parameters are the dataclass's fields."""

    name: ClassVar[str] = ""
    title: ClassVar[str] = ""
    reference: ClassVar[str] = ""
    costs: ClassVar[Costs] = Costs()
    #: Parts of a model that it needs, e.g. ``features``; a model without them is refused.
    parts: ClassVar[tuple[str, ...]] = ()
    #: Kinds of targets that it can learn, e.g. ``classes``; none: all.
    targets: ClassVar[tuple[str, ...]] = ()
    #: What leaves a client besides its update.
    privacy: ClassVar[str] = "Nothing but the update leaves a client."
    #: Whether the server's half combines clients only in sums over the cohort (``mean``, ``total``, ``weighted_sum``,
    #: ``across``), so that several processes can add up what each has of them. A subclass that overrides
    #: :meth:`transform`, :meth:`combine`, :meth:`aggregate` or :meth:`broadcast` says it again.
    needs_only_sums: ClassVar[bool] = False
    #: Whether statistics of the network, such as BatchNorm's, stay with each client.
    keeps_statistics: ClassVar[bool] = False
    #: The server's learning rate where none is set; None: that of the clients.
    usual_server_lr: ClassVar[float | None] = None

    def hyper(self) -> dict[str, Any]:
        """Return the hyper-parameters by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def light(cls) -> Self:
        """Return an instance for measurements of cost: the default, unless it computes long before round 1."""
        return cls()

    @classmethod
    def describe(cls) -> str:
        """Return the docstring: what the method does, its equations, symbols, departures and reference."""
        return inspect.cleandoc(cls.__doc__ or "")

    def require(self, holds: bool, name: str, domain: str) -> None:
        """Refuse a hyper-parameter outside its domain."""
        if not holds:
            raise BadInputError(f"{self.name}: {name} = {getattr(self, name)!r} is outside its domain: {domain}")
