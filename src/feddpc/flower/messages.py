"""The messages between server and clients: tensors as array records, the experiment, and what is read from replies.

Readers do not trust their input. They check how an array was written, its type, its shape and its number of bytes
before they use it. Nothing is unpickled, and nothing is allocated that the receiver did not expect.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from feddpc import methods
from feddpc.checks import check_int, coerce
from feddpc.config import Config
from feddpc.data.untrusted import Header, read_header
from feddpc.errors import FeddpcError
from feddpc.flower import versions
from feddpc.methods.base import Method, State
from feddpc.models.flat import Flat
from feddpc.own_functions import without_module
from feddpc.tasks import TASKS
from feddpc.tasks.augmentation import TRANSFORMS
from feddpc.tasks.losses import LOSSES
from feddpc.tasks.measures import FUNCTIONS, MEASURES

R = TypeVar("R", ArrayRecord, MetricRecord)
#: The longest header of an array that is read.
HEADER = 1 << 12
#: Names of records: the experiment, a reply's header, and in that header the reason why a client refuses a message.
SPEC, REPLY, REFUSED = "orders", "reply", "refused"
#: The record that says which one-time payload a client must have, and how a client says that it does not have it.
SETUP, NO_SETUP = "setup", "this node does not have what the server hands out"
#: The last round in which a client's reply counted, for a client none of whose replies has counted yet.
NEVER = -1


class RefusedError(FeddpcError):
    """A message that cannot be used, and why."""


class TooManyClientsError(RefusedError):
    """A message of a client beyond the population, which is no fault of the client."""


def pack(state: Mapping[str, Tensor]) -> ArrayRecord:
    """Return tensors as an array record."""
    return ArrayRecord({key: Array(value.detach().cpu().numpy()) for key, value in state.items()})


def unpack(record: ArrayRecord, device: torch.device | str = "cpu") -> State:
    """Return a record's tensors, copied to torch's memory: with another alignment, sums may differ in the last bit."""
    arrays = {key: peek(array, key) for key, array in record.items()}
    try:
        return {key: torch.from_numpy(np.array(values)).to(device, copy=True) for key, values in arrays.items()}
    except TypeError as error:
        raise RefusedError(f"an array is not made of numbers: {error}") from None


def peek(array: Array, name: str, shape: tuple[int, ...] | None = None, dtype: str | None = None) -> NDArray[Any]:
    """Return a view of an array's numbers, without a copy; ``shape`` and ``dtype`` are what is expected, if anything.

    Where a floating type is expected, any floating type passes: the receiver casts, and checks the result.

    >>> peek(Array(np.array([1.0, 2.0])), "w", (2,), "float64")
    array([1., 2.])
    >>> peek(Array(np.array([1.0, 2.0])), "w", (3,), "float64")
    Traceback (most recent call last):
    feddpc.flower.messages.RefusedError: w has shape (2,), not (3,)
    """
    if array.stype != "numpy.ndarray":
        raise RefusedError(f"{name} was written as {array.stype!r}, not 'numpy.ndarray'")
    # In a file of NumPy's, byte 6 is the version, and the header's length follows.
    start = 10 if array.data[6:7] == b"\x01" else 12
    start += int.from_bytes(array.data[8:start], "little")
    try:
        header = _header(array.data[: min(start, HEADER)])
    except Exception as error:  # of any kind
        raise RefusedError(f"{name} is no array: {error}") from None
    if dtype is not None and str(header.dtype) != dtype and not header.dtype.kind == np.dtype(dtype).kind == "f":
        raise RefusedError(f"{name} is {header.dtype}, not {dtype}")
    if shape is not None and header.shape != shape:
        raise RefusedError(f"{name} has shape {header.shape}, not {shape}")
    if not header.fills(len(array.data) - start):
        raise RefusedError(f"{name} has {len(array.data) - start} bytes, which is not {header.shape} of {header.dtype}")
    values = np.frombuffer(array.data, header.dtype, header.numbers, start)
    return values.reshape(header.shape, order="F" if header.by_columns else "C")


@functools.lru_cache(maxsize=4096)
def _header(start: bytes) -> Header:
    """Read the header of an array. A model's arrays have the same ones every time."""
    return read_header(io.BytesIO(start))


def tensor(array: Array, name: str, like: Tensor) -> Tensor:
    """Return an array as a tensor of its own, of the type of ``like``, after checking shape and kind of numbers."""
    values = peek(array, name, tuple(like.shape), str(like.numpy().dtype))
    copied = torch.empty(like.shape, dtype=like.dtype)
    with np.errstate(over="ignore"):  # what the type cannot hold becomes infinite, and is refused as that
        np.copyto(copied.numpy(), values)
    return copied


