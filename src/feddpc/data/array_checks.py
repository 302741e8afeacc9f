"""Checks of the arrays of a data set: samples, targets and client ids. Each returns an array in its stored type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from feddpc.errors import BadInputError, DataError

Array = npt.NDArray[Any]
#: What a target is: a class number, real numbers, several yes/no labels, or a sequence of tokens.
Target = Literal["classes", "floats", "multihot", "tokens"]
#: A larger label is taken for a mistake: a model with that many outputs would fill the memory.
MAX_CLASSES = 100_000
MAX_TOKENS = 1 << 24
#: How many samples are checked at a time.
CHUNK = 10_000
#: The token target that no loss counts, as in torch's cross-entropy: it pads sequences.
IGNORED = -100


def infer_target(ys: list[Array]) -> Target:
    """Return what these targets are, by their type and shape; see :meth:`Dataset.from_arrays`."""
    if any(np.issubdtype(y.dtype, np.floating) for y in ys):
        return "floats"
    if any(y.ndim >= 2 and y.shape[1] > 1 for y in ys):
        return "multihot" if all(y.size and ((y == 0) | (y == 1)).all() for y in ys) else "tokens"
    return "classes"


def to_numpy(value: Any, field: str) -> Array:
    """Return a numpy array, torch tensor or list as a numpy array."""
    # Recognized by a method, so that torch is not imported for users of numpy.
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        if value.is_floating_point():
            value = value.float()  # numpy has no bfloat16
        value = value.numpy()
    try:
        return np.asarray(value)
    except ValueError as error:
        raise BadInputError(f"{field} is not an array ({error}): give all samples the same shape") from None


def check_samples(value: Any, field: str) -> Array:
    """Return samples as uint8, int64 or float32, or say what is wrong with them."""
    x = to_numpy(value, field)
    if x.ndim == 0 or x.size == 0:
        raise DataError(f"{field} is empty (shape {x.shape}): give at least one sample")
    if x.dtype == np.uint8:
        return _bytes(x)
    if np.issubdtype(x.dtype, np.integer):
        return np.ascontiguousarray(_int64(x, field))
    if not np.issubdtype(x.dtype, np.floating):
        raise DataError(f"{field} has type {x.dtype}: give uint8 images (0..255), float32 arrays or integer tokens")
    return _finite(x, field, DataError)


def _bytes(x: Array) -> Array:
    """Return images as [n, H, W, C], and bytes of any other shape unchanged."""
    if x.ndim == 3:
        x = x[..., None]
    elif x.ndim == 4 and x.shape[-1] not in (1, 3) and x.shape[1] in (1, 3):
        x = x.transpose(0, 2, 3, 1)
    return np.ascontiguousarray(x)


def _finite(values: Array, field: str, error: type[DataError] | type[BadInputError]) -> Array:
    """Return ``values`` as float32, or raise ``error`` where one is NaN or infinite."""
    with np.errstate(over="ignore"):  # a float64 beyond the range of float32 becomes Inf and is reported below
        x = np.ascontiguousarray(values, dtype=np.float32)
    count, first = 0, tuple[int, ...]()
    for start in range(0, len(x), CHUNK):  # it may be a file that is larger than the memory
        bad = ~np.isfinite(x[start : start + CHUNK])
        if bad.any() and not count:
            row, *rest = (int(i) for i in np.argwhere(bad)[0])
            first = (row + start, *rest)
        count += int(bad.sum())
    if count:
        raise error(
            f"{field} holds {count} values that are NaN or infinite, the first ({x[first]}) at index {first}: "
            "remove or replace them"
        )
    return x


def _int64(values: Array, field: str) -> npt.NDArray[np.int64]:
    if values.size and values.max() > np.iinfo(np.int64).max:
        raise BadInputError(f"{field} holds {values.max()}, which is beyond int64: give smaller numbers")
    return values.astype(np.int64, copy=False)


def _class_targets(y: Array, field: str) -> Array:
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1:
        raise DataError(f"{field} has shape {y.shape}: give one integer label per sample, shape [n]")
    if y.size == 0:
        raise DataError(f"{field} is empty: give at least one label")
    if not np.issubdtype(y.dtype, np.integer):
        raise DataError(
            f"{field} has type {y.dtype} (first value {y[0]}): labels are integers, 0 to classes - 1; convert them, or "
            'give task="regression" (of a Dataset target="floats") for numbers to be predicted'
        )
    if y.max() >= MAX_CLASSES:
        raise DataError(
            f"{field}[{y.argmax()}] is {y.max()}: class numbers are 0 or larger and below {MAX_CLASSES}; give "
            'task="regression" (of a Dataset target="floats") for numbers to be predicted'
        )
    return y.astype(np.int64)


def _float_targets(y: Array, field: str) -> Array:
    if y.ndim not in (1, 2) or y.size == 0:
        raise BadInputError(f"{field} has shape {y.shape}: float targets are [n] or [n, k]; reshape them")
    if y.dtype.kind not in "iufb":
        raise BadInputError(f"{field} has type {y.dtype}: float targets are numbers; convert them")
    return _finite(y, field, BadInputError)


def _multihot_targets(y: Array, field: str) -> Array:
    if y.ndim != 2 or y.size == 0 or y.dtype.kind not in "iufb":
        raise BadInputError(f"{field} is {y.dtype} of shape {y.shape}: multi-hot targets are [n, k] of 0 and 1")
    if found := _first(y, field, (y != 0) & (y != 1)):
        raise BadInputError(
            f'{found}: multi-hot targets are 0 or 1; give target="floats" or "tokens" for other numbers'
        )
    return y.astype(np.float32)


def _token_targets(y: Array, field: str) -> Array:
    if y.ndim != 2 or y.size == 0 or not np.issubdtype(y.dtype, np.integer):
        raise BadInputError(f"{field} is {y.dtype} of shape {y.shape}: token targets are integers [n, T]; reshape them")
    tokens = _int64(y, field)
    if found := _first(tokens, field, ((tokens < 0) & (tokens != IGNORED)) | (tokens >= MAX_TOKENS)):
        raise BadInputError(
            f"{found}: tokens are 0 or larger and below {MAX_TOKENS}, or {IGNORED} where nothing is to be predicted"
        )
    empty = np.flatnonzero((tokens == IGNORED).all(1))
    if len(empty):
        raise BadInputError(f"{field}[{empty[0]}] has only ignored tokens ({IGNORED}): leave such samples out")
    return tokens


#: The check of each kind of target.
TARGET_CHECKS: dict[Target, Callable[[Array, str], Array]] = {
    "classes": _class_targets,
    "floats": _float_targets,
    "multihot": _multihot_targets,
    "tokens": _token_targets,
}


def check_alike(what: str, letter: str, arrays: dict[str, Array]) -> None:
    """Raise unless training and test arrays have one shape per sample and one type."""
    train, test = arrays[f"{letter}_train"], arrays[f"{letter}_test"]
    if train.shape[1:] != test.shape[1:] or train.dtype != test.dtype:
        raise DataError(
            f"{what} of {letter}_train are {describe(train)} but those of {letter}_test are {describe(test)}: "
            "give both the same shape and type"
        )


def check_count(kind: Target, xs: dict[str, Array], ys: dict[str, Array], classes: int | None) -> int:
    """Return the number of classes, outputs, labels or tokens, after checking that it fits the arrays."""
    if classes is not None and (isinstance(classes, bool) or int(classes) != classes or classes < 1):
        raise BadInputError(f"classes is {classes!r}: give a whole number, at least 1")
    if kind in ("floats", "multihot"):
        y = ys["y_train"]
        outputs = y.shape[1] if y.ndim == 2 else 1
        if classes not in (None, outputs):
            raise BadInputError(f"classes = {classes}, but targets have {outputs} values per sample: leave classes out")
        return outputs
    whole = dict(ys)
    if kind == "tokens":
        whole |= {field: x for field, x in xs.items() if np.issubdtype(x.dtype, np.integer)}
    if classes is None:
        classes = int(max(array.max() for array in whole.values())) + 1
    noun = "label" if kind == "classes" else "token"
    for field, array in whole.items():
        wrong = (array < 0) | (array >= classes)
        if kind == "tokens" and field in ys:
            wrong &= array != IGNORED
        if found := _first(array, field, wrong):
            raise DataError(
                f"{found}, but with {classes} classes a {noun} is 0 to {classes - 1} ({wrong.sum()} such {noun}s)"
            )
    return int(classes)


def _first(values: Array, field: str, wrong: npt.NDArray[np.bool_]) -> str | None:
    """Say where the first wrong value is, and what it is; None if there is none."""
    if not wrong.any():
        return None
    place = tuple(int(i) for i in np.argwhere(wrong)[0])
    return f"{field}[{', '.join(map(str, place))}] is {values[place]}"


def check_client_ids(value: Any, samples: int) -> Array:
    """Return one id per training sample, as int64 or as strings."""
    ids = to_numpy(value, "client_ids")
    if ids.dtype == object and all(isinstance(i, str) for i in ids.flat):
        ids = ids.astype(str)
    if ids.ndim != 1 or len(ids) != samples:
        raise BadInputError(
            f"client_ids has shape {ids.shape}, but there are {samples} training samples: give one id per sample"
        )
    if np.issubdtype(ids.dtype, np.integer):
        return _int64(ids, "client_ids")
    if ids.dtype.kind != "U":
        raise BadInputError(
            f"client_ids has type {ids.dtype} (first value {ids[0]!r}): ids are integers or strings; convert them"
        )
    return ids


def describe(x: Array) -> str:
    """Return shape and type of one sample in words."""
    return f"{'x'.join(str(n) for n in x.shape[1:]) or 'scalar'} {x.dtype}"
