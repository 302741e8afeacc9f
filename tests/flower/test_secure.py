"""Under secure aggregation the model is that of the plain server, and the server sees nothing but the sum."""

import sys

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common.secure_aggregation.quantization import dequantize, quantize
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from flwr.compat.common.parameter import bytes_to_ndarray
from hypothesis import given
from hypothesis import strategies as st

from feddpc import flower, methods
from feddpc.engines.loop import Loop
from feddpc.flower.secure.client import hide_sample_count, masked_training
from feddpc.flower.secure.encoding import MODULUS, Encoding
from feddpc.flower.secure.protocol import masks
from feddpc.round.round import run_round
from feddpc.round.state import RunState
from secure_sums import CLIENT_SIDE, CLIENTS, COHORT, SERVER_SIDE, Watched, cohort_of, federated, lenet, losing, plain
from support import small_setting

# The encoding.


@given(clients=st.integers(1, 100_000))
def test_as_many_levels_as_fit_and_no_more(clients):
    levels = Encoding(1.0, clients).levels
    assert clients * levels < MODULUS
    assert levels == 1 << 30 or clients * 2 * levels >= MODULUS


@pytest.mark.parametrize("clients", [2, 4, 7, 16, 100])
def test_the_mean_of_encoded_updates_is_off_by_less_than_stated(clients):
    encoding = Encoding(3.0, clients)
    rng = np.random.default_rng(clients)
    ups = [{"delta": torch.from_numpy(rng.uniform(-3, 3, 500)), "flag": torch.tensor(1.0)} for _ in range(clients)]
    ups[0]["delta"][:2] = torch.tensor([-3.0, 3.0])  # at the bound
    total = sum(quantize(encoding.encode(up), 1.0, encoding.levels)[0].astype(np.int64) for up in ups)
    assert total.max() < MODULUS
    mean = (dequantize([total], 1.0, encoding.levels)[0] - (clients - 1)) / clients
    back = encoding.decode([mean], {"delta": (500,)}, torch.float64)["delta"]
    error = (back - torch.stack([up["delta"] for up in ups]).mean(0)).abs().max()
    assert encoding.error / 100 < error < encoding.error


def test_float32_would_not_have_the_digits_and_is_not_used():
    up = {"delta": torch.tensor([0.1]), "guarded": torch.tensor(0.0)}
    arrays = Encoding(10.0, 4).encode(up)
    assert [(a.dtype, a.shape) for a in arrays] == [(np.float64, (1,))] * 2


# Agreement with the plain server.


@pytest.fixture(scope="module")
def lenet_run():
    """Three rounds of FedDPC on LeNet5: the state after each, what the server received, and what the clients sent."""
    setting, snapshots, sent = lenet(), [], []
    encode = Encoding.encode
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Encoding, "encode", lambda self, up: sent.append(up) or encode(self, up))
        strategy, grid = federated(setting, rounds=3, snapshots=snapshots)
    return setting, strategy, grid, snapshots, sent


def test_lenet5_agrees_with_the_plain_server_round_by_round(lenet_run):
    setting, strategy, _, snapshots, _ = lenet_run
    assert setting.task.d == 62_006
    method, whole = methods.create("feddpc"), RunState.begin(methods.create("feddpc"), setting.w0, 6)
    for t in (1, 2, 3):
        participants = strategy.records[t - 1].participants
        progress = plain(setting, method, participants, t, snapshots[t - 1])
        torch.testing.assert_close(snapshots[t][0], progress.w, rtol=0, atol=1e-6)
        record = run_round(setting, method, Loop(), whole)
        assert participants == record.participants
        assert strategy.records[t - 1].train_loss == pytest.approx(record.train_loss, abs=1e-5)
        torch.testing.assert_close(snapshots[t][0], whole.w, rtol=0, atol=1e-5)
        moved = (snapshots[t][0] - snapshots[t - 1][0]).abs().max()
        assert moved > 1e-3  # there is something to agree on


