"""Running items: order, resuming, sharing, merging, damage, divergence, failure."""

import dataclasses
import json
import shutil
import threading
import time

import pytest

from feddpc.errors import BadInputError
from feddpc.report import tables
from feddpc.runs import runner
from feddpc.runs.record import RunFolder
from feddpc.runs.stop import Stop
from feddpc.study import InProcess, Processes, RunSpec, StudyPlan, gather, run_study, scan, setup_cache, workers
from feddpc.study import runner as study_runner
from feddpc.study.folder import StudyFolder
from feddpc.study.overrides import Overrides
from feddpc.study.space import Space
from sweeping import SMALL, config, numbers, records, specs


@pytest.fixture
def whole(tmp_path):
    """All items, run without interruption."""
    return run_study(specs(), tmp_path / "whole")


@pytest.fixture
def runs(monkeypatch):
    """What is run, as it is run: method and rate."""
    seen = []
    plain = workers.execute

    def watched(setting, **how):
        seen.append((setting.config.method, setting.config.lr))
        return plain(setting, **how)

    monkeypatch.setattr(workers, "execute", watched)
    return seen


class StopAfter(Stop):
    """Wishes to stop after some rounds, whoever makes them."""

    def __init__(self, rounds):
        super().__init__()
        self.left = rounds

    def __call__(self, *_):
        self.left -= 1
        self.wanted = self.left <= 0


def stopped(wanted, folder, rounds, monkeypatch):
    """Run until some rounds are made, then stop: a wish is heard in the next round."""
    stop = StopAfter(rounds - 1)
    plain = workers.execute

    def watched(setting, on_round, **how):
        def both(record):
            on_round(record)
            stop()

        return plain(setting, on_round=both, **how)

    with monkeypatch.context() as patch:
        patch.setattr(workers, "execute", watched)
        return run_study(wanted, folder, stop=stop, checkpoint_seconds=0)


def test_outcomes_come_in_the_order_of_the_items(tmp_path, whole):
    outcomes = run_study(specs()[::-1], tmp_path / "whole")
    assert numbers(outcomes) == numbers(whole)[::-1]
    assert [o.spec.name for o in outcomes] == [i.name for i in specs()[::-1]]
    for outcome in whole:
        assert outcome.status == "done"
        rows = outcome.records()
        assert [row["round"] for row in rows] == [1, 2, 3, 4]
        assert outcome.best == max(row["test_accuracy"] for row in rows)
        assert outcome.validated == rows[outcome.validation_round - 1]["test_accuracy"]
        assert outcome.validation == max(row["validation_accuracy"] for row in rows)


def test_an_item_gives_what_an_ordinary_run_gives(tmp_path, whole):
    from feddpc.build import build

    item = specs()[3]
    alone = runner.execute(build(item.complete), out=tmp_path / "alone")
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in alone.records]
    assert rows == [{k: v for k, v in row.items() if k != "seconds"} for row in whole[3].records()]


def test_the_folder_of_an_item_is_a_run_folder_without_what_is_large(whole):
    names = {path.name for path in whole[0].path.iterdir()} - {".lock"}
    assert names == {"config.toml", "rounds.jsonl", "summary.json", "environment.json", "privacy.json"}


def test_what_is_there_is_not_run_again(tmp_path, whole, runs):
    again = run_study(specs(rates=(0.3, 0.1, 0.03)), tmp_path / "whole")
    assert sorted(runs) == [("fedavg", 0.03), ("feddpc", 0.03)]
    assert [numbers([o])[0] for o in again if o.spec.config.lr != 0.03] == numbers(whole)


def test_equal_items_are_run_once(tmp_path, runs):
    one, other = RunSpec(config(), "one"), RunSpec(config(engine="stacked", server_lr=0.1), "other")
    first, second = run_study([one, other], tmp_path)
    assert len(runs) == 1
    assert (first.spec.label, second.spec.label, first.key) == ("one", "other", second.key)


@pytest.mark.parametrize("rounds", [2, 3, 4, 6, 15])
def test_a_stopped_sweep_goes_on_where_it_was(tmp_path, whole, monkeypatch, rounds):
    cut = stopped(specs(), tmp_path / "cut", rounds, monkeypatch)
    done, rest = divmod(rounds, 4)
    assert sum(o.status == "done" for o in cut) == done
    assert sorted(o.rounds for o in cut if o.status == "missing")[-1] == rest
    if rest:
        assert f"{rest} of 4 rounds" in {o.message for o in cut}
    made = []
    again = run_study(specs(), tmp_path / "cut", on_progress=made.append)
    assert numbers(again) == numbers(whole)
    assert records(tmp_path / "cut") == records(tmp_path / "whole")
    assert made[-1].ended == made[-1].total == 4
    assert made[-1].rounds == made[-1].all_rounds == 16


