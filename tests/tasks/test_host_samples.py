"""Training samples in host memory or in files: the same numbers as with samples on the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import feddpc
from feddpc.data import load
from feddpc.data.batches import Planner
from feddpc.data.partition import Partition
from feddpc.engines.cuda.captured import Cuda
from feddpc.engines.loop import Loop
from feddpc.errors import DataError
from feddpc.tasks.host_samples import HostSamples, is_mapped
from support import HARD, VARIANTS, run_rounds, setting_for, small_setting

SETTING = {"clients": 12, "cohort": 4, "rounds": 4, "precision": "float64", "device": "cpu"}


def numbers(result):
    return [{k: v for k, v in record.items() if k != "seconds"} for record in result.records]


@pytest.fixture
def folder(tmp_path):
    data = load("digits")
    for field in ("x_train", "y_train", "x_test", "y_test"):
        np.save(tmp_path / f"{field}.npy", getattr(data, field))
    return tmp_path


@pytest.mark.parametrize("engine", ["loop", "threads", "stacked"])
@pytest.mark.parametrize("method", ["feddpc", "fedga", "scaffold", "datasharing"])
def test_records_do_not_depend_on_where_samples_lie(method, engine):
    more = {"evaluate_clients": True, "finetune_steps": 1, "validation": 0.1, "dropout": 0.3, "augment": True}
    given = {**SETTING, **more, "data": "digits", "method": method, "engine": engine}
    there, here = (feddpc.simulate(**given, data_memory=memory) for memory in ("device", "host"))
    assert numbers(there) == numbers(here)
    assert all(torch.equal(value, here.state_dict[name]) for name, value in there.state_dict.items())


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("name", ["feddpc", "fedga fresh", "scaffold"])
def test_captured_rounds_read_the_samples_of_the_cohort(name, streams):
    there, here = (setting_for(VARIANTS[name], **HARD, data_memory=memory) for memory in ("device", "host"))
    one, _ = run_rounds(there, VARIANTS[name], Loop(), 4)
    two, _ = run_rounds(here, VARIANTS[name], Cuda(anywhere=True, streams=streams), 4)
    assert here.task.host is not None
    torch.testing.assert_close(two.w, one.w, rtol=1e-10, atol=1e-10)


def test_graphs_are_captured_anew_when_samples_have_moved():
    setting, engine = small_setting(data_memory="host"), Cuda(anywhere=True)
    run_rounds(setting, VARIANTS["feddpc"], engine, 2)
    captured = engine.captures
    setting.task.host.generation += 1
    run_rounds(setting, VARIANTS["feddpc"], engine, 2)
    assert engine.captures > captured


def test_a_compiled_round_refuses_samples_that_change():
    assert "data_memory" in Cuda(anywhere=True, compile=True).refuses(small_setting(data_memory="host").task)


@pytest.mark.parametrize("task", ["regression", "next-token"])
def test_other_targets_lie_in_host_memory_too(task):
    rng = np.random.default_rng(0)
    if task == "regression":
        x, y = rng.normal(size=(90, 5)).astype(np.float32), rng.normal(size=90).astype(np.float32)
    else:
        x, y = rng.integers(0, 7, (90, 6)), rng.integers(0, 7, (90, 6))
    model = "mlp" if task == "regression" else "transformer"
    given = {**SETTING, "data": (x[:60], y[:60], x[60:], y[60:]), "model": model, "method": "feddpc"}
    there, here = (feddpc.simulate(**given, data_memory=memory) for memory in ("device", "host"))
    assert numbers(there) == numbers(here)


def test_a_cohort_of_changing_size_finds_room():
    given = {**SETTING, "data": "digits", "method": "fedavg", "participation": "poisson", "rounds": 12}
    there, here = (feddpc.simulate(**given, data_memory=memory) for memory in ("device", "host"))
    assert numbers(there) == numbers(here)


def test_a_folder_of_arrays_is_mapped_and_not_read(folder):
    data = load(folder)
    assert is_mapped(data.x_train)
    assert not is_mapped(load("digits").x_train)
    given = {**SETTING, "method": "feddpc"}
    mapped, known = feddpc.simulate(data=str(folder), **given), feddpc.simulate(data="digits", **given)
    assert numbers(mapped) == numbers(known)
    assert mapped.config.data_memory == "host"
    assert known.config.data_memory == "device"


def test_a_run_may_be_resumed_with_samples_elsewhere(tmp_path):
    given = {**SETTING, "data": "digits", "method": "feddpc"}
    whole = feddpc.simulate(**given)
    feddpc.simulate(**{**given, "rounds": 2}, data_memory="host", out=tmp_path / "a")
    resumed = feddpc.simulate(**given, data_memory="device", out=tmp_path / "a", resume=True)
    assert numbers(resumed) == numbers(whole)


def test_only_the_samples_of_a_cohort_are_read():
    read: list[np.ndarray] = []

    def reader(ids):
        read.append(ids)
        return torch.from_numpy(ids * 10), torch.from_numpy(ids)

    partition = Partition.from_lists([[5, 3], [0, 4, 1], [2]])
    host, planner = HostSamples(reader, "cpu"), Planner(partition, 2, 1, seed=0)
    for clients in ([0, 1], [1, 2], [2]):
        plan = planner.plan(1, np.array(clients))
        staged = host.stage(plan, partition)
        there = plan.count[:, :, None] > np.arange(plan.index.shape[2])
        assert (host.y[torch.from_numpy(staged.index)].numpy() == plan.index)[there].all()
        assert (host.x[torch.from_numpy(staged.index)].numpy() == plan.index * 10)[there].all()
    assert [sorted(ids.tolist()) for ids in read[1:]] == [[0, 1, 3, 4, 5], [0, 1, 2, 4]]  # the last was there already


def test_what_was_read_ahead_is_used():
    read: list[int] = []

    def reader(ids):
        read.append(len(ids))
        return torch.from_numpy(ids), torch.from_numpy(ids)

    partition = Partition.from_lists([[0, 1], [2, 3, 4]])
    host, planner = HostSamples(reader, "cpu"), Planner(partition, 2, 1, seed=0)
    host.read_ahead(np.array([1]), partition)
    staged = host.stage(planner.plan(1, np.array([1])), partition)
    assert read == [1, 3]
    assert sorted(host.y[torch.from_numpy(staged.index[0, 0])].tolist()) == sorted(
        planner.plan(1, np.array([1])).index[0, 0].tolist()
    )


@pytest.mark.parametrize("broken", ["missing", "short", "pickle", "text"])
def test_a_broken_file_is_named(folder, broken):
    path = folder / "y_train.npy"
    if broken == "missing":
        path.unlink()
    elif broken == "short":
        path.write_bytes(path.read_bytes()[:-8])
    elif broken == "pickle":
        np.save(path, np.array([{}], dtype=object), allow_pickle=True)
    else:
        path.write_text("1,2,3")
    with pytest.raises(DataError, match="y_train"):
        load(folder)
