"""Private runs: engines, empty rounds, records, resuming, and every configuration that would break the promise."""

import json
import math

import pytest
import torch

import feddpc
from feddpc import methods, sampling
from feddpc.cli import main
from feddpc.engines.cuda.captured import Cuda
from feddpc.engines.loop import Loop
from feddpc.engines.stacked import Stacked
from feddpc.engines.threads import Threads
from feddpc.errors import BadInputError, RunFolderError
from feddpc.privacy import epsilon
from feddpc.round.round import run_round
from feddpc.runs.record import load_config, read_records
from feddpc.runs.runner import execute
from feddpc.study.compare import Overrides, compare
from support import VARIANTS, run_rounds, small_setting

TERMS = {"clip": 0.5, "noise": 1.0}
METHODS = pytest.mark.parametrize("name", ["fedavg", "feddpc", "feddpc client", "feddpc streaming"])


def private(**values):
    return small_setting(**{"participation": "poisson", "privacy": TERMS, **values})


@METHODS
@pytest.mark.parametrize("engine", [Stacked(), Threads(), Cuda(anywhere=True)], ids=lambda e: e.name)
def test_engines_agree(name, engine):
    setting, method = private(augment=True, lr_decay=0.9, dropout=0.3), VARIANTS[name]
    a, left = run_rounds(setting, method, Loop(), 6)
    b, right = run_rounds(setting, method, engine, 6)
    torch.testing.assert_close(b.w, a.w, rtol=0, atol=1e-10)
    for one, other in zip(left, right, strict=True):
        assert one.notes == pytest.approx(other.notes, abs=1e-8, nan_ok=True)
    assert a.meter == b.meter
    assert getattr(engine, "captures", 0) == 0  # a graph would skip the noise


