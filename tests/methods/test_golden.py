"""The golden table of methods.md 7.2: 50-digit values of every method on problem Q4, in both engines."""

import numpy as np
import pytest

from feddpc import methods
from feddpc.config import Config
from feddpc.engines.loop import Loop
from feddpc.engines.stacked import Stacked
from feddpc.quadratic import trajectory
from support import Q4

FEDAVG = (0.181422, -0.151166, 0.35360575), (0.211582280136, -0.098019997608, 0.214563407397)
DPC1 = (
    (-0.0433814707344936, 0.0285827877950411, -0.321766774837805),
    (0.590997533419198, 0.988589352230133, -0.4706947497248),
)
MOMENTUM1 = (
    (-0.09763147073449358, 0.3538327877950411, -0.9702667748378051),
    (-1.28443508713735, 0.4780052124054433, 0.6304986480001497),
)
MOMENTUM0 = (
    (0.1573856815687849, -0.02640243319339519, 0.04194313473977122),
    (0.4168875725080368, 0.482761247110835, -0.1431619959431214),
)
FORMS = ("matrix", "streaming", "client")

GOLDEN = [
    ("fedavg", {}, *FEDAVG),
    ("fedprox", {"mu": 0.0}, *FEDAVG),
    ("fedcm", {"alpha": 1.0}, *FEDAVG),
    ("fedga", {"beta": 0.0, "variant": "fresh"}, *FEDAVG),
    ("fedga", {"beta": 0.0, "variant": "stale"}, *FEDAVG),
    ("feddpc", {"scaling": False, "projection": False}, *FEDAVG),
    (
        "fedprox",
        {"mu": 0.5},
        (0.19786434375, -0.16092571875, 0.376753453125),
        (0.211578979010584, -0.0957999236881699, 0.222129867075647),
    ),
    (
        "fedexp",
        {"eps": 0.001},
        (-1.12921162227174, -0.230747362428968, 0.649894383894039),
        (-0.224318735028115, -0.124487803775526, 0.293185374132587),
    ),
    (
        "fedexp",
        {"eps": 0.001, "eps_times_m": True},
        (-1.11038488644128, -0.227257566063042, 0.641476903375322),
        (-0.218057188611732, -0.123327139381775, 0.290951745172062),
    ),
    (
        "fedga",
        {"beta": 0.1, "variant": "fresh"},
        (0.12036437875, -0.19744487375, 0.275278830625),
        (0.155951543238164, -0.159930302736444, 0.169230451019948),
    ),
    (
        "fedga",
        {"beta": 0.1, "variant": "stale"},
        (0.181422, -0.151166, 0.35360575),
        (0.217663206401583, -0.173236122951778, 0.150418589858222),
    ),
    (
        "fedcm",
        {"alpha": 0.1},
        (0.443510356737, -0.417271543901, 0.78560215047325),
        (0.272709203655135, -0.259859691724867, 0.386997350533476),
    ),
    ("fedvarp", {}, (0.154297, 0.011459, 0.02935575), (0.1797791565735, -0.006537137858, 0.209949430772)),
    (
        "clusterfedvarp",
        {"clusters": ((0, 1), (2, 3))},
        (0.154297, 0.011459, 0.02935575),
        (0.202560830636, -0.043932874108, 0.128521724397),
    ),
    (
        "mifa",
        {"table": "zero"},
        (0.307293, -0.125229, 0.2910264375),
        (0.115144146563187, 0.083361534462, -0.0055912638970625),
    ),
    (
        "scaffold",
        {"option": "II"},
        (0.159269916666667, -0.0183555833333333, 0.0752911666666667),
        (0.0926303029162315, -0.053971510111287, -0.0114046314446667),
    ),
    (
        "scaffold",
        {"option": "I"},
        (0.150797, 0.001959, -0.09701925),
        (0.1087775389485, -0.064335736858, 0.102949046522),
    ),
    (
        "feddyn",
        {"alpha": 0.1},
        (0.0187845337375, 0.0705145193125, -0.10268442856875),
        (-0.0321486250229137, 0.141049877092806, -0.314833448808032),
    ),
    (
        "fedspeed",
        {"lam": 10.0, "rho": 0.1, "alpha": 1.0, "server": "paper"},
        (-0.123566949965567, -0.13472839938017, 0.201255876245522),
        (0.452341257260465, -0.543509149696931, 0.408141556947812),
    ),
    (
        "fedspeed",
        {"lam": 10.0, "rho": 0.1, "alpha": 1.0, "server": "code"},
        (-0.0190845205085739, 0.0592780584139537, -0.131430788555937),
        (-0.044334232282662, 0.109020516486745, -0.330964852622524),
    ),
    (
        "feddc",
        {"alpha": 0.01, "form": "paper"},
        (-0.130460240756322, 0.161158506600275, -0.356148248625573),
        (0.420975184559914, -0.491835944153252, 0.545918255445089),
    ),
    (
        "feddc",
        {"alpha": 0.01, "form": "code"},
        (-0.01877800863637, 0.27127087338985, -0.525165895855969),
        (-0.130639046793374, 0.131763343259336, -0.345390716818566),
    ),
    ("feddpc", {"lam": 1.0}, *DPC1),
    ("feddpc", {"lam": 1.0, "form": "streaming"}, *DPC1),
    ("feddpc", {"lam": 1.0, "form": "client"}, *DPC1),
    (
        "feddpc",
        {"lam": 0.0},
        (0.184510681568785, -0.189027433193395, 0.366193134739771),
        (0.419738958406619, 0.277040895584693, -0.402143461321045),
    ),
    (
        "feddpc",
        {"lam": -0.5},
        (0.284771409385191, -0.317430596686273, 0.701488684608548),
        (0.380014186771849, -0.00310774369986316, 0.0887412408221974),
    ),
    (
        "feddpc",
        {"scaling": False},
        (0.18353804508937, -0.16385251917636, 0.378900777473848),
        (0.30822526400369, 0.142301444498992, -0.301253800539557),
    ),
    *[("feddpc", {"lam": 1.0, "momentum": 0.5, "form": form}, *MOMENTUM1) for form in FORMS],
    *[("feddpc", {"lam": 0.0, "momentum": 0.5, "form": form}, *MOMENTUM0) for form in FORMS],
]