def test_an_item_whose_folder_somebody_holds_is_waited_for(tmp_path, whole, monkeypatch):
    """Another process on the same folder has the lock of a run: the rest is run, then this one is looked at again."""
    monkeypatch.setattr(study_runner, "POLL_SECONDS", 0.05)
    stopped(specs(), tmp_path / "cut", 3, monkeypatch)
    (path,) = (tmp_path / "cut" / "items").iterdir()
    held = RunFolder(path)
    held._acquire()
    timer = threading.Timer(0.6, held.close)
    timer.start()
    began = time.monotonic()
    outcomes = run_study(specs(), tmp_path / "cut")
    assert time.monotonic() - began > 0.5
    assert numbers(outcomes) == numbers(whole)
    timer.join()


def test_folders_merge_by_copying_items(tmp_path, whole, runs):
    run_study(specs(methods=["fedavg"]), tmp_path / "a")
    run_study(specs(methods=["feddpc"]), tmp_path / "b")
    shutil.copytree(tmp_path / "b" / "items", tmp_path / "a" / "items", dirs_exist_ok=True)
    runs.clear()
    assert numbers(run_study(specs(), tmp_path / "a")) == numbers(whole)
    assert runs == []


def plan_of(rates=(0.3, 0.1)):
    overrides = Overrides({**SMALL, "model_options": dict(SMALL["model_options"])})
    return StudyPlan(["fedavg", "feddpc"], [0], overrides, Space.grid({"lr": list(rates)}))


def test_several_folders_are_one_sweep(tmp_path, whole):
    run_study(specs(methods=["fedavg"]), tmp_path / "a")
    run_study(specs(methods=["feddpc"], rates=[0.3]), tmp_path / "b")
    found = gather(plan_of(), [tmp_path / "a", tmp_path / "b"])
    assert [o.status for o in found] == ["done", "done", "done", "missing"]
    assert [n[0] for n in numbers(found)] == [n[0] for n in numbers(whole)]
    assert numbers(found)[:3] == numbers(whole)[:3]
    assert {o.key for o in scan([tmp_path / "a", tmp_path / "b"])} == {o.key for o in whole[:3]}


DAMAGE = {
    "no configuration": lambda p: (p / "config.toml").unlink(),
    "garbled configuration": lambda p: (p / "config.toml").write_text("lr = "),
    "another configuration": lambda p: (p / "config.toml").write_text(
        (p / "config.toml").read_text().replace("lr = 0.3", "lr = 0.4")
    ),
    "garbled summary": lambda p: (p / "summary.json").write_text('{"status": "fini'),
    "empty summary": lambda p: (p / "summary.json").write_text(""),
    "rounds lost": lambda p: (p / "rounds.jsonl").write_bytes(b"".join(_lines(p)[:2])),
    "a round torn": lambda p: (p / "rounds.jsonl").write_bytes((p / "rounds.jsonl").read_bytes()[:-20]),
    "a round garbled": lambda p: (p / "rounds.jsonl").write_bytes(b"\0" * 50 + b"".join(_lines(p))),
    "a round without accuracy": lambda p: (p / "rounds.jsonl").write_bytes(
        b"".join(_lines(p)).replace(b"test_accuracy", b"test_ackuracy")
    ),
    "no rounds": lambda p: (p / "rounds.jsonl").unlink(),
    "something foreign": lambda p: [(p / "thesis.txt").write_text("x"), (p / "config.toml").unlink()],
}


def _lines(path):
    return (path / "rounds.jsonl").read_bytes().splitlines(keepends=True)


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_item_is_found_set_aside_and_run_again(tmp_path, whole, runs, damage):
    folder = tmp_path / "whole"
    before = records(folder)
    damage(whole[0].path)
    spoiled = StudyFolder(folder).read(specs()[0])
    assert (spoiled.status, spoiled.damaged) == ("missing", True)
    assert spoiled.message.startswith("damaged: ")
    runs.clear()
    assert numbers(run_study(specs(), folder)) == numbers(whole)
    assert runs == [("fedavg", 0.3)]
    assert records(folder) == before
    assert (folder / "damaged" / f"{whole[0].key}-1").is_dir()
    assert len(tables.collect(folder)) == 4  # what was set aside is no run


