"""The engines themselves: dropout layers, the hook for a compiler, choosing, and untouched global state."""

import numpy as np
import pytest
import torch
from torch import nn

from feddpc import methods
from feddpc.build import build
from feddpc.config import Config
from feddpc.engines.loop import Loop
from feddpc.engines.stacked import Stacked
from feddpc.engines.threads import Threads
from feddpc.errors import BadInputError
from feddpc.runs.engine_choice import choose_engine
from support import blobs, run_rounds, small_setting, uneven


def dropout_setting():
    module = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
    config = Config.read({"cohort": 3, "clients": 8, "batch_size": 8, "rounds": 2})
    return build(config, data=blobs(), module=module, partition=uneven(90))


def test_dropout_layers_are_reproducible_and_leave_the_global_stream():
    setting, method = dropout_setting(), methods.create("fedavg")
    state = torch.get_rng_state()
    a, b = (run_rounds(setting, method, Loop(), 2)[0].w for _ in range(2))
    assert torch.equal(a, b)
    assert torch.equal(state, torch.get_rng_state())
    assert setting.task.module.training


class Functional(nn.Module):
    """Dropout that no layer announces."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(36, 3)

    def forward(self, x):
        return self.head(nn.functional.dropout(x.flatten(1), 0.3, self.training))


@pytest.mark.parametrize("name", ["fedavg", "fedga"])
def test_hidden_dropout_is_found_out(name):
    method = methods.create(name, **({"variant": "fresh"} if name == "fedga" else {}))
    config = Config.read({"cohort": 3, "clients": 8, "batch_size": 8, "rounds": 2})
    ends = []
    for seed in (1, 2):
        torch.manual_seed(0)
        module = Functional().eval()
        setting = build(config, data=blobs(), module=module, partition=uneven(90))
        torch.manual_seed(seed)
        ends.append(run_rounds(setting, method, Loop(), 2)[0].w)
    assert setting.task.stochastic
    assert torch.equal(*ends)
    with pytest.warns(UserWarning, match="random numbers"):
        assert choose_engine("auto", setting, method).name == "loop"


def test_stacked_refuses_dropout_and_auto_takes_the_loop():
    setting, method = dropout_setting(), methods.create("fedavg")
    with pytest.raises(BadInputError, match="draws random numbers"):
        choose_engine("stacked", setting, method)
    with pytest.warns(UserWarning, match="random numbers"):
        assert choose_engine("auto", setting, method).name == "loop"


def test_choosing_does_not_change_the_run():
    setting, method = small_setting(), methods.create("fedvarp")
    before, _ = run_rounds(setting, method, Loop(), 3)
    choose_engine("auto", setting, method)
    after, _ = run_rounds(setting, method, Loop(), 3)
    assert torch.equal(before.w, after.w)


def test_unknown_engine():
    with pytest.raises(BadInputError, match="did you mean 'stacked'"):
        choose_engine("staked", small_setting(), methods.create("fedavg"))


def test_the_compiler_hook_sees_every_step():
    calls = []

    def wrap(step):
        def counted(*args):
            calls.append(len(args[0]))
            return step(*args)

        return counted

    setting, method = small_setting(), methods.create("feddpc")
    a, _ = run_rounds(setting, method, Stacked(narrow=False, wrap=wrap), 2)
    b, _ = run_rounds(setting, method, Stacked(narrow=False), 2)
    assert torch.equal(a.w, b.w)
    assert calls
    assert set(calls) == {4}


@pytest.mark.parametrize("engine", [Loop(), Threads(), Stacked()], ids=["loop", "threads", "stacked"])
def test_global_state_is_untouched(engine):
    np_state, torch_state = np.random.get_state()[1].copy(), torch.get_rng_state()  # noqa: NPY002
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    run_rounds(small_setting(augment=True), methods.create("feddpc"), engine, 2)
    assert np.array_equal(np_state, np.random.get_state()[1])  # noqa: NPY002
    assert torch.equal(torch_state, torch.get_rng_state())
    assert (threads, dtype) == (torch.get_num_threads(), torch.get_default_dtype())
    assert torch.is_grad_enabled()


def test_loop_gradients_are_those_of_torch():
    """One client, one full batch: the update must be what a hand-written step gives."""
    setting = small_setting(cohort=1, batch_size=64, epochs=1, lr=0.1, server_lr=0.1)
    progress, (record,) = run_rounds(setting, methods.create("fedavg"), Loop(), 1)
    (client,) = record.participants
    module = setting.task.module
    setting_w = setting.task.flat.state_dict(setting.w0)
    module.load_state_dict(setting_w)
    own = torch.from_numpy(setting.partition[client].copy())
    x = (setting.task.x[own].double() - 127.5) / 127.5
    loss = nn.functional.cross_entropy(module(x), setting.task.y[own])
    module.zero_grad()
    loss.backward()
    with torch.no_grad():
        stepped = torch.cat([(p - 0.1 * p.grad).flatten() for p in module.parameters()])
    torch.testing.assert_close(progress.w, stepped, rtol=0, atol=1e-12)
    assert record.train_loss == pytest.approx(loss.item(), abs=1e-12)
