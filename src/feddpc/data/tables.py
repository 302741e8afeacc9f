"""Tables with named columns as data sets: .csv and .parquet files, and Hugging Face's library datasets."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from feddpc.checks import check_int, check_probability
from feddpc.data.array_checks import Array, Target, to_numpy
from feddpc.data.dataset import Dataset
from feddpc.data.untrusted import decoding_errors
from feddpc.errors import BadInputError, DataError, unknown
from feddpc.rng import generator


def from_hugging_face(
    source: Any,
    *,
    inputs: str | Sequence[str],
    target: str,
    client: str | None = None,
    kind: Target | None = None,
    test: float | str = "test",
    seed: int = 0,
    name: str = "custom",
) -> Dataset:
    """Read a data set of Hugging Face's library ``datasets``.

    Args:
        source: a ``DatasetDict`` with the splits "train" and ``test``, or one ``Dataset`` to be split.
        inputs: the column of the samples, or several columns of numbers, as a list or separated by commas, which
            become the columns of a table.
        target: the column of the targets. Numbers of a ``ClassLabel`` keep their names.
        client: the column with the owner of each sample.
        kind: what the targets are, as ``target`` of :meth:`Dataset.from_arrays`; by default it is inferred.
        test: the name of the test split, or the share of the samples to draw for it if ``source`` has no splits.
        seed: the seed of that draw.
        name: the name of the data set.
    """
    parts: dict[str, Any] = {"train": source}
    if isinstance(source, Mapping):
        for part in ("train", test):
            if part not in source:
                raise unknown("split", str(part), [str(key) for key in source])
        parts = {"train": source["train"], "test": source[test]}
    columns = _listed(inputs, parts["train"].column_names)
    wanted = [*columns, target, *([client] if client is not None else [])]
    tables = {part: {c: _column(rows, c, f"split {part}") for c in wanted} for part, rows in parts.items()}
    feature = getattr(parts["train"], "features", {}).get(target)
    names = tuple(getattr(feature, "names", None) or ()) or None
    split = None if "test" in tables else (test, seed)
    return _from_columns(tables, columns, target, client, split, name=name, kind=kind, class_names=names)


def read_table(
    path: str | Path,
    *,
    target: str,
    inputs: str | Sequence[str] | None = None,
    client: str | None = None,
    kind: Target | None = None,
    test: float | str | Path = 0.2,
    seed: int = 0,
) -> Dataset:
    """Read a table with one sample per row and one column per number, from a ``.csv`` or ``.parquet`` file.

    Args:
        path: the file. The first line of a CSV file names its columns. Parquet needs pyarrow, the extra ``tables``.
        target: the column of the targets: whole numbers or text are classes, other numbers are predicted.
        inputs: the columns of the samples, as a list or separated by commas, by default all others. They must be
            numbers: text is refused.
        client: the column with the owner of each sample.
        kind: what the targets are, as ``target`` of :meth:`Dataset.from_arrays`; by default it is inferred.
        test: the share of the rows to draw for testing, or a second file with the test rows.
        seed: the seed of that draw.
    """
    path = Path(path).expanduser()
    table = _read_columns(path)
    columns = [c for c in table if c not in (target, client)] if inputs is None else _listed(inputs, table)
    tables = {"train": table}
    if isinstance(test, str | Path):
        tables["test"] = _read_columns(Path(test).expanduser())
    split = None if "test" in tables else (test, seed)
    return _from_columns(tables, columns, target, client, split, name=path.stem, kind=kind)


def _listed(inputs: str | Sequence[str], known: Iterable[str] = ()) -> list[str]:
    """Return the names of columns, which are given as a list or in one text with commas between them."""
    if not isinstance(inputs, str):
        return list(inputs)
    return [inputs] if inputs in known else [name.strip() for name in inputs.split(",")]


def _column(rows: Any, column: str, where: str) -> Any:
    """Return one column of a Hugging Face data set, as an array or a list."""
    if column not in rows.column_names:
        raise unknown(f"column of {where}", column, rows.column_names)
    return np.asarray(rows.with_format("numpy")[column][:])


def _read_columns(path: Path) -> dict[str, Any]:
    """Return the columns of a table by name: numbers where all values are numbers, else text."""
    if not path.is_file():
        raise DataError(f"{path} does not exist: give a .csv or .parquet file")
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet
        except ImportError:
            raise BadInputError(
                f"{path} needs the package pyarrow: pip install 'pyarrow>=14', or save the table as .csv"
            ) from None
        with decoding_errors(f"{path} is not a readable Parquet file"):
            table = pyarrow.parquet.read_table(path)
            return {name: np.asarray(table[name].to_numpy()) for name in table.column_names}
    with decoding_errors(f"{path} is not a readable CSV file in UTF-8"):
        with path.open(newline="", encoding="utf-8-sig") as file:
            header, *rows = (row for row in csv.reader(file) if row)
        if len(set(header)) != len(header):
            raise DataError(f"{path} has two columns of one name: rename one of {', '.join(header)}")
        uneven = [number for number, row in enumerate(rows, 1) if len(row) != len(header)]
        if uneven:
            raise DataError(f"{path} has another number of values than columns in row {uneven[0]}: correct it")
        return {name: _numbers([row[i] for row in rows]) for i, name in enumerate(header)}


def _numbers(values: list[str]) -> Array:
    """Return integers or floats where all values are such numbers, else the text."""
    for kind in (np.int64, np.float64):
        try:
            return np.array(values).astype(kind)
        except (ValueError, OverflowError):
            continue
    return np.array(values)


def _from_columns(
    tables: dict[str, dict[str, Any]],
    columns: list[str],
    target: str,
    client: str | None,
    split: tuple[object, int] | None,
    *,
    name: str,
    kind: Target | None,
    class_names: tuple[str, ...] | None = None,
) -> Dataset:
    """Build a data set from a training and a test table, or from one table and the share and seed of the test part."""
    for part, table in tables.items():
        for column in (*columns, target, *([client] if client is not None and part == "train" else [])):
            if column not in table:
                raise unknown(f"column of the {part} table", column, table)
            _refuse_empty(table[column], column, part)
        for column in columns:
            table[column] = _numeric(table[column], column)
    if split is not None:
        tables = _split(tables["train"], *split)
    arrays: dict[str, Any] = {}
    for part, table in tables.items():
        chosen = [table[column] for column in columns]
        arrays[f"x_{part}"] = chosen[0] if len(chosen) == 1 and chosen[0].ndim > 1 else _as_table(chosen, columns)
        arrays[f"y_{part}"] = _plain(table[target])
        if kind in ("floats", "multihot"):
            arrays[f"y_{part}"] = _numeric(arrays[f"y_{part}"], target)
    targets = [arrays["y_train"], arrays["y_test"]]
    if all(y.dtype.kind == "U" for y in targets):
        class_names = tuple(str(text) for text in np.unique(np.concatenate(targets)))
        for field in ("y_train", "y_test"):
            arrays[field] = np.searchsorted(class_names, arrays[field])
    classes = len(class_names) if class_names is not None and kind in (None, "classes") else None
    ids = None if client is None else _plain(tables["train"][client])
    return Dataset.from_arrays(
        **arrays, name=name, target=kind, classes=classes, class_names=class_names, client_ids=ids
    )


def _refuse_empty(values: Any, column: str, part: str) -> None:
    """Raise if cells of a column are empty: with one of them, numbers would be read as text, and so as classes."""
    array = _plain(values)
    empty = np.flatnonzero(np.char.strip(array) == "") if array.dtype.kind == "U" else np.empty(0, np.int64)
    if len(empty):
        raise BadInputError(
            f"column {column!r} of the {part} table is empty in row {empty[0] + 1} and {len(empty)} rows in all: fill "
            "it in, or leave these rows out"
        )


def _plain(values: Any) -> Array:
    """Return a column as numbers or text: an object array of strings, as pandas has it, becomes one of text."""
    array = to_numpy(values, "column")
    return array.astype(str) if array.dtype == object and all(isinstance(v, str) for v in array.flat) else array


def _numeric(values: Any, column: str) -> Array:
    array = _plain(values)
    if array.dtype.kind not in "iufb":
        wrong = next((value for value in array.flat if not _is_number(value)), "nothing")
        raise BadInputError(
            f"column {column!r} holds {str(wrong)[:40]!r}, which is not a number: leave the column out of inputs, or "
            "replace it by columns of numbers, such as one column of 0 and 1 per category"
        )
    return array


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _as_table(columns: list[Array], names: list[str]) -> Array:
    """Return columns of single numbers side by side, as float32."""
    if not columns:
        raise BadInputError("inputs is empty: name at least one column")
    for column, name in zip(columns, names, strict=True):
        if column.ndim != 1:
            raise BadInputError(f"column {name!r} holds arrays of shape {column.shape[1:]}: give it as the only input")
    return np.stack([column.astype(np.float64) for column in columns], axis=1)


def _split(table: dict[str, Any], test: object, seed: int) -> dict[str, dict[str, Any]]:
    """Draw the share ``test`` of the rows for testing; both parts keep the order of the rows."""
    if isinstance(test, str):
        raise BadInputError(f"test = {test!r}, but the data have no splits: give the share to draw, such as test = 0.2")
    share = check_probability("test", test, zero=False, one=False)
    rows = len(next(iter(table.values()), ()))
    count = round(share * rows)
    if not 0 < count < rows:
        raise BadInputError(f"test = {share} of {rows} rows leaves one part empty: change it")
    drawn = generator(check_int("seed", seed, 0), "test-split").permutation(rows)[:count]
    chosen = np.zeros(rows, bool)
    chosen[drawn] = True
    return {
        part: {name: np.asarray(values)[mask] for name, values in table.items()}
        for part, mask in (("train", ~chosen), ("test", chosen))
    }
