"""What to reproduce: data set, scale, rows, seeds, grid, and how settings are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from feddpc import methods
from feddpc.config import Config
from feddpc.errors import BadInputError, unknown
from feddpc.paper import presets, published
from feddpc.paper.tuned import MOMENTUM, SELECTIONS, Setting, Tuned
from feddpc.study.space import equal_budgets

#: FedAvg with the server step multiplied by (1 + lambda): about the step that FedDPC takes, without its projection.
DOUBLED = "fedavg x2"
#: Controls that the paper lacks, and all rows of Table 2: the paper's, the controls, and one step beyond the paper.
CONTROLS = ("fedavg", DOUBLED, "fedavgm")
ROWS = (*published.METHODS, *CONTROLS, MOMENTUM)
#: Rows that are a method under another name.
METHOD_OF = {DOUBLED: "fedavg", MOMENTUM: "feddpc"}
#: What is tried besides the rate where the paper has no grid: as many combinations as the other methods have values.
COMBINATIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "fedavgm": tuple({"momentum": beta} for beta in (0.8, 0.9, 0.5, 0.95)),
    MOMENTUM: tuple({"lam": lam, "momentum": beta} for lam, beta in ((0.0, 0.5), (0.0, 0.8), (1.0, 0.5), (0.5, 0.5))),
}
#: Share of the training set that the ladder holds out, to choose settings on.
HELD_OUT = 0.1
#: The parts whose runs each target needs; figures 1 to 3 show the runs of Table 2 as curves.
TARGETS: dict[str, tuple[str, ...]] = {
    "table1": (),
    "table2": ("table2",),
    **dict.fromkeys(published.FIGURES, ("table2",)),
    "figure4": ("figure4",),
    "figure5": ("figure5",),
    "all": ("table2", "figure4", "figure5"),
}


@dataclass(frozen=True)
class PaperSpec:
    """One data set at one scale."""

    data: str
    scale: str
    alphas: tuple[float, ...] = published.ALPHAS
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    select: str = "validation"  #: a key of SELECTIONS; the paper chose on the test set
    rows: tuple[str, ...] = ROWS
    ladder_seeds: tuple[int, ...] = (0, 1)  #: of the last rung; the first of them climbs alone
    rates: tuple[float, ...] = published.RATES  #: of the ladder
    values: tuple[float, ...] = published.VALUES  #: of the ladder, for the paper's second hyper-parameter
    changes: dict[str, Any] = field(default_factory=dict)  #: values of other keys than the preset has: rounds, engine

    def __post_init__(self) -> None:
        if self.scale not in (sizes := presets.scales(self.data)):
            raise unknown("scale", self.scale, sizes)
        if self.select not in SELECTIONS:
            raise unknown("selection", self.select, SELECTIONS)
        for name in self.rows:
            if name not in ROWS:
                raise unknown("row of Table 2", name, ROWS)
        for what in ("alphas", "seeds", "rows", "ladder_seeds", "rates", "values"):
            given = getattr(self, what)
            if not given or len(set(given)) < len(given):
                raise BadInputError(f"{what} = {', '.join(map(str, given))}: give at least one, and none twice")

    def config(self, name: str, setting: Setting, **changes: Any) -> Config:
        """Return the configuration of a row of Table 2 at one setting."""
        values = {"scale": self.scale, "lr": setting.lr, "hyper": setting.hyper, **self.changes, **changes}
        if name == DOUBLED:
            values["server_lr"] = times(1 + published.LAMBDA, setting.lr)
        return presets.preset(self.data, METHOD_OF.get(name, name), **values)

    def settings(self) -> dict[str, list[dict[str, Any]]]:
        """Return what the ladder begins with per row: as many settings for each, where finer rates can fill up."""
        own = {}
        for name in self.rows:
            second: list[dict[str, Any]] = [{}]
            if key := published.TUNED.get(name):
                second = [{key: value} for value in self.values]
            elif name in COMBINATIONS:
                second = list(COMBINATIONS[name][: len(self.values)])
            own[name] = [{"lr": lr, **hyper} for lr in self.rates for hyper in second]
        return equal_budgets(own)

    def left_out(self, tuned: Tuned) -> dict[float, list[str]]:
        """Return the rows that have no setting, by alpha; none if rows were asked for, or if all of them lack one."""
        lacking = {
            alpha: [n for n in self.rows if self.select not in tuned.settings.get(alpha, {}).get(n, {})]
            for alpha in self.alphas
        }
        return {alpha: names for alpha, names in lacking.items() if 0 < len(names) < len(ROWS) and self.rows == ROWS}

    def best(self, tuned: Tuned, alpha: float, name: str) -> Setting:
        """Return the best setting of a row, or raise with the command that finds it."""
        setting = tuned.settings.get(alpha, {}).get(name, {}).get(self.select)
        if setting is None:
            command = f"feddpc reproduce table2 --data {self.data} --alpha {alpha:g} --ladder"
            raise BadInputError(
                f"no setting of {name} on {self.data}, alpha = {alpha:g}, is recorded as best on {self.select}: run "
                f"`{command}` first, with the same --out"
            )
        return setting

    @property
    def rounds(self) -> int | None:
        """The rounds that were asked for instead of the scale's."""
        return self.changes.get("rounds")

    @property
    def short(self) -> str:
        """What is left out of the paper's experiment; empty if nothing."""
        cut, whole = presets.scales(self.data)[self.scale].short, presets.preset(self.data, scale="paper").rounds
        if self.rounds is None:
            return cut
        fewer = [] if self.rounds == whole else [f"{self.rounds} of the paper's {whole} rounds"]
        return ",".join([*fewer, *cut.split(",")[1:]]).strip()

    @property
    def slug(self) -> str:
        """The name of the results' folder."""
        precision = self.changes.get("precision", Config.precision)
        parts = [self.scale, *([] if self.rounds is None else [f"{self.rounds}-rounds"])]
        return "-".join(parts if precision == Config.precision else [*parts, precision])

    @property
    def ladder_words(self) -> str:
        """The ladder in words, for the file of its winners."""
        whole = self.rates == published.RATES and self.values == published.VALUES
        part = "" if whole else f" (part of it: rates {_listed(self.rates)}, values {_listed(self.values)})"
        cut = f", {self.short}" if self.short else ""
        held = f"{100 * HELD_OUT:g} % of the training set held out"
        seeds = f"seed{'s' * (len(self.ladder_seeds) > 1)} {_listed(self.ladder_seeds)}"
        return f"a ladder over the paper's grid{part} on {self.data}{cut}, {seeds} on the last rung, {held}"


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{v:g}" for v in values)


