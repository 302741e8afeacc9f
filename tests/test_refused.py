"""What cannot be used is refused where it is given, with an error that names it and the remedy."""

import functools

import numpy as np
import pytest
from torch import nn
from typer.testing import CliRunner

import feddpc
from feddpc.api import REGISTRIES
from feddpc.cli import app
from feddpc.config import Config
from feddpc.engines.loop import Loop
from feddpc.errors import BadInputError
from feddpc.tasks.kinds import Classification

SHORT = {"rounds": 1, "clients": 5, "cohort": 2, "engine": "loop", "data": "digits", "model": "mlp"}
X = np.random.default_rng(0).normal(size=(60, 2)).astype(np.float32)


@pytest.fixture
def register():
    """``feddpc.register``, undone at the end."""
    kept = {kind: dict(known.entries) for kind, known in REGISTRIES.items()}
    yield feddpc.register
    for kind, entries in kept.items():
        REGISTRIES[kind].entries.clear()
        REGISTRIES[kind].entries.update(entries)


@pytest.mark.parametrize("metrics", ["accuracy,mm", ["accuracy", "mm"]])
def test_a_registered_metric_keeps_its_name_and_direction(metrics, register):
    def f(outputs, targets):
        return float(outputs.mean())

    f.direction = "min"
    register("metric", "mm", f)
    result = feddpc.simulate(metrics=metrics, **SHORT)
    assert list(result.metrics) == ["test_accuracy", "test_mm", "test_loss"]
    assert result.stored.metrics[1].direction == "min"


@pytest.mark.parametrize(
    ("kind", "thing", "wanted"),
    [
        ("task", nn.Linear, "NetworkTask"),
        ("task", lambda: 3, "NetworkTask"),
        ("engine", nn.Linear, "Engine"),
        ("engine", lambda: 3, "Engine"),
        ("sampler", lambda: 3, "pool"),
        ("sampler", nn.Linear, "pool"),
        ("rule", lambda rows: rows, "options"),
        ("rule", nn.Linear, "options"),
        ("transform", lambda x: x, "inputs"),
        ("transform", nn.ReLU, "inputs"),
        ("loss", lambda outputs: outputs, "targets"),
        ("loss", nn.CrossEntropyLoss, "targets"),
        ("metric", lambda outputs: 0.0, "targets"),
    ],
)
def test_things_of_the_wrong_kind_are_not_registered(kind, thing, wanted, register):
    with pytest.raises(BadInputError, match=rf"^{kind} .*{wanted}"):
        register(kind, "mine", thing)
    assert "mine" not in REGISTRIES[kind].entries


def test_things_of_the_right_kind_are_registered_and_used(register):
    def first(pool, *, shift=0):
        return lambda round: np.arange(pool.cohort) + shift

    class Mine(Loop):
        pass

    register("sampler", "first", first)
    register("transform", "flipped", lambda x, uniforms: -x)
    register("loss", "smooth", nn.CrossEntropyLoss(reduction="none", label_smoothing=0.1))
    register("task", "mine", type("Own", (Classification,), {}))
    register("engine", "mine", Mine)
    register("rule", "mine", REGISTRIES["rule"].entries["median"])
    result = feddpc.simulate(
        **SHORT | {"engine": "mine"},
        participation="first",
        transform="flipped",
        loss="smooth",
        task="mine",
        rule="mine",
    )
    assert (result.status, result.config.engine, Loop.name) == ("finished", "mine", "loop")


def test_samplers_and_rules_return_functions(register):
    register("sampler", "mine", lambda pool: 3)
    register("rule", "mine", lambda: 3)
    for key, kind in (("participation", "sampler"), ("rule", "rule")):
        with pytest.raises(BadInputError, match=f"^{kind} 'mine' returns int"):
            feddpc.simulate(**SHORT, **{key: "mine"})


def test_a_task_is_given_as_its_class():
    instance = Classification.__new__(Classification)
    with pytest.raises(BadInputError, match=r"^task is an instance of Classification: give the class"):
        feddpc.simulate(task=instance, **SHORT)
    for wrong in (nn.Linear, 3, lambda: 3):
        with pytest.raises(BadInputError, match=r"^task .*NetworkTask"):
            feddpc.simulate(task=wrong, **SHORT)


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (nn.CrossEntropyLoss(), "CrossEntropyLoss"),
        (functools.partial(nn.functional.cross_entropy, label_smoothing=0.1), "cross_entropy"),
    ],
)
def test_a_loss_that_returns_a_mean_is_called_by_its_name(loss, name):
    with pytest.raises(BadInputError, match=f"^loss {name} must"):
        feddpc.simulate(loss=loss, **SHORT)


def test_curves_have_the_names_of_what_is_recorded():
    result = feddpc.simulate(**SHORT)
    assert result.test_accuracy.shape == result.curve("mean_scale").shape == (1,)
    for wrong in ("meanscale", "participants"):
        with pytest.raises(BadInputError, match=f"^unknown curve '{wrong}'"):
            result.curve(wrong)
    with pytest.raises(BadInputError, match="'mean_scale'"):
        result.curve("meanscale")


def test_a_regression_has_no_accuracy():
    y = X.sum(1)
    result = feddpc.simulate(**SHORT | {"data": (X, y, X, y)})
    with pytest.raises(BadInputError, match=r"^test_accuracy: .*test_mse"):
        _ = result.test_accuracy
    assert len(result.test_loss) == 1


@pytest.mark.parametrize("engine", ["loop", "stacked", "threads", "auto"])
def test_nothing_is_compiled_in_vain(engine):
    with pytest.raises(BadInputError, match=r"^compile = true"):
        feddpc.simulate(**SHORT | {"engine": engine}, compile=True, device="cpu")


@pytest.mark.parametrize("compile", ["auto", False])
def test_without_a_compiler_every_engine_runs(compile):
    assert feddpc.simulate(**SHORT, compile=compile).status == "finished"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("class Other:\n    pass\n", "defines no 'nothere' (it defines Other)"),
        ("import os\n", "nothing"),
        ("class nothere: pass\n", "'nothere' is none"),
    ],
)
def test_what_a_file_defines_is_listed(content, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(content)
    done = CliRunner().invoke(app, ["run", "--rounds", "1", "--loss", "mine.py:nothere"])
    assert isinstance(done.exception, BadInputError)
    assert said in str(done.exception)


def test_names_of_other_libraries_are_understood():
    with pytest.raises(BadInputError, match=r"^unknown key 'learning_rate': did you mean 'lr'\?"):
        Config.read({"learning_rate": 0.1})
    done = CliRunner().invoke(app, ["run", "--set", "learning_rate=0.1"])
    assert isinstance(done.exception, BadInputError)
    assert "did you mean 'lr'" in str(done.exception)
