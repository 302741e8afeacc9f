"""A run that cannot train says so: small samples, void rounds, a first model that is not finite, wrappers."""

import re

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord
from flwr.serverapp import strategy as flower_strategies
from flwr.serverapp.strategy import FedAvg

from feddpc import flower
from feddpc.errors import BadInputError, FeddpcError
from feddpc.flower import VoidRoundsError
from federations import NODES, Unreliable, W, halves, move, plain_app, train, vector
from support import VARIANTS, small_setting

EVERYBODY = {"min_train_nodes": NODES, "min_available_nodes": NODES, "fraction_evaluate": 0.0}


class Broken(Unreliable):
    """A grid in which ``change(reply)`` spoils every training reply of the rounds ``rounds``."""

    def __init__(self, app, change, rounds=range(1, 100), nodes=NODES):
        super().__init__(app, nodes)
        self.change, self.rounds, self.trained = change, rounds, 0

    def deliver(self, message):
        replies = super().deliver(message)
        if message.metadata.message_type != "train":
            return replies
        self.trained += 1
        return [self.change(reply) for reply in replies] if int(message.metadata.group_id) in self.rounds else replies


def not_finite(reply):
    record = next(iter(reply.content.array_records.values()))
    name = next(iter(record))
    record[name] = Array(np.full(record[name].shape, np.nan, record[name].dtype))
    return reply


def retyped(dtype):
    """Return a change of every array of a reply to another type of numbers."""

    def change(reply):
        record = next(iter(reply.content.array_records.values()))
        for name in list(record):
            record[name] = Array(record[name].numpy().astype(dtype))
        return reply

    return change


class TestSmallSamples:
    """``min_replies`` is compared with how many clients a round asks."""

    def test_a_sample_smaller_than_min_replies_is_refused_before_a_client_trains(self):
        grid = Broken(plain_app(), lambda reply: reply, nodes=10)
        strategy = flower.FedDPC(fraction_train=0.1, min_replies=5, fraction_evaluate=0.0)
        with pytest.raises(BadInputError, match=r"min_replies = 5.*fraction_train") as error:
            train(strategy, grid, 3)
        assert "0.5" in str(error.value)  # the fraction that would do
        assert grid.trained == 0

    def test_more_than_there_are_nodes(self):
        strategy = flower.FedAvg(min_replies=NODES + 1, fraction_evaluate=0.0)
        with pytest.raises(BadInputError, match="min_replies"):
            train(strategy, Unreliable(plain_app()))

    def test_the_sample_is_taken_of_the_nodes_that_are_waited_for(self):
        """With 2 nodes there at first and 10 to wait for, half of them are 5, not 2."""

        class Slowly(Unreliable):
            asked = 0

            def get_node_ids(self):
                self.asked += 1
                return list(self.contexts) if self.asked > 2 else list(self.contexts)[:2]

        wanted = {"fraction_train": 0.5, "min_available_nodes": 10, "min_replies": 4, "fraction_evaluate": 0.0}
        strategy = flower.FedDPC(**wanted)
        train(strategy, Slowly(plain_app(), 10), 1)
        assert len(strategy.records[0].participants) == 5

    def test_nodes_that_leave_later_cost_rounds_and_not_the_run(self):
        grid = Unreliable(plain_app())
        strategy = flower.FedAvg(min_replies=NODES, min_train_nodes=1, fraction_evaluate=0.0)

        def leave(t, arrays):
            gone = grid.contexts.pop(1003, None) if t == 1 else None
            if gone is None and t == 2:
                grid.contexts[1003] = left[0]
            left.extend([gone] if gone is not None else [])

        left = []
        train(strategy, grid, 3, evaluate_fn=leave)
        assert [len(r.participants) for r in strategy.records] == [NODES, 0, NODES]

    def test_training_that_is_switched_off_is_no_mistake(self):
        strategy = flower.FedAvg(fraction_train=0.0, min_available_nodes=NODES)
        result = train(strategy, Unreliable(plain_app()), 5)
        assert list(result.evaluate_metrics_clientapp) == [1, 2, 3, 4, 5]

    @pytest.mark.parametrize("make", [flower.strategy, flower.secure_strategy])
    def test_any_method_with_a_cohort_smaller_than_min_replies(self, make):
        server, _ = halves(cohort=4)
        with pytest.raises(BadInputError, match=r"min_replies = 5.*cohort"):
            make("feddpc", **server, min_replies=5)

    def test_a_secure_sum_needs_a_cohort_of_two(self):
        server, _ = halves(cohort=1)
        with pytest.raises(BadInputError, match="cohort"):
            flower.secure_strategy(**server)


