"""The flags that `run`, `compare` and `partition` share, and how they become a configuration: flag, file, default."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from feddpc.study.compare import Overrides

EXPERIMENT = "Experiment"
TRAINING = "Training"
OUTPUT = "Output"

Data = Annotated[
    str | None,
    typer.Option(
        help="A known data set (`feddpc data list`), an .npz or a folder. [default: digits]", rich_help_panel=EXPERIMENT
    ),
]
Model = Annotated[
    str | None,
    typer.Option(help="lenet5, resnet18, cnn or mlp. [default: what suits the data]", rich_help_panel=EXPERIMENT),
]
Clients = Annotated[int | None, typer.Option(help="Number of clients. [default: 100]", rich_help_panel=EXPERIMENT)]
Cohort = Annotated[int | None, typer.Option(help="Clients a round. [default: 10]", rich_help_panel=EXPERIMENT)]
Alpha = Annotated[
    float | None, typer.Option(help="Dirichlet parameter: small is uneven. [default: 0.2]", rich_help_panel=EXPERIMENT)
]
PartitionName = Annotated[
    str | None,
    typer.Option(
        "--partition",
        help="dirichlet, dirichlet-equal, shards, quantity or iid. [default: dirichlet]",
        rich_help_panel=EXPERIMENT,
    ),
]
Participation = Annotated[
    str | None,
    typer.Option(
        help="uniform, bernoulli, poisson, cyclic, markov or weighted. [default: uniform]", rich_help_panel=EXPERIMENT
    ),
]
Dropout = Annotated[
    float | None,
    typer.Option(help="Chance that a sampled client never answers. [default: 0]", rich_help_panel=EXPERIMENT),
]
Scaling = Annotated[
    str | None, typer.Option(help="half, channel, unit or none. [default: half for images]", rich_help_panel=EXPERIMENT)
]
Rounds = Annotated[int | None, typer.Option(help="Communication rounds. [default: 100]", rich_help_panel=TRAINING)]
Lr = Annotated[float | None, typer.Option(help="Local learning rate. [default: 0.1]", rich_help_panel=TRAINING)]
ServerLr = Annotated[
    float | None, typer.Option(help="Server learning rate. [default: the local one]", rich_help_panel=TRAINING)
]
BatchSize = Annotated[
    int | None, typer.Option(help="[default: 256, or half a client where data are few]", rich_help_panel=TRAINING)
]
Epochs = Annotated[int | None, typer.Option(help="Local epochs a round. [default: 1]", rich_help_panel=TRAINING)]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda, cuda:1. [default: a GPU if there is one]", rich_help_panel=TRAINING)
]
Threads = Annotated[
    str | None, typer.Option(help="CPU threads. [default: auto, one for small models]", rich_help_panel=TRAINING)
]
Engine = Annotated[
    str | None,
    typer.Option(
        help="auto, loop, threads, stacked; on a GPU graph, streams, graph-compiled, streams-compiled. [default: auto]",
        rich_help_panel=TRAINING,
    ),
]
Precision = Annotated[
    str | None,
    typer.Option(help="float32, tf32, bf16 or float64. [default: float32]", rich_help_panel=TRAINING),
]
ClientMemory = Annotated[
    str | None,
    typer.Option(
        help="Where states of clients lie: auto, device, host or disk. [default: auto]", rich_help_panel=TRAINING
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A hyper-parameter (lam=2, feddpc.lam=2), an option of a part (model.groups=32), or any key.",
        rich_help_panel=TRAINING,
    ),
]
Faults = Annotated[
    Path | None,
    typer.Option(
        help="A TOML file with the shares of clients that misbehave: sign_flip = 0.2. Also --set faults.sign_flip=0.2.",
        rich_help_panel=EXPERIMENT,
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="A TOML file with the names of these flags; flags win.", rich_help_panel=EXPERIMENT),
]
Out = Annotated[
    Path | None, typer.Option(help="Folder for all results. [default: a new one below runs/]", rich_help_panel=OUTPUT)
]
CheckpointSeconds = Annotated[
    float,
    typer.Option(
        min=0.0, help="At most this long between checkpoints; 0 makes one every round.", rich_help_panel=OUTPUT
    ),
]
Track = Annotated[
    str | None,
    typer.Option(help="Tell tensorboard, mlflow or both (tensorboard,mlflow) of every round.", rich_help_panel=OUTPUT),
]
Like = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN_FOLDER",
        help="Make this run again, with its settings and its engine, and say how alike it came out; flags win.",
        rich_help_panel=EXPERIMENT,
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue what is in --out.", rich_help_panel=OUTPUT)]
AtOnce = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Runs at a time in one process, for a GPU that small models leave idle. [default: 4 of these there, else "
        "1]",
        rich_help_panel=TRAINING,
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.", rich_help_panel=OUTPUT)]
Json = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON on standard output.", rich_help_panel=OUTPUT)
]


def wishes(
    given: dict[str, Any],
    table: dict[str, Any],
    sets: Sequence[str] | None,
    names: Sequence[str],
    *,
    extra: Sequence[str] = (),
    base: Overrides | None = None,
) -> Overrides:
    """Merge a file's ``table`` and flags over ``base``, what an earlier call asked for.

    ``names`` are the methods that will run, ``extra`` the keys of the table that are for the caller.
    """
    from feddpc.config import parse_set
    from feddpc.study.compare import Overrides

    merged = base or Overrides()
    merged.absorb({k: v for k, v in table.items() if k not in extra}, names)
    merged.values.update({k: v for k, v in given.items() if v is not None})
    for text in sets or []:
        merged.set(*parse_set(text), names)
    return merged


def table(file: Path | None) -> dict[str, Any]:
    """Read a configuration file, once: it may be a pipe. Names may be written with hyphens, as flags are."""
    from feddpc.config import read_toml

    return {key.replace("-", "_"): value for key, value in read_toml(file).items()} if file else {}


def listed(text: str, flag: str) -> list[str]:
    """Split a comma-separated flag.

    >>> listed("feddpc, fedavg", "--methods")
    ['feddpc', 'fedavg']
    """
    from feddpc.errors import BadInputError

    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise BadInputError(f"{flag} {text!r}: write names with commas between them")
    return items


def given(local: dict[str, Any], *more: str) -> dict[str, Any]:
    """Return the flags that were set, by the names of the configuration."""
    names = [
        "data",
        "model",
        "clients",
        "cohort",
        "alpha",
        "partition",
        "participation",
        "dropout",
        "scaling",
        "rounds",
        "lr",
        "server_lr",
        "batch_size",
        "epochs",
        "device",
        "engine",
        "client_memory",
    ]
    found = {name: local[name] for name in (*names, *more) if local[name] is not None}
    if local["threads"] is not None:
        found["threads"] = int(local["threads"]) if local["threads"].isdecimal() else local["threads"]
    if local.get("faults") is not None:
        found["faults"] = table(local["faults"])
    return found


def warn_of_failures(failures: Sequence[str], folder: Path) -> None:
    """Say in one line which pictures or pages of finished runs are not there, and how to get them later."""
    if failures:
        remedy = f"the records are complete, `feddpc report {folder}` draws them later"
        typer.echo(f"warning: {'; '.join(failures)}; {remedy}", err=True)


def method_names(flag: str | None, filed: Any) -> list[str] | None:
    """Read the methods from the flag or, without it, from a file (``filed``); None if neither says any."""
    from feddpc import methods
    from feddpc.errors import BadInputError

    if flag == "all":
        return methods.names()
    names = listed(flag, "--methods") if flag is not None else filed
    if names is None:
        return None
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise BadInputError(f"methods = {names!r}: must be a list of names")
    for name in names:
        methods.get(name)
    return names


def seed_numbers(flag: str | None, filed: Any) -> list[int] | None:
    """Read the seeds from the flag or, without it, from a file (``filed``); None if neither says any."""
    from feddpc.errors import BadInputError

    if flag is None and filed is None:
        return None
    seeds = listed(flag, "--seeds") if flag is not None else filed
    whole = isinstance(seeds, list) and all(
        n.removeprefix("-").isdecimal() if isinstance(n, str) and flag is not None else type(n) is int for n in seeds
    )
    if not whole or not seeds:
        raise BadInputError(f"seeds = {flag or filed!r}: must be whole numbers with commas between them")
    return [int(n) for n in seeds]


def usual_at_once(device: str | None, data: str, model: str) -> int:
    """Return how many runs share a process if nobody says: a GPU has room for several small models, a CPU has not."""
    from feddpc import models
    from feddpc.data.specs import SPECS
    from feddpc.experiment import resolve_device

    if not resolve_device(device or "auto").startswith("cuda"):
        return 1
    if model == "auto":
        if data not in SPECS:  # one's own may want a large one
            return 1
        model = models.default_for(classes=SPECS[data].classes, size=SPECS[data].shape[0])
    return 1 if model in models.LARGE else 4
