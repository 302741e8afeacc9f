"""Whatever goes wrong under secure aggregation costs a vote or a round, never the model."""

import base64
import re

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, x25519
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common.secure_aggregation.ndarrays_arithmetic import parameters_mod
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.compat.common.parameter import bytes_to_ndarray, ndarray_to_bytes

from feddpc import flower, methods
from feddpc.engines.loop import Loop
from feddpc.errors import BadInputError
from feddpc.flower.messages import RefusedError
from feddpc.flower.secure.client import check_bounds, require_min_cohort
from feddpc.flower.secure.encoding import MODULUS, Encoding, summable
from secure_sums import CLIENTS, COHORT, Watched, cohort_of, federated, losing, plain
from support import small_setting, tiny_net

# Faults.


@pytest.mark.parametrize("stage", Stage.all())
@pytest.mark.parametrize("method", ["feddpc", "fedavg"])
def test_a_drop_out_is_survived_in_every_stage(method, stage):
    setting, snapshots = small_setting(cohort=COHORT), []
    first = cohort_of(setting)
    lost = first[1]
    strategy, _ = federated(setting, method, 2, tamper=losing((lost, stage)), snapshots=snapshots)
    left = first if stage == Stage.UNMASK else [c for c in first if c != lost]
    assert strategy.records[0].participants == left
    assert strategy.records[0].dropped == [c for c in first if c not in left]
    torch.testing.assert_close(snapshots[1][0], plain(setting, method, left).w, rtol=0, atol=1e-6)


def test_drop_outs_in_different_stages_are_survived_together():
    setting, snapshots = small_setting(cohort=8), []
    lost = [(0, Stage.SETUP), (1, Stage.SHARE_KEYS), (2, Stage.COLLECT_MASKED_VECTORS)]
    federated(setting, tamper=losing(*lost), snapshots=snapshots)
    torch.testing.assert_close(snapshots[1][0], plain(setting, "feddpc", [3, 4, 5, 6, 7]).w, rtol=0, atol=1e-6)


@pytest.mark.parametrize("stage", Stage.all())
def test_without_a_quorum_the_model_stays_and_g_is_zero(stage):
    setting, snapshots = small_setting(cohort=COHORT), []
    lost = cohort_of(setting, 2)[:2]
    tamper = losing(*((c, stage) for c in lost))
    halves = flower.app_arguments(setting)
    grid = Watched(flower.secure_client_app(**halves.client()), CLIENTS)
    grid.tamper = lambda s, c, reply: tamper(s, c, reply) if reply.metadata.group_id == "2" else [reply]
    strategy = flower.secure_strategy(**halves.server())
    keep = lambda t, arrays: snapshots.append((strategy.now.w.clone(), strategy.now.server["delta"].clone()))  # noqa: E731
    strategy.start(grid, strategy.initial_arrays(), num_rounds=3, evaluate_fn=keep)
    (_, one, two, three) = snapshots
    assert torch.equal(one[0], two[0])
    assert one[1].norm() > 0
    assert not bool(two[1].any())
    assert strategy.records[1].participants == []
    assert set(lost) <= set(cohort_of(setting, 2))
    assert not torch.equal(two[0], three[0])  # the run goes on
    after = plain(setting, "feddpc", cohort_of(setting, 3), 3, (two[0], {"delta": two[1]}))
    torch.testing.assert_close(three[0], after.w, rtol=0, atol=1e-6)


def test_min_replies_is_a_quorum():
    setting, snapshots = small_setting(cohort=8), []
    federated(setting, tamper=losing((3, Stage.COLLECT_MASKED_VECTORS)), snapshots=snapshots, min_replies=8)
    assert torch.equal(snapshots[0][0], snapshots[1][0])


