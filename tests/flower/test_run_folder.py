"""What the folder of a drop-in's run says: evaluations, clients, nodes, times; and which experiment it belongs to."""

import json

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, MetricRecord

from feddpc import flower
from feddpc.errors import BadInputError
from feddpc.report import page, tables
from feddpc.runs.record import line
from feddpc.runs.stored import load
from federations import EVERYBODY, NODES, Unreliable, W, halves, judged, moved, plain_app, run, train, vector


def lines(folder):
    return [json.loads(text) for text in (folder / "rounds.jsonl").read_text().splitlines()]


class TestRecords:
    def test_the_servers_evaluation_is_there_also_after_a_restart(self, tmp_path):
        run(tmp_path / "run", 2)
        run(tmp_path / "run", 4)
        records = lines(tmp_path / "run")
        assert [r["test_accuracy"] for r in records] == [0.1, 0.2, 0.3, 0.4]
        assert [r["test_loss"] for r in records] == [2 / (t + 1) for t in (1, 2, 3, 4)]
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        assert summary["primary"]["name"] == "accuracy"
        assert (summary["best_accuracy"], summary["final_accuracy"]) == (0.4, 0.4)

    def test_what_clients_measure_their_nodes_and_the_time(self, tmp_path):
        _, result = run(tmp_path / "run", 2)
        for record in lines(tmp_path / "run"):
            t = record["round"]
            assert record["clients_train_loss"] == record["train_loss"] == result.train_metrics_clientapp[t]["loss"]
            assert record["clients_evaluate_sum"] == result.evaluate_metrics_clientapp[t]["sum"]
            assert record["nodes"] == {str(i): 1000 + i for i in range(NODES)}
            assert record["time"].startswith("20")
            assert record["time"].endswith("+00:00")
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        assert summary["clients"]["clients_evaluate_sum"] == result.evaluate_metrics_clientapp[2]["sum"]
        assert summary["nodes"]["7"] == 1007

    def test_without_a_function_of_the_server_the_clients_evaluations_are_the_test_metrics(self, tmp_path):
        _, result = run(tmp_path / "run", 2, evaluate_fn=None)
        assert [r["test_sum"] for r in lines(tmp_path / "run")] == [
            result.evaluate_metrics_clientapp[t]["sum"] for t in (1, 2)
        ]
        assert result.evaluate_metrics_serverapp == {}

    def test_nothing_measured_is_nothing_and_not_zero(self, tmp_path):
        run(tmp_path / "run", 2, evaluate_fn=None, fraction_evaluate=0.0)
        assert {(r["test_loss"], r["test_accuracy"]) for r in lines(tmp_path / "run")} == {(None, None)}
        text = (tmp_path / "run" / "summary.json").read_text()
        assert all(value is None for value in json.loads(text)["metrics"].values())

    def test_a_function_that_evaluates_now_and_then(self, tmp_path):
        run(tmp_path / "run", 4, lambda t, _: MetricRecord({"perplexity": 9.0 - t}) if t in (2, 4) else None)
        loaded = load(tmp_path / "run")
        assert loaded.primary.direction == "min"
        assert loaded.summarize("finished")["best_perplexity"] == 5.0
        assert [r.get("test_perplexity") for r in loaded.records] == [None, 7.0, None, 5.0]

    def test_the_report_shows_them(self, tmp_path):
        run(tmp_path / "run", 3)
        runs = tables.collect(tmp_path / "run")
        (row,) = tables.rows(runs)
        assert (row.metric.name, row.best) == ("accuracy", 0.3)
        page.write_page(tmp_path / "page.html", runs)
        text = (tmp_path / "page.html").read_text()
        assert "clients_evaluate_sum" in text
        assert "<td class=text>1007</td>" in text
        assert "first round began" in text
        assert '"test_accuracy":[0.1,0.2,0.3]' in text

    @pytest.mark.parametrize("every", [2, 5])
    def test_the_report_shows_rounds_before_the_first_evaluation(self, tmp_path, every):
        run(tmp_path / "run", 4, lambda t, arrays: MetricRecord({"f1": t / 10}) if t and t % every == 0 else None)
        damage = []
        (stored,) = tables.collect(tmp_path / "run", damage)
        assert damage == []
        assert len(stored.records) == 4

    @pytest.mark.parametrize("name", ["a\nb", "\x1b[2Jacc", "x" * 101])
    def test_metrics_with_names_that_nobody_could_read_are_left_out(self, tmp_path, name):
        class Chatty(Unreliable):
            def deliver(self, message):
                replies = super().deliver(message)
                for reply in replies:
                    reply.content["metrics"][name] = 1.0
                return replies

        strategy = flower.FedDPC(**EVERYBODY, folder=tmp_path / "run")
        train(strategy, Chatty(plain_app()), 1)
        assert len(strategy.records[0].participants) == NODES
        assert not any(name in key for key in strategy.records[0].federation)

    def test_the_type_that_a_reply_states_cannot_write_lines_into_the_log(self, tmp_path, caplog):
        def fault(t, replies):
            for array in replies[0].content["arrays"].values():
                array.dtype = "float64\nCRITICAL forged" + "x" * 2000
            return replies

        train(flower.FedDPC(**EVERYBODY), Unreliable(plain_app(), victim=1, fault=fault), 1)
        (said,) = [record.getMessage() for record in caplog.records if "forged" in record.getMessage()]
        assert "\n" not in said
        assert len(said) < 1000

    @pytest.mark.parametrize("stored", [True, False])
    def test_metrics_that_json_cannot_write_are_converted_or_left_out_with_one_warning(self, tmp_path, caplog, stored):
        def measured(*_):
            return {
                "accuracy": np.float32(0.5),
                "loss": torch.tensor(2.0, requires_grad=True),
                "count": np.int64(3),
                "per-class": torch.tensor([0.25, 0.5]),
                "good": np.bool_(True),
                "name": "a text",
                "none": None,
                "matrix": np.eye(2),
            }

        folder = tmp_path / "run" if stored else None
        functions = {"train_metrics_aggr_fn": measured, "evaluate_metrics_aggr_fn": measured}
        strategy, result = run(folder, 2, measured, **functions)
        numbers = {"accuracy": 0.5, "loss": 2.0, "count": 3, "per-class": [0.25, 0.5], "good": 1.0}
        for record in map(json.loads, map(line, strategy.records)):
            assert {f"clients_evaluate_{name}": value for name, value in numbers.items()}.items() <= record.items()
            assert {f"clients_train_{name}": value for name, value in numbers.items()}.items() <= record.items()
            assert (record["test_accuracy"], record["test_loss"], record["train_loss"]) == (0.5, 2.0, 2.0)
            assert not any("matrix" in key or "name" in key for key in record)
        if stored:
            assert [r["test_accuracy"] for r in lines(folder)] == [0.5, 0.5]
        for of in (result.evaluate_metrics_serverapp, result.evaluate_metrics_clientapp):
            assert dict(of[2]) == numbers
        for name in ("name", "none", "matrix"):
            assert sum(f"{name!r} is no number" in text for text in caplog.messages) == 1

    def test_any_method_converts_them_too(self, tmp_path):
        server, client = halves()
        strategy = flower.strategy("feddpc", **server, folder=tmp_path / "run")
        result = train(
            strategy, Unreliable(flower.client_app(**client)), 1, evaluate_fn=lambda *_: {"f1": np.float32(0.5)}
        )
        assert result.evaluate_metrics_serverapp[1]["f1"] == 0.5
        assert len(lines(tmp_path / "run")) == 1

    def test_a_round_whose_evaluation_fails_is_kept(self, tmp_path):
        def fails(t, arrays):
            if t == 2:
                raise RuntimeError("no test set")
            return judged(t, arrays)

        with pytest.raises(RuntimeError, match="no test set"):
            run(tmp_path / "run", 3, fails)
        assert [r["test_accuracy"] for r in lines(tmp_path / "run")] == [0.1, None]
        strategy, _ = run(tmp_path / "run", 3)
        assert [r.round for r in strategy.records] == [3]

    def test_any_method_has_nodes_and_times(self, tmp_path):
        server, client = halves()
        strategy = flower.strategy("feddpc", **server, folder=tmp_path / "run")
        train(strategy, Unreliable(flower.client_app(**client)), 2)
        for record in lines(tmp_path / "run"):
            asked = {*record["participants"], *record["dropped"], *record["rejected"]}
            assert record["nodes"] == {str(c): 1000 + c for c in sorted(asked)}
            assert record["time"]


