"""feddpc.compare: the same numbers as simulate and the command line, with parts of one's own and without a folder."""

import dataclasses
import json
import signal
import threading
from typing import ClassVar

import numpy as np
import pytest
from torch import nn
from typer.testing import CliRunner

import feddpc
from feddpc.cli import app
from feddpc.errors import BadInputError, RunFolderError
from feddpc.methods.fedavg import FedAvg
from feddpc.methods.feddpc import FedDPC
from feddpc.report import tables
from support import blobs, tiny_net, uneven
from test_callbacks import StopAt, same, without_seconds

NAMED = {"clients": 20, "cohort": 3, "rounds": 3, "engine": "loop", "threads": 1}


def own(**more):
    values = {"data": blobs(), "model": tiny_net(), "partition": uneven(90), "cohort": 3, "rounds": 3}
    return values | {"batch_size": 4, "engine": "loop"} | more


def equal(one, other):
    return without_seconds(one.records) == without_seconds(other.records) and same(one.state_dict, other.state_dict)


def test_numbers_are_those_of_simulate():
    comparison = feddpc.compare(["feddpc", "fedavg", "fedprox"], [0, 3], hyper={"feddpc": {"lam": 0.5}}, **NAMED)
    assert list(comparison.results) == [(m, s) for s in (0, 3) for m in ("feddpc", "fedavg", "fedprox")]
    for (method, seed), result in comparison.results.items():
        hyper = {"lam": 0.5} if method == "feddpc" else {}
        alone = feddpc.simulate(method=method, seed=seed, hyper=hyper, **NAMED)
        assert equal(result, alone)
        assert result.config == alone.config


def test_numbers_with_parts_of_ones_own_are_those_of_simulate():
    methods = [FedDPC(lam=0.5), FedDPC, "fedavg"]
    comparison = feddpc.compare(methods, [0, 1], **own())
    assert list(comparison.results)[:3] == [("feddpc lam=0.5", 0), ("feddpc lam=1", 0), ("fedavg", 0)]
    for method, result in zip([*methods, *methods], comparison.results.values(), strict=True):
        assert equal(result, feddpc.simulate(method=method, seed=result.config.seed, **own()))
        assert np.array_equal(result.partition.order, uneven(90).order)


def test_a_module_of_ones_own_with_named_data():
    more = NAMED | {"model": nn.Sequential(nn.Flatten(), nn.Linear(64, 10))}
    comparison = feddpc.compare(["fedavg"], [0, 1], **more)
    for seed in (0, 1):
        assert equal(comparison.results["fedavg", seed], feddpc.simulate(method="fedavg", seed=seed, **more))


def test_numbers_are_those_of_the_command_line(tmp_path):
    words = "compare --methods feddpc,fedavg --seeds 0,1 --clients 20 --cohort 3 --rounds 3 --engine loop --threads 1"
    done = CliRunner().invoke(app, [*words.split(), "--set", "lam=0.5", "--quiet", "--out", str(tmp_path / "cli")])
    assert done.exit_code == 0, done.output
    comparison = feddpc.compare(["feddpc", "fedavg"], [0, 1], hyper={"lam": 0.5}, out=tmp_path / "python", **NAMED)
    stored = {run.folder.name: run for run in tables.collect(tmp_path / "cli")}
    mine = {run.folder.name: run for run in tables.collect(tmp_path / "python")}
    assert list(stored) == list(mine) == ["feddpc-seed0", "fedavg-seed0", "feddpc-seed1", "fedavg-seed1"]
    for name, run in stored.items():
        assert without_seconds(run.records) == without_seconds(mine[name].records)
        assert run.config == mine[name].config
        model = "model.safetensors"
        assert (tmp_path / "cli" / name / model).read_bytes() == (tmp_path / "python" / name / model).read_bytes()
    plans = [json.loads((tmp_path / folder / "compare.json").read_text()) for folder in ("cli", "python")]
    assert [plans[0][key] for key in ("runs", "methods", "seeds", "set")] == [
        plans[1][key] for key in ("runs", "methods", "seeds", "set")
    ]
    words = "compare --resume --rounds 4 --quiet --out"
    done = CliRunner().invoke(app, [*words.split(), str(tmp_path / "python")])
    assert done.exit_code == 0, done.output
    assert {len(run.records) for run in tables.collect(tmp_path / "python")} == {4}
    assert comparison.folder == tmp_path / "python"


