"""The description of a function of the user's own changes when, and only when, the function does."""

import copy
import dataclasses
import functools
import importlib.util
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from feddpc.own_functions import describe


def load(tmp_path: Path, text: str, name="mine"):
    """Import ``text`` as a module, from a file of its own each time."""
    path = tmp_path / f"v{len(list(tmp_path.iterdir()))}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (math.sqrt, "math.sqrt"),
        (len, "builtins.len"),
        (F.cross_entropy, "torch.nn.functional.cross_entropy"),
        (nn.ReLU, "torch.nn.modules.activation.ReLU"),
        (max, "builtins.max"),
    ],
)
def test_functions_of_libraries_have_a_name_only(fn, name):
    assert describe(fn) == name


def test_functions_of_torchs_extension_are_named():
    assert describe(torch.sigmoid).endswith("sigmoid")
    assert len(describe(torch.sigmoid).split()) == 1


def test_own_functions_are_told_apart_by_their_source(tmp_path):
    first = "def loss(x):\n    return 2 * x\n"
    one, same, other = (load(tmp_path, text).loss for text in (first, first, first.replace("2", "3")))
    assert describe(one) == describe(same) != describe(other)
    assert describe(one).split()[0] == "mine.loss"
    moved = load(tmp_path, "import math\n\n\n" + first).loss
    assert describe(moved) == describe(one)


def test_a_module_of_the_users_may_have_the_name_of_a_standard_one(tmp_path, monkeypatch):
    one = load(tmp_path, "def f(x):\n    return x\n", name="test")
    monkeypatch.setitem(sys.modules, "test", one)
    assert len(describe(one.f).split()) == 2


def test_defaults_count(tmp_path):
    text = "import os\nT = {}\n\n\ndef f(x, t=T, *, u=T):\n    return x\n"
    one, other = (load(tmp_path, text.format(value)).f for value in (1.0, 2.0))
    assert describe(one) != describe(other)


def test_lambdas(tmp_path):
    one, other = (load(tmp_path, f"f = lambda x: {k} * x\n").f for k in (2, 3))
    assert describe(one).split()[0] == "mine.<lambda>"
    assert describe(one) != describe(other)
    pair = load(tmp_path, "f, g = lambda x: 2 * x, lambda x: 3 * x\n")
    assert describe(pair.f) != describe(pair.g)


def test_functions_without_a_file_too():
    def made(text):
        space = {"__name__": "__main__"}
        exec(text, space)
        return space["f"]

    assert describe(made("f = lambda x: 2 * x")) == describe(made("f = lambda x: 2 * x"))
    assert describe(made("f = lambda x: 2 * x")) != describe(made("f = lambda x: 3 * x"))
    assert describe(made("def f(x): return x.sin()")) != describe(made("def f(x): return x.cos()"))
    inner = "def f(x):\n def g(y): return {} * y\n return g(x)"
    assert describe(made(inner.format(2))) != describe(made(inner.format(3)))


def test_values_that_a_function_holds_count():
    def power(p):
        return lambda x: x**p

    assert describe(power(2)) == describe(power(2)) != describe(power(3))
    add = functools.partial(max, 2)
    assert describe(add) == describe(functools.partial(max, 2)) != describe(functools.partial(max, 3))
    assert describe(functools.partial(max, key=None)) != describe(add)


class Scaled:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return self.factor * x

    def plus(self, x):
        return self.factor + x


def test_objects_and_methods():
    assert describe(Scaled(2)) == describe(Scaled(2)) != describe(Scaled(3))
    assert describe(Scaled(2)).split()[0].endswith(".Scaled")
    assert describe(Scaled(2).plus) == describe(Scaled(2).plus) != describe(Scaled(3).plus)
    assert describe(nn.CrossEntropyLoss()) != describe(nn.CrossEntropyLoss(label_smoothing=0.1))


def weighted(weight):
    """A function that holds a value in a closure."""

    def loss(x):
        return weight * x

    return loss


