"""Costs as they are counted at run time, against the specification (methods.md 5) and against what methods declare."""

import re

import pytest

from feddpc import methods
from feddpc.engines.loop import Loop
from feddpc.engines.stacked import Stacked
from feddpc.runs.costs import POPULATION, count_costs
from support import VARIANTS, run_rounds, setting_for

N = POPULATION
#: down, up, client state, server state in multiples of d; gradients and passes per local step of FedAvg.
SPECIFIED = {
    "feddpc": (1, 1, 0, 1, 1, 1),
    "feddpc client": (2, 1, 0, 1, 1, 1),
    "fedavg": (1, 1, 0, 0, 1, 1),
    "fedprox": (1, 1, 0, 0, 1, 1),
    "fedexp": (1, 1, 0, 0, 1, 1),
    "fedga": (2, 1, 1, 1, 1, 1),
    "fedga fresh": (2, 2, 0, 0, 2, 2),
    "fedcm": (2, 1, 0, 1, 1, 1),
    "fedvarp": (1, 1, 0, N + 1, 1, 1),
    "clusterfedvarp": (1, 1, 0, 3, 1, 1),
    "scaffold": (2, 2, 1, 1, 1, 1),
    "scaffold I": (2, 2, 1, 1, 2, 2),
    "feddyn": (1, 1, 1, 1, 1, 1),
    "fedspeed": (1, 1, 1, 1, 2, 2),
    "fedspeed paper": (1, 1, 1, 0, 2, 2),
    "fedalign": (1, 1, 0, 0, 1, 1),  # the last stage once more is inside the same pass
    "fedbr": (1, 1, 0, 0, 1, 4),  # batch and pseudo-data together, phi_g, and twice the projector
    "moon": (1, 1, 1, 0, 1, 3),
    "feddc": (2, 2, 2, 2, 1, 1),
    "mifa": (1, 1, 0, N + 1, 1, 1),
    "datasharing": (1, 1, 0, 0, 1, 1),
    "gmm": (1, 1, 0, 0, 1, 1),
    "faug": (1, 1, 0, 0, 1, 1),
    "fednova": (1, 1, 0, 0, 1, 1),
    "fedavgm": (1, 1, 0, 1, 1, 1),
    "fedadam": (1, 1, 0, 2, 1, 1),
    "fedyogi": (1, 1, 0, 2, 1, 1),
    "fedadagrad": (1, 1, 0, 2, 1, 1),
    "fedbn": (1, 1, 1, 0, 1, 1),
}


@pytest.mark.parametrize("name", SPECIFIED)
def test_counted_costs_are_those_of_the_specification(name):
    m = count_costs(VARIANTS[name])
    counted = (m.down, m.up, m.client_state, m.server_state, m.gradients, m.passes)
    # A flag or a membership list is a few numbers beside vectors of some hundred.
    assert counted == pytest.approx(SPECIFIED[name], abs=0.05)


def test_every_method_is_specified():
    assert set(methods.names()) - set(SPECIFIED) == {"fedamd"}


def test_fedamds_work_follows_its_roles():
    """Anchors make one pass of gradients, miners two a step; both send one vector, and everybody is sent two."""
    m = count_costs(methods.create("fedamd", p=0.5))
    assert (m.down, m.up, m.client_state, m.server_state) == (2, 1, 1, 1)
    assert 1 < m.gradients < 2
    assert count_costs(methods.create("fedamd", p=0.0)).gradients == 2
    assert count_costs(methods.create("fedamd", p=1.0)).gradients == 1


@pytest.mark.parametrize(
    ("name", "down", "up"), [("datasharing", 1, 0), ("fedbr", 1, 1), ("gmm", 1, 1), ("faug", 1, 1)]
)
def test_what_travels_once(name, down, up):
    m = count_costs(VARIANTS[name])
    assert (m.down_once > 0, m.up_once > 0) == (bool(down), bool(up))


@pytest.mark.parametrize("name", methods.names())
def test_methods_declare_what_is_counted(name):
    """The first of two alternatives is the default; N and C stand for clients and clusters."""
    method = VARIANTS[name]
    m = count_costs(method)
    for key in ("down", "up", "client_state", "server_state"):
        declared = getattr(method.costs, key).split(" / ")[0].split(" + ")[0]
        if re.fullmatch(r"[\dNC+]+", declared):
            clusters = getattr(method, "clusters", 0)
            value = sum({"N": N, "C": clusters}.get(term) or int(term) for term in declared.split("+"))
            assert getattr(m, key) == pytest.approx(value, abs=0.05), key
        else:  # samples, a mixture, a generator: not a vector of the method's state
            assert getattr(m, key) == 0, key


@pytest.mark.parametrize(("name", "hyper"), [("fedamd", {}), ("scaffold", {"warm": True})])
def test_a_survey_is_counted(name, hyper):
    """Before round 1 every client receives the model, makes one pass over its data and sends a vector."""
    m = count_costs(methods.create(name, **hyper))
    assert (m.down_once, m.up_once) == (1, 1)
    assert m.gradients_once == 2  # eight samples in batches of four
    assert count_costs(methods.create("scaffold")).gradients_once == 0


def test_vector_work_is_counted():
    """The paper's Table 1 in our unit: FedProx works more a step than FedAvg, FedDPC's server more than FedAvg's."""
    avg, prox, dpc, exp = (count_costs(methods.create(n)) for n in ("fedavg", "fedprox", "feddpc", "fedexp"))
    assert avg.client_work < prox.client_work
    assert avg.server_work < exp.server_work < dpc.server_work
    assert dpc.client_work == avg.client_work


@pytest.mark.parametrize("name", ["fedavg", "fedspeed", "fedamd", "scaffold I", "moon", "fedga fresh"])
def test_both_engines_count_the_same(name):
    method = VARIANTS[name]
    one, other = (run_rounds(setting_for(method), method, e, 3)[0].meter for e in (Loop(), Stacked()))
    assert one == other
    assert one.gradients > 0
