"""Fault injection: who misbehaves, what it sends, and that engines, records and checkpoints agree about it."""

import json
import math

import numpy as np
import pytest
import torch

from feddpc import methods
from feddpc.engines.cuda.captured import Cuda
from feddpc.engines.loop import Loop
from feddpc.errors import BadInputError
from feddpc.robust import attacks, faults
from feddpc.runs.runner import execute
from feddpc.runs.stop import Stop
from support import compare_with_loop, run_rounds, same_memories, setting_for, small_setting

F64 = torch.float64
EVERY = {kind: 1 / len(faults.KINDS) for kind in faults.KINDS}


def sent(kind, up, memory=None, round=1, **how):
    """What eight clients send if all misbehave in one way."""
    made = faults.make({kind: 1.0, **how}, population=8, seed=0)
    return made.tamper(round, np.arange(8), up, memory or {})


def honest(d=5, seed=0):
    return {"delta": torch.randn(8, d, generator=torch.Generator().manual_seed(seed), dtype=F64)}


def test_shares_are_of_the_population_and_kinds_do_not_overlap():
    made = faults.make({"sign_flip": 0.2, "zero": 0.1, "nan": 0.05}, population=200, seed=3)
    assert [len(made.members[k]) for k in ("sign_flip", "zero", "nan", "noise")] == [40, 20, 10, 0]
    assert len(np.unique(np.concatenate(list(made.members.values())))) == 70
    again, other = (faults.make({"sign_flip": 0.2}, population=200, seed=s) for s in (3, 4))
    assert not np.array_equal(again.members["sign_flip"], other.members["sign_flip"])
    assert faults.make({}, population=9, seed=0) is None
    assert faults.make({}, population=9, seed=0) is None


def test_what_each_kind_sends():
    up = honest()
    x = up["delta"]
    assert torch.equal(sent("sign_flip", up).up["delta"], -x)
    assert torch.equal(sent("scaled", up, scale=-7.0).up["delta"], -7 * x)
    assert torch.equal(sent("zero", up).up["delta"], 0 * x)
    assert torch.equal(sent("huge", up).up["delta"], 1e30 * x.sign())
    for kind, value in (("nan", math.isnan), ("inf", math.isinf)):
        got = sent(kind, up).up["delta"]
        assert [sum(value(v) for v in row) for row in got.tolist()] == [1] * 8
    assert sent("zero", up).who == {"zero": list(range(8))}
    assert torch.equal(up["delta"], honest()["delta"])


def test_colluders_send_one_vector_against_their_mean():
    x = honest()["delta"]
    got = sent("colluding", honest()).up["delta"]
    assert all(torch.equal(row, got[0]) for row in got)
    assert float(got[0].norm()) == pytest.approx(float(x.norm(dim=1).mean()))
    assert float(got[0] @ x.mean(0)) == pytest.approx(-float(got[0].norm() * x.mean(0).norm()))


def test_noise_is_as_long_as_asked_and_differs_by_round_and_client():
    up = honest(d=20_000)
    one, two, again = (sent("noise", up, round=t, spread=3.0).up["delta"] - up["delta"] for t in (1, 2, 1))
    ratio = one.norm(dim=1) / up["delta"].norm(dim=1)
    torch.testing.assert_close(ratio, torch.full((8,), 3.0, dtype=F64), rtol=0.05, atol=0)
    assert torch.equal(one, again)
    assert not torch.equal(one, two)
    assert abs(float(torch.nn.functional.cosine_similarity(one[0], one[1], dim=0))) < 0.05


def test_a_replaying_client_sends_its_first_update_for_ever():
    first, later = honest(seed=0), honest(seed=1)
    made = faults.make({"replayed": 1.0}, population=8, seed=0)
    a = made.tamper(1, np.array([2, 5]), {"delta": first["delta"][:2]}, {})
    assert torch.equal(a.up["delta"], first["delta"][:2])
    assert a.who == {}
    b = made.tamper(2, np.array([2, 7]), {"delta": later["delta"][:2]}, a.memory)
    assert torch.equal(b.up["delta"], torch.stack([first["delta"][0], later["delta"][1]]))
    assert b.who == {"replayed": [2]}
    c = made.tamper(3, np.array([5, 7]), {"delta": later["delta"][3:5]}, b.memory)
    assert torch.equal(c.up["delta"], torch.stack([first["delta"][1], later["delta"][1]]))


def test_a_parallel_update_is_as_long_as_the_honest_one_and_points_along_the_last():
    last, x = honest(seed=4)["delta"][0], honest()["delta"]
    got = attacks.parallel(last, 1e-3)(x)
    torch.testing.assert_close(got.norm(dim=1), x.norm(dim=1))
    cosine = torch.nn.functional.cosine_similarity(got, last[None])
    torch.testing.assert_close(cosine, torch.full((8,), math.sqrt(1 - 1e-6), dtype=F64))
    hidden = got - (got @ last)[:, None] * last / last.square().sum()
    torch.testing.assert_close(hidden.norm(dim=1), 1e-3 * x.norm(dim=1))
    assert bool((hidden @ x.mean(0) < 0).all())


def test_nothing_is_parallel_to_an_update_that_nobody_knows():
    up = honest()
    assert torch.equal(sent("parallel", up).up["delta"], up["delta"])
    assert sent("parallel", up).who == {}