def test_a_client_beyond_the_bound_abstains_and_says_no_number():
    setting, snapshots = small_setting(cohort=COHORT), []
    ids, method = cohort_of(setting), methods.create("feddpc", form="client")
    plan = setting.planner.plan(1, np.array(ids))
    down = {"g": torch.zeros_like(setting.w0)}
    norms = Loop().train(method, setting.task, setting.w0, down, {}, plan, 0.05).uploads["delta"].norm(dim=1)
    longest = int(norms.argmax())
    bound = float(norms.sort().values[-2:].mean())
    strategy, _ = federated(setting, snapshots=snapshots, max_norm=bound)
    (refusal,) = strategy.refusals
    assert refusal.client == ids[longest]
    assert "this client abstains" in refusal.reason
    assert not re.search(r"\d\.\d", refusal.reason)
    assert strategy.records[0].rejected == [ids[longest]]
    left = [c for c in ids if c != ids[longest]]
    torch.testing.assert_close(snapshots[1][0], plain(setting, "feddpc", left).w, rtol=0, atol=1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 1.1])
def test_screening_before_the_masks(bad):
    up = {"delta": torch.tensor([0.5, bad]), "guarded": torch.tensor(0.0)}
    with pytest.raises(RefusedError, match="abstains"):
        check_bounds(up, Encoding(1.0, 4))
    up["delta"][1] = 0.5
    assert check_bounds(up, Encoding(1.0, 4)) is up


class Broken(type(tiny_net())):
    def forward(self, x):
        return super().forward(x) * torch.nan


def test_a_client_whose_training_fails_drops_out():
    setting, snapshots = small_setting(cohort=COHORT), []
    bad = cohort_of(setting)[0]
    halves = flower.app_arguments(setting).client()
    apps = [flower.secure_client_app(**halves)] * CLIENTS
    apps[bad] = flower.secure_client_app(**{**halves, "model": Broken})
    strategy, _ = federated(setting, apps=apps, snapshots=snapshots)
    assert [r.client for r in strategy.refusals] == [bad]
    torch.testing.assert_close(snapshots[1][0], plain(setting, "feddpc", cohort_of(setting)[1:]).w, rtol=0, atol=1e-6)


# Replies that make no sense.


def changed(stage, **values):
    """Put other values into a stage's reply."""

    def tamper(reply):
        record = reply.content[RECORD_KEY_CONFIGS]
        for name, make in values.items():
            record[getattr(Key, name)] = make(record[getattr(Key, name)])
        return [reply]

    return stage, tamper


def masked(change):
    return changed(
        Stage.COLLECT_MASKED_VECTORS,
        MASKED_PARAMETERS=lambda arrays: [
            arrays[0],
            ndarray_to_bytes(change(bytes_to_ndarray(arrays[1]))),
            *arrays[2:],
        ],
    )


def without(key):
    def tamper(reply):
        del reply.content[key]
        return [reply]

    return Stage.COLLECT_MASKED_VECTORS, tamper


def public(key, encoding="PEM"):
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_key().public_bytes(getattr(serialization.Encoding, encoding), form)


def unknown_curve(_):
    """A point on P-384, whose curve has a number that no curve has."""
    der = public(ec.generate_private_key(ec.SECP384R1()), "DER")
    text = base64.encodebytes(der.replace(bytes.fromhex("2b81040022"), bytes.fromhex("2b8104007f")))
    return b"-----BEGIN PUBLIC KEY-----\n" + text + b"-----END PUBLIC KEY-----\n"


NONSENSE = {
    "short": masked(lambda a: a[:1]),
    "another shape": masked(lambda a: a[None]),
    "floats": masked(lambda a: a.astype(np.float64)),
    "negative": masked(lambda a: -a - 1),
    "beyond the modulus": masked(lambda a: a + MODULUS),
    "fewer arrays": changed(Stage.COLLECT_MASKED_VECTORS, MASKED_PARAMETERS=lambda arrays: arrays[:2]),
    "no array": changed(Stage.COLLECT_MASKED_VECTORS, MASKED_PARAMETERS=lambda arrays: [b"rubbish"] * len(arrays)),
    "text": changed(Stage.COLLECT_MASKED_VECTORS, MASKED_PARAMETERS=lambda arrays: "rubbish"),
    "no protocol": without(RECORD_KEY_CONFIGS),
    "no older record": without("fitres.num_examples"),
    "no key": changed(Stage.SETUP, PUBLIC_KEY_1=lambda key: b"rubbish"),
    "a key on another curve": changed(
        Stage.SETUP, PUBLIC_KEY_1=lambda key: public(ec.generate_private_key(ec.SECP256R1()))
    ),
    "a key of another kind": changed(Stage.SETUP, PUBLIC_KEY_2=lambda key: public(x25519.X25519PrivateKey.generate())),
    "a key on no known curve": changed(Stage.SETUP, PUBLIC_KEY_1=unknown_curve),
    "a key less": changed(Stage.SETUP, PUBLIC_KEY_2=lambda key: 5),
    "shares for nobody": changed(Stage.SHARE_KEYS, DESTINATION_LIST=lambda nodes: nodes[:1]),
}