def _dropin(**more):
    strategy = flower.FedDPC(**EVERYBODY, **more)
    return strategy, plain_app()


def _any_method(**more):
    server, client = halves(cohort=NODES)
    return flower.strategy("feddpc", **server, **more), flower.client_app(**client)


KINDS = pytest.mark.parametrize("make", [_dropin, _any_method], ids=["drop-in", "any method"])


class TestVoidRounds:
    """Rounds in which no reply can be used end a run after a while, with the reason of every reply."""

    @KINDS
    def test_three_in_a_row_end_the_run_and_name_every_reason(self, make):
        strategy, app = make()
        with pytest.raises(VoidRoundsError, match="max_void_rounds = 3") as error:
            train(strategy, Broken(app, not_finite), 10)
        assert isinstance(error.value, FeddpcError)
        assert len(strategy.records) == 3
        for t in (1, 2, 3):
            assert f"round {t}: " in str(error.value)
        for node in range(1000, 1000 + NODES):
            assert str(node) in str(error.value)
        assert str(error.value).count("not finite") == 3
        assert "\n" not in str(error.value)

    @KINDS
    def test_a_good_round_between_starts_the_count_again(self, make):
        strategy, app = make()
        train(strategy, Broken(app, not_finite, rounds=(1, 2, 4, 5)), 6)
        assert [len(r.participants) for r in strategy.records] == [0, 0, NODES, 0, 0, NODES]

    @KINDS
    def test_the_number_can_be_chosen(self, make):
        strategy, app = make(max_void_rounds=1)
        with pytest.raises(VoidRoundsError, match="max_void_rounds = 1"):
            train(strategy, Broken(app, not_finite, rounds=(2,)), 3)
        assert len(strategy.records) == 2
        with pytest.raises(BadInputError, match="max_void_rounds"):
            make(max_void_rounds=0)

    def test_clients_that_never_answer_are_named_too(self):
        class Silent(Unreliable):
            def deliver(self, message):
                return []

        with pytest.raises(VoidRoundsError, match="no reply from clients 0, 1, 2"):
            train(flower.FedAvg(**EVERYBODY), Silent(plain_app()), 5)

    def test_secure_sums_that_are_never_opened(self):
        server, client = halves(cohort=4)
        app = flower.client_app(**client)  # not the client of secure sums
        strategy = flower.secure_strategy(**server)
        with pytest.raises(VoidRoundsError, match="the sum was not opened") as error:
            train(strategy, Unreliable(app), 5)
        assert "the node says" in str(error.value)
        assert len(strategy.records) == 3

    def test_a_weight_that_is_refused_is_named(self):
        def negative(reply):
            reply.content["metrics"]["num-examples"] = -0.5
            return reply

        with pytest.raises(VoidRoundsError, match=r"num-examples.*-0\.5"):
            train(flower.FedAvg(**EVERYBODY, weighting="samples"), Broken(plain_app(), negative), 5)

    def test_the_run_goes_on_from_there_when_the_cause_is_gone(self, tmp_path):
        wanted = {**EVERYBODY, "folder": tmp_path / "run"}
        with pytest.raises(VoidRoundsError):
            train(flower.FedDPC(**wanted), Broken(plain_app(), not_finite, rounds=(2, 3, 4)), 6)
        again = flower.FedDPC(**wanted)
        train(again, Unreliable(plain_app()), 6)
        assert [r.round for r in again.records] == [5, 6]
        assert [len(r.participants) for r in again.records] == [NODES] * 2

    def test_empty_draws_are_no_void_rounds(self):
        """With Poisson participation some rounds invite nobody, which is no fault."""
        server, client = halves(cohort=1, participation="poisson")
        strategy = flower.strategy("fedavg", **server, max_void_rounds=1)
        train(strategy, Unreliable(flower.client_app(**client)), 12)
        assert any(not record.participants for record in strategy.records)


