"""The paper's numbers as data: what must be true of them if they were copied right."""

import pytest

from feddpc.paper import published


def test_feddpc_is_highest_in_every_column_of_table_2():
    """The paper prints it bold in each of the six."""
    assert len(published.TABLE2) == 6
    for column in published.TABLE2.values():
        assert tuple(column) == published.METHODS
        assert max(column, key=lambda m: column[m].accuracy) == "feddpc"


def test_rounds_are_within_the_experiment():
    for (data, _), column in published.TABLE2.items():
        most = 400 if data == "cifar10" else 800
        assert all(most / 2 < cell.round <= most for cell in column.values())


def test_less_heterogeneous_data_are_easier():
    for data in published.SECONDS:
        for method in published.METHODS:
            assert published.TABLE2[data, 0.2][method].accuracy < published.TABLE2[data, 0.6][method].accuracy


@pytest.mark.parametrize(
    ("method", "local", "server"),
    [
        ("fedavg", "d + mnd + md", "k'd"),
        ("fedprox", "d + mnd + 2md", "k'd"),
        ("fedga", "4d + mnd + md", "2k'd"),
        ("fedcm", "2d + mnd + 2md", "k'd + d"),
        ("fedvarp", "2d + mnd + md", "2k'd + 3d"),
        ("feddpc", "2d + mnd + md", "4k'd + d"),
    ],
)
def test_formulas_read_as_printed_and_count_what_they_say(method, local, server):
    formula = published.TABLE1[method]
    assert (formula.local_text, formula.server_text) == (local, server)
    m, n, k, d = 3, 7, 5, 1

    def value(text):
        terms = text.replace("mnd", str(m * n * d)).replace("md", f"*{m * d}").replace("k'd", f"*{k * d}")
        terms = terms.replace("d", f"*{d}").replace(" ", "")
        return eval("+".join(t if t[0] != "*" else f"1{t}" for t in terms.split("+")))

    assert formula.local(m, n) == value(local)
    assert formula.server(k) == value(server)


def test_feddpc_costs_what_the_text_says_beyond_fedavg():
    """Line 203: d more at a client; 3k'd + d more at the server (printed as 3k' + d)."""
    ours, plain = published.TABLE1["feddpc"], published.TABLE1["fedavg"]
    assert ours.local(2, 256) - plain.local(2, 256) == 1
    assert ours.server(10) - plain.server(10) == 3 * 10 + 1