def test_the_mean_is_orthogonal_to_g_before_the_server_cleans_up(lenet_run):
    _, strategy, *_ = lenet_run
    assert strategy.records[0].notes["along_g"] == 0  # there is no g yet
    assert all(record.notes["along_g"] < 1e-5 for record in strategy.records[1:])


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "feddpc"])
def test_the_model_is_off_by_less_than_the_stated_bound(method):
    # A bound so wide that rounding shows: 1e4 / 2^28.
    setting, snapshots = small_setting(cohort=COHORT, server_lr=0.1), []
    strategy, _ = federated(setting, method, rounds=2, snapshots=snapshots, max_norm=1e4)
    bound = 2 * Encoding(1e4, COHORT).error  # server_lr / client_lr = 2
    for t in (1, 2):
        progress = plain(setting, method, strategy.records[t - 1].participants, t, snapshots[t - 1])
        error = snapshots[t][0] - progress.w
        assert error.norm() < bound * np.sqrt(len(error))
        assert error.abs().max() > bound / 100
        if method != "feddpc" or t == 1:  # the clean-up projection moves errors between coordinates
            assert error.abs().max() < bound


@pytest.mark.parametrize(
    "hyper", [{"guard": "exclude", "tau": 0.95}, {"normalize_by_steps": True}, {"lam": -0.5}, {"momentum": 0.5}]
)
def test_variants_of_feddpc_agree_too(hyper):
    setting, snapshots = small_setting(cohort=COHORT), []
    strategy, _ = federated(setting, rounds=3, snapshots=snapshots, hyper=hyper)
    method, guarded = methods.create("feddpc", **hyper), 0
    for t in (1, 2, 3):
        progress = plain(setting, method, strategy.records[t - 1].participants, t, snapshots[t - 1])
        torch.testing.assert_close(snapshots[t][0], progress.w, rtol=0, atol=1e-5)
        guarded += strategy.records[t - 1].notes["guarded"]
    assert guarded == pytest.approx(round(guarded), abs=1e-4)  # a sum of flags
    assert (guarded > 0) == ("guard" in hyper)


def test_a_run_goes_on_where_it_was(tmp_path):
    setting = small_setting(cohort=COHORT)
    federated(setting, rounds=2, folder=tmp_path / "run")
    strategy, _ = federated(setting, rounds=4, folder=tmp_path / "run")
    assert [record.round for record in strategy.records] == [3, 4]
    progress = RunState.begin(methods.create("feddpc"), setting.w0, CLIENTS)
    for _ in range(4):
        run_round(setting, methods.create("feddpc"), Loop(), progress)
    torch.testing.assert_close(strategy.now.w, progress.w, rtol=0, atol=1e-5)


def test_the_app_reads_its_configuration():
    setting, made = small_setting(cohort=COHORT), []
    halves = flower.app_arguments(setting)
    grid = Watched(flower.secure_client_app(**halves.client()), CLIENTS)
    app = flower.secure_server_app(rounds=9, on_result=lambda s, _: made.append(s), **halves.server())
    run_config = {"rounds": 1, "hyper.lam": 0.5}
    app(grid, Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=run_config))
    assert (made[0].method.hyper()["lam"], len(made[0].records)) == (0.5, 1)


# What the server sees.


def test_what_the_server_receives_is_masked_and_uniform(lenet_run):
    _, strategy, grid, _, sent = lenet_run
    encoding = Encoding(strategy.max_norm, 4)
    for i, reply in enumerate(grid.replies(Stage.COLLECT_MASKED_VECTORS, round=1).values()):
        weight, delta, guarded, loss = map(bytes_to_ndarray, reply.content[RECORD_KEY_CONFIGS][Key.MASKED_PARAMETERS])
        ours = quantize(encoding.encode(sent[i]), 1.0, encoding.levels)
        assert weight != encoding.levels
        assert guarded != ours[1]
        assert loss != ours[2]
        assert (np.abs(delta - ours[0]) > 1).mean() > 0.999
        assert abs(np.corrcoef(delta, ours[0])[0, 1]) < 5 / np.sqrt(len(delta))
        counts = np.histogram(delta, 64, (0, MODULUS))[0]
        expected = len(delta) / 64
        assert ((counts - expected) ** 2 / expected).sum() < 63 + 6 * np.sqrt(2 * 63)  # chi-square, six deviations