def cast_note(arrays: Mapping[str, Array], dtypes: Mapping[str, str]) -> str | None:
    """Describe the first array that has another floating type than expected; return None if there is none."""
    for name, dtype in dtypes.items():
        if name in arrays and arrays[name].dtype != dtype:
            return f"{name} came as {arrays[name].dtype} and is cast to {dtype}"
    return None


def expect(record: Mapping[str, Any], names: Iterable[str], what: str, optional: Iterable[str] = ()) -> None:
    """Refuse a record that does not have exactly these ``names``; it may have those that are ``optional``."""
    names, known = list(names), {*names, *optional}
    missing, extra = [n for n in names if n not in record], [n for n in record if n not in known]
    if missing:
        raise RefusedError(f"{what} lacks {', '.join(missing[:3])}{' and more' if missing[3:] else ''}")
    if extra:
        raise RefusedError(
            f"{what} has {', '.join(extra[:3])}{' and more' if extra[3:] else ''}, which is not expected"
        )


def layout_tag(shapes: Mapping[str, Iterable[int]], frozen: Mapping[str, Tensor] | None = None) -> str:
    """Return a short name for a model: for names, order and shapes of what is trained, and for what is frozen.

    Frozen parameters do not travel, so a second part of the name says which values they have.

    >>> layout_tag({"a": (2,)}) == layout_tag({"a": (2,)}, {})
    True
    >>> one, other = (layout_tag({"a": (2,)}, {"base": torch.full((3,), value)}) for value in (0.0, 1.0))
    >>> one == other, one.partition("+")[0] == layout_tag({"a": (2,)})
    (False, True)
    """
    text = ";".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
    tag = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    if not frozen:
        return tag
    values = hashlib.blake2b(digest_size=8)
    for name, value in frozen.items():
        values.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        values.update(value.detach().cpu().contiguous().numpy().tobytes())
    return f"{tag}+{values.hexdigest()}"


def model_tag(flat: Flat) -> str:
    """Return the short name of a network in the experiment's precision."""
    return layout_tag(dict(zip(flat.names, flat.shapes, strict=True)), flat.frozen())


def arrays_of(content: RecordDict, key: str) -> ArrayRecord:
    """Return an array record of a message; an absent one is empty."""
    value = content.get(key)
    return value if isinstance(value, ArrayRecord) else ArrayRecord()


def read_arrays(content: RecordDict, key: str, like: Mapping[str, Tensor]) -> State:
    """Return the tensors of a message's array record, which must have the names, shapes and types of ``like``."""
    arrays = arrays_of(content, key)
    expect(arrays, like, f"the record {key!r}")
    return {name: tensor(arrays[name], name, expected) for name, expected in like.items()}


def only_record(content: RecordDict, kind: type[R]) -> R:
    """Return the one record of a kind in a message, as Flower's strategies want it, or refuse the message.

    Flower's own ``content.array_records`` ties the content into a cycle, so that a model would stay in memory until
    the garbage collector comes.
    """
    records = [record for record in content.values() if isinstance(record, kind)]
    if len(records) != 1:
        what = kind.__name__.removesuffix("Record").lower()
        raise RefusedError(f"it has {len(records)} {what} records, not one")
    return records[0]


#: Limits that protect a node from a server that asks for too much work or memory.
MOST_EPOCHS, MOST_SAMPLES, MOST_CLASSES = 1000, 10**8, 10**6
#: Keys of the configuration that clients must know.
CLIENT_KEYS = (
    *("method", "hyper", "seed", "clients", "batch_size", "epochs", "lr", "scaling", "augment", "precision"),
    *("client_optimizer", "client_optimizer_options", "clip_norm", "task", "loss", "metrics", "transform"),
)