@pytest.mark.parametrize("fault", NONSENSE.values(), ids=NONSENSE)
def test_a_reply_that_makes_no_sense_costs_its_sender_the_vote(fault):
    stage, tamper = fault
    setting, snapshots = small_setting(cohort=COHORT), []
    bad, *left = cohort_of(setting)
    strategy, _ = federated(
        setting, snapshots=snapshots, tamper=lambda s, c, r: tamper(r) if (s, c) == (stage, bad) else [r]
    )
    (refusal,) = strategy.refusals
    assert (refusal.node, refusal.client) == (1000 + bad, bad)
    assert strategy.records[0].rejected == [bad]
    torch.testing.assert_close(snapshots[1][0], plain(setting, "feddpc", left).w, rtol=0, atol=1e-6)


UNHEARD = {
    "other nodes": changed(Stage.UNMASK, NODE_ID_LIST=lambda nodes: [n + 50 for n in nodes]),
    "a share less": changed(Stage.UNMASK, SHARE_LIST=lambda shares: shares[1:]),
    "twice": (Stage.UNMASK, lambda reply: [reply, reply]),
}


@pytest.mark.parametrize("fault", UNHEARD.values(), ids=UNHEARD)
def test_nonsense_while_unmasking_is_not_needed(fault):
    stage, tamper = fault
    setting, snapshots = small_setting(cohort=COHORT), []
    bad = cohort_of(setting)[0]
    strategy, _ = federated(
        setting, snapshots=snapshots, tamper=lambda s, c, r: tamper(r) if (s, c) == (stage, bad) else [r]
    )
    assert [r.client for r in strategy.refusals] == [bad]
    torch.testing.assert_close(snapshots[1][0], plain(setting, "feddpc", cohort_of(setting)).w, rtol=0, atol=1e-6)


def test_shares_that_do_not_fit_end_the_round_and_not_the_run():
    setting, snapshots = small_setting(cohort=COHORT), []
    bad = cohort_of(setting)[0]
    _, tamper = changed(Stage.UNMASK, SHARE_LIST=lambda shares: [s[:4] + bytes(len(s) - 4) for s in shares])
    strategy, _ = federated(
        setting, snapshots=snapshots, tamper=lambda s, c, r: tamper(r) if (s, c) == (Stage.UNMASK, bad) else [r]
    )
    assert torch.equal(snapshots[0][0], snapshots[1][0])
    assert strategy.records[0].participants == []