def label(name: str) -> str:
    """Return the label of a row of Table 2.

    >>> label("fedprox"), label(DOUBLED), label(MOMENTUM)
    ('FedProx', 'FedAvg, step x2', 'FedDPC, momentum')
    """
    return {DOUBLED: "FedAvg, step x2", MOMENTUM: "FedDPC, momentum"}.get(name) or methods.get(name).title


def times(factor: float, lr: float) -> float:
    """Multiply a rate without the digits that binary fractions leave behind.

    >>> 1.1 * 0.1, times(1.1, 0.1)
    (0.11000000000000001, 0.11)
    """
    return round(factor * lr, 12)


def data_of(target: str, names: Sequence[str] | None) -> dict[str, tuple[str, ...]]:
    """Return the data sets of a target, each with the parts that it needs; ``names`` are those asked for, if any.

    >>> data_of("figure2", None), data_of("all", ["digits"])
    ({'cifar100': ('table2',)}, {'digits': ('table2', 'figure4', 'figure5')})
    """
    own = published.FIGURES.get(target)
    for name in names or ():
        presets.scales(name)  # an unknown data set is an error
        if own and name not in (own, "digits"):
            other = next(figure for figure, data in published.FIGURES.items() if data == name)
            raise BadInputError(f"{target} is that of {own}: for the curves of {name} ask for {other}")
    if names or own:
        return dict.fromkeys(names or [own or ""], TARGETS[target])
    if target in ("table2", "all"):  # the paper has its ablation and its study of lambda on CIFAR-10 only
        return {name: TARGETS[target] if name == "cifar10" else ("table2",) for name in published.FIGURES.values()}
    return {"cifar10": TARGETS[target]}