@dataclasses.dataclass
class Setting:
    scale: float
    table: np.ndarray


class Weighted(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.register_buffer("weight", weight)
        self.inner = nn.Linear(1, 1, bias=False)
        self.inner.weight.data.fill_(float(weight.sum()))

    def forward(self, x):
        return self.weight * self.inner(x)


#: Ways to hold a value that is no number.
HOLDERS = {
    "closure": weighted,
    "partial": lambda value: functools.partial(max, value),
    "partial by name": lambda value: functools.partial(max, key=value),
    "callable": Scaled,
    "nested": lambda value: weighted(functools.partial(weighted(1.0), value)),
    "list": lambda value: weighted([1.0, value]),
    "table": lambda value: weighted({"a": {"b": value}}),
    "callable in a closure": lambda value: weighted(Scaled(value)),
}
PAIRS = {
    "tensor": (torch.ones(3), torch.tensor([1.0, 1.0, 1.5])),
    "type": (torch.ones(3), torch.ones(3).double()),
    "bfloat16": (torch.ones(3).bfloat16(), torch.zeros(3).bfloat16()),
    "array": (np.arange(3), np.arange(1, 4)),
    "number of numpy": (np.float64(1.0), np.float64(2.0)),
    "module": (Weighted(torch.ones(2)), Weighted(torch.tensor([0.5, 1.5]))),
    "deep module": (nn.Sequential(Weighted(torch.ones(2))), nn.Sequential(Weighted(torch.zeros(2)))),
    "data class": (Setting(1.0, np.ones(2)), Setting(1.0, np.zeros(2))),
    "function": (weighted(1.0), weighted(2.0)),
}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("holder", HOLDERS)
def test_values_count_by_content_wherever_they_are_held(holder, pair):
    hold, (one, other) = HOLDERS[holder], PAIRS[pair]
    assert describe(hold(one)) == describe(hold(copy.deepcopy(one))) != describe(hold(other))


def test_weights_of_a_loss_of_torch_count():
    one, other = (nn.CrossEntropyLoss(weight=torch.tensor(w)) for w in ([1.0, 2.0], [1.0, 3.0]))
    assert describe(one) == describe(copy.deepcopy(one)) != describe(other)


@pytest.mark.parametrize("attribute", ["uniforms", "direction"])
@pytest.mark.parametrize("made", [lambda: weighted(1.0), lambda: functools.partial(max, 1.0)])
def test_what_the_library_reads_of_a_function_counts(made, attribute):
    one, same, other = made(), made(), made()
    for fn, value in ((one, 2), (same, 2), (other, 3)):
        setattr(fn, attribute, value)
    assert describe(one) == describe(same) != describe(other)
    assert describe(one) != describe(made())


def test_what_differs_between_processes_does_not_count():
    for value in (object(), torch.Generator(), np.random.default_rng(0), torch.device("cpu"), iter([])):
        assert describe(weighted(value)) == describe(weighted(object()))


def test_functions_that_hold_themselves():
    def made(step):
        def down(t):
            return t if t < 1 else down(t - step)

        return down

    assert describe(made(1)) == describe(made(1)) != describe(made(2))
    table = {}
    table["self"] = table
    assert describe(weighted(table)) == describe(weighted(table))


class Accumulates:
    """An object with the hooks of torchmetrics."""

    def __init__(self, threshold):
        self.threshold, self.total = threshold, torch.zeros(2)

    def reset(self):
        self.total = torch.zeros(2)

    def update(self, outputs, targets):
        self.total = self.total + outputs.sum()

    def compute(self):
        return self.total.sum() > self.threshold

    def __call__(self, outputs, targets):
        raise AssertionError


def test_of_an_object_that_accumulates_its_configuration_counts():
    one, same, other = Accumulates(0.5), Accumulates(0.5), Accumulates(0.6)
    one.update(torch.ones(3), None)
    assert describe(one) == describe(same) != describe(other)
    assert float(one.total.sum()) == 6
