"""Which experiment a run folder belongs to: what another one is, and what may change."""

import dataclasses
import inspect
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord

from feddpc import flower
from feddpc.config import write_toml
from feddpc.errors import FolderInUseError, RunFolderError
from feddpc.flower.dropin_strategy import DropInStrategy
from feddpc.runs.record import RunFolder, config_digest, load_config
from federations import EVERYBODY, NODES, Unreliable, halves, moved, plain_app, run, train, vector

#: Arguments of drop-in strategies that do not decide the numbers, each with another value.
MAY_CHANGE = (
    *({"fraction_evaluate": 0.5}, {"min_evaluate_nodes": 3}, {"min_available_nodes": 3}, {"population": NODES}),
    *({"train_metrics_aggr_fn": lambda *_: None}, {"evaluate_metrics_aggr_fn": lambda *_: None}),
    *({"min_replies": 2}, {"max_void_rounds": 5}),
    *({"quarantine": None}, {"check_initial_arrays": False}, {"prometheus": 0}),
)


class TestAnotherExperiment:
    """A folder belongs to one experiment, whether its run has ended or not."""

    @pytest.mark.parametrize("ended", [True, False])
    @pytest.mark.parametrize(
        ("change", "word"),
        [
            ({"arrays": moved()}, "initial weights"),
            ({"arrays": moved(0.0, np.float32)}, "types"),
            ({"train_config": ConfigRecord({"lr": 0.1})}, "train_config"),
            ({"server_lr": 0.5}, "server_lr"),
            ({"lam": 0.5}, "lam"),
            ({"weighting": "samples"}, "weighting"),
            ({"screen": None}, "screen"),
            ({"fraction_train": 0.5}, r"fraction_train = 0\.5, was 1\.0"),
            ({"min_train_nodes": 2}, f"min_train_nodes = 2, was {NODES}"),
            ({"max_norm": 5.0}, r"max_norm = 5\.0, was None"),
            ({"max_examples": 16}, "max_examples = 16, was None"),
            ({"buffers": "local"}, "buffers = local, was average"),
            ({"buffer_names": []}, "buffer_names = none, was bias"),
        ],
    )
    def test_is_refused_with_the_remedy(self, tmp_path, ended, change, word):
        began = {"buffer_names": ["bias"]} if any("buffer" in name for name in change) else {}
        run(tmp_path / "run", 2, **began)
        before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
        with pytest.raises(RunFolderError, match=word) as error:
            run(tmp_path / "run", 2 if ended else 3, **{**began, **change})
        assert "folder=" in str(error.value)
        assert "--out" not in str(error.value)
        assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before

    def test_the_weights_of_replies_are_compared_where_they_count(self, tmp_path):
        for weighting in ("samples", "uniform"):
            folder = tmp_path / weighting
            run(folder, 1, weighting=weighting)
            again = {"weighting": weighting, "weighted_by_key": "loss"}
            if weighting == "uniform":
                run(folder, 2, **again)
                continue
            with pytest.raises(RunFolderError, match="weighted_by_key = loss, was num-examples"):
                run(folder, 2, **again)

    @pytest.mark.parametrize("change", MAY_CHANGE, ids=lambda change: "-".join(change))
    def test_what_may_change_continues_the_run(self, tmp_path, change):
        run(tmp_path / "run", 2)
        again, _ = run(tmp_path / "run", 3, **change)
        assert [r.round for r in again.records] == [3]

    def test_the_document_lists_what_may_change_and_every_other_argument_is_compared(self):
        text = (Path(__file__).parents[2] / "docs" / "flower.md").read_text()
        (listed,) = re.findall(r"Another value of these continues the run: (.*?)\.\n", text, re.DOTALL)
        listed = set(re.findall(r"`(\w+)`", listed))
        names = {"folder", "weighted_by_key", "arrayrecord_key", "configrecord_key"}  # which the client app decides
        assert {name for change in MAY_CHANGE for name in change} | names == listed
        compared = {"fraction_train", "min_train_nodes", "server_lr", "weighting", "max_norm", "max_examples", "rule"}
        compared |= {"rule_options", "screen", "privacy", "buffers", "buffer_names", "hyper"}
        assert {*inspect.signature(DropInStrategy.__init__).parameters} - {"self"} == listed | compared

    def test_buffers_that_are_named_in_another_way_are_the_same(self, tmp_path):
        run(tmp_path / "run", 1, buffer_names=["bias"])
        again, _ = run(tmp_path / "run", 2, buffer_names="b*")
        assert [r.round for r in again.records] == [2]

    def test_a_run_of_an_earlier_release_goes_on(self, tmp_path):
        """Its folder does not say which settings it had, and counts one client."""
        run(tmp_path / "run", 2)
        about = json.loads((tmp_path / "run" / "environment.json").read_text())
        new = {"fraction_train", "min_train_nodes", "max_norm", "max_examples", "buffers", "buffer_names"}
        about["fingerprint"] = {key: value for key, value in about["fingerprint"].items() if key not in new}
        config = dataclasses.replace(load_config(tmp_path / "run"), clients=1, cohort=1)
        about["fingerprint"]["configuration"] = config_digest(config)
        (tmp_path / "run" / "environment.json").write_text(json.dumps(about))
        (tmp_path / "run" / "config.toml").write_text(write_toml(config.asdict()))
        again, _ = run(tmp_path / "run", 3, fraction_train=0.5)
        assert [r.round for r in again.records] == [3]

    @pytest.mark.parametrize(("fraction", "least", "cohort"), [(1.0, 2, NODES), (0.5, 2, 4), (0.1, 3, 3)])
    def test_the_folder_says_how_many_clients_there_are(self, tmp_path, fraction, least, cohort):
        more = {"fraction_train": fraction, "min_train_nodes": least}
        run(tmp_path / "run", 2, **more)
        config = load_config(tmp_path / "run")
        assert (config.clients, config.cohort) == (NODES, cohort)
        run(tmp_path / "known", 2, population=20, **{**more, "min_train_nodes": 2})
        config = load_config(tmp_path / "known")
        assert (config.clients, config.cohort) == (20, int(20 * fraction))

    def test_a_population_may_be_given_later(self, tmp_path):
        run(tmp_path / "run", 2)
        again, _ = run(tmp_path / "run", 4, population=NODES)
        whole, _ = run(None, 4)
        assert (vector(again) == vector(whole)).all()
        assert load_config(tmp_path / "run").clients == NODES

    def test_a_method_that_remembers_clients_keeps_their_number(self, tmp_path):
        def remembering(population, rounds):
            strategy = flower.MIFA(**EVERYBODY, population=population, folder=tmp_path / "run")
            train(strategy, Unreliable(plain_app()), rounds)

        remembering(NODES, 1)
        with pytest.raises(RunFolderError, match=f"clients = {NODES + 1}, was {NODES}"):
            remembering(NODES + 1, 2)
        remembering(NODES, 2)

    def test_an_app_without_a_seed_says_so_and_goes_on(self, tmp_path):
        run(tmp_path / "run", 2)
        with pytest.raises(RunFolderError, match="check_initial_arrays"):
            run(tmp_path / "run", 3, arrays=moved())
        again, _ = run(tmp_path / "run", 3, arrays=moved(), check_initial_arrays=False)
        whole, _ = run(None, 3)
        assert (vector(again) == vector(whole)).all()

    def test_any_method_compares_the_weights_of_its_model(self, tmp_path):
        server, client = halves()
        train(flower.strategy("feddpc", **server, folder=tmp_path / "run"), Unreliable(flower.client_app(**client)), 1)
        with torch.no_grad():
            next(server["model"].parameters()).add_(1.0)
        with pytest.raises(RunFolderError, match="initial weights"):
            train(
                flower.strategy("feddpc", **server, folder=tmp_path / "run"),
                Unreliable(flower.client_app(**client)),
                2,
            )

    def test_a_finished_run_says_that_nothing_is_trained(self, tmp_path, caplog):
        run(tmp_path / "run", 2)
        run(tmp_path / "run", 2)
        assert any("num_rounds" in message and "folder=" in message for message in caplog.messages)

    def test_other_trouble_with_a_folder_names_arguments_too(self, tmp_path):
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "thesis.tex").touch()
        run(tmp_path / "run", 1)
        held = RunFolder.reopen(tmp_path / "run")
        for folder, kind in ((tmp_path / "full", RunFolderError), (tmp_path / "run", FolderInUseError)):
            with pytest.raises(kind) as error:
                run(folder, 2)
            assert "--" not in str(error.value)
            assert "folder=" in str(error.value)
        held.close()
