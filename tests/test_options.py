"""Menus and the checks of numbers that partitions, samplers and models share."""

import numpy as np
import pytest

from feddpc.checks import check_int, check_positive, check_probability
from feddpc.errors import BadInputError
from feddpc.registry import Registry


def test_menu_lists_keyword_only_parameters_and_refuses_the_rest():
    menu = Registry("thing", {"a": lambda x, *, depth=2: (x, depth), "b": lambda x: x})
    assert menu.names() == ["a", "b"]
    assert (menu.options("a"), menu.options("b")) == ({"depth": 2}, {})
    assert menu.builder("a", {"depth": 3})(1, depth=3) == (1, 3)
    with pytest.raises(BadInputError, match="did you mean 'depth'"):
        menu.builder("a", {"dept": 3})
    with pytest.raises(BadInputError, match="thing 'b' has no options, but 'depth' was given"):
        menu.builder("b", {"depth": 3})
    with pytest.raises(BadInputError, match="unknown thing 'c'"):
        menu.options("c")


@pytest.mark.parametrize("value", [1.0, True, "1", None, float("nan"), 0, 6])
def test_whole_refuses(value):
    with pytest.raises(BadInputError, match=r"n = .*from 1 to 5"):
        check_int("n", value, 1, 5)


def test_numbers_of_numpy_are_numbers():
    assert check_int("n", np.int32(3), 1) == 3
    assert check_positive("x", np.float32(0.5)) == 0.5
    assert check_positive("x", 2) == 2.0
    assert check_probability("p", np.float64(1.0)) == 1.0


@pytest.mark.parametrize("value", [0, -1, "x", None, True, float("nan"), float("inf")])
def test_positive_refuses(value):
    with pytest.raises(BadInputError, match=r"x = .*finite number above 0"):
        check_positive("x", value)


def test_chance_of_names_the_interval():
    for value, ends, message in [
        (1.0, {"one": False}, r"\[0, 1\)"),
        (0, {"zero": False}, r"\(0, 1\]"),
        (-0.1, {}, r"\[0, 1\]"),
        ("x", {}, "probability"),
    ]:
        with pytest.raises(BadInputError, match=message):
            check_probability("p", value, **ends)
