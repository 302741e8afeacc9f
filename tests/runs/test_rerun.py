"""A run made again from its folder: bit-identical from two files alone, or it says what is not as it was."""

import json
import shutil
import warnings

import numpy as np
import pytest
import torch

import feddpc
from feddpc.errors import BadInputError, RunFolderError
from support import blobs, tiny_net, uneven

QUICK = {"clients": 20, "cohort": 4, "rounds": 4, "model": "mlp"}


@pytest.fixture
def run(tmp_path):
    """A finished run of digits, by the stacked engine."""
    return feddpc.simulate(**QUICK, method="scaffold", engine="stacked", out=tmp_path / "first").folder


def numbers(records):
    return [{k: v for k, v in r.items() if k != "seconds"} for r in records]


def alone(run, place):
    """The two files that must suffice, elsewhere."""
    place.mkdir()
    for name in ("config.toml", "environment.json"):
        shutil.copy(run / name, place)
    return place


def change(path, **values):
    """Change values of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_copied_folder_comes_out_bit_identical(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "elsewhere" / "copy")
    shutil.rmtree(run)
    again = feddpc.rerun(copy, out=tmp_path / "again")
    assert again.likeness.identical
    assert (again.likeness.rounds, again.likeness.changed, again.likeness.differs) == (4, [], [])
    assert again.config.engine == "stacked"
    assert str(again.likeness) == f"records bit-identical to those of {copy} in the 4 rounds that both have"
    model = "model.safetensors"
    assert (tmp_path / "again" / model).read_bytes() == (copy / model).read_bytes()


def test_two_files_suffice(run, tmp_path):
    again = feddpc.rerun(alone(run, tmp_path / "two"))
    assert again.likeness.rounds == 0
    assert "no records to compare with" in str(again.likeness)
    first = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    assert numbers(again.records) == numbers(first)


@pytest.mark.parametrize("method", ["feddpc", "datasharing", "gmm", "moon"])
def test_methods_that_change_data_or_network_come_out_again(tmp_path, method):
    first = feddpc.simulate(**QUICK | {"rounds": 2}, method=method, engine="loop", out=tmp_path / "first")
    assert feddpc.rerun(first.folder).likeness.identical


def test_a_run_that_was_cut_off_is_compared_as_far_as_it_went(run):
    path = run / "rounds.jsonl"
    path.write_bytes(path.read_bytes()[:-10])
    likeness = feddpc.rerun(run).likeness
    assert (likeness.rounds, likeness.identical) == (3, True)


def test_another_seed_is_said(run):
    with pytest.warns(UserWarning, match=r"changed from .*: seed = 1, was 0.*other partition"):
        again = feddpc.rerun(run, seed=1)
    assert again.likeness.changed == ["seed = 1, was 0"]
    assert again.likeness.differs[:2] == ["other partition", "other initial model"]
    assert not again.likeness.identical
    assert again.likeness.tolerance is None  # other clients took part
    assert "records differ" in str(again.likeness)


def test_another_engine_equals_to_a_tolerance(run):
    with pytest.warns(UserWarning, match="engine = 'loop', was 'stacked'"):
        likeness = feddpc.rerun(run, engine="loop").likeness
    assert likeness.tolerance < 1e-4
    assert likeness.where.split(" of ")[0] in ("test_loss", "train_loss", "test_accuracy")


def test_options_go_with_the_choice_they_belong_to(run):
    with pytest.warns(UserWarning, match="changed from"):
        config = feddpc.rerun(run, rounds=1, method="fedprox", alpha=0.7, hyper={"mu": 0.5}).config
    assert (config.method, config.hyper) == ("fedprox", {"mu": 0.5})
    assert config.partition_options["alpha"] == 0.7
    with pytest.warns(UserWarning, match="changed from"):
        config = feddpc.rerun(run, rounds=1, partition="shards", client_lr=0.05).config
    assert (config.partition, set(config.partition_options)) == ("shards", {"shards"})
    assert (config.lr, config.model_options) == (0.05, feddpc.rerun(run).config.model_options)


def test_other_versions_are_warned_of(run):
    change(run / "environment.json", torch="1.0", python="3.99")
    with pytest.warns(
        UserWarning, match=rf"python .*, was 3.99, torch {torch.__version__}, was 1.0".replace("+", r"\+")
    ):
        likeness = feddpc.rerun(run).likeness
    assert likeness.identical
    assert len(likeness.differs) == 2


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.write_text('{"torch": '), "cannot be read"),
        (lambda path: path.write_text("{}"), "does not say what the run was made with"),
        (lambda path: change(path, fingerprint={"data": "0"}), "do not belong together"),
    ],
)
def test_a_damaged_environment_is_an_error_with_a_remedy(run, damage, said):
    damage(run / "environment.json")
    with pytest.raises(RunFolderError, match=said):
        feddpc.rerun(run)


@pytest.mark.parametrize("part", ["data", "partition"])
def test_other_data_are_an_error_unless_settings_change(run, part):
    path = run / "environment.json"
    prints = json.loads(path.read_text())["fingerprint"]
    change(path, fingerprint=prints | {part: "0" * 32})
    with pytest.raises(RunFolderError, match=f"other {part} than .* restore them, or run its settings"):
        feddpc.rerun(run)
    with pytest.warns(UserWarning, match=f"other {part}"):
        assert feddpc.rerun(run, rounds=2).likeness.differs == [f"other {part}"]


@pytest.mark.parametrize("wrong", [{"roundz": 3}, {"rounds": {"a": 1}}, {"hyper": 3}, {"foo": {"a": 1}}, {"lr": 0.0}])
def test_changes_are_checked_like_any_settings(run, wrong):
    with pytest.raises(BadInputError, match=next(iter(wrong))):
        feddpc.rerun(run, **wrong)


def test_a_configuration_that_was_edited_is_noticed(run):
    path = run / "config.toml"
    path.write_text(path.read_text().replace("seed = 0", "seed = 5"))
    with pytest.raises(RunFolderError, match="do not belong together"):
        feddpc.rerun(run)


def test_what_a_folder_only_names_must_be_given(tmp_path):
    own = {"data": blobs(), "model": tiny_net(), "partition": uneven(90)}
    feddpc.simulate(**own, cohort=3, rounds=3, batch_size=4, engine="loop", out=tmp_path / "first")
    assert feddpc.rerun(tmp_path / "first", **own).likeness.identical
    for lacking, said in (("data", "'blobs', not found"), ("model", "TinyNet"), ("partition", "index lists")):
        with pytest.raises(BadInputError, match=f"{said}.*give it to feddpc.rerun"):
            feddpc.rerun(tmp_path / "first", **{k: v for k, v in own.items() if k != lacking})
    with pytest.warns(UserWarning, match="other initial model"):
        assert not feddpc.rerun(tmp_path / "first", **own | {"model": tiny_net(seed=1)}).likeness.identical
    with pytest.raises(RunFolderError, match="other data and all data than"):
        feddpc.rerun(tmp_path / "first", **own | {"data": blobs(seed=3)})


def test_data_in_a_file_are_found_again(tmp_path):
    data = blobs()
    np.savez(tmp_path / "blobs.npz", **{k: getattr(data, k) for k in ("x_train", "y_train", "x_test", "y_test")})
    first = feddpc.simulate(data=tmp_path / "blobs.npz", **QUICK | {"clients": 8}, out=tmp_path / "first")
    assert first.config.data == str(tmp_path / "blobs.npz")
    assert feddpc.rerun(tmp_path / "first").likeness.identical


def test_as_many_threads_as_then_and_afterwards_as_many_as_before(run):
    threads = torch.get_num_threads()
    change(run / "environment.json", threads=threads + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = feddpc.rerun(run)
    assert again.config.threads == threads + 1
    assert torch.get_num_threads() == threads
