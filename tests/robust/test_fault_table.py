"""The fault table: what every kind of fault does to a run, without and with a defense, written to reports/faults.md."""

import os
from pathlib import Path

from feddpc import methods
from feddpc.engines.loop import Loop
from feddpc.robust.faults import KINDS
from support import run_rounds, small_setting

REPORTS = Path(os.environ.get("FEDDPC_REPORTS", Path(__file__).resolve().parents[2] / "reports"))
ROUNDS = 4
DEFENCE = {"screen": {"norm": 10.0}, "rule": "geometric_median"}
#: What becomes of a faulty reply: the server never sees it, turns it away, or counts it.
FATES = dict.fromkeys(KINDS, "participants") | {"straggler": "dropped", "nan": "rejected", "inf": "rejected"}
FENCED = FATES | {"huge": "rejected"}


def run(**how):
    """Eight clients, all in every round."""
    setting = small_setting(cohort=8, **how)
    return setting, *run_rounds(setting, methods.create("feddpc"), Loop(), ROUNDS)


def fate(setting, records, kind):
    """Where the records list those who misbehave."""
    bad = {j for r in records for ids in r.faults.values() for j in ids}
    assert bad == set(setting.policies.faults.members[kind].tolist())
    last = records[-1]
    return next(name for name in ("dropped", "rejected", "participants") if bad <= set(getattr(last, name)))


def test_every_fault_and_what_becomes_of_it():
    start, honest, _ = run()
    lines = [
        "| fault | reply | distance | with screen and geometric median: reply | distance |",
        "|---|---|---|---|---|",
    ]
    for kind in KINDS:
        faults, cells = {kind: 0.25} | ({"scale": -10.0} if kind == "scaled" else {}), []
        for defense, fates in (({}, FATES), (DEFENCE, FENCED)):
            setting, progress, records = run(faults=faults, **defense)
            found = fate(setting, records, kind)
            away = float((progress.w - honest.w).norm() / (honest.w - start.w0).norm())
            cells += ["counted" if found == "participants" else found, f"{away:.3g}"]
            assert found == fates[kind], kind
            assert records[-1].diverged is None or (kind, defense) == ("huge", {})
            assert away > 1e20 if (kind, defense) == ("huge", {}) else away < (1.5 if defense else 100), kind
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    REPORTS.mkdir(parents=True, exist_ok=True)
    about = (
        f"Two of eight clients misbehave; FedDPC, {ROUNDS} rounds. Distance: from the model that honest clients make,"
    )
    text = f"{about} in lengths of their way.\n\n" + "\n".join(lines) + "\n"
    (REPORTS / "faults.md").write_text(text, encoding="utf-8")
