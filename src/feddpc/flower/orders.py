"""What every message says about the experiment, so that a client knows it without asking, and refuses another one."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from flwr.app import ConfigRecord, RecordDict

from feddpc import methods
from feddpc._version import __version__
from feddpc.checks import check_int, coerce
from feddpc.config import Config
from feddpc.flower.wire import ORDERS, RefusedError, layout_tag
from feddpc.methods.base import Method
from feddpc.models.flat import Flat

#: What an experiment has in common with a configuration, and is checked like one.
SHARED = ("seed", "clients", "batch_size", "epochs", "lr", "scaling", "augment", "precision")
#: No server may keep a node busy for longer than so many passes over its samples, nor let it count more samples.
MOST_EPOCHS, MOST_SAMPLES, MOST_CLASSES = 1000, 10**8, 10**6


@dataclass(frozen=True)
class Orders:
    """The experiment as a client must know it."""

    version: str
    method: str
    hyper: str  #: as JSON
    layout: str  #: of the model's parameters
    seed: int
    clients: int
    samples: int  #: of all clients and the server together
    classes: int
    batch_size: int
    epochs: int
    lr: float
    scaling: str
    augment: bool
    precision: str

    @classmethod
    def of(cls, config: Config, method: Method, flat: Flat, classes: int, samples: int) -> Orders:
        """Return the orders of a configuration."""
        return cls(
            version=__version__,
            method=method.name,
            hyper=hyper_text(method),
            layout=layout_tag(dict(zip(flat.names, flat.shapes, strict=True))),
            samples=samples,
            classes=classes,
            **{name: getattr(config, name) for name in SHARED} | {"batch_size": config.batch_size or 1},
        )

    def record(self) -> ConfigRecord:
        """Return the orders as they travel."""
        return ConfigRecord(asdict(self))

    @classmethod
    def read(cls, content: RecordDict) -> Orders:
        """Return the orders of a message, or refuse one of another version."""
        found = content.get(ORDERS)
        if not isinstance(found, ConfigRecord):
            raise RefusedError("the message has no orders: it does not come from a strategy of feddpc.flower.strategy")
        if found.get("version") != __version__:
            raise RefusedError(
                f"the server runs feddpc {found.get('version')!s}, this node {__version__}: install the same on both"
            )
        wanted = {f.name for f in fields(cls)}
        if set(found) != wanted:
            raise RefusedError(f"the orders lack {sorted(wanted - set(found))} and have {sorted(set(found) - wanted)}")
        return cls(**_checked(dict(found)))

    @property
    def tag(self) -> str:
        """A name for this experiment."""
        return hashlib.blake2b(json.dumps(asdict(self)).encode(), digest_size=8).hexdigest()

    def build(self, own: Method | None) -> Method:
        """Return the method; ``own`` is the one that this node was set up for, if it was."""
        if own is not None:
            if (own.name, hyper_text(own)) != (self.method, self.hyper):
                raise RefusedError(
                    f"the server runs {self.method} with {self.hyper}, this node was set up for {own.name} with "
                    f"{hyper_text(own)}: use the same method on both"
                )
            return own
        if self.method not in methods.names():  # a path is no name here: a server must not choose what a node loads
            raise RefusedError(f"this node knows no method {self.method!r}: give it to client_app(method=...)")
        return methods.create(self.method, **hyper_of(self.hyper))


def _checked(found: dict[str, Any]) -> dict[str, Any]:
    """Return orders whose values are of the right kind and within reason."""
    config = Config.read({name: found[name] for name in SHARED} | {"cohort": 1})
    texts = {name: coerce(name, found[name], str) for name in ("version", "method", "hyper", "layout")}
    return {
        **texts,
        **{name: getattr(config, name) for name in SHARED},
        "batch_size": check_int("batch_size", config.batch_size, 1),
        "epochs": check_int("epochs", config.epochs, 1, MOST_EPOCHS),
        "samples": check_int("samples", found["samples"], 0, MOST_SAMPLES),
        "classes": check_int("classes", found["classes"], 1, MOST_CLASSES),
    }


def hyper_of(text: str) -> dict[str, Any]:
    """Return hyper-parameters that :func:`hyper_text` wrote, or refuse them."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"the hyper-parameters {text[:80]!r} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise RefusedError(f"the hyper-parameters are {text[:80]!r}, not names with values")
    return found


def hyper_text(method: Method) -> str:
    """Return a method's hyper-parameters as JSON."""
    return json.dumps(method.hyper(), sort_keys=True)