@pytest.mark.parametrize("damage", ["flip", "index", "records"])
def test_a_half_item_that_cannot_be_continued_is_run_again(tmp_path, whole, monkeypatch, damage):
    stopped(specs(), tmp_path / "cut", 3, monkeypatch)
    (path,) = (tmp_path / "cut" / "items").iterdir()
    if damage == "flip":  # of both generations
        for state in (path / "checkpoint").glob("*.safetensors"):
            state.write_bytes(state.read_bytes()[:-1] + b"\xff")
    elif damage == "index":
        for note in (path / "checkpoint").glob("*.json"):
            note.write_text("{")
    else:
        (path / "rounds.jsonl").write_text("")
    assert numbers(run_study(specs(), tmp_path / "cut")) == numbers(whole)
    assert records(tmp_path / "cut") == records(tmp_path / "whole")
    assert len(list((tmp_path / "cut" / "damaged").iterdir())) == 1


def test_a_diverged_item_is_a_result(tmp_path, runs):
    bad = RunSpec(config(method="fedprox", hyper={"mu": 1e30}))
    good = RunSpec(config(method="fedprox"))
    one, other = run_study([bad, good], tmp_path)
    assert (one.status, one.ended, other.status) == ("diverged", True, "done")
    assert one.rounds < 4
    assert "round" in one.message
    runs.clear()
    assert [o.status for o in run_study([bad, good], tmp_path)] == ["diverged", "done"]
    assert runs == []


def test_an_item_that_fails_stops_nobody_and_is_tried_again(tmp_path, whole, monkeypatch):
    plain = workers.execute

    def poisoned(setting, **how):
        if (setting.config.method, setting.config.lr) == ("fedavg", 0.1):
            raise ZeroDivisionError("a hole in the data")
        return plain(setting, **how)

    with monkeypatch.context() as patch:
        patch.setattr(workers, "execute", poisoned)
        outcomes = run_study(specs(), tmp_path / "f")
    assert [o.status for o in outcomes] == ["done", "failed", "done", "done"]
    assert outcomes[1].message == "ZeroDivisionError: a hole in the data"
    note = json.loads((tmp_path / "f" / "failed" / f"{outcomes[1].key}.json").read_text())
    assert "poisoned" in note["trace"]
    assert note["config"]["lr"] == 0.1
    assert numbers(run_study(specs(), tmp_path / "f")) == numbers(whole)
    assert not list((tmp_path / "f" / "failed").iterdir())


def test_an_item_of_a_refused_engine_fails_with_the_reason(tmp_path):
    (outcome,) = run_study([RunSpec(config(engine="cuda"))], tmp_path)
    assert (outcome.status, "graphs need a GPU" in outcome.message) == ("failed", True)


def test_a_mistake_in_an_item_is_said_before_any_is_run(tmp_path, runs):
    with pytest.raises(BadInputError, match="mu = -1"):
        run_study([*specs(), RunSpec(config(method="fedprox", hyper={"mu": -1}))], tmp_path / "new")
    assert runs == []
    assert not (tmp_path / "new").exists()


def test_items_of_one_world_go_together(tmp_path, monkeypatch):
    sent = []
    plain = workers.run_batch

    def watched(given, **how):
        sent.append([(i.config.seed, i.config.lr) for i in given.specs])
        return plain(given, **how)

    monkeypatch.setattr("feddpc.study.workers.run_batch", watched)
    mixed = specs(methods=["fedavg"], rates=(0.3, 0.2, 0.1), seeds=(0, 1))
    outcomes = run_study(mixed, tmp_path, workers=InProcess(at_once=2))
    assert sent == [[(0, 0.3), (0, 0.2), (0, 0.1)], [(1, 0.3), (1, 0.2), (1, 0.1)]]
    assert [o.status for o in outcomes] == ["done"] * 6


def test_auto_is_one_engine_for_all_seeds(tmp_path):
    outcomes = run_study(specs(seeds=(0, 1), engine="auto"), tmp_path)
    engines = {
        line
        for o in outcomes
        for line in (o.path / "config.toml").read_text().splitlines()
        if line.startswith("engine")
    }
    assert len(engines) == 1
    assert engines != {'engine = "auto"'}


def test_results_are_derived_and_can_be_made_anew(tmp_path, whole):
    folder = tmp_path / "whole"
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert [row["key"] for row in rows] == [o.key for o in whole]
    assert [row["best_accuracy"] for row in rows] == [o.best for o in whole]
    assert rows[0]["settings"]["lr"] == 0.3
    assert rows[0]["path"] == f"items/{whole[0].key}"
    head, *lines = (folder / "results.csv").read_text().splitlines()
    assert head.endswith(",seconds_per_round,lr")
    assert len(lines) == 4
    before = (folder / "results.csv").read_bytes()
    (folder / "results.csv").write_text("lost")
    run_study(specs(), folder)
    assert (folder / "results.csv").read_bytes() == before