@pytest.mark.parametrize("engine", [Loop(), Stacked(), Stacked(narrow=False)], ids=["loop", "stacked", "masked"])
@pytest.mark.parametrize(("name", "hyper", "w2", "w4"), GOLDEN, ids=[f"{n} {h}" for n, h, *_ in GOLDEN])
def test_golden_table(name, hyper, w2, w4, engine):
    path = trajectory(methods.create(name, **hyper), **Q4, engine=engine)
    assert path.shape == (5, 3)
    assert path.dtype == np.float64
    np.testing.assert_allclose(path[2], w2, atol=1e-10, rtol=0)
    np.testing.assert_allclose(path[4], w4, atol=1e-10, rtol=0)


class FirstIsAnchor(methods.get("fedamd")):
    """The roles of the golden table: the first of the round's clients measures, the second descends."""

    def train_mask(self, cohort):
        return np.arange(len(cohort.clients)) > 0


@pytest.mark.parametrize("engine", [Loop(), Stacked(), Stacked(narrow=False)], ids=["loop", "stacked", "masked"])
def test_golden_fedamd(engine):
    path = trajectory(FirstIsAnchor(), **Q4, engine=engine)
    np.testing.assert_allclose(path[2], (0.049375, -0.07125, -0.2195), atol=1e-10, rtol=0)
    np.testing.assert_allclose(path[4], (-0.27038390625, 0.2815040625, -0.890754875), atol=1e-10, rtol=0)


FIRST_AVG, FIRST_DPC = (0.44575, -0.17475, 0.3515), (0.3915, 0.1505, -0.297)


