"""Data sets of other libraries, tables and LEAF's files, on made-up data."""

import json
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from feddpc import data
from feddpc.data import readers
from feddpc.errors import BadInputError, DataError


class Rows:
    """What readers use of ``datasets.Dataset``."""

    def __init__(self, columns, features=None):
        self.columns, self.features = columns, features or {}
        self.column_names = list(columns)

    def with_format(self, form):
        assert form == "numpy"
        return {name: np.asarray(values) for name, values in self.columns.items()}


class Named:
    names = ("cat", "dog")


# torch


def test_torch_data_sets_are_read_once():
    x, y = torch.arange(24, dtype=torch.uint8).reshape(6, 1, 2, 2), torch.tensor([0, 1, 2, 0, 1, 2])
    seen = []
    made = readers.from_torch(TensorDataset(x, y), TensorDataset(x[:2], y[:2]), name="mine", progress=seen.append)
    assert (made.name, made.classes, made.sample_shape, len(made.x_test)) == ("mine", 3, (2, 2, 1), 2)
    np.testing.assert_array_equal(made.x_train[..., 0], x[:, 0])
    assert seen == [1] * 8


def test_torch_targets_and_options_reach_the_data_set():
    rows = [(np.ones(3), torch.tensor([0.5, 1.5])), (np.zeros(3), torch.tensor([2.5, 3.5]))]
    made = readers.from_torch(rows, rows, client_ids=["a", "b"])
    assert (made.target, made.classes, made.natural_partition()[1]) == ("floats", 2, ("a", "b"))


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (iter([]), "train is a"),
        ([3], r"train\[0\] is a int: it must be a pair"),
        ([(1.0, 2, 3)], r"train\[0\] is a tuple"),
        ([(np.zeros(2), 0), (np.zeros(3), 1)], "samples of train have the shapes"),
        ([], "samples of train have the shapes none"),
    ],
)
def test_bad_torch_data_sets_are_named(train, message):
    with pytest.raises(BadInputError, match=message):
        readers.from_torch(train, [(np.zeros(2), 0)])


# Hugging Face


def test_a_dictionary_of_splits_with_class_names_and_clients():
    x, y = np.arange(32, dtype=np.uint8).reshape(2, 4, 4), [1, 0]
    split = Rows({"image": x, "label": y, "writer": ["b", "a"]}, {"label": Named()})
    made = readers.from_hugging_face(
        {"train": split, "valid": split}, inputs="image", target="label", client="writer", test="valid"
    )
    assert made.is_image
    assert (made.class_names, made.natural_partition()[1]) == (("cat", "dog"), ("a", "b"))
    np.testing.assert_array_equal(made.y_test, y)


def test_one_data_set_is_split_and_columns_become_a_table():
    rows = Rows({"a": np.arange(10), "b": np.arange(10) / 2, "y": np.arange(10) / 4})
    made = readers.from_hugging_face(rows, inputs=["a", "b"], target="y", test=0.3)
    assert (made.target, made.sample_shape, len(made.x_train), len(made.x_test)) == ("floats", (2,), 7, 3)
    np.testing.assert_array_equal(made.x_train[:, 0], 4 * made.y_train)
    assert sorted([*made.y_train, *made.y_test]) == (np.arange(10) / 4).tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inputs": "c", "target": "y", "test": 0.5}, "unknown column of split train 'c'"),
        ({"inputs": "a", "target": "y", "client": "who", "test": 0.5}, "'who'"),
        ({"inputs": "a", "target": "y"}, "test = 'test'.*test = 0.2"),
        ({"inputs": "a", "target": "y", "test": 1.0}, "test = 1.0"),
        ({"inputs": ["a", "m"], "target": "y", "test": 0.5}, "column 'm' holds arrays"),
        ({"inputs": [], "target": "y", "test": 0.5}, "inputs is empty"),
    ],
)
def test_bad_requests_to_hugging_face_data_are_named(options, message):
    with pytest.raises(BadInputError, match=message):
        readers.from_hugging_face(Rows({"a": [1, 2], "y": [0, 1], "m": np.zeros((2, 2))}), **options)


def test_a_missing_split_is_named():
    with pytest.raises(BadInputError, match=r"unknown split 'test'.*train, valid"):
        readers.from_hugging_face({"train": Rows({}), "valid": Rows({})}, inputs="x", target="y")


# Tables


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "houses.csv"
    lines = ["size,rooms,city,price,kind"]
    lines += [f"{10 * i},{i},{'rome' if i % 2 else 'oslo'},{i / 2},{'flat' if i < 5 else 'house'}" for i in range(10)]
    path.write_text("\n".join(lines) + "\n\n")
    return path