def test_methods_share_what_the_server_keeps():
    """The most demanding method decides how many samples the server keeps, for all of them."""
    comparison = feddpc.compare(["fedavg", "datasharing"], [0], **NAMED)
    shares = {result.config.reserve for result in comparison.results.values()}
    assert len(shares) == 1
    assert shares != {0.0}


@dataclasses.dataclass(frozen=True)
class Mine(FedAvg):
    """A method without a registered name."""

    name: ClassVar[str] = "mine"
    factor: float = 1.0


def test_own_methods_in_a_folder_can_be_resumed(tmp_path):
    whole = feddpc.compare([Mine, Mine(factor=2.0), "feddpc"], [0, 1], hyper={"lam": 0.5}, **own(rounds=4))
    out = tmp_path / "c"
    short = feddpc.compare(
        [Mine, Mine(factor=2.0), "feddpc"], [0, 1], hyper={"lam": 0.5}, out=out, callbacks=[StopAt(2)], **own(rounds=4)
    )
    assert {result.status for result in short.results.values()} == {"stopped"}
    assert {len(result.records) for result in short.results.values()} == {2}
    with pytest.raises(RunFolderError, match="resume"):
        feddpc.compare([Mine], out=out, **own())
    again = feddpc.compare(
        [Mine, Mine(factor=2.0), "feddpc"], [0, 1], hyper={"lam": 0.5}, out=out, resume=True, **own(rounds=4)
    )
    assert list(again.results) == list(whole.results)
    assert all(equal(again.results[key], whole.results[key]) for key in whole.results)


def test_a_frame_has_a_row_per_method_seed_and_round():
    comparison = feddpc.compare(["feddpc", "fedavg"], [0, 1], validation=0.1, **NAMED)
    frame = comparison.frame()
    assert len(frame) == 2 * 2 * 3
    assert not frame.duplicated(["method", "seed", "round"]).any()
    assert list(frame.columns[:3]) == ["method", "seed", "round"]
    recorded = {key for result in comparison.results.values() for record in result.records for key in record}
    assert set(frame.columns) == {"method", "seed", *recorded}
    for (method, seed), result in comparison.results.items():
        rows = frame[(frame.method == method) & (frame.seed == seed)]
        assert np.array_equal(rows["test_accuracy"], result.test_accuracy)
        assert np.array_equal(rows["mean_scale"], result.curve("mean_scale"), equal_nan=True)
        assert result.frame().equals(rows[list(result.frame().columns)].reset_index(drop=True))
    few = comparison.frame(["validation_loss"])
    assert list(few.columns) == ["method", "seed", "round", "validation_loss"]
    assert frame["test_loss"].dtype == np.float64
    for one in (comparison, result):
        with pytest.raises(BadInputError, match="test_los"):
            one.frame(["test_los"])
        with pytest.raises(BadInputError, match="columns"):
            one.frame("test_loss")


