"""Which runs each table and figure needs: rows with complete configurations, the paper's and the controls it lacks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from feddpc.paper import published
from feddpc.paper.study import PaperRow
from feddpc.paper.study_spec import DOUBLED, HELD_OUT, PaperSpec, label, times
from feddpc.paper.tuned import Setting, Tuned
from feddpc.report.groups import show
from feddpc.runs.stored import StoredRun, load
from feddpc.study import RunResult
from feddpc.study.ladder import Trial


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
    """Return the rows of Table 2 and of figures 1 to 3: every method with its best setting, if one is known."""
    without = spec.left_out(tuned)
    return [
        _row(spec, "table2", alpha, name, label(name), spec.best(tuned, alpha, name), method=name)
        for alpha in spec.alphas
        for name in spec.rows
        if name not in without.get(alpha, ())
    ]


def ladder(spec: PaperSpec, alpha: float) -> list[Trial]:
    """Return all settings that climb the ladder of one alpha, each row of Table 2 as a group."""
    return [trial(spec, alpha, name, values) for name, mine in spec.settings().items() for values in mine]


def trial(spec: PaperSpec, alpha: float, name: str, values: Mapping[str, Any]) -> Trial:
    """Return one setting of a row of Table 2: a rate, and the hyper-parameters that are tuned."""
    setting = Setting(values["lr"], {key: value for key, value in values.items() if key != "lr"})
    config = spec.config(name, setting, alpha=alpha, validation=HELD_OUT)
    words = " ".join(f"{k}={show(v)}" for k, v in values.items())
    return Trial(name, values, config, f"{name} {words}")


def climbed(alpha: float, one: Trial, results: Sequence[RunResult]) -> PaperRow:
    """Return a setting with the runs of the highest rung that it reached."""
    config = dataclasses.replace(one.config, rounds=results[0].spec.config.rounds)
    text = f"{label(one.group)} {one.label.removeprefix(one.group).strip()}"
    row = PaperRow("grid", alpha, one.label, text, config, tuple(result.spec.config.seed for result in results))
    row.runs.update({r.spec.config.seed: until(load(r.path), config.rounds) for r in results if r.ended})
    return row


def until(run: StoredRun, rounds: int) -> StoredRun:
    """Return a run up to a round; one that climbed on has more."""
    if len(run.records) <= rounds:
        return run
    config, summary = dataclasses.replace(run.config, rounds=rounds), (run.summary or {}) | {"status": "finished"}
    return dataclasses.replace(run, config=config, records=run.records[:rounds], summary=summary)


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