def test_a_worker_that_does_not_see_the_folder_sends_runs_home(tmp_path, whole, monkeypatch):
    monkeypatch.setattr(InProcess, "remote", True)
    monkeypatch.setattr(workers, "_study_id", lambda _: None)
    wanted = [*specs(), RunSpec(config(method="fedprox", hyper={"mu": 1e30}))]
    outcomes = run_study(wanted, tmp_path / "far")
    assert numbers(outcomes[:4]) == numbers(whole)
    assert outcomes[4].status == "diverged"
    assert records(tmp_path / "far").items() >= records(tmp_path / "whole").items()
    assert not list(workers._scratch().glob("items/*"))


def test_what_sweeps_share_is_built_once(tmp_path, monkeypatch):
    built = []
    plain = setup_cache.construct
    monkeypatch.setattr(setup_cache, "construct", lambda c, *how: built.append(c.seed) or plain(c, *how))
    setup_cache._cache.clear()
    run_study(specs(rates=(0.3, 0.2, 0.1), seeds=(0, 1)), tmp_path)
    assert built == [0, 1]


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_items_beside_each_other_have_the_numbers_of_items_alone(tmp_path, engine):
    some = specs(methods=("fedavg", "feddpc", "fedvarp"), engine=engine, threads=1)
    alone = run_study(some, tmp_path / "one", workers=InProcess())
    beside = run_study(some, tmp_path / "three", workers=InProcess(at_once=3))
    assert numbers(beside) == numbers(alone)
    assert all(outcome.status == "done" for outcome in beside)


def test_as_one_ends_the_next_begins(tmp_path, monkeypatch):
    """Two at a time, and nobody waits for the slowest."""
    plain, busy, most, ended, others = workers.execute, [], [], [], threading.Event()

    def watched(setting, **how):
        rate = setting.config.lr
        busy.append(rate)
        most.append(len(busy))
        assert rate != 0.4 or others.wait(60)
        outcome = plain(setting, **how)
        busy.remove(rate)
        ended.append(rate)
        if len(ended) == 3:
            others.set()
        return outcome

    monkeypatch.setattr(workers, "execute", watched)
    some = specs(rates=(0.4, 0.3, 0.2, 0.1, 0.09, 0.08, 0.07, 0.06), methods=("fedavg",))
    outcomes = run_study(some, tmp_path, workers=InProcess(at_once=2))
    assert [outcome.status for outcome in outcomes] == ["done"] * 8
    assert max(most) == 2
    assert ended.index(0.4) >= 3


def test_a_process_that_may_die_gets_few_runs():
    assert (InProcess(at_once=2).batch_size, InProcess().batch_size, Processes(2, at_once=2).batch_size) == (None, 1, 2)


def test_a_run_that_another_process_finishes_meanwhile_is_kept(tmp_path, whole, monkeypatch):
    """It ends between the look at its folder and the lock: there is nothing to continue, and nothing to set aside."""
    (spec,) = specs()[:1]
    plain, seen = StudyFolder.read, []

    def stale(folder, one):
        result = plain(folder, one)
        seen.append(one.key)
        return result if seen.count(spec.key) > 2 else dataclasses.replace(result, status="missing")

    monkeypatch.setattr(StudyFolder, "read", stale)
    (result,) = run_study([spec], tmp_path / "whole")
    assert numbers([result]) == numbers(whole)[:1]
    assert not (tmp_path / "whole" / "damaged").exists()


def test_progress_is_told_while_a_batch_is_out(tmp_path):
    seen = []
    some = specs(rates=(0.4, 0.3, 0.2, 0.1), methods=("fedavg", "feddpc"), rounds=15)
    run_study(some, tmp_path, workers=InProcess(at_once=2), on_progress=lambda p: seen.append((p.ended, p.running)))
    assert seen[-1][0] == 8
    assert max(running for _, running in seen) >= 1
    assert max(running for _, running in seen) <= 3  # one may end while others are counted


MINE = """
from feddpc.methods import FedAvg

class Mine(FedAvg):
    name = "mine"
"""


def test_a_changed_file_of_ones_own_is_run_again_and_named(tmp_path, runs):
    own = tmp_path / "mine.py"
    own.write_text(MINE)
    some = {"methods": (f"{own}:Mine", "fedavg"), "rates": (0.1,)}
    run_study(specs(**some), tmp_path / "s")
    run_study(specs(**some), tmp_path / "s")
    assert [name for name, _ in runs] == [f"{own}:Mine", "fedavg"]
    own.write_text(MINE + "    # other\n")
    with pytest.warns(UserWarning, match=r"mine\.py changed"):
        again = run_study(specs(**some), tmp_path / "s")
    assert [name for name, _ in runs] == [f"{own}:Mine", "fedavg", f"{own}:Mine"]
    assert [result.status for result in again] == ["done", "done"]
    run_study(specs(**some), tmp_path / "s")  # says nothing more