def test_nothing_else_leaves_a_client(lenet_run):
    _, strategy, grid, *_ = lenet_run
    for reply in grid.replies(Stage.COLLECT_MASKED_VECTORS).values():
        content = dict(reply.content)
        assert set(content.pop(RECORD_KEY_CONFIGS)) == {Key.MASKED_PARAMETERS}
        assert set(content) == {"fitres.parameters", "fitres.num_examples", "fitres.metrics", "fitres.status"}
        assert not content["fitres.parameters"]
        assert not content["fitres.metrics"]
        assert dict(content["fitres.num_examples"]) == {"num_examples": 1}
    assert set(strategy.registry.sizes.values()) == {1}  # how many samples a client has is hidden


def test_the_sum_is_that_of_what_the_clients_sent():
    setting, sent = small_setting(cohort=COHORT), []
    encode = Encoding.encode
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Encoding, "encode", lambda self, up: sent.append(up) or encode(self, up))
        strategy, _ = federated(setting)
    mean = torch.stack([up["delta"] for up in sent]).mean(0)
    got = strategy._open(1)
    torch.testing.assert_close(got["delta"], mean, rtol=0, atol=strategy._encoding.error)


def test_masks_are_new_every_time():
    setting = small_setting(cohort=COHORT)
    first, second = (federated(setting)[1].replies(Stage.COLLECT_MASKED_VECTORS) for _ in range(2))
    for client, reply in first.items():
        one, other = (
            bytes_to_ndarray(r.content[RECORD_KEY_CONFIGS][Key.MASKED_PARAMETERS][1]) for r in (reply, second[client])
        )
        assert (one == other).mean() < 0.01


def test_masks_are_uniform_and_as_secret_as_their_seed():
    seed = bytes(range(32))
    folded = np.bitwise_xor.reduce(np.frombuffer(seed, np.uint32)).tobytes()
    # Flower's own: any two seeds that are folded to the same 32 bits. When this fails, masks.py has had its day.
    assert np.array_equal(*(pseudo_rand_gen(s, MODULUS, [(9,)])[0] for s in (seed, folded)))
    ours, others = (masks(s, MODULUS, [(50_000,), (3, 4)]) for s in (seed, folded))
    assert (ours[0] == others[0]).mean() < 0.001
    assert (ours[0].dtype, ours[1].shape) == (np.int64, (3, 4))
    assert ours[0].min() >= 0
    counts = np.histogram(ours[0], 64, (0, MODULUS))[0]
    assert counts.sum() == 50_000
    assert ((counts - 781.25) ** 2 / 781.25).sum() < 63 + 6 * np.sqrt(2 * 63)
    assert masks(seed, 16, [(1000,)])[0].max() == 15


def test_flowers_own_masks_are_not_used(monkeypatch):
    def own(*_):
        raise AssertionError("Flower's generator was used")

    for module in (CLIENT_SIDE, SERVER_SIDE):
        monkeypatch.setattr(sys.modules[module], "pseudo_rand_gen", own)
    lost = (0, Stage.COLLECT_MASKED_VECTORS)  # so that the server makes masks of both kinds
    strategy, _ = federated(small_setting(cohort=8), tamper=losing(lost))
    assert strategy.records[0].participants == list(range(1, 8))


def test_a_client_with_flowers_own_masks_spoils_the_round_and_not_the_model():
    setting, snapshots = small_setting(cohort=COHORT), []
    halves = flower.app_arguments(setting).client()
    stock = ClientApp()
    plain_app = flower.client_app(**halves)
    stock.query("hello")(hide_sample_count(plain_app))
    stock.train(mods=[secaggplus_mod])(masked_training(plain_app))
    apps = [flower.secure_client_app(**halves)] * CLIENTS
    apps[cohort_of(setting)[0]] = stock
    strategy, _ = federated(setting, apps=apps, snapshots=snapshots)
    assert strategy.records[0].participants == []
    assert torch.equal(snapshots[0][0], snapshots[1][0])