class TestTypes:
    """Replies in another floating type than the model's are cast, and that is said once."""

    def run(self, dtype, model=np.float32, strategy=None):
        arrays = ArrayRecord({k: Array(a.numpy().astype(model)) for k, a in W.items()})
        strategy = strategy or flower.FedDPC(**EVERYBODY)
        result = strategy.start(Broken(plain_app(), retyped(dtype)), arrays, num_rounds=3)
        return strategy, result

    @pytest.mark.parametrize("dtype", [np.float64, np.float16, ">f4"])
    def test_other_floats_are_cast(self, dtype, caplog):
        strategy, result = self.run(dtype)
        expected, _ = self.run(np.float32)
        assert [len(r.participants) for r in strategy.records] == [NODES] * 3
        assert {a.dtype for a in result.arrays.values()} == {"float32"}
        torch.testing.assert_close(vector(strategy), vector(expected), rtol=0, atol=1e-2)
        assert sum("cast" in record.getMessage() for record in caplog.records) == 1

    def test_the_same_numbers_in_float64_give_the_same_model(self):
        strategy, expected = flower.FedAvg(**EVERYBODY), flower.FedAvg(**EVERYBODY)
        self.run(np.float64, strategy=strategy)
        self.run(np.float32, strategy=expected)
        torch.testing.assert_close(vector(strategy), vector(expected), rtol=0, atol=1e-6)

    def test_nothing_is_said_without_a_cast(self, caplog):
        self.run(np.float32)
        assert not any("cast" in record.getMessage() for record in caplog.records)

    def test_a_number_that_the_type_cannot_hold_is_refused(self):
        def change(reply):
            record = reply.content["arrays"]
            record["bias"] = Array(np.full(2, 1e300))
            return reply

        arrays = ArrayRecord({k: Array(a.numpy().astype(np.float32)) for k, a in W.items()})
        with pytest.raises(VoidRoundsError, match="not finite"):
            flower.FedAvg(**EVERYBODY).start(Broken(plain_app(), change), arrays, num_rounds=3)

    @pytest.mark.parametrize("dtype", [np.int64, np.complex128, np.bool_])
    def test_what_is_no_float_is_not_cast(self, dtype):
        with pytest.raises(VoidRoundsError, match=np.dtype(dtype).name):
            self.run(dtype)

    def test_any_method(self, caplog):
        strategy, app = _any_method()
        train(strategy, Broken(app, retyped(np.float32)), 3)
        assert [len(r.participants) for r in strategy.records] == [NODES] * 3
        assert sum("cast" in record.getMessage() for record in caplog.records) == 1


class TestFirstModel:
    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_a_first_model_that_is_not_finite_is_refused(self, value, tmp_path):
        bad = ArrayRecord({"weight": W["weight"], "bias": Array(np.array([0.0, value]))})
        grid = Broken(plain_app(), lambda reply: reply)
        with pytest.raises(BadInputError, match="'bias'"):
            flower.FedDPC(**EVERYBODY, folder=tmp_path / "run").start(grid, bad)
        assert grid.trained == 0
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize("make", [flower.strategy, flower.secure_strategy])
    def test_any_method(self, make):
        server, client = halves(cohort=4)
        with torch.no_grad():
            next(server["model"].parameters()).reshape(-1)[0] = torch.nan
        strategy = make("fedavg", **server)
        with pytest.raises(BadInputError, match="finite"):
            train(strategy, Unreliable(flower.client_app(**client)))


class TestIdle:
    """A round without usable updates sets FedDPC's g to zero, as in the simulator."""

    def test_a_void_round_sets_g_to_zero_and_the_next_is_a_first_one(self):
        strategy = flower.FedDPC(**EVERYBODY)
        grid, g = Broken(plain_app(), not_finite, rounds=(2,)), []
        train(strategy, grid, 3, evaluate_fn=lambda t, arrays: g.append(strategy.now.server["delta"].clone()))
        assert bool(g[1].any())
        assert not bool(g[2].any())
        # Without g nothing is projected: lam + 1 times the mean of the updates.
        moves = [np.concatenate([v.ravel() for v in move(n, 3).values()]) for n in range(NODES)]
        np.testing.assert_allclose(g[3].numpy(), 2 * np.mean(moves, axis=0), rtol=0, atol=1e-12)

    def test_it_survives_a_restart(self, tmp_path):
        wanted = {**EVERYBODY, "folder": tmp_path / "run"}
        train(flower.FedDPC(**wanted), Broken(plain_app(), not_finite, rounds=(2,)), 2)
        again = flower.FedDPC(**wanted)
        train(again, Unreliable(plain_app()), 3)
        whole = flower.FedDPC(**EVERYBODY)
        train(whole, Broken(plain_app(), not_finite, rounds=(2,)), 3)
        assert torch.equal(vector(again), vector(whole))
        assert torch.equal(again.now.server["delta"], whole.now.server["delta"])

    def test_too_few_replies_are_none(self):
        strategy = flower.FedDPC(**EVERYBODY, min_replies=NODES)
        lost = Unreliable(plain_app(), victim=2, fault=lambda t, replies: [] if t == 2 else replies)
        train(strategy, lost, 2)
        assert bool(vector(strategy).any())
        assert not bool(strategy.now.server["delta"].any())