class TestFlowersArguments:
    """Flower's arguments mean what they mean in Flower."""

    @pytest.mark.parametrize("weights", [[0.5, 2.25, 1e-3, 7, 3e12, 1.5, 40, 2]])
    def test_any_positive_weight_as_in_flower(self, weights):
        from flwr.serverapp.strategy import FedAvg

        class Weighing(Unreliable):
            def deliver(self, message):
                replies = super().deliver(message)
                for reply in replies:
                    metrics = reply.content["metrics"]
                    metrics["tokens"] = weights[message.metadata.dst_node_id - 1000]
                    del metrics["num-examples"]
                return replies

        more = {**EVERYBODY, "weighted_by_key": "tokens"}
        theirs, ours = FedAvg(**more), flower.FedAvg(**more, weighting="samples")
        a, b = (train(strategy, Weighing(plain_app())) for strategy in (theirs, ours))
        for name in W:
            np.testing.assert_allclose(b.arrays[name].numpy(), a.arrays[name].numpy(), rtol=0, atol=1e-12)
        assert b.train_metrics_clientapp[2]["loss"] == pytest.approx(a.train_metrics_clientapp[2]["loss"])
        assert b.evaluate_metrics_clientapp[2]["sum"] == pytest.approx(a.evaluate_metrics_clientapp[2]["sum"])

    @pytest.mark.parametrize("value", [None, -1.0, float("nan"), [1.0, 2.0], 0])
    def test_a_weight_that_is_not_used_costs_nobody_the_vote(self, value):
        """Only the means of metrics leave that reply out, since these are weighted."""

        def fault(t, replies):
            metrics = replies[0].content["metrics"]
            if value is None:
                del metrics["num-examples"]
            else:
                metrics["num-examples"] = value
            return replies

        strategy, whole = flower.FedAvg(**EVERYBODY), flower.FedAvg(**EVERYBODY)
        result = train(strategy, Unreliable(plain_app(), victim=7, fault=fault))
        train(whole, Unreliable(plain_app()))
        assert (vector(strategy) == vector(whole)).all()
        rest = np.arange(NODES - 1)
        assert result.train_metrics_clientapp[1]["loss"] == pytest.approx(np.average(rest, weights=10 + rest))
        bad = flower.FedAvg(**EVERYBODY, weighting="samples")
        train(bad, Unreliable(plain_app(), victim=7, fault=fault), 1)
        assert [r.client for r in bad.refusals] == [7]

    def test_functions_for_metrics_may_return_none(self, tmp_path):
        def nothing(contents, weighted_by):
            return None

        _, result = run(tmp_path / "run", 2, None, train_metrics_aggr_fn=nothing, evaluate_metrics_aggr_fn=nothing)
        assert result.evaluate_metrics_clientapp == {}
        assert result.train_metrics_clientapp[2]["replies"] == NODES

    def test_no_rounds_evaluate_the_first_model_as_in_flower(self, tmp_path):
        from flwr.serverapp.strategy import FedAvg

        def evaluate(t, arrays):
            return MetricRecord({"round": t, "sum": float(sum(a.numpy().sum() for a in arrays.values()))})

        folder = tmp_path / "run"
        found = []
        for strategy in (FedAvg(), flower.FedAvg(folder=folder), flower.FedDPC()):
            result = strategy.start(Unreliable(plain_app()), moved(2.0), num_rounds=0, evaluate_fn=evaluate)
            found.append((dict(result.arrays), result.evaluate_metrics_serverapp, result.train_metrics_clientapp))
        assert found[0] == found[1] == found[2]
        assert found[0][1] == {0: MetricRecord({"round": 0, "sum": 16.0})}
        assert not folder.exists()

    def test_positional_arguments_are_in_flowers_order(self):
        def train_metrics(contents, key):
            return MetricRecord({"n": len(contents)})

        args = (0.5, 0.25, 3, 1, 4, "weight", "model", "settings", train_metrics, None)
        strategy = flower.FedAvg(*args)
        assert strategy.train_metrics_aggr_fn is train_metrics
        assert (strategy.arrayrecord_key, strategy.configrecord_key) == ("model", "settings")
        seen = []
        plain = flower.FedAvg(**EVERYBODY)
        config = ConfigRecord({"lr": 0.1})
        plain.start(Unreliable(plain_app()), W, 2, 60.0, config, None, lambda t, _: seen.append(t))
        assert seen == [0, 1, 2]

    def test_metrics_of_clients_keep_their_names(self):
        def named(contents, key):
            return MetricRecord({"replies": 0.125, "refused": 0.25, "loss": 1.0})

        strategy = flower.FedDPC(**EVERYBODY, train_metrics_aggr_fn=named)
        result = train(strategy, Unreliable(plain_app()), 1)
        metrics = result.train_metrics_clientapp[1]
        assert (metrics["replies"], metrics["refused"]) == (0.125, 0.25)
        assert strategy.records[0].notes["refused"] == 0

    def test_a_limit_on_weights_is_kept(self):
        strategy = flower.FedAvg(**EVERYBODY, max_examples=16)
        train(strategy, Unreliable(plain_app()), 1)
        assert [r.client for r in strategy.refusals] == [7]


def test_dir_lists_everything_that_can_be_imported():
    listed = {name for name in dir(flower) if not name.startswith("_")}
    from feddpc.flower.dropin import dropins

    assert set(dropins()) <= listed
    assert {"strategy", "client_app", "secure_strategy", "FaultyGrid", "VoidRoundsError", "buffer_names"} <= listed
    assert all(getattr(flower, name) is not None for name in listed)
    with pytest.raises(BadInputError, match="flwr"):
        flower.check_flwr("1.5.0")