def test_a_frame_without_pandas_names_the_remedy(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(BadInputError, match="pip install 'pandas"):
        feddpc.simulate(**own()).frame()


def test_plot_report_and_table(tmp_path):
    comparison = feddpc.compare(["feddpc", Mine], [0, 1], **own())
    comparison.plot(tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
    page = comparison.report(tmp_path / "page.html")
    text = page.read_text()
    for name in ("feddpc", "mine"):
        assert name in text
        assert name in comparison.table()
        assert f"<td>{name}</td>" in comparison._repr_html_() or f"<b>{name}</b>" in comparison._repr_html_()
        assert name in repr(comparison)
    best = max(100 * np.mean([comparison.results[m, s].best_accuracy for s in (0, 1)]) for m in ("feddpc", "mine"))
    for shown in (comparison.table(), comparison._repr_html_(), repr(comparison)):
        assert f"{best:.2f}" in shown
    assert len(repr(comparison)) < 300
    assert "\n" not in repr(comparison)
    assert comparison.report(tmp_path) == tmp_path / "report.html"


def test_a_comparison_of_nothing_can_be_shown():
    empty = feddpc.Comparison({}, 4, None)
    assert "0 of 4 runs" in repr(empty)
    assert "method" in empty.table()
    assert "<table>" in empty._repr_html_()
    assert len(empty.frame()) == 0
    with pytest.raises(BadInputError, match="no runs"):
        empty.plot()


def test_nothing_is_written_without_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    feddpc.compare(["fedavg", "feddpc"], [0], **own()).table()
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_returns_what_there_is():
    class Interrupt(feddpc.Callback):
        def on_round_end(self, run):
            if (run.config.method, run.round) == ("fedavg", 2):
                signal.raise_signal(signal.SIGINT)

    assert threading.current_thread() is threading.main_thread()
    comparison = feddpc.compare(["feddpc", "fedavg"], [0, 1], callbacks=[Interrupt()], **own())
    assert list(comparison.results) == [("feddpc", 0), ("fedavg", 0)]
    assert [result.status for result in comparison.results.values()] == ["finished", "interrupted"]
    assert len(comparison.frame()) == 3 + 2
    assert "2 of 4 runs" in repr(comparison)


def test_callbacks_follow_every_run():
    class Seeds(feddpc.Callback):
        def __init__(self):
            self.seen = []

        def on_run_end(self, run):
            self.seen.append((run.config.method, run.config.seed, run.round))

    seeds = Seeds()
    feddpc.compare(["fedavg", "feddpc"], [4, 5], callbacks=[seeds, StopAt(2)], **own())
    assert seeds.seen == [(m, s, 2) for s in (4, 5) for m in ("fedavg", "feddpc")]


def test_progress_is_shown_on_standard_error(capfd):
    feddpc.simulate(progress=True, **own())
    feddpc.compare(["fedavg"], [7], progress=True, **own())
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "feddpc seed 0" in shown.err
    assert "fedavg seed 7" in shown.err
    assert "3/3" in shown.err


def test_a_result_knows_its_partition_and_its_model():
    result = feddpc.simulate(**own())
    assert np.array_equal(result.partition.order, uneven(90).order)
    assert result.model is result.model
    assert same(result.model.state_dict(), result.state_dict)
    assert not result.model.training
    assert set(result.metrics) == {"test_accuracy", "test_loss"}


class Nameless(FedAvg):
    """Has the name of the method that it changes."""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": []}, "methods"),
        ({"methods": "feddpc"}, "methods"),
        ({"methods": 3}, "methods"),
        ({"methods": [3]}, "method is of type int"),
        ({"methods": ["fedsgd"]}, "unknown method 'fedsgd'"),
        ({"methods": ["fedavg", "fedavg"]}, "methods"),
        ({"methods": ["fedavg", Nameless]}, "fedavg"),
        ({"methods": [FedDPC(), FedDPC()]}, "feddpc"),
        ({"seeds": []}, "seeds"),
        ({"seeds": 3}, "seeds = 3"),
        ({"seeds": [0.5]}, "seeds = 0.5"),
        ({"seeds": [1, 1]}, "seeds"),
        ({"seed": 1}, "seeds"),
        ({"method": "feddpc"}, "methods"),
        ({"hyper": {"lamda": 1.0}}, "lamda"),
        ({"hyper": {"fedcm": {"alpha": 1.0}}}, "fedcm"),
        ({"hyper": 3}, "hyper"),
        ({"rouns": 3}, "did you mean 'rounds'"),
        ({"data": 3}, "data is of type int"),
        ({"data": None}, "data is None"),
        ({"resume": True}, "out"),
        ({"track": "tensorboard"}, "out"),
        ({"cohort": 99}, "cohort = 99"),
    ],
)
def test_mistakes_are_explained(change, message):
    with pytest.raises(BadInputError, match=message):
        feddpc.compare(**({"methods": ["feddpc", "fedavg"]} | own() | change))


def test_public_names():
    assert {"compare", "Comparison", "Callback", "EarlyStopping", "Partition", "Config"} <= set(feddpc.__all__)
    assert set(feddpc.__all__) <= set(dir(feddpc))
    assert feddpc.__all__ == sorted(feddpc.__all__)
    for name in feddpc.__all__:
        assert getattr(feddpc, name).__doc__, name
