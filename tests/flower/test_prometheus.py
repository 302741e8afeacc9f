"""The metrics endpoint: what a scraper reads, after restarts too, and that nothing about it can end a round."""

import json
import re
import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch

from feddpc import flower
from feddpc.errors import BadInputError
from feddpc.flower.exposition import OTHER, REASONS, Counts, Page, reason_label, render
from feddpc.flower.prometheus import Exporter, MeteredGrid, address_of, server_class
from feddpc.flower.screening import UNREACHABLE
from feddpc.flower.server import from_run_config
from federations import NODES, Unreliable, halves, plain_app, train, vector

LINE = re.compile(r'([a-z_]+)(?:\{((?:[a-z_]+="(?:[^"\\\n]|\\["\\n])*",?)*)\})? (\S+)')


def read(text):
    """Samples by name and labels; raises on what Prometheus could not read."""
    samples, kinds = {}, {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in kinds, "a metric is described twice"
            kinds[name] = kind
        elif not line.startswith("# HELP "):
            found = LINE.fullmatch(line)
            assert found, line
            name, labels, value = found.groups()
            assert name in kinds, "a sample before its type"
            samples[name.removeprefix("feddpc_"), labels or ""] = float(value)
    return samples


def scrape(port, path="/metrics"):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return read(answer.read().decode())


@pytest.fixture
def pages(monkeypatch):
    """What a scraper reads after every round of any strategy with an endpoint, and at the end."""
    seen, exporters = [], []
    enter = Exporter.__enter__

    def entered(self):
        exporters.append(self)
        return enter(self)

    monkeypatch.setattr(Exporter, "__enter__", entered)

    def scraping(strategy):
        aggregate = strategy.aggregate_train

        def scraped(server_round, replies):
            made = aggregate(server_round, replies)
            strategy.run_log.end_round()  # as the end of the round's evaluations does
            seen.append(scrape(exporters[-1].server.server_address[1]))
            return made

        strategy.aggregate_train = scraped
        return strategy

    return scraping, seen


def refuse_one(_, replies):
    for reply in replies:
        reply.content["metrics"]["num-examples"] = -1
    return replies


def drop_in(**more):
    return flower.FedDPC(
        fraction_train=1.0, fraction_evaluate=0.0, weighting="samples", quarantine=None, prometheus=0, **more
    )


def test_a_scraper_reads_rounds_replies_refusals_seconds_and_bytes(pages, tmp_path):
    scraping, seen = pages
    strategy = scraping(drop_in(folder=tmp_path / "run"))
    train(strategy, Unreliable(plain_app(), victim=3, fault=refuse_one))
    assert [page["round", ""] for page in seen] == [1, 2, 3]
    last = seen[-1]
    assert last["rounds_planned", ""] == 3
    assert last["replies", ""] == NODES - 1
    assert last["replies_total", ""] == 3 * (NODES - 1)
    assert last["refusals_total", 'reason="examples"'] == 3
    assert sum(value for (name, _), value in last.items() if name == "refusals_total") == 3
    assert last["round_seconds_count", ""] == 3
    seconds = sum(record.seconds for record in strategy.records)
    assert last["round_seconds_sum", ""] == pytest.approx(seconds)
    model = 8 * 8 + 2 * 128  # eight float64 numbers, and the heads of two arrays
    for way in ("in", "out"):
        assert 3 * NODES * model <= last["bytes_total", f'direction="{way}"'] <= 3 * NODES * (model + 300)
    assert not any("path" in name or str(tmp_path) in labels for name, labels in last)


def test_counters_continue_after_a_restart(pages, tmp_path):
    scraping, seen = pages
    folder = tmp_path / "run"
    for rounds in (2, 4):
        train(scraping(drop_in(folder=folder)), Unreliable(plain_app(), victim=3, fault=refuse_one), rounds=rounds)
    assert [page["round", ""] for page in seen] == [1, 2, 3, 4]
    for name, labels in (("replies_total", ""), ("refusals_total", 'reason="examples"'), ("round_seconds_count", "")):
        first, *_, last = (page[name, labels] for page in seen)
        assert last == 4 * first
    sent = [page["bytes_total", 'direction="out"'] for page in seen]
    assert sent == [sent[0] * t for t in (1, 2, 3, 4)]


def names_in(page):
    return {name for name, _ in page}


def test_before_the_first_round_nothing_is_counted(pages, tmp_path, monkeypatch):
    """Zeros would look like a restart, and Prometheus would count all that came before once more."""
    scraping, seen = pages
    folder = tmp_path / "run"
    train(scraping(drop_in(folder=folder)), Unreliable(plain_app()), rounds=2)
    early = []
    enter = Exporter.__enter__
    monkeypatch.setattr(Exporter, "__enter__", lambda self: (enter(self), early.append(read(self.text())))[0])
    train(scraping(drop_in(folder=folder)), Unreliable(plain_app()), rounds=3)
    assert names_in(early[0]) == {"info"}
    assert seen[-1]["round", ""] == 3


@pytest.mark.parametrize("stored", [True, False])
def test_a_scrape_between_training_and_evaluation_loses_no_metric(tmp_path, monkeypatch, stored):
    exporters, between, enter = [], [], Exporter.__enter__
    monkeypatch.setattr(Exporter, "__enter__", lambda self: (exporters.append(self), enter(self))[1])
    strategy = flower.FedDPC(prometheus=0, folder=tmp_path / "run" if stored else None)
    configure = strategy.configure_evaluate

    def scraped(*arguments):
        between.append(read(exporters[0].text()))
        return configure(*arguments)

    strategy.configure_evaluate = scraped
    train(strategy, Unreliable(plain_app()))
    assert [page["round", ""] for page in between] == [0, 1, 2]
    last = read(exporters[0].text())
    assert last["round", ""] == 3
    assert [v for (name, _), v in last.items() if name == "metric"] == [strategy.records[-1].metrics["test_sum"]]


def test_metrics_of_which_the_last_evaluation_knows_nothing_are_gone():
    counts = Counts()
    for t in (1, 2):
        counts.add_record({"round": t, "participants": [1], f"test_a{t}": 0.5})
    counts.add_record({"round": 3, "participants": [1], "test_a2": None})
    assert counts.measured == {"test_a2": 0.5}


def test_a_round_that_asks_nobody_is_not_void():
    counts = Counts()
    counts.add_record({"round": 1, "participants": [], "dropped": [], "rejected": []})
    counts.add_record({"round": 2, "participants": [], "dropped": [], "rejected": [4]})
    assert counts.void == 1


def test_an_address_of_the_newer_kind_gets_a_server_of_that_kind():
    assert address_of("[::1]:9464") == ("::1", 9464)
    assert server_class("::1").address_family == socket.AF_INET6
    assert server_class("127.0.0.1").address_family == socket.AF_INET


def test_the_grid_keeps_what_else_it_has():
    class Other(Unreliable):
        def get_nodes(self):
            return ["a node"]

    grid = MeteredGrid(Other(plain_app()), None)
    assert grid.get_nodes() == ["a node"]
    assert grid.contexts is grid.grid.contexts


def test_any_method_shows_its_primary_metric_with_the_numbers_of_a_run_without_an_endpoint(pages):
    scraping, seen = pages
    server, client = halves()
    models = []
    for more in ({}, {"prometheus": "127.0.0.1:0"}):
        strategy = flower.strategy("feddpc", **server, **more)
        grid = flower.InProcessGrid(flower.client_app(**client), server["clients"])
        train(scraping(strategy) if more else strategy, grid)
        models.append(vector(strategy))
    assert torch.equal(*models)
    for page, record in zip(seen, strategy.records, strict=True):
        labels = 'name="test_accuracy",primary="true"'
        assert page["metric", labels] == pytest.approx(record.metrics["test_accuracy"])


def test_replies_still_come_one_by_one(pages):
    scraping, seen = pages
    grid = flower.InProcessGrid(plain_app(), NODES, one_by_one=True)
    strategy = scraping(drop_in())
    train(strategy, grid)
    assert seen[-1]["bytes_total", 'direction="in"'] > 0


def test_a_port_in_use_is_logged_and_ends_no_round(caplog):
    with socket.create_server(("127.0.0.1", 0)) as other:
        strategy = flower.FedDPC(fraction_train=1.0, prometheus=other.getsockname()[1])
        train(strategy, Unreliable(plain_app()))
    assert len(strategy.records) == 3
    assert "cannot be listened on" in caplog.text


def test_an_error_while_answering_is_the_scrapers(monkeypatch):
    monkeypatch.setattr("feddpc.flower.prometheus.render", lambda *_: 1 / 0)
    strategy, codes = drop_in(), []
    exporters = []
    monkeypatch.setattr(Exporter, "begin", lambda self: exporters.append(self))
    aggregate = strategy.aggregate_train

    def scraped(server_round, replies):
        exporters[0].began = True
        port = exporters[0].server.server_address[1]
        for path in ("/metrics", "/else"):
            with pytest.raises(urllib.error.HTTPError) as error:
                scrape(port, path)
            codes.append(error.value.code)
            error.value.close()
        return aggregate(server_round, replies)

    strategy.aggregate_train = scraped
    train(strategy, Unreliable(plain_app()), rounds=1)
    assert codes == [500, 404]
    assert len(strategy.records) == 1


@pytest.mark.parametrize("damage", [b"", b"[", b"[1]", b'{"in": "x"}', b'{"in": 7}', b"[" * 10**5])
def test_a_damaged_count_of_bytes_starts_from_zero(pages, tmp_path, damage):
    scraping, seen = pages
    train(scraping(drop_in(folder=tmp_path / "run")), Unreliable(plain_app()), rounds=1)
    (tmp_path / "run" / "traffic.json").write_bytes(damage)
    train(scraping(drop_in(folder=tmp_path / "run")), Unreliable(plain_app()), rounds=2)
    assert seen[0]["bytes_total", 'direction="in"'] == seen[1]["bytes_total", 'direction="in"']
    assert json.loads((tmp_path / "run" / "traffic.json").read_text())["in"] > 0


def test_nothing_listens_by_default_nor_after_the_run(monkeypatch):
    exporters = []
    monkeypatch.setattr(Exporter, "begin", lambda self: exporters.append(self))
    train(flower.FedDPC(fraction_train=1.0), Unreliable(plain_app()), rounds=1)
    assert exporters == []
    train(drop_in(), Unreliable(plain_app()), rounds=1)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(exporters[0].server.server_address[:2], timeout=1)


@pytest.mark.parametrize("value", ["", "here", "host:", ":9464", "1.2.3.4:99999", -1, True, 70000])
def test_a_bad_address_is_refused_before_anything_starts(value):
    if value == "":
        assert address_of(value) is None
        return
    with pytest.raises(BadInputError, match="prometheus"):
        flower.FedDPC(prometheus=value)
    server, _ = halves()
    with pytest.raises(BadInputError, match="prometheus"):
        flower.strategy("feddpc", **server, prometheus=value)


def test_the_apps_configuration_can_switch_it_on():
    assert from_run_config({"prometheus": "127.0.0.1:9464"}) == {"prometheus": "127.0.0.1:9464"}
    assert from_run_config({"prometheus": 9464}) == {"prometheus": 9464}


def test_labels_are_escaped_and_read_back():
    value = 'quote " backslash \\ line\nend {}='
    page = Page()
    page.add("x", "gauge", "About\\\nit.", [({"reason": value}, 1)])
    ((_, labels),) = read(page.text())
    escaped = re.fullmatch(r'reason="(.*)"', labels)[1]
    assert json.loads(f'"{escaped}"') == value


@pytest.mark.parametrize(
    ("reason", "label"),
    [
        ("error 1: ValueError: boom", "client_error"),
        ("the node says: this node does not know which client it is", "client_refused"),
        ("the node says: the server runs feddpc 9 with protocols 2 to 3, this node ...", "protocol"),
        ("delta is not finite", "not_finite"),
        ("its loss is nan, not a number of at most 3e+32", "not_finite"),
        ("delta has norm 7, more than 1", "too_long"),
        ("its update is much longer than usual, or the rule did not choose it", "screened"),
        ("it could be used, but fewer than 3 could", "too_few_replies"),
        ("it was not asked", "unexpected"),
        ("it answers for round 3, not 4", "unexpected"),
        ("it counts -1 examples: a whole number from 1 to 1000000000 is needed", "examples"),
        ("its weight 'num-examples' is 0: a positive number of at most 1.71441e+302 is needed", "examples"),
        ("its weight 'tokens' is None: a positive number of at most 1.71441e+302 is needed", "examples"),
        ("its loss is 4e+33, not a number of at most 3e+32", "form"),
        ("its loss is 'small', not a number of at most 3e+32", "form"),
        ("its loss is None, not a number of at most 3e+32", "form"),
        *((f"error {code}: Node Unavailable", "unreachable") for code in UNREACHABLE),
        ("error 8: the client app crashed", "client_error"),
        (
            "its update is much longer than usual: delta has norm 2.1, the bound is 0.09, 30 times the median norm "
            "0.003 of the last 100 replies",
            "screened",
        ),
        ("weight has shape (1,), not (3, 2)", "form"),
        ("the record 'arrays' lacks bias", "form"),
        ("x" * 10_000, OTHER),
        ('"} 1\nfeddpc_round 7', OTHER),
    ],
)
def test_every_reason_has_one_of_few_labels(reason, label):
    assert reason_label(reason) == label
    counts = Counts()
    counts.add_refusal(reason)
    samples = read(render(counts, {}, None, "test_accuracy", {}))
    labels = {labels for name, labels in samples if name == "refusals_total"}
    assert labels == {f'reason="{name}"' for name in (*REASONS, OTHER)}


def test_the_document_lists_the_labels():
    text = (Path(__file__).parents[2] / "docs" / "federation.md").read_text()
    (listed,) = re.findall(r"by one of these kinds of reason: (.*?) \(`refused", text)
    assert re.findall(r"`(\w+)`", listed) == [*REASONS, OTHER]


def test_quarantined_nodes_and_values_that_are_missing():
    counts = Counts()
    counts.add_record({"round": 1, "participants": [], "dropped": [2], "test_accuracy": None})
    counts.add_record(
        {"round": 2, "participants": [1], "dropped": [], "seconds": 0.5, "quarantined": [7, 9], "epsilon": 1.5}
    )
    samples = read(render(counts, {}, 5, "test_accuracy", {}))
    assert samples["quarantined_nodes", ""] == 2
    assert samples["void_rounds_total", ""] == 1
    assert samples["missing_replies_total", ""] == 1
    assert samples["epsilon", ""] == 1.5
    assert not any(name in ("metric", "train_loss") for name, _ in samples)