def test_a_sum_that_nobody_honest_could_have_made_is_not_used():
    setting, snapshots = small_setting(cohort=COHORT), []
    bad = cohort_of(setting)[0]
    # Masked numbers may be shifted by whoever sends them: the sum shifts with them.
    _, tamper = masked(lambda a: parameters_mod([a + MODULUS // 16], MODULUS)[0])
    strategy, _ = federated(
        setting,
        snapshots=snapshots,
        tamper=lambda s, c, r: tamper(r) if (s, c) == (Stage.COLLECT_MASKED_VECTORS, bad) else [r],
    )
    assert torch.equal(snapshots[0][0], snapshots[1][0])
    assert strategy.records[0].participants == []


# What a client refuses.


def test_a_client_takes_no_part_in_a_small_sum():
    setting, snapshots = small_setting(cohort=COHORT), []
    app = flower.secure_client_app(**flower.app_arguments(setting).client(), min_cohort=5)
    strategy, _ = federated(setting, apps=app, snapshots=snapshots)
    assert len(strategy.refusals) == COHORT
    assert "no part in a sum of 4" in strategy.refusals[0].reason
    assert torch.equal(snapshots[0][0], snapshots[1][0])


def test_a_client_does_not_go_on_when_a_sum_becomes_small():
    setting = small_setting(cohort=COHORT)
    app = flower.secure_client_app(**flower.app_arguments(setting).client(), min_cohort=4)
    for stage in Stage.all()[:3]:
        strategy, _ = federated(setting, apps=app, tamper=losing((cohort_of(setting)[0], stage)))
        assert strategy.records[0].participants == []
        assert "no part in a sum of 3" in strategy.refusals[0].reason


def test_a_client_does_not_let_half_of_a_cohort_open_its_update(monkeypatch):
    setting = small_setting(cohort=COHORT)
    monkeypatch.setattr("feddpc.flower.secure.server.SecureStrategy.quorum", lambda self, invited: 2)
    strategy, _ = federated(setting)
    assert "half of the cohort could open" in strategy.refusals[0].reason
    assert strategy.records[0].participants == []


@pytest.mark.parametrize(
    ("active", "dead", "why"), [([1, 2, 3], [3], "both secrets"), ([1, 2, 2], [], "a sum of 2"), ([1, 2, 3], [4], None)]
)
def test_a_client_does_not_give_away_what_opens_a_single_update(active, dead, why):
    Watched([], 0)  # messages can only be made within a run
    lists = {Key.ACTIVE_NODE_ID_LIST: active, Key.DEAD_NODE_ID_LIST: dead}
    record = ConfigRecord({Key.STAGE: Stage.UNMASK, **lists})
    message = Message(RecordDict({RECORD_KEY_CONFIGS: record}), 1000, "train")
    answer = lambda: require_min_cohort(3)(message, None, lambda message, context: "shares")  # noqa: E731
    if why is None:
        assert answer() == "shares"
        return
    with pytest.raises(RefusedError, match=why):
        answer()


def test_a_client_does_not_train_for_a_server_without_masks():
    setting = small_setting(cohort=COHORT)
    halves = flower.app_arguments(setting)
    grid = flower.InProcessGrid(flower.secure_client_app(**halves.client()), CLIENTS)
    strategy = flower.strategy("feddpc", **halves.server())
    strategy.start(grid, strategy.initial_arrays(), num_rounds=1)
    assert torch.equal(strategy.now.w, setting.w0)
    assert all("under secure aggregation only" in r.reason for r in strategy.refusals)
    evaluate = Message(RecordDict({"arrays": ArrayRecord()}), 1000, "evaluate", group_id="1")
    (reply,) = grid.deliver(evaluate)
    assert reply.has_error()


def test_a_client_set_up_for_another_method_abstains():
    setting = small_setting(cohort=COHORT)
    halves = flower.app_arguments(setting).client()
    apps = [flower.secure_client_app(**halves, method=methods.create("feddpc"))] * CLIENTS
    apps[2] = flower.secure_client_app(**halves, method=methods.create("fedavg"))
    with pytest.raises(BadInputError, match="set up for fedavg"):  # it says so when it enrols
        federated(setting, apps=apps)


# Bad input.


@pytest.mark.parametrize("name", ["fedexp", "scaffold", "fedvarp", "fedcm", "moon", "gmm", "fedga", "mifa"])
def test_methods_that_need_more_than_a_sum_are_refused(name):
    with pytest.raises(BadInputError, match="needs more than a sum"):
        summable(name)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"batch_size": None}, "batch_size"),
        ({"weighting": "samples"}, "use 'uniform'"),
        ({"participation": "weighted"}, "participation"),
        ({"participation": "poisson", "privacy": {"clip": 1.0, "noise": 1.0}}, "privacy clips"),
        ({"max_norm": 0.0}, "max_norm"),
        ({"max_norm": float("inf")}, "max_norm"),
    ],
)
def test_settings_that_need_what_is_hidden_are_refused(change, why):
    settings = flower.app_arguments(small_setting()).server()
    with pytest.raises(BadInputError, match=re.escape(why)):
        flower.secure_strategy("feddpc", **{**settings, **change})


def test_min_cohort_of_one_is_refused():
    with pytest.raises(BadInputError, match="min_cohort"):
        flower.secure_client_app(model=tiny_net(), data=lambda client, clients: (), min_cohort=1)


def test_a_message_without_terms_is_refused():
    with pytest.raises(BadInputError, match="max_norm"):
        Encoding.read(ConfigRecord({"clients": 3}))
    assert Encoding.read(Encoding(2.0, 5).record()) == Encoding(2.0, 5)
