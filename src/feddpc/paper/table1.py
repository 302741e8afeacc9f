"""Table 1: costs counted while a method runs, next to the paper's formulas for the same federation."""

from __future__ import annotations

import math
from functools import cache

from feddpc import methods, models
from feddpc.data.specs import spec
from feddpc.paper import presets, published
from feddpc.report.table import Table
from feddpc.runs.costs import POPULATION, MeasuredCosts, count_costs

#: Local steps of a client in the small federation that is measured.
STEPS = 2
#: How far a measured ratio may be from the formula's and still be called the same.
FACTOR = 2.0
_LOCAL_HEADINGS = (
    *("method", "paper", "operations", "of FedAvg's", "gradients per step"),
    *("work, paper", "measured", "agrees"),
)
_SERVER_HEADINGS = (
    *("method", "paper", "operations", "work, paper", "measured", "agrees"),
    *("state, paper", "server", "client", "agree", "down", "up"),
)
_STATE = {"-": 0, "d": 1, "k'd": POPULATION}
_LOCAL = (
    "Operations: the paper's formula for this model, with m for a client of average size. Gradients per step are "
    "measured; the paper's mnd is one. Vector work is the rest, as a multiple of FedAvg's: by the formula without mnd, "
    f"and by the numbers that vector operations touch in one round of {POPULATION} clients, both with {STEPS} steps. "
    "They agree if within a factor of two: one operation of the paper is one to three of ours."
)
_SERVER = (
    f"Work as a multiple of FedAvg's, with {POPULATION} participants. States, down and up are counted in d: what the "
    "server and each client remember besides the model, what a participant receives and sends per round. FedVARP's "
    f"server holds N + 1 vectors; here N = {POPULATION}."
)


@cache
def measured() -> dict[str, MeasuredCosts]:
    """Measure the methods of Table 1, each in one round of ten clients that make two steps."""
    return {name: count_costs(methods.create(name)) for name in published.TABLE1}


def parameters(data: str, scale: str) -> int:
    """Return d of a data set's model; the data need not be here."""
    config, known = presets.preset(data, scale=scale), spec(data)
    shape = {"classes": known.classes, "channels": known.shape[2], "size": known.shape[0]}
    model = models.make(config.model, **shape, **config.model_options)
    return sum(p.numel() for p in model.parameters())


def tables(data: str, scale: str) -> list[Table]:
    """Return Table 1 for a data set: the clients' costs, and the server's."""
    config = presets.preset(data, scale=scale)
    d, n, k = parameters(data, scale), config.batch_size or 1, config.cohort
    m = math.ceil(spec(data).train / config.clients / n)
    fedavg, base = measured()["fedavg"], published.TABLE1["fedavg"]
    local, server = [], []
    for name, formula in published.TABLE1.items():
        mine, title, operations = measured()[name], methods.get(name).title, formula.local(m, n)
        work = _compared(formula.vectors(STEPS) / base.vectors(STEPS), mine.client_work / fedavg.client_work)
        of_fedavg = f"{operations / base.local(m, n):.4f}"
        local.append([title, formula.local_text, f"{operations * d:.4g}", of_fedavg, f"{mine.gradients:g}", *work])
        work = _compared(formula.server(POPULATION) / base.server(POPULATION), mine.server_work / fedavg.server_work)
        held = round(mine.server_state + POPULATION * mine.client_state)
        states = [formula.state, f"{mine.server_state:.3g}", f"{mine.client_state:.3g}"]
        states += [agreement(held, _STATE[formula.state]), f"{mine.down:g}", f"{mine.up:g}"]
        server.append([title, formula.server_text, f"{formula.server(k) * d:.4g}", *work, *states])
    about = f"{published.TITLES[data]}, {config.model}, d = {d:,}, m = {m} batches of n = {n}, k' = {k}"
    text = frozenset({"paper", "agrees", "agree", "state, paper"})
    return [
        Table("table1-local", f"Table 1, local costs, {about}", _LOCAL_HEADINGS, local, [_LOCAL], text_columns=text),
        Table(
            "table1-server", f"Table 1, server costs, {about}", _SERVER_HEADINGS, server, [_SERVER], text_columns=text
        ),
    ]


def agreement(found: float, stated: float) -> str:
    """Say whether a measured amount is within a factor of two of the formula's.

    >>> agreement(3.0, 2.0), agreement(5.0, 2.0), agreement(0.0, 0.0), agreement(1.0, 0.0)
    ('yes', '2.5 times it', 'yes', 'no')
    """
    if stated == 0:
        return "no" if found else "yes"
    ratio = found / stated
    return "yes" if 1 / FACTOR <= ratio <= FACTOR else f"{ratio:.2g} times it"


def _compared(stated: float, found: float) -> list[str]:
    """Return an amount of work by the formula, as measured, and whether they agree."""
    return [f"{stated:.2f}", f"{found:.2f}", agreement(found, stated)]