def test_feddpc_forms_agree():
    ends = [run_rounds(private(), VARIANTS[n], Loop(), 6)[0].w for n in ("feddpc", "feddpc client", "feddpc streaming")]
    for other in ends[1:]:
        torch.testing.assert_close(other, ends[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["fedavg", "feddpc"])
def test_a_round_with_nobody_is_noise_and_not_silence(name):
    setting, method = private(cohort=1), methods.create(name)
    draws = [setting.draw(t) for t in range(1, 20)]
    empty = next(t for t, draw in enumerate(draws, start=1) if not len(draw.answered))
    progress, _ = run_rounds(setting, method, Loop(), empty - 1)
    before = progress.w.clone()
    record = run_round(setting, method, Loop(), progress)
    moved = (progress.w - before).norm() / setting.config.server_lr * setting.config.lr
    assert record.participants == []
    assert record.notes["epsilon"] == epsilon(1.0, 1 / 8, empty, 1e-5)
    assert float(moved) == pytest.approx(0.5 * math.sqrt(before.numel()), rel=0.15)
    if name == "feddpc":
        assert progress.server["delta"].norm() > 0


def test_clients_with_non_finite_updates_add_nothing_but_the_noise_stays():
    setting, method = private(), methods.create("feddpc")
    setting.task.x = torch.full_like(setting.task.x.to(torch.float64), math.nan)
    progress, records = run_rounds(setting, method, Loop(), 1)
    assert records[0].rejected
    assert bool(progress.w.isfinite().all())
    assert not torch.equal(progress.w, setting.w0)


def test_records_tell_the_budget_round_by_round():
    result = feddpc.simulate(
        rounds=12,
        clients=50,
        cohort=10,
        engine="loop",
        model="mlp",
        participation="poisson",
        privacy={"clip": 1, "epsilon": 8, "delta": 1e-4},
    )
    terms = result.config.privacy
    assert (terms["clip"], terms["epsilon"], terms["delta"]) == (1.0, 8.0, 1e-4)
    spent = [epsilon(terms["noise"], 0.2, t, 1e-4) for t in range(1, 13)]
    assert result.curve("epsilon").tolist() == spent == sorted(spent)
    assert 0.99 * 8 <= result.summary["epsilon"] == spent[-1] <= 8


def test_a_plain_run_has_no_budget():
    result = feddpc.simulate(rounds=1, clients=20, cohort=4, engine="loop", model="mlp")
    assert "epsilon" not in result.records[0]
    assert "epsilon" not in result.summary
    assert result.config.privacy == {}


def lines(folder):
    return [{k: v for k, v in r.items() if k != "seconds"} for r in read_records(folder / "rounds.jsonl")]


@pytest.mark.parametrize("terms", [TERMS, {"clip": 0.5, "epsilon": 20.0}], ids=["noise", "epsilon"])
def test_a_resumed_run_goes_on_with_the_same_noise_and_budget(tmp_path, terms):
    class KilledError(Exception):
        pass

    def kill(line):
        if line["round"] == 3:
            raise KilledError

    def go(out, **more):
        method = methods.create("feddpc")
        return execute(private(privacy=terms, engine="loop"), method=method, out=out, checkpoint_seconds=0, **more)

    whole = go(tmp_path / "whole")
    with pytest.raises(KilledError):
        go(tmp_path / "parts", on_round=kill)
    parts = go(tmp_path / "parts", resume=True)
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")
    assert torch.equal(parts.w, whole.w)
    assert (
        "differentially private at client level"
        in json.loads((tmp_path / "parts" / "privacy.json").read_text())["note"]
    )


def longer(tmp_path, terms, **changes):
    method = methods.create("fedavg")
    execute(private(privacy=terms, rounds=3, engine="loop"), method=method, out=tmp_path / "r")
    stored = load_config(tmp_path / "r").privacy
    values = {"privacy": stored, "rounds": 6, "engine": "loop", **changes}
    return execute(
        small_setting(**{"participation": "poisson", **values}), method=method, out=tmp_path / "r", resume=True
    )


def test_more_rounds_spend_more_where_only_the_noise_was_asked_for(tmp_path):
    outcome = longer(tmp_path, TERMS)
    assert outcome.summary["epsilon"] == epsilon(1.0, 0.5, 6, 1e-5)
    whole = execute(private(rounds=6, engine="loop"), method=methods.create("fedavg"))
    assert torch.equal(outcome.w, whole.w)


def test_more_rounds_are_refused_where_they_would_spend_more_than_was_asked_for(tmp_path):
    with pytest.raises(BadInputError, match=r"spends epsilon .* in 6 rounds, more than privacy\.epsilon = 20"):
        longer(tmp_path, {"clip": 0.5, "epsilon": 20.0})


@pytest.mark.parametrize("now", [{}, {"clip": 0.5, "noise": 0.6}, {"clip": 5.0, "noise": 1.0}])
def test_a_run_cannot_be_resumed_with_another_mechanism(tmp_path, now):
    with pytest.raises(RunFolderError, match=r"another configuration .*privacy"):
        longer(tmp_path, TERMS, privacy=now)


REFUSED = {
    "uniform": ({"participation": "uniform"}, "participation = 'uniform' cannot be run with privacy.*'poisson'"),
    "bernoulli": ({"participation": "bernoulli"}, "participation = 'bernoulli' cannot .*rounds that may be empty"),
    "weighted": ({"participation": "weighted"}, "participation = 'weighted' cannot"),
    "samples": ({"weighting": "samples"}, "weighting = 'samples' cannot be run with privacy"),
    "channel": ({"scaling": "channel"}, "scaling = 'channel' cannot be run with privacy"),
    "no clip": ({"privacy": {"noise": 1.0}}, "privacy needs privacy.clip"),
    "no noise": ({"privacy": {"clip": 1.0}}, r"one of privacy\.epsilon .* and privacy\.noise"),
    "hardly any": ({"privacy": {"clip": 1.0, "noise": 0.01}}, r"privacy\.noise = 0.01: must be at least 0.05"),
    "zero noise": ({"privacy": {"clip": 1.0, "noise": 0}}, r"privacy\.noise = 0.0: must be a finite number above 0"),
    "negative clip": ({"privacy": {"clip": -1.0, "noise": 1.0}}, r"privacy\.clip = -1.0"),
    "a word": ({"privacy": {"clip": "big", "noise": 1.0}}, r"privacy\.clip = 'big' is a str, expected float"),
    "misspelt": ({"privacy": {"clip": 1.0, "noize": 1.0}}, "unknown option of privacy 'noize': did you mean 'noise'"),
    "delta": ({"privacy": {**TERMS, "delta": 0.2}}, r"privacy\.delta = 0.2 with 8 clients: must be below 1/8"),
    "too much": ({"privacy": {"clip": 1.0, "epsilon": 1e4}}, r"privacy\.epsilon = 10000: must be above 0"),
    "too little noise": ({"privacy": {"clip": 1.0, "noise": 1.0, "epsilon": 1.0}}, "spends epsilon"),
    "no table": ({"privacy": 8.0}, "privacy = 8.0 must be a table"),
}


@pytest.mark.parametrize(("values", "message"), REFUSED.values(), ids=REFUSED)
def test_what_would_break_the_promise_is_refused(values, message):
    with pytest.raises(BadInputError, match=message):
        private(**values)


def test_a_comparison_refuses_a_method_before_any_run(tmp_path):
    wishes = Overrides({"participation": "poisson", "privacy": TERMS, "clients": 20, "cohort": 4})
    with pytest.raises(BadInputError, match="scaffold cannot be run with privacy"):
        compare(wishes, ["fedavg", "scaffold"], [0], tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_a_run_refuses_a_method_before_it_makes_a_folder(tmp_path):
    with pytest.raises(BadInputError, match="fedprox cannot be run with privacy"):
        execute(private(), method=methods.create("fedprox"), out=tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_the_command_line_takes_flags_and_a_table(tmp_path, monkeypatch, capsys):
    quick = ["feddpc", "run", "--rounds", "3", "--clients", "20", "--cohort", "4", "--engine", "loop", "--model", "mlp"]
    file = tmp_path / "c.toml"
    file.write_text('participation = "poisson"\n[privacy]\nclip = 0.5\nepsilon = 30\n')
    flags = ["--set", "privacy.clip=0.5", "--set", "privacy.epsilon=30", "--participation", "poisson"]

    def run(*more):
        monkeypatch.setattr("sys.argv", [*quick, *more])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code

    assert run(*flags, "--out", str(tmp_path / "flags")) == 0
    assert run("--config", str(file), "--out", str(tmp_path / "file"), "-q") == 0
    assert "epsilon 30.00" in " ".join(capsys.readouterr().out.split())
    assert lines(tmp_path / "flags") == lines(tmp_path / "file")
    assert 29.7 < lines(tmp_path / "flags")[-1]["epsilon"] <= 30
    assert run(*flags[:4], "--out", str(tmp_path / "none")) == 2
    assert "use participation = 'poisson'" in capsys.readouterr().err


def test_poisson_participation_is_independent_coins():
    s = sampling.make("poisson", population=40, cohort=2, seed=0)
    came = [len(s.draw(t).invited) for t in range(1, 4001)]
    empty = (1 - 2 / 40) ** 40
    assert sum(c == 0 for c in came) / 4000 == pytest.approx(empty, abs=5 * math.sqrt(empty * (1 - empty) / 4000))
    assert sum(came) / 4000 == pytest.approx(2, abs=5 * math.sqrt(2 * 0.95 / 4000))


def test_the_mechanism_knows_the_sampling_rate():
    assert private().policies.privacy.sampling == 4 / 8
