"""Configuration: names, types, domains, TOML there and back, precedence of flag, file and default."""

import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feddpc.config import Config, parse_set, read_toml, write_toml
from feddpc.errors import BadInputError
from feddpc.study.compare import Overrides

PLAIN = st.one_of(
    st.booleans(), st.integers(-(2**53), 2**53), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=20)
)


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,10}", fullmatch=True), PLAIN | st.lists(PLAIN, max_size=3), max_size=5))
@settings(max_examples=100, deadline=None)
def test_toml_there_and_back(table):
    assert tomllib.loads(write_toml({**table, "hyper": table})) == {**table, **({"hyper": table} if table else {})}


def test_a_complete_configuration_survives_its_file():
    config = Config.read({"method": "fedcm", "lr": 1, "hyper": {"alpha": 0.5}, "partition_options": {"min_size": 3}})
    assert Config.read(tomllib.loads(write_toml(config.asdict()))) == config
    assert config.lr == 1.0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"round": 3}, "unknown key 'round': did you mean 'rounds'"),
        ({"rounds": "many"}, "rounds = 'many' is a str, expected int"),
        ({"rounds": True}, "rounds = True is a bool, expected int"),
        ({"rounds": 0}, "rounds = 0: must be at least 1"),
        ({"clients": 0}, "clients = 0: must be at least 1"),
        ({"cohort": 101, "partition": "iid"}, "cohort = 101: must be at most clients = 100"),
        ({"cohort": 31, "clients": 30}, "cohort = 31: must be at most clients = 30"),
        ({"cohort": 0}, "cohort = 0"),
        ({"lr": -0.1}, "lr = -0.1: must be a finite number above 0"),
        ({"lr": float("nan")}, "lr = nan: must be a finite number"),
        ({"server_lr": 0}, "server_lr = 0.0"),
        ({"alpha": 0}, "alpha = 0.0: must be a finite number above 0"),
        ({"dropout": 1.0}, r"dropout = 1.0: must be a probability in \[0, 1\)"),
        ({"seed": -1}, "seed = -1"),
        ({"scaling": "quarter"}, "Valid: auto, channel, half, none, unit"),
        ({"hyper": 3}, "hyper = 3 must be a table"),
        ({"batch_size": 0}, "batch_size = 0"),
        ({"epochs": 1.5}, "epochs = 1.5 is a float, expected int"),
        ({"lr": 10**400}, "must be a finite number"),
        ({"threads": 10**9}, "at most 1024"),
    ],
)
def test_bad_values(values, message):
    with pytest.raises(BadInputError, match=message):
        Config.read(values)


def test_differences_name_the_keys():
    config = Config.read({"lr": 0.1, "hyper": {"lam": 1.0}})
    assert config.differences({"lr": 0.1, "engine": "auto", "hyper": {"lam": 1.0}}) == []
    assert Config.read({"hyper": {"clusters": [[0, 1]]}}).differences({"hyper": {"clusters": ((0, 1),)}}) == []
    assert config.differences({"lr": 0.2, "hyper": {"lam": 2.0}}) == ["lr = 0.2, was 0.1", "hyper.lam = 2.0, was 1.0"]


def test_reading_files(tmp_path):
    with pytest.raises(BadInputError, match="there is no file"):
        read_toml(tmp_path / "absent.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("rounds = = 3")
    with pytest.raises(BadInputError, match=r"broken.toml cannot be read as TOML: .*line 1"):
        read_toml(broken)
    broken.write_bytes(b"\xff\xfe")
    with pytest.raises(BadInputError, match="cannot be read as TOML"):
        read_toml(broken)


def test_set_needs_a_key_and_a_value():
    for text in ("lam", "=3", " =3"):
        with pytest.raises(BadInputError, match="KEY=VALUE"):
            parse_set(text)
    assert parse_set("hidden=[3, 4]") == ("hidden", [3, 4])
    assert parse_set("width=2024-01-01") == ("width", "2024-01-01")
    assert parse_set("name=1\nmore = 2") == ("name", "1\nmore = 2")


NAMES = ["feddpc", "fedcm", "fedavg"]


def wish(*pairs, names=NAMES):
    wishes = Overrides()
    for key, value in pairs:
        wishes.set(key, value, names)
    return wishes


def test_set_finds_where_a_key_belongs():
    wishes = wish(
        ("lam", 2.0), ("fedcm.alpha", 0.5), ("model.width", 8), ("lr_decay", 0.9), ("participation.groups", 5)
    )
    assert wishes.config("feddpc").hyper == {"lam": 2.0}
    assert wishes.config("fedcm").hyper == {"alpha": 0.5}
    assert wishes.config("fedavg").hyper == {}
    for name in NAMES:
        config = wishes.config(name, seed=7)
        assert (config.seed, config.lr_decay, config.model_options) == (7, 0.9, {"width": 8})
        assert config.participation_options == {"groups": 5}


def test_a_hyper_parameter_wins_over_a_key_of_the_same_name():
    assert wish(("alpha", 0.5)).config("fedcm").hyper == {"alpha": 0.5}
    assert wish(("alpha", 0.5), names=["fedavg"]).config("fedavg").alpha == 0.5


def test_set_says_what_it_does_not_know():
    with pytest.raises(BadInputError, match="unknown key 'lamda': did you mean 'lam'"):
        wish(("lamda", 1))
    with pytest.raises(BadInputError, match="unknown hyper-parameter of fedcm 'lam'"):
        wish(("fedcm.lam", 1))
    with pytest.raises(BadInputError, match="unknown key 'hyper'"):
        wish(("hyper", {}))
    with pytest.raises(BadInputError, match="use --method"):
        wish(("method", "fedavg"))
    with pytest.raises(BadInputError, match="must be a table"):
        Overrides().absorb({"hyper": 3}, NAMES)


def test_a_file_with_tables_for_methods():
    wishes = Overrides()
    wishes.absorb({"lr": 0.3, "hyper": {"alpha": 0.2, "feddpc": {"lam": 3.0}, "fedprox": {"mu": 1.0}}}, NAMES)
    assert wishes.config("feddpc").hyper == {"lam": 3.0}
    assert wishes.config("fedcm").hyper == {"alpha": 0.2}
    with pytest.raises(BadInputError, match="unknown hyper-parameter 'gamma'"):
        Overrides().absorb({"hyper": {"gamma": 1}}, NAMES)
    with pytest.raises(BadInputError, match="unknown method 'fedfoo'"):
        Overrides().absorb({"hyper": {"fedfoo": {"mu": 1}}}, NAMES)


def test_threads_are_set_only_on_request():
    import torch

    from feddpc.runs.runner import execute
    from support import small_setting

    def run(**values):
        return execute(small_setting(rounds=1, engine="loop", **values)).config.threads

    before = torch.get_num_threads()
    try:
        assert run() is None
        assert torch.get_num_threads() == before
        torch.set_num_threads(2)
        assert run(threads="auto") == 1  # small work
        assert torch.get_num_threads() == 1
        assert run(threads=2) == 2
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    with pytest.raises(BadInputError, match="expected int or 'auto'"):
        Config.read({"threads": "many"})