class TestWrappers:
    """Flower's differential privacy clips before FedDPC stretches, so its noise would be too small."""

    def wrapped(self, name, strategy):
        cls = getattr(flower_strategies, name)
        fixed = {"clipping_norm": 1.0} if "Fixed" in name else {}
        return cls(strategy, noise_multiplier=0.1, num_sampled_clients=NODES, **fixed)

    NAMES = sorted(name for name in flower_strategies.__all__ if name.startswith("DifferentialPrivacy"))

    def test_these_are_all(self):
        assert len(self.NAMES) == 4

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("make", [_dropin, _any_method], ids=["drop-in", "any method"])
    def test_they_are_refused_with_the_remedy(self, name, make):
        strategy, app = make()
        grid = Broken(app, lambda reply: reply)
        with pytest.raises(BadInputError, match=rf"{name}.*privacy="):
            self.wrapped(name, strategy).start(grid, W, num_rounds=1)
        assert grid.trained == 0

    @pytest.mark.parametrize("name", NAMES)
    def test_also_when_the_wrapper_is_called_directly(self, name):
        wrapper = self.wrapped(name, flower.FedDPC(**EVERYBODY))
        with pytest.raises(BadInputError, match="privacy="):
            wrapper.configure_train(1, W, ConfigRecord(), Unreliable(plain_app()))

    def test_also_below_a_wrapper_of_ones_own(self):
        class Mine(FedAvg):
            def __init__(self, strategy):
                super().__init__()
                self.strategy = strategy

            def configure_train(self, *args):
                return self.strategy.configure_train(*args)

        wrapper = self.wrapped(self.NAMES[0], Mine(flower.FedAvg(**EVERYBODY)))
        with pytest.raises(BadInputError, match="privacy="):
            wrapper.configure_train(1, W, ConfigRecord(), Unreliable(plain_app()))

    def test_a_wrapper_of_another_kind_is_not(self):
        class Counting(FedAvg):
            def __init__(self, strategy):
                super().__init__(fraction_evaluate=0.0)
                self.strategy, self.calls = strategy, 0

            def configure_train(self, *args):
                self.calls += 1
                return self.strategy.configure_train(*args)

            def aggregate_train(self, *args):
                return self.strategy.aggregate_train(*args)

        wrapper, alone = Counting(flower.FedDPC(**EVERYBODY)), flower.FedDPC(**EVERYBODY)
        result = wrapper.start(Unreliable(plain_app()), W, num_rounds=3)
        assert wrapper.calls == 3
        assert np.array_equal(
            result.arrays["bias"].numpy(), train(alone, Unreliable(plain_app())).arrays["bias"].numpy()
        )


def test_the_example_of_the_readme_trains_with_ten_nodes(tmp_path, monkeypatch):
    from pathlib import Path

    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    snippet = re.search(r"```python\n(from feddpc\.flower import FedDPC.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(snippet[1], names)
    strategy = names["strategy"]
    train(strategy, Unreliable(plain_app(), 10), 3)
    assert all(len(record.participants) >= strategy.min_replies for record in strategy.records)
    assert strategy.method.max_scale == 10


def test_a_void_round_in_the_simulator_and_over_flower_is_the_same():
    from feddpc.engines.loop import Loop
    from support import run_rounds

    how = {"cohort": 1, "faults": {"nan": 1.0, "often": 0.5}}
    progress, records = run_rounds(small_setting(**how), VARIANTS["feddpc"], Loop(), 8)
    arguments = flower.app_arguments(small_setting(**how))
    strategy = flower.strategy(VARIANTS["feddpc"], **arguments.server(), max_void_rounds=100)
    train(strategy, flower.InProcessGrid(flower.client_app(**arguments.client()), 8), 8)
    counted = [bool(record.participants) for record in records]
    assert counted == [bool(record.participants) for record in strategy.records]
    voids = [i for i, good in enumerate(counted) if not good]
    assert any(any(counted[:i]) and any(counted[i:]) for i in voids)  # one after g was set, and a good one after it
    assert torch.equal(strategy.now.w, progress.w)
    assert torch.equal(strategy.now.server["delta"], progress.server["delta"])
