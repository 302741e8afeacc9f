"""Which runs each table and figure needs: rows with complete configurations, the paper's and the controls it lacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from feddpc.config import Config
from feddpc.paper import published
from feddpc.paper.study import Line
from feddpc.paper.study_spec import DOUBLED, HELD_OUT, StudySpec, label
from feddpc.paper.tuned import Setting, Tuned
from feddpc.report.groups import show


def lines(parts: Sequence[str], spec: StudySpec, tuned: Tuned) -> list[Line]:
    """Return the rows of all ``parts``."""
    found: list[Line] = []
    if "table2" in parts:
        found += table2(spec, tuned)
    if "figure4" in parts:
        found += figure4(spec, ablation_rate(spec, tuned))
    if "figure5" in parts:
        found += figure5(spec, ablation_rate(spec, tuned))
    return found


def table2(spec: StudySpec, tuned: Tuned) -> list[Line]:
    """Return the rows of Table 2 and of figures 1 to 3: every method with its best setting."""
    return [
        Line("table2", alpha, name, label(name), config, spec.seeds)
        for alpha in spec.alphas
        for name in spec.rows
        for config in [_config(spec, name, spec.best(tuned, alpha, name), alpha=alpha)]
    ]


def grid(spec: StudySpec) -> list[Line]:
    """Return all settings of the paper's grid: for an alpha 90, 5 of FedAvg and 5 of the control."""
    found = []
    more = {"validation": HELD_OUT} | ({"rounds": spec.grid_rounds} if spec.grid_rounds else {})
    for alpha in spec.alphas:
        for name in spec.rows:
            key = published.TUNED.get(name)
            for lr in spec.rates:
                for hyper in [{key: value} for value in spec.values] if key else [{}]:
                    words = " ".join(f"{k}={show(v)}" for k, v in {"lr": lr, **hyper}.items())
                    config = _config(spec, name, Setting(lr, hyper), alpha=alpha, **more)
                    texts = (f"{name} {words}", f"{label(name)} {words}")
                    found.append(Line("grid", alpha, *texts, config, spec.grid_seeds))
    return found


def figure4(spec: StudySpec, lr: float) -> list[Line]:
    """Return the ablation: FedDPC, without scaling, without both, and FedAvg with the doubled step as a control."""
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "feddpc": ("FedDPC", {}),
        "no scaling": ("projection only", {"scaling": False}),
        "neither": ("neither (FedAvg)", {"scaling": False, "projection": False}),
    }
    found = [
        _line(spec, "figure4", name, text, spec.config("feddpc", Setting(lr, hyper), alpha=spec.alphas[0]))
        for name, (text, hyper) in kinds.items()
    ]
    return [*found, _stepped(spec, "figure4", DOUBLED, 1 + published.LAMBDA, lr)]


def figure5(spec: StudySpec, lr: float) -> list[Line]:
    """Return the study of lambda, and for every lambda its control: FedAvg with its step times 1 + lambda."""
    found = [
        _line(spec, "figure5", text, text, config)
        for lam in published.LAMBDAS
        for text in [f"lambda {lam:g}"]
        for config in [spec.config("feddpc", Setting(lr, {"lam": lam}), alpha=spec.alphas[0])]
    ]
    return found + [_stepped(spec, "figure5", f"step {1 + lam:g}", 1 + lam, lr) for lam in published.LAMBDAS]


def ablation_rate(spec: StudySpec, tuned: Tuned) -> float:
    """Return the rate of figures 4 and 5: the paper's where it gives one, else FedDPC's best."""
    if spec.data == "cifar10":
        return published.ABLATION_RATE
    return spec.best(tuned, spec.alphas[0], "feddpc").lr


def _config(spec: StudySpec, name: str, setting: Setting, **more: Any) -> Config:
    """Return the configuration of a row of Table 2."""
    if name == DOUBLED:
        return spec.config("fedavg", setting, server_lr=_times(1 + published.LAMBDA, setting.lr), **more)
    return spec.config(name, setting, **more)


def _stepped(spec: StudySpec, part: str, name: str, factor: float, lr: float) -> Line:
    """Return FedAvg with its server step multiplied by ``factor``."""
    config = spec.config("fedavg", Setting(lr), alpha=spec.alphas[0], server_lr=_times(factor, lr))
    return _line(spec, part, name, f"FedAvg, step x{factor:g}", config)


def _line(spec: StudySpec, part: str, name: str, text: str, config: Config) -> Line:
    """Return a row of figure 4 or 5, which have one alpha."""
    return Line(part, config.alpha, name, text, config, spec.seeds)


def _times(factor: float, lr: float) -> float:
    """Multiply without the digits that binary fractions leave behind.

    >>> 1.1 * 0.1, _times(1.1, 0.1)
    (0.11000000000000001, 0.11)
    """
    return round(factor * lr, 12)
