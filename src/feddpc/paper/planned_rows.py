"""Which runs each table and figure needs: rows with complete configurations, the paper's and the controls it lacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from feddpc.paper import published
from feddpc.paper.study import PaperRow
from feddpc.paper.study_spec import DOUBLED, HELD_OUT, PaperSpec, label, times
from feddpc.paper.tuned import Setting, Tuned
from feddpc.report.groups import show


def rows(parts: Sequence[str], spec: PaperSpec, tuned: Tuned) -> list[PaperRow]:
    """Return the rows of all ``parts``."""
    planned: list[PaperRow] = []
    if "table2" in parts:
        planned += table2(spec, tuned)
    if "figure4" in parts:
        planned += figure4(spec, ablation_rate(spec, tuned))
    if "figure5" in parts:
        planned += figure5(spec, ablation_rate(spec, tuned))
    return planned


def table2(spec: PaperSpec, tuned: Tuned) -> list[PaperRow]:
    """Return the rows of Table 2 and of figures 1 to 3: every method with its best setting."""
    return [
        _row(spec, "table2", alpha, name, label(name), spec.best(tuned, alpha, name), method=name)
        for alpha in spec.alphas
        for name in spec.rows
    ]


def grid(spec: PaperSpec) -> list[PaperRow]:
    """Return all settings of the paper's grid: 90 per alpha, 5 of FedAvg and 5 of the control."""
    planned = []
    changes = {"validation": HELD_OUT} | ({"rounds": spec.grid_rounds} if spec.grid_rounds else {})
    for alpha in spec.alphas:
        for name in spec.rows:
            key = published.TUNED.get(name)
            for lr in spec.rates:
                for hyper in [{key: value} for value in spec.values] if key else [{}]:
                    words = " ".join(f"{k}={show(v)}" for k, v in {"lr": lr, **hyper}.items())
                    config = spec.config(name, Setting(lr, hyper), alpha=alpha, **changes)
                    texts = (f"{name} {words}", f"{label(name)} {words}")
                    planned.append(PaperRow("grid", alpha, *texts, config, spec.grid_seeds))
    return planned


def figure4(spec: PaperSpec, lr: float) -> list[PaperRow]:
    """Return the ablation: FedDPC, without scaling, without both, and FedAvg with the doubled step as a control."""
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "feddpc": ("FedDPC", {}),
        "no scaling": ("projection only", {"scaling": False}),
        "neither": ("neither (FedAvg)", {"scaling": False, "projection": False}),
    }
    variants = [
        _row(spec, "figure4", spec.alphas[0], name, text, Setting(lr, hyper)) for name, (text, hyper) in kinds.items()
    ]
    return [*variants, _control(spec, "figure4", DOUBLED, 1 + published.LAMBDA, lr)]


def figure5(spec: PaperSpec, lr: float) -> list[PaperRow]:
    """Return the study of lambda, and for every lambda its control: FedAvg with its step times 1 + lambda."""
    settings = {f"lambda {lam:g}": Setting(lr, {"lam": lam}) for lam in published.LAMBDAS}
    variants = [_row(spec, "figure5", spec.alphas[0], name, name, setting) for name, setting in settings.items()]
    return variants + [_control(spec, "figure5", f"step {1 + lam:g}", 1 + lam, lr) for lam in published.LAMBDAS]


def ablation_rate(spec: PaperSpec, tuned: Tuned) -> float:
    """Return the rate of figures 4 and 5: the paper's where it gives one, else FedDPC's best."""
    if spec.data == "cifar10":
        return published.ABLATION_RATE
    return spec.best(tuned, spec.alphas[0], "feddpc").lr


def _control(spec: PaperSpec, part: str, name: str, factor: float, lr: float) -> PaperRow:
    """Return FedAvg with its server step multiplied by ``factor``; figures 4 and 5 have one alpha."""
    text, server_lr = f"FedAvg, step x{factor:g}", times(factor, lr)
    return _row(spec, part, spec.alphas[0], name, text, Setting(lr), method="fedavg", server_lr=server_lr)


def _row(
    spec: PaperSpec,
    part: str,
    alpha: float,
    name: str,
    text: str,
    setting: Setting,
    method: str = "feddpc",
    **changes: Any,
) -> PaperRow:
    config = spec.config(method, setting, alpha=alpha, **changes)
    return PaperRow(part, alpha, name, text, config, spec.seeds)
