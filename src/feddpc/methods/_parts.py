"""What a method needs of a network beyond its logits."""

from __future__ import annotations

from torch import nn

from feddpc.errors import BadInputError
from feddpc.methods.base import Method


def require_parts(method: Method, module: nn.Module) -> None:
    """Refuse a network that lacks one of the method's ``parts``; a ``head`` must be a linear layer.

    A network of your own may define them in any way, as long as they fit together: with a ``head``,
    ``forward(x) == head(features(x))``, which is not checked.
    """
    for part in method.parts:
        attribute = getattr(module, part, None)
        if attribute is None or part in getattr(module, "lacks", ()):
            what = "a head, an nn.Linear," if part == "head" else f"a {part}() method"
            raise BadInputError(
                f"{method.title} needs {part}, but this model defines none: give it {what} or choose another method"
            )
        if part == "head" and not isinstance(attribute, nn.Linear):
            raise BadInputError(
                f"{method.title} needs a linear head, but this model's is a {type(attribute).__name__}: make it an "
                "nn.Linear on top of features(), or choose another method"
            )