def test_a_table_is_split_by_seed_with_clients(table):
    made = data.load(table, target="price", inputs=["size", "rooms"], client="city", test=0.2)
    assert (made.name, made.target, made.sample_shape, len(made.x_test)) == ("houses", "floats", (2,), 2)
    np.testing.assert_array_equal(made.x_train[:, 0], 20 * made.y_train)
    partition, names = made.natural_partition()
    assert names == ("oslo", "rome")
    assert (made.x_train[partition[0], 1] % 2 == 0).all()
    again, other = (
        readers.read_table(table, target="price", inputs=["size"], test=0.2, seed=seed).y_test.tolist()
        for seed in (0, 1)
    )
    assert made.y_test.tolist() == again != other


def test_text_targets_are_classes_in_sorted_order(table):
    made = readers.read_table(table, target="kind", inputs=["size"])
    assert (made.target, made.class_names) == ("classes", ("flat", "house"))
    np.testing.assert_array_equal(made.y_train, made.x_train[:, 0] >= 50)


def test_all_other_columns_are_inputs_and_a_second_file_holds_the_tests(tmp_path):
    (tmp_path / "a.csv").write_text("u,y,v\n1,0,2\n3,1,4\n")
    (tmp_path / "b.csv").write_text("y,u,v\n1,5,6.5\n")
    made = readers.read_table(tmp_path / "a.csv", target="y", test=tmp_path / "b.csv")
    assert made.x_train.tolist() == [[1, 2], [3, 4]]
    assert made.x_test.tolist() == [[5, 6.5]]
    assert made.target == "classes"
    assert readers.read_table(tmp_path / "a.csv", target="y", test=tmp_path / "b.csv", kind="floats").target == "floats"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "price"}, "column 'city' holds 'oslo', which is not a number: leave"),
        ({"target": "cost"}, "unknown column of the train table 'cost'"),
        ({"target": "price", "inputs": ["size"], "client": "town"}, "'town'"),
        ({"target": "price", "inputs": ["size"], "client": "price"}, "client_ids has type float64"),
        ({"target": "price", "inputs": ["size"], "test": 0.01}, "test = 0.01 of 10 rows"),
        ({"target": "price", "inputs": ["size"], "test": 2}, "test = 2"),
        ({"target": "price", "inputs": ["size"], "seed": -1}, "seed = -1"),
        ({"target": "price", "inputs": ["size"], "kind": "prices"}, "unknown target 'prices'"),
    ],
)
def test_bad_requests_to_a_table_are_named(table, options, message):
    with pytest.raises(BadInputError, match=message):
        readers.read_table(table, **options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a readable CSV"),
        ("a,y\n1,2\n3\n", "row 2"),
        ("a,a\n1,2\n", "two columns of one name"),
        ("a,y\n1,0\nnan,1\n2,0\n3,1\n", "NaN"),
    ],
)
def test_damaged_tables_are_named(tmp_path, text, message):
    (tmp_path / "bad.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        readers.read_table(tmp_path / "bad.csv", target="y", test=0.5)


def test_a_missing_value_is_named(tmp_path):
    (tmp_path / "bad.csv").write_text("a,y\n1,0\n,1\n2,0\n")
    with pytest.raises(BadInputError, match="column 'a'"):
        readers.read_table(tmp_path / "bad.csv", target="y", test=0.5)


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    with pytest.raises(BadInputError, match="pip install 'pyarrow"):
        data.load(tmp_path / "t.parquet", target="y")


def test_parquet_is_read_like_csv(tmp_path):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {"a": list(range(10)), "who": list("abcdeabcde"), "y": [i / 2 for i in range(10)]}
    parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
    (tmp_path / "t.csv").write_text("a,who,y\n" + "".join(f"{i},{'abcde'[i % 5]},{i / 2}\n" for i in range(10)))
    made, same = (data.load(tmp_path / f"t.{form}", target="y", client="who") for form in ("parquet", "csv"))
    assert made.digest == same.digest


def test_options_are_only_for_what_has_options(tmp_path):
    with pytest.raises(BadInputError, match="'digits' has no options, but target"):
        data.load("digits", target="y")


# LEAF


def leaf(folder, train, test):
    for part, users in (("train", train), ("test", test)):
        (folder / part).mkdir(parents=True)
        for number, (user, (x, y)) in enumerate(users.items()):
            content = {"users": [user], "num_samples": [len(y)], "user_data": {user: {"x": x, "y": y}}}
            (folder / part / f"all_{number}.json").write_text(json.dumps(content))
    return folder


def test_femnist_like_numbers(tmp_path):
    x = [[0.5, 1.0, 0.0]] * 2
    made = data.load(leaf(tmp_path / "femnist", {"f2": (x, [3, 1]), "f1": (x[:1], [0])}, {"f2": (x, [2, 2])}))
    assert (made.name, made.target, made.classes, made.sample_shape) == ("femnist", "classes", 4, (3,))
    assert made.y_train.tolist() == [3, 1, 0]
    partition, names = made.natural_partition()
    assert names == ("f1", "f2")
    assert partition[1].tolist() == [0, 1]


def test_shakespeare_like_text(tmp_path):
    train = {"ROMEO": (["abc", "bcd"], ["d", "a"]), "JULIET": (["dd"], ["b"])}
    made = readers.read_leaf(leaf(tmp_path / "s", train, {"ROMEO": (["cab"], ["d"])}))
    assert (made.target, made.classes, made.class_names) == ("classes", 4, tuple("abcd"))
    assert made.x_train.tolist() == [[0, 1, 2], [1, 2, 3], [3, 3, 0]]
    assert made.y_train.tolist() == [3, 0, 1]


def test_targets_of_several_characters_are_tokens(tmp_path):
    made = readers.read_leaf(leaf(tmp_path / "s", {"A": (["abc"], ["bcd"])}, {"A": (["ab"], ["bcd"])}))
    assert (made.target, made.y_train.tolist(), made.x_test.tolist()) == ("tokens", [[1, 2, 3]], [[0, 1, 0]])


def test_damaged_leaf_files_are_named(tmp_path):
    x = [[0.5]]
    with pytest.raises(DataError, match=r"no \.json files"):
        readers.read_leaf(tmp_path)
    with pytest.raises(DataError, match="1 samples, but 2 targets"):
        readers.read_leaf(leaf(tmp_path / "a", {"u": (x, [1, 2])}, {"u": (x, [1])}))
    with pytest.raises(DataError, match="mixes text and numbers"):
        readers.read_leaf(leaf(tmp_path / "b", {"u": (x, ["a"])}, {"u": (x, ["b"])}))
    with pytest.raises(DataError, match="holds no samples"):
        readers.read_leaf(leaf(tmp_path / "c", {"u": ([], [])}, {"u": (x, [1])}))
    (tmp_path / "a" / "train" / "all_0.json").write_text('{"users": ["u"]}')
    with pytest.raises(DataError, match=r"all_0\.json is not a file of LEAF"):
        readers.read_leaf(tmp_path / "a")


# npz


@pytest.mark.parametrize("ids", [[3, 1, 3], ["b", "a", "b"]])
def test_npz_with_client_ids(tmp_path, ids):
    x, y = np.zeros((3, 2)), np.array([0.5, 1, 2])
    np.savez(tmp_path / "d.npz", x_train=x, y_train=y, x_test=x, y_test=y, client_ids=ids)
    made = data.load(tmp_path / "d.npz")
    assert made.natural_partition()[1] == tuple(sorted({str(i) for i in ids}))
    assert made.target == "floats"


def test_npz_with_ids_that_do_not_fit(tmp_path):
    x, y = np.zeros((3, 2)), np.array([0, 1, 2])
    np.savez(tmp_path / "d.npz", x_train=x, y_train=y, x_test=x, y_test=y, client_ids=[1, 2])
    with pytest.raises(BadInputError, match="client_ids"):
        data.load(tmp_path / "d.npz")


@pytest.mark.parametrize("inputs", ["b,a", "b, a", ["b", "a"]])
def test_inputs_are_a_list_or_a_text_with_commas(inputs, tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,b,c,y\n" + "1,2,3,0\n4,5,6,1\n" * 5)
    assert readers.read_table(path, target="y", inputs=inputs).x_train[0].tolist() in ([2, 1], [5, 4])
    assert readers.read_table(path, target="y", inputs="c").sample_shape == (1,)
    with pytest.raises(BadInputError, match="'area'"):
        readers.read_table(path, target="y", inputs="area,b")


def test_a_column_with_a_comma_in_its_name_is_found(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text('"a,b",y\n' + "1,0\n2,1\n" * 5)
    assert readers.read_table(path, target="y", inputs="a,b").sample_shape == (1,)
    rows = Rows({"a,b": np.ones((10, 3)), "y": np.arange(10) % 2})
    assert readers.from_hugging_face(rows, inputs="a,b", target="y", test=0.2).sample_shape == (3,)


@pytest.mark.parametrize(
    "text", ["a,y,who\n1,2.5,u\n3,,v\n2,1.5,u\n", "a,y,who\n1,2.5,u\n,1,v\n2,1.5,u\n", "a,y,who\n1,2,\n2,1,v\n"]
)
def test_empty_cells_are_refused(text, tmp_path):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(BadInputError, match="is empty in row"):
        readers.read_table(tmp_path / "t.csv", target="y", client="who", test=0.5)
