"""Robust rules: what a server may put in the place of the plain mean, with any method.

A method averages rows, but it may do more with them: remember them client by client (FedVARP, MIFA), add them to a mean
over all clients (SCAFFOLD, FedDyn), divide them by step counts (FedCM). So a rule does not return a centre alone. It
returns rows again, of which the method makes what it always makes:

* a rule that **selects** says which clients count; the others are neither averaged nor remembered;
* a rule that **replaces** puts other rows in the place of those that came. Their plain mean is the rule's centre, and
  none of them is farther from it than the bulk of what came, so that memories of clients stay sound as well.

| name | rows that the method sees; m came, f = floor(share m) of them are thought hostile |
|---|---|
| ``median`` | coordinate by coordinate the middle one or two; the others become the median |
| ``trimmed_mean`` | coordinate by coordinate all but the f smallest and largest; these become the mean of the others |
| ``krum`` | the one row whose m - f - 2 nearest rows are nearest |
| ``multi_krum`` | the m - f - 2 rows with the best such scores (``select`` of them if given) |
| ``centered_clipping`` | moved towards the centre until none is farther than ``radius``, ``iterations`` times over |
| ``geometric_median`` | put at one distance about the point from which the sum of distances is least |

All count clients alike. Where a client sends several vectors, replacing rules treat each by itself; selecting ones
look at all, each brought to unit median length, because a client is in or out as a whole.

References: median and trimmed mean, Yin et al., ICML 2018, arXiv:1803.01498. Krum and multi-Krum, Blanchard et al.,
NeurIPS 2017, arXiv:1703.02757. Centred clipping, Karimireddy, He, Jaggi, ICML 2021, arXiv:2012.10333. Geometric median,
Pillutla, Kakade, Harchaoui, IEEE TSP 2022, arXiv:1912.13445.

Departures: centred clipping starts at the coordinate median, not at the last centre, so that it needs no memory; its
radius is by default the median distance from there. f is at most what the rule can bear: (m - 3) / 2 for Krum, and
(m - 1) / 2 for the trimmed mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from feddpc.checks import check_int, check_positive, check_probability
from feddpc.errors import BadInputError
from feddpc.methods._algebra import BLOCK, exact_sum, row_distances, row_squares, safe_ratio, saturated
from feddpc.methods.base import State
from feddpc.registry import Registry

#: A row nearer to the geometric median than this, in median distances, counts as if it were this far away.
NEAREST = 1e-6


class RuleOutcome(NamedTuple):
    """Which clients count, ``[m]``, and the rows of those."""

    kept: Tensor
    up: State


Rule = Callable[[State], RuleOutcome]


def names() -> list[str]:
    """Return the names a configuration may choose from."""
    return RULES.names()


def options(name: str) -> dict[str, object]:
    """Return the options of a rule with their defaults.

    >>> options("trimmed_mean")
    {'share': 0.3}
    """
    return RULES.options(name)


def make(name: str, **options: object) -> Rule | None:
    """Return the rule ``name``; None for ``mean``, which needs none.

    >>> rule = make("median")
    >>> rule({"delta": torch.tensor([[1.0], [2.0], [900.0]])}).up["delta"].mean(0)
    tensor([2.])
    """
    rule = RULES.builder(name, options)(**options)
    if rule is not None and not callable(rule):
        raise BadInputError(f"rule {name!r} returns {type(rule).__name__}: it must return a function of the rows")
    return rule


def trimmed(x_md: Tensor, cut: int) -> Tensor:
    """Return rows whose mean is that of all but the ``cut`` smallest and largest numbers of every column.

    >>> trimmed(torch.tensor([[0.0], [1.0], [3.0], [99.0]]), 1)
    tensor([[2.],
            [1.],
            [3.],
            [2.]])
    """
    if cut == 0:
        return x_md
    parts = []
    for x in torch.split(x_md, BLOCK, dim=1):
        sorted_, order = x.sort(dim=0, stable=True)
        middle = sorted_[cut:-cut].mean(0, dtype=torch.float64).to(x.dtype).expand(cut, -1)
        parts.append(x.scatter(0, order[:cut], middle).scatter(0, order[-cut:], middle))
    return torch.cat(parts, dim=1)


def coordinate_median(x_md: Tensor) -> Tensor:
    """Return the median of every column, the mean of the middle two where the number of rows is even, in float64."""
    return trimmed(x_md, (len(x_md) - 1) // 2).mean(0, dtype=torch.float64)


def krum_scores(square_mm: Tensor, hostile: int) -> Tensor:
    """Return, a row, the sum of the squared distances to its m - ``hostile`` - 2 nearest others, at least one."""
    m = len(square_mm)
    nearest = square_mm.sort(dim=1).values[:, 1:]  # the nearest of all is the row itself
    return nearest[:, : max(m - hostile - 2, 1)].sum(1)


def clipped(x_md: Tensor, radius: float, iterations: int) -> Tensor:
    """Return rows no farther than ``radius`` from a centre that moves to their mean, ``iterations`` times."""
    centre = coordinate_median(x_md)
    far_m = row_distances(x_md, centre)
    reach = torch.full_like(far_m[0], radius) if radius else far_m.median()
    for _ in range(iterations - 1):
        centre = _about(centre, x_md, safe_ratio(reach, far_m).clamp(max=1)).mean(0, dtype=torch.float64)
        far_m = row_distances(x_md, centre)
    return _about(centre, x_md, safe_ratio(reach, far_m).clamp(max=1))


def spatial_median(x_md: Tensor, tolerance: float, iterations: int) -> tuple[Tensor, Tensor]:
    """Return the geometric median in float64, and rows at one distance about it, whose mean it is.

    Weiszfeld's iteration from the coordinate median: the mean with weights 1 / distance. It stops when a step is
    shorter than ``tolerance`` median distances. Towards a row it only creeps, so at the end the nearest row is tried:
    it is the median if the unit vectors from it to the others add up to one at most (Vardi, Zhang, PNAS 2000). Else
    those from the median add up to zero, so their mean stays when all are given one length, here the median distance;
    what remains of the sum, or of the iteration, is taken out of every row.
    """
    centre = coordinate_median(x_md)
    for _ in range(iterations):
        far_m = row_distances(x_md, centre)
        usual = far_m.median()
        if not bool(usual > 0):
            break  # half of the rows, or more, are one point: it is the median
        pull_m = 1 / far_m.clamp(min=NEAREST * float(usual))
        before, centre = centre, exact_sum(x_md, pull_m / pull_m.sum())
        if bool(torch.linalg.vector_norm(centre - before) <= tolerance * usual):
            break
    centre = _nearest_if_median(x_md, centre)
    far_m = row_distances(x_md, centre)
    usual = far_m.median()
    rows = _about(centre, x_md, safe_ratio(usual, far_m.clamp(min=NEAREST * float(usual))))
    rows += saturated(centre - rows.mean(0, dtype=torch.float64), rows.dtype)
    return centre, saturated(rows, rows.dtype)


def _nearest_if_median(x_md: Tensor, centre_d: Tensor) -> Tensor:
    """Return the row nearest to ``centre_d`` if it is the geometric median, else ``centre_d``."""
    row = x_md[row_distances(x_md, centre_d).argmin()].double()
    far_m = row_distances(x_md, row)
    pull_m = safe_ratio(torch.ones_like(far_m), far_m)  # 0 for the row itself, and for its copies
    total = exact_sum(x_md, pull_m) - pull_m.sum() * row
    return row if bool(torch.linalg.vector_norm(total) <= (far_m == 0).sum()) else centre_d


def _about(centre_d: Tensor, x_md: Tensor, factor_m: Tensor) -> Tensor:
    """Return ``c + factor_j (x_j - c)``, a row at a time: a float64 copy of the stack would be large."""
    rows = torch.empty_like(x_md)
    for row, x, factor in zip(rows, x_md, factor_m, strict=True):
        row.copy_(saturated(centre_d + factor * (x.double() - centre_d), rows.dtype))
    return rows


def _replacing(clean: Callable[[Tensor], Tensor]) -> Rule:
    def rule(up: State) -> RuleOutcome:
        m = len(next(iter(up.values())))
        kept = torch.ones(m, dtype=torch.bool, device=next(iter(up.values())).device)
        return RuleOutcome(kept, {k: clean(x.reshape(m, -1)).reshape(x.shape) for k, x in up.items()})

    return rule


def _selecting(choose: Callable[[Tensor], Tensor]) -> Rule:
    def rule(up: State) -> RuleOutcome:
        kept = torch.zeros(len(next(iter(up.values()))), dtype=torch.bool, device=next(iter(up.values())).device)
        kept[choose(_squares(up))] = True
        return RuleOutcome(kept, {k: x[kept] for k, x in up.items()})

    return rule


def _squares(up: State) -> Tensor:
    """Return the squared distances between all clients, every key brought to unit median length."""
    first = next(iter(up.values()))
    total = torch.zeros(len(first), len(first), dtype=torch.float64, device=first.device)
    for stack in up.values():
        x_md = stack.reshape(len(stack), -1)
        usual = row_squares(x_md).median()
        total += torch.stack([row_distances(x_md, x).square() for x in x_md]) / torch.where(usual > 0, usual, 1.0)
    return total


def _mean() -> None:
    """Nothing stands between the rows and the method."""


def _median() -> Rule:
    return _replacing(lambda x: trimmed(x, (len(x) - 1) // 2))


def _trimmed_mean(*, share: float = 0.3) -> Rule:
    share = _hostile(share)
    return _replacing(lambda x: trimmed(x, min(_count(share, len(x)), (len(x) - 1) // 2)))


def _krum(*, share: float = 0.3) -> Rule:
    return _multi_krum(share=share, select=1)


def _multi_krum(*, share: float = 0.3, select: int = 0) -> Rule:
    share, select = _hostile(share), check_int("rule.select", select, 0)

    def choose(square_mm: Tensor) -> Tensor:
        m = len(square_mm)
        hostile = max(min(_count(share, m), (m - 3) // 2), 0)
        return krum_scores(square_mm, hostile).argsort(stable=True)[: select or max(m - hostile - 2, 1)]

    return _selecting(choose)


def _centered_clipping(*, radius: float = 0.0, iterations: int = 3) -> Rule:
    radius = 0.0 if radius == 0 else check_positive("rule.radius", radius)
    iterations = check_int("rule.iterations", iterations, 1)
    return _replacing(lambda x: clipped(x, radius, iterations))


def _geometric_median(*, tolerance: float = 1e-8, iterations: int = 1000) -> Rule:
    tolerance, iterations = check_positive("rule.tolerance", tolerance), check_int("rule.iterations", iterations, 1)
    return _replacing(lambda x: spatial_median(x, tolerance, iterations)[1])


def _count(share: float, m: int) -> int:
    """Return how many of ``m`` a share is: 0.29 of 100 are 29, whatever floating point says."""
    return int(share * m + 1e-9)


def _hostile(share: float) -> float:
    share = check_probability("rule.share", share)
    if share >= 0.5:
        raise BadInputError(
            f"rule.share = {share}: must be below 0.5: no rule tolerates half of the clients being hostile"
        )
    return share


RULES: Registry[Rule | None] = Registry(
    "rule",
    {
        "mean": _mean,
        "median": _median,
        "trimmed_mean": _trimmed_mean,
        "krum": _krum,
        "multi_krum": _multi_krum,
        "centered_clipping": _centered_clipping,
        "geometric_median": _geometric_median,
    },
)