@pytest.mark.parametrize(
    ("name", "hyper", "w1"),
    [
        ("fedavg", {}, FIRST_AVG),
        ("fedga", {"variant": "stale"}, FIRST_AVG),
        ("fedvarp", {}, FIRST_AVG),
        ("clusterfedvarp", {"clusters": 2}, FIRST_AVG),
        ("scaffold", {"option": "I"}, FIRST_AVG),
        ("scaffold", {"option": "II"}, FIRST_AVG),
        ("feddpc", {"lam": 0.0}, FIRST_AVG),
        ("feddpc", {"scaling": False}, FIRST_AVG),
        ("feddpc", {"lam": 1.0}, FIRST_DPC),
    ],
)
def test_first_round(name, hyper, w1):
    np.testing.assert_allclose(trajectory(methods.create(name, **hyper), **Q4)[1], w1, atol=1e-14, rtol=0)


@pytest.mark.parametrize(
    ("name", "hyper", "limit", "tolerance", "rounds"),
    [
        ("fedavg", {}, (0.0924719, 0.0924719, 0.0159868), 1e-7, 100),
        ("fedcm", {"alpha": 0.1}, (0.00864, 0.00864, -0.11205), 1e-5, 250),
        ("fedga", {"variant": "fresh", "beta": 0.1}, (0.0231, 0.0231, -0.0824), 1e-4, 100),
        ("fedprox", {"mu": 0.5}, (0.0938, 0.0938, 0.0179), 1e-4, 100),
        ("scaffold", {"option": "I"}, (0, 0, -0.125), 1e-13, 100),
        ("scaffold", {"option": "II"}, (0, 0, -0.125), 1e-13, 100),
        ("feddyn", {"alpha": 0.1}, (0, 0, -0.125), 1.5e-5, 400),
        ("feddc", {"form": "code"}, (0, 0, -0.125), 1e-13, 200),
        ("feddc", {"form": "paper"}, (0.0295, 0.0295, -0.0781), 1e-4, 400),
    ],
)
def test_limits_with_full_participation(name, hyper, limit, tolerance, rounds):
    """After at least some rounds more than it takes to come as near as ``tolerance``."""
    path = trajectory(methods.create(name, **hyper), **{**Q4, "schedule": [[0, 1, 2, 3]] * rounds})
    np.testing.assert_allclose(path[-1], limit, atol=tolerance, rtol=0)


def test_the_scales_of_feddpc():
    """methods.md 7.2: s_j in order of the schedule, read back through the mean scale of each round."""
    from feddpc.round.round import run_round

    expected = {
        1.0: [
            2,
            2,
            2.0122178422594,
            2.4560363260394,
            2.0893896361942,
            2.1862147774303,
            2.0955337663624,
            4.5719198572087,
        ],
        0.0: [
            1,
            1,
            1.1081031378433,
            1.2588013828059,
            1.0356281018821,
            1.4804482252453,
            1.2584375324316,
            1.6087029333941,
        ],
    }
    for lam, scales in expected.items():
        federation, progress, method = _q4(methods.create("feddpc", lam=lam))
        means = [run_round(federation, method, Loop(), progress).notes["mean_scale"] for _ in range(4)]
        np.testing.assert_allclose(means, np.reshape(scales, (4, 2)).mean(1), atol=1e-12)


def _q4(method):
    import torch

    from feddpc import sampling
    from feddpc.data.partition import Partition
    from feddpc.quadratic import Quadratic, quadratic_experiment
    from feddpc.round.state import RunState

    a, c = (torch.tensor(Q4[k], dtype=torch.float64) for k in ("curvature", "centre"))
    federation = quadratic_experiment(
        Quadratic(a, c),
        Partition.from_lists([[j] for j in range(4)]),
        sampling.make("fixed", population=4, cohort=4, seed=0, schedule=Q4["schedule"]),
        torch.tensor(Q4["w0"], dtype=torch.float64),
        config=Config(lr=0.1, server_lr=0.1, epochs=3),
    )
    return federation, RunState.begin(method, torch.tensor(Q4["w0"], dtype=torch.float64), 4), method