@dataclass(frozen=True)
class ExperimentSpec:
    """What a client must know about the experiment. Every message carries it, and a client refuses another one."""

    version: str  #: the server's release and protocols, see `versions`
    layout: str  #: of the model, see `layout_tag`
    target: str  #: what the targets are: classes, floats, multihot or tokens
    classes: int
    settings: str  #: the keys of the configuration that clients must know, as JSON

    @classmethod
    def of(cls, config: Config, layout: str, target: str, classes: int) -> ExperimentSpec:
        """Return the specification of a configuration; code of the user's own is named without its module."""
        settings = {key: getattr(config, key) for key in CLIENT_KEYS if getattr(config, key) is not None}
        settings |= {name: code_name(settings[name]) for name in known_code()}
        return cls(versions.stated(), layout, target, classes, json.dumps(settings, sort_keys=True))

    def record(self) -> ConfigRecord:
        """Return the record for a message."""
        return ConfigRecord(asdict(self))

    @classmethod
    def read(cls, content: RecordDict) -> ExperimentSpec:
        """Return the specification in a message, or refuse a message of a protocol that this node does not speak."""
        record = content.get(SPEC)
        if not isinstance(record, ConfigRecord):
            raise RefusedError("the message has no experiment: it does not come from feddpc.flower.strategy")
        try:
            versions.agreed(record.get("version"), "the server", "this node")
        except versions.ProtocolError as error:
            raise RefusedError(str(error)) from None
        wanted = {f.name for f in fields(cls)}
        if set(record) != wanted:
            raise RefusedError(
                f"the message's experiment lacks {sorted(wanted - set(record))} and has {sorted(set(record) - wanted)}"
            )
        check_int("classes", record["classes"], 1, MOST_CLASSES)
        for name in ("layout", "target", "settings"):
            coerce(name, record[name], str)
        spec = cls(**record)  # type: ignore[arg-type]
        check_int("epochs", spec.config.epochs, 1, MOST_EPOCHS)
        return spec

    @functools.cached_property
    def config(self) -> Config:
        """What a client needs of the configuration; refused if it makes no sense."""
        try:
            settings = json.loads(self.settings)
        except (ValueError, RecursionError) as error:
            raise RefusedError(f"the settings {self.settings[:80]!r} cannot be read: {error}") from None
        if not isinstance(settings, dict):
            raise RefusedError(f"the settings are {self.settings[:80]!r}, not names with values")
        expect(settings, (), "the table of settings", CLIENT_KEYS)
        return Config.read({"batch_size": 1, **settings, "cohort": 1})

    @functools.cached_property
    def tag(self) -> str:
        """A short name for this experiment; equal experiments have equal names, whatever release the server has."""
        about = {name: value for name, value in asdict(self).items() if name != "version"}
        return hashlib.blake2b(json.dumps(about).encode(), digest_size=8).hexdigest()

    def build(self, own: Method | None) -> Method:
        """Return the method; ``own`` is the only one that this node takes part in, if it has one."""
        name, hyper = self.config.method, self.config.hyper
        if own is not None:
            if own.name != name or json.dumps(own.hyper(), sort_keys=True) != json.dumps(hyper, sort_keys=True):
                raise RefusedError(
                    f"the server runs {name} with {json.dumps(hyper)}, this node was set up for {own.name} with "
                    f"{json.dumps(own.hyper())}: use the same method on both"
                )
            return own
        if name not in methods.names():  # not a path: a server must not choose what a node loads
            raise RefusedError(f"this node knows no method {name!r}: give it to client_app(method=...)")
        return methods.create(name, **hyper)

    def check_code(self, own: Mapping[str, str]) -> None:
        """Refuse a task, loss, transform or metric that is neither part of the library nor the one this node has.

        ``own`` says what this node was given. A server must not choose which file a node loads.
        """
        for name, known in known_code().items():
            wanted = getattr(self.config, name)
            if name in own and wanted != code_name(own[name]) and (wanted or name != "metrics"):
                raise RefusedError(
                    f"the server's {name} is {wanted[:80]!r}, this node was set up for {own[name]!r}: use the same "
                    "on both"
                )
            if name not in own and (missing := [part for part in wanted.split(",") if part not in known]):
                raise RefusedError(
                    f"this node knows no {name} {missing[0][:80]!r}: give it to client_app({name}=...), the same code "
                    "as to the server"
                )


def known_code() -> dict[str, Container[str]]:
    """Return which tasks, losses, metrics and transforms have names that both ends know."""
    return {
        "task": TASKS.entries,
        "loss": {"auto", *LOSSES.entries},
        "metrics": {"", *MEASURES, *FUNCTIONS.entries},
        "transform": {"", *TRANSFORMS.entries},
    }


def code_name(names: str) -> str:
    """Return names, separated by commas, as both ends know them: code of the user's own without its module."""
    return ",".join(without_module(name.strip()) for name in names.split(","))


@dataclass(frozen=True)
class ReplyTensors:
    """One tensor per reply, each read when it is asked for: a server that takes them one by one holds one."""

    replies: list[RecordDict]
    read: Callable[[RecordDict], Tensor]
    norms: Tensor | None = None  #: of the tensors, where they are known

    def __iter__(self) -> Iterator[Tensor]:
        return map(self.read, self.replies)

    def __getitem__(self, mask: Tensor) -> ReplyTensors:
        """Return the tensors that ``mask`` marks."""
        kept = [reply for reply, keep in zip(self.replies, mask.tolist(), strict=True) if keep]
        return ReplyTensors(kept, self.read, None if self.norms is None else self.norms[mask])
