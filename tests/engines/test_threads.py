"""Several clients at a time on a CPU: bit for bit what one after the other gives."""

import threading
from dataclasses import replace

import pytest
import torch
from torch import nn

from feddpc import methods
from feddpc.build import build
from feddpc.config import Config
from feddpc.engines.loop import Loop
from feddpc.engines.threads import Threads
from feddpc.runs.engine_choice import choose_engine
from support import VARIANTS, blobs, run_rounds, setting_for, small_setting, uneven


@pytest.fixture(autouse=True)
def one_thread():
    """With several threads the reference engine itself may add in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("method", VARIANTS.values(), ids=VARIANTS.keys())
def test_bit_identical_to_one_after_the_other(method):
    setting = setting_for(method, device="cpu", precision="float32", augment=True)
    a, left = run_rounds(setting, method, Loop(), 3)
    b, right = run_rounds(setting, method, Threads(3), 3)
    assert torch.equal(a.w, b.w)
    for one, other in zip(left, right, strict=True):
        assert repr(replace(one, seconds=0.0)) == repr(replace(other, seconds=0.0))
    for mine, theirs in ((a.slots, b.slots), (a.clients, b.clients)):
        (ids, table), (other_ids, other_table) = mine.export(), theirs.export()
        assert ids.tolist() == other_ids.tolist()
        assert all(torch.equal(value, other_table[key]) for key, value in table.items())
    assert a.meter == b.meter


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_the_number_of_workers_does_not_matter(workers):
    setting, method = small_setting(device="cpu", precision="float32"), methods.create("scaffold")
    a, b = (run_rounds(setting, method, engine, 4)[0].w for engine in (Loop(), Threads(workers)))
    assert torch.equal(a, b)


class Watched(methods.FedAvg):
    """Writes down where steps run, and with how many threads."""

    name = "watched"
    seen: set[tuple[str, int]] = set()  # noqa: RUF012
    both = threading.Barrier(2, timeout=20)

    def finish(self, y, ctx):
        self.both.wait()
        torch.ones(1 << 20).sum()  # large enough for several
        self.seen.add((threading.current_thread().name, torch.get_num_threads()))
        return super().finish(y, ctx)


def test_two_clients_run_at_a_time_on_one_core_each():
    torch.set_num_threads(2)
    run_rounds(small_setting(device="cpu", cohort=2), Watched(), Threads(2), 2)
    assert {threads for _, threads in Watched.seen} == {1}
    assert len(Watched.seen) == 2


def test_the_threads_of_others_are_left_alone():
    torch.set_num_threads(2)
    run_rounds(small_setting(device="cpu"), methods.create("fedavg"), Threads(), 1)
    found = [torch.get_num_threads()]
    other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    other.start()
    other.join()
    assert found == [2, 2]


class Failing(methods.FedAvg):
    """Fails for some clients."""

    name = "failing"

    def finish(self, y, ctx):
        raise ValueError("a client fails")


def test_a_failure_is_that_of_the_client_and_leaves_the_engine_usable():
    setting, engine = small_setting(device="cpu"), Threads(2)
    with pytest.raises(ValueError, match="a client fails"):
        run_rounds(setting, Failing(), engine, 1)
    a, b = (run_rounds(setting, methods.create("fedavg"), e, 2)[0].w for e in (Loop(), engine))
    assert torch.equal(a, b)


def test_one_engine_may_run_several_settings():
    engine, method = Threads(2), methods.create("fedavg")
    for setting in (small_setting(device="cpu"), small_setting(device="cpu", lr=0.01), small_setting(device="cpu")):
        a, b = (run_rounds(setting, method, e, 2)[0].w for e in (Loop(), engine))
        assert torch.equal(a, b)


class Uncopied(nn.Module):
    """A network that cannot be copied."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(36, 3)

    def forward(self, x):
        return self.head(x.flatten(1))

    def __deepcopy__(self, memo):
        raise RuntimeError("not to be copied")


def test_what_it_refuses():
    config = Config.read({"cohort": 3, "clients": 8, "batch_size": 8, "rounds": 2})
    dropout = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    for module, why in ((dropout, "random numbers"), (Uncopied(), "cannot be copied: not to be copied")):
        setting = build(config, data=blobs(), module=module, partition=uneven(90))
        assert why in Threads().refuses(setting.task)
        with pytest.warns(UserWarning, match="'loop'"):
            assert choose_engine("auto", setting, methods.create("fedavg")).name == "loop"
    setting.task.device = torch.device("cuda")
    assert "CPU" in Threads().refuses(setting.task)