def test_some_misbehave_only_sometimes():
    made = faults.make({"zero": 0.5, "often": 0.3}, population=1000, seed=0)
    up = {"delta": torch.ones(1000, 1)}
    rounds = [made.tamper(t, np.arange(1000), up, {}).who["zero"] for t in range(1, 6)]
    assert all(100 < len(ids) < 200 for ids in rounds)
    assert set().union(*map(set, rounds)) <= set(made.members["zero"].tolist())
    assert rounds[0] != rounds[1]


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"sign_flip": 1.2}, "probability"),
        ({"sign_flip": 0.6, "zero": 0.6}, "add up to 1.2"),
        ({"sine_flip": 0.1}, "did you mean 'sign_flip'"),
        ({"noise": 0.1, "spread": 0}, "above 0"),
        ({"noise": 0.1, "often": 0}, "probability"),
        ({"scaled": 0.1, "scale": "much"}, "expected float"),
    ],
)
def test_bad_tables_say_what_to_do(table, words):
    with pytest.raises(BadInputError, match=words):
        faults.complete(table)


@pytest.mark.parametrize("name", ["feddpc", "scaffold", "fedvarp", "fedamd", "feddc"])
@pytest.mark.parametrize(
    "how",
    [
        {"faults": {"sign_flip": 0.25, "straggler": 0.25, "noise": 0.25, "often": 0.7}},
        {"faults": {"replayed": 0.25, "parallel": 0.25, "nan": 0.25}, "rule": "trimmed_mean"},
        {"faults": {"colluding": 0.4, "huge": 0.2}, "rule": "multi_krum", "screen": {"norm": 4.0}},
    ],
    ids=["faults", "replay", "all"],
)
def test_engines_agree(name, how):
    """A captured engine declines such rounds, and trains all clients at once instead: the same numbers."""
    compare_with_loop(methods.create(name), Cuda(anywhere=True), how)


def test_records_say_who_did_what():
    setting = small_setting(faults={"zero": 0.25, "straggler": 0.25, "inf": 0.25}, cohort=8)
    made = setting.policies.faults
    _, records = run_rounds(setting, methods.create("fedavg"), Loop(), 2)
    for record in records:
        assert record.faults == {k: made.members[k].tolist() for k in ("straggler", "inf", "zero")}
        assert record.dropped == record.faults["straggler"]
        assert record.rejected == record.faults["inf"]
        assert len(record.participants) == 4
        assert set(record.faults["zero"]) <= set(record.participants)


def test_honest_rounds_have_no_faults_in_their_records(tmp_path):
    setting = small_setting(faults={"replayed": 0.5}, cohort=8, rounds=2, engine="loop")
    execute(setting, out=tmp_path / "run")
    lines = [json.loads(text) for text in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert "faults" not in lines[0]
    assert len(lines[1]["faults"]["replayed"]) == 4


def test_a_round_of_nothing_but_bad_updates_does_not_end_a_run():
    setting = small_setting(faults={"nan": 1.0})
    progress, records = run_rounds(setting, methods.create("feddpc"), Loop(), 3)
    assert [r.diverged for r in records] == [None] * 3
    assert torch.equal(progress.w, setting.w0)


def test_a_resumed_run_remembers_what_attackers_and_the_screen_know(tmp_path):
    """Replays, the last global update and the norms are in the checkpoint: the numbers are those of one run."""
    how = {
        "faults": {"replayed": 0.4, "parallel": 0.2, "scaled": 0.1},
        "screen": {"norm": 3.0},
        "rule": "geometric_median",
        "engine": "stacked",
    }
    method = methods.create("feddpc")
    whole = execute(small_setting(**how), method=method)
    stop = Stop()

    def after_three(record):
        stop.wanted = record["round"] == 3

    first = execute(small_setting(**how), method=method, out=tmp_path / "run", on_round=after_three, stop=stop)
    assert first.status == "interrupted"
    rest = execute(small_setting(**how), method=method, out=tmp_path / "run", resume=True)
    assert torch.equal(rest.w, whole.w)
    strip = [{k: v for k, v in r.items() if k != "seconds"} for r in whole.records]
    assert [{k: v for k, v in r.items() if k != "seconds"} for r in rest.records] == strip
    assert any("replayed" in r.get("faults", {}) for r in rest.records)


def test_without_faults_nothing_changes():
    """A share of zero is no fault: bit for bit the plain run."""
    method = methods.create("scaffold")
    (a, left), (b, right) = (
        run_rounds(setting_for(method, faults=table), method, Loop(), 4) for table in ({}, {"sign_flip": 0.0})
    )
    assert torch.equal(a.w, b.w)
    same_memories(a, b)
    assert [r.participants for r in left] == [r.participants for r in right]


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"often": 0.5, "scale": 3.0}, "misbehaves"),
        ({"sign_flip": 0.5, "scale": 3.0}, "faults.scale is for faults.scaled"),
        ({"sign_flip": 0.04}, "faults.sign_flip = 0.04 of 10 clients"),
    ],
)
def test_faults_that_would_do_nothing_are_refused(table, said):
    with pytest.raises(BadInputError, match=said):
        faults.make(table, population=10, seed=0)
