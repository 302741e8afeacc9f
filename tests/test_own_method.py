"""The documented example of a method of one's own: short, exact, and at home in every engine and command."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import feddpc
from feddpc import methods
from feddpc.engines.loop import Loop
from feddpc.engines.stacked import Stacked
from feddpc.errors import BadInputError
from feddpc.methods.base import Method, Step
from feddpc.quadratic import trajectory
from support import Q4, run_rounds, small_setting

FILE = Path(__file__).parent.parent / "examples" / "own_method.py"
SPEC = f"{FILE}:ShortSteps"


def test_it_is_as_short_as_promised():
    text = FILE.read_text()
    body = text[text.index("@dataclass") : text.index("if __name__")]
    assert len(body.strip().splitlines()) <= 30


@pytest.mark.parametrize("engine", [Loop(), Stacked()], ids=["loop", "stacked"])
def test_closed_form(engine):
    """On one quadratic |D_t| = b |e_t|; a step is cut to ``times`` the mean of b |e_1| to b |e_t|."""
    problem = {**Q4, "curvature": [[2.0]], "centre": [[0.0]], "w0": [1.0], "schedule": [[0]] * 6}
    path = trajectory(methods.create(SPEC, times=0.5), **problem, engine=engine)[:, 0]
    b = (1 - (1 - 0.1 * 2.0) ** 3) / 0.1
    want = [1.0]
    for _ in range(6):
        want.append(want[-1] - 0.1 * min(b * want[-1], 0.5 * b * np.mean(want)))
    np.testing.assert_allclose(path, want, atol=1e-14)


def test_the_engines_agree():
    method = methods.create(SPEC)
    a, b = (run_rounds(small_setting(), method, engine, 4)[0].w for engine in (Loop(), Stacked()))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_it_runs_as_a_program():
    done = subprocess.run([sys.executable, FILE], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.count("best accuracy") == 2


def test_a_file_must_say_which_class(tmp_path):
    two = tmp_path / "two.py"
    two.write_text("from feddpc.methods import Method\nclass A(Method): pass\nclass B(Method): pass\n")
    with pytest.raises(BadInputError, match="defines 2 "):
        methods.get(str(two))
    assert methods.get(f"{two}:B").name == "b"
    with pytest.raises(BadInputError, match="unknown method in"):
        methods.get(f"{two}:C")
    with pytest.raises(BadInputError, match="there is no file"):
        methods.get("absent.py:A")


def test_a_file_with_postponed_annotations(tmp_path):
    file = tmp_path / "late.py"
    file.write_text("from __future__ import annotations\n" + FILE.read_text())
    assert methods.create(f"{file}:ShortSteps", times=0.25).times == 0.25
    broken = tmp_path / "broken.py"
    broken.write_text("import nonsense_that_is_not_there")
    with pytest.raises(BadInputError, match="cannot be loaded: ModuleNotFoundError"):
        methods.get(str(broken))


def test_registering_makes_it_known():
    spec = importlib.util.spec_from_file_location("own_method", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        methods.register(module.ShortSteps)
        assert "shortsteps" in methods.names()
        assert methods.create("shortsteps", times=0.1).times == 0.1
    finally:
        methods.METHODS.entries.pop("shortsteps")


class TestWhatAServerRuleReturns:
    """A mistake in a method of one's own is named, and never trains something else in silence."""

    @pytest.mark.parametrize("engine", ["loop", "stacked"])
    @pytest.mark.parametrize(
        ("made", "words"),
        [
            (lambda mean: None, "NoneType"),
            (lambda mean: Step(mean.mean(), rate=1.0), "shape"),
            (lambda mean: Step(mean.expand(2, -1), rate=1.0), "shape"),
            (lambda mean: Step(mean, rate=1.0, notes={"round": torch.tensor(99.0)}), "round"),
            (lambda mean: Step(mean, rate=1.0, notes={"test_accuracy": 1.0}), "test_accuracy"),
            (lambda mean: Step(mean, rate=1.0, notes={"spread": torch.ones(3)}), "spread"),
        ],
    )
    def test_is_checked(self, made, words, engine):
        class Mistaken(Method):
            name = "mistaken"

            def aggregate(self, w, server, up, cohort):
                return made(cohort.mean(up["delta"]))

        with pytest.raises(BadInputError, match=f"mistaken.*{words}"):
            feddpc.simulate(method=Mistaken(), rounds=1, clients=10, cohort=2, engine=engine)

    def test_a_misspelt_hook_is_named(self):
        with pytest.warns(UserWarning, match="aggregat is never called: did you mean aggregate"):

            class Misspelt(Method):
                name = "misspelt"

                def aggregat(self, w, server, up, cohort):
                    raise AssertionError
