"""The summary of a run, made from its records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from feddpc.config import Config
from feddpc.tasks.metrics import CLASSIFICATION, PARTS, Metric


def summarize(
    config: Config,
    records: Sequence[dict[str, Any]],
    status: str,
    reason: str | None,
    metrics: Sequence[Metric] = CLASSIFICATION,
) -> dict[str, Any]:
    """Return the summary of a run: the best and last values of its primary metric, over the rounds that have one.

    ``primary`` describes that metric, and its name is part of the keys, ``best_accuracy``; shares go from 0 to 1.
    """
    primary = metrics[0]
    name, key = primary.name, primary.key()
    # Rounds of a federation that came before its first evaluation do not know what is measured.
    scored = [r for r in records if (r.get(key) if "nodes" in r else r[key]) is not None]
    best = primary.pick(scored, lambda r: r[key])
    last = [r[key] for r in scored[-10:]]
    return {
        "status": status,
        "reason": reason,
        "method": config.method,
        "hyper": config.hyper,
        "seed": config.seed,
        "rounds": len(records),
        "primary": primary.as_dict(),
        f"best_{name}": best and best[key],
        "best_round": best and best["round"],
        f"final_{name}": last[-1] if last else None,
        f"last10_{name}": float(np.mean(last)) if last else None,
        "seconds_per_round": seconds_per_round(records),
        **_validated(scored, primary),
        "metrics": _final(records, metrics),
        **({"epsilon": records[-1]["epsilon"]} if config.privacy and records else {}),
    }


def seconds_per_round(records: Sequence[dict[str, Any]]) -> float | None:
    """Return the mean seconds of a round, but for the first, in which everything is made ready, if there are more."""
    seconds = [r["seconds"] for r in records[1:] or records]
    return float(np.mean(seconds)) if seconds else None


def _validated(scored: Sequence[dict[str, Any]], primary: Metric) -> dict[str, Any]:
    """Return the round that held-out samples choose, and the test value there; nothing if there are none."""
    key = primary.key("validation")
    chosen = primary.pick([r for r in scored if r.get(key) is not None], lambda r: r[key])
    if chosen is None:
        return {}
    return {key: chosen[key], "validation_round": chosen["round"], f"validated_{primary.name}": chosen[primary.key()]}


def _final(records: Sequence[dict[str, Any]], metrics: Sequence[Metric]) -> dict[str, float | None]:
    """Return all metrics of the last round that was evaluated."""
    keys = [metric.key(part) for part in PARTS for metric in metrics]
    known = ({key: record[key] for key in keys if key in record} for record in reversed(records))
    return next((values for values in known if any(v is not None for v in values.values())), {})
