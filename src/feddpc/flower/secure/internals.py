"""Which of Flower's private functions secure sums replace, and whether the installed release still has them.

Flower has no option for another generator of masks, so ``protocol.py`` runs copies of its functions with one. That
works only while these functions exist, call the generator by its name, and pass what it takes. Another release may
change each of these without notice; secure sums are then refused by name, before any key is exchanged.
"""

from __future__ import annotations

import inspect
from importlib import import_module, metadata
from typing import NamedTuple

from feddpc.errors import BadInputError


class Private(NamedTuple):
    """A private function of Flower, and the names that it must look up or take."""

    module: str
    path: str
    looks_up: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()


_CLIENT = "flwr.client.mod.secure_aggregation.secaggplus_mod"
_SERVER = "flwr.server.workflow.secure_aggregation.secaggplus_workflow"
PRIVATE = (
    Private(_CLIENT, "secaggplus_mod", looks_up=("_collect_masked_vectors",)),
    Private(_CLIENT, "_collect_masked_vectors", looks_up=("pseudo_rand_gen",)),
    Private(_CLIENT, "pseudo_rand_gen", takes=("seed", "num_range", "dimensions_list")),
    Private(_SERVER, "SecAggPlusWorkflow.unmask_stage", looks_up=("pseudo_rand_gen",)),
    Private(_SERVER, "pseudo_rand_gen", takes=("seed", "num_range", "dimensions_list")),
    Private(_SERVER, "WorkflowState"),
    Private("flwr.server.compat.grid_client_proxy", "GridClientProxy"),
    Private("flwr.server.compat.legacy_context", "LegacyContext"),
    Private("flwr.compat.common.recorddict_compat", "recorddict_to_fitres"),
    Private("flwr.supercore.primitives.asymmetric", "bytes_to_public_key"),
)


def check_internals(private: tuple[Private, ...] = PRIVATE) -> None:
    """Raise if this release of Flower lacks a private function that secure sums need, or has another one."""
    for needed in private:
        if missing := _missing(needed):
            raise BadInputError(
                f"secure sums need {needed.module}.{needed.path} of Flower, and flwr {metadata.version('flwr')} "
                f"{missing}: install a release of Flower that secure sums were tested with (docs/flower.md), or use "
                "feddpc.flower.strategy, which does not need it"
            )


def _missing(needed: Private) -> str | None:
    """Return what is missing, or None."""
    try:
        found = import_module(needed.module)
        for name in needed.path.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError):
        return "does not have it"
    code = getattr(found, "__code__", None)
    if absent := [name for name in needed.looks_up if code is None or name not in code.co_names]:
        return f"has one that does not call {absent[0]}"
    if needed.takes and tuple(inspect.signature(found).parameters) != needed.takes:  # type: ignore[arg-type]
        return f"has one that takes other arguments than {', '.join(needed.takes)}"
    return None
