"""Flags: one per key of the configuration, built from its metadata, and those that several commands share."""

from __future__ import annotations

import functools
import inspect
import operator
import time
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from feddpc.config import GROUPS, choices_of, code_in, default_of, keys, parse_set, read_toml, types_of_keys
from feddpc.errors import BadInputError
from feddpc.registry import refuse_code

if TYPE_CHECKING:
    from feddpc.study.overrides import Overrides
    from feddpc.study.plan import StudyPlan

#: Sections of the help text, in their order; other sections follow.
EXPERIMENT = "Experiment"
TRAINING = "Training"
EXECUTION = "Execution"
OUTPUT = "Output"
SECTIONS = (*(group.capitalize() for group in GROUPS), EXPERIMENT, OUTPUT)

#: Exit code when some runs are missing: not begun, interrupted, or failed.
UNFINISHED = 3
#: A command with its flags.
Function = Callable[..., None]


def flag(section: str, help: str, *names: str, **more: Any) -> Any:
    """Return a flag with its section of the help text; without ``names`` it is called after its parameter."""
    return typer.Option(*names, help=help, rich_help_panel=section, **more)


def methods_flag(default: str) -> Any:
    """Return the flag ``--methods`` of a comparison or sweep."""
    return flag("Method", f"Names with commas between them, or all. [default: {default}]")


def option(name: str, default: str | None = None) -> Any:
    """Return the flag of a key: its help text, the values that it takes, and its default."""
    facts, values = keys()[name], choices_of(name)
    words = [facts.help, f"One of {', '.join(values)}." if values else "", f"[default: {default or default_of(name)}]"]
    hyphenated = name.replace("_", "-")
    return flag(
        facts.group.capitalize(),
        " ".join(word for word in words if word),
        f"--{hyphenated}/--no-{hyphenated}" if types_of_keys()[name] is bool else f"--{hyphenated}",
        metavar="KEY=VALUE,...|FILE" if facts.options_of else None,
    )


def config_flags(
    *only: str, without: Sequence[str] = (), defaults: Mapping[str, str] = MappingProxyType({})
) -> Callable[[Function], Function]:
    """Give a command one flag per key of the configuration, or for the keys in ``only``.

    The command declares its own flags as usual, and a parameter ``given``: the keys that were set, with their values.
    ``defaults`` are those that differ from the configuration's, in words.
    """
    tables = {name: facts.options_of for name, facts in keys().items()}
    names = only or [n for n, part in tables.items() if part in (None, n) and n not in without]

    def decorate(command: Function) -> Function:
        hints = typing.get_type_hints(command, include_extras=True)
        own = [p for p in inspect.signature(command).parameters.values() if p.name != "given"]
        parameters = [p.replace(kind=p.KEYWORD_ONLY, annotation=hints[p.name]) for p in own]
        for name in names:
            hint = operator.getitem(Annotated, (_type(name) | None, option(name, defaults.get(name))))
            parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint))

        @functools.wraps(command)
        def with_flags(**values: Any) -> None:
            given = {name: value for name in names if (value := values.pop(name)) is not None}
            command(given={name: _value(name, value) for name, value in given.items()}, **values)

        with_flags.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_flags.__annotations__ = {p.name: p.annotation for p in parameters}
        return with_flags

    return decorate


def _type(name: str) -> Any:
    """Return the type of a flag: that of the key where it is one plain type, else text."""
    hint = types_of_keys()[name]
    plain = [t for t in typing.get_args(hint) or (hint,) if t is not type(None)]
    return plain[0] if len(plain) == 1 and plain[0] in (int, float, bool) else str


def _value(name: str, value: Any) -> Any:
    """Return the value of a flag: a table from pairs or a file, a number or a bool where the key takes those too.

    >>> _value("threads", "2"), _value("threads", "auto"), _value("model", "2")
    (2, 'auto', '2')
    """
    if keys()[name].options_of:
        return _pairs(value)
    both = {int, float, bool} & set(typing.get_args(types_of_keys()[name]))
    return parse_set(f"{name}={value}")[1] if isinstance(value, str) and both else value


def _pairs(text: str) -> dict[str, Any]:
    """Read ``KEY=VALUE,KEY=VALUE``, or a TOML file.

    >>> _pairs("clip=1,epsilon=8")
    {'clip': 1, 'epsilon': 8}
    """
    if "=" not in text or Path(text).exists():
        return table(Path(text))
    return dict(parse_set(pair) for pair in text.split(","))


Device = Annotated[str | None, option("device")]
Engine = Annotated[str | None, option("engine")]
Seeds = Annotated[str | None, flag(TRAINING, "Numbers with commas between them. [default: 0]")]
Set = Annotated[
    list[str] | None,
    flag(
        EXPERIMENT,
        "A hyper-parameter (lam=2, feddpc.lam=2), an option of a part (model.groups=32), or any key.",
        "--set",
        metavar="KEY=VALUE",
    ),
]
ConfigFile = Annotated[
    Path | None, flag(EXPERIMENT, "A TOML file with the names of these flags; flags win.", "--config")
]
Out = Annotated[Path | None, flag(OUTPUT, "Folder for all results. [default: a new one in runs/]")]
CheckpointSeconds = Annotated[
    float, flag(OUTPUT, "Longest time between checkpoints; 0 writes one after every round.", min=0.0)
]
Track = Annotated[str | None, flag(OUTPUT, "Log every round to tensorboard, mlflow or both (tensorboard,mlflow).")]
Like = Annotated[
    Path | None,
    flag(
        EXPERIMENT,
        "Repeat this run with its settings and its engine, and report how closely the records agree; flags win.",
        metavar="RUN_FOLDER",
    ),
]
Resume = Annotated[bool, flag(OUTPUT, "Continue what is in --out.", "--resume")]
AtOnce = Annotated[
    int | None,
    flag(
        EXECUTION,
        "Runs at a time in one process. [default: 4 for small models, which leave a GPU idle, else 1]",
        min=1,
    ),
]
Quiet = Annotated[bool, flag(OUTPUT, "Print only errors.", "--quiet", "-q")]
Json = Annotated[bool, flag(OUTPUT, "Print the result as JSON on standard output.", "--json")]


def merge(
    given: dict[str, Any],
    table: dict[str, Any],
    sets: Sequence[str] | None,
    names: Sequence[str],
    base: Overrides | None = None,
) -> Overrides:
    """Merge a file's ``table``, then flags, over ``base``; ``names`` are the methods that will run."""
    from feddpc.study.overrides import Overrides

    merged = base or Overrides()
    merged.absorb(table, names)
    merged.values.update(given)
    for text in sets or []:
        merged.set(*parse_set(text), names)
    return merged


def merge_study(
    kind: str,
    out: Path,
    methods: str | None,
    seeds: str | None,
    given: dict[str, Any],
    file: Path | None,
    sets: Sequence[str] | None,
    *,
    default: Sequence[str],
    add: bool,
    resume: bool = True,
    axes: Sequence[str] = (),
) -> tuple[list[str], list[int], Overrides, StudyPlan | None]:
    """Return methods, seeds and overrides of a comparison or sweep, and the plan of the one in ``out``, if any.

    What is not asked for is taken from that plan if it is to be resumed, else it is the default. With ``add``, methods
    and seeds are added to those of the plan. Code of the user's own runs only if the user names it.
    """
    from feddpc.study.plan import stored_plan

    values = table(file)
    for key in ("method", "seed"):
        if key in values:
            raise BadInputError(f"{key} in {file}: a {kind} has {key}s, a list")
    before = stored_plan(out, kind, [methods or "", given, values, sets or [], axes]) if resume else None
    asked = method_names(methods, values.pop("methods", None)) or []
    numbers = seed_numbers(seeds, values.pop("seeds", None)) or []
    names, base = asked, None
    if before is not None:
        names = list(dict.fromkeys([*before.methods, *asked])) if add or not asked else asked
        numbers = list(dict.fromkeys([*before.seeds, *numbers])) if add or not numbers else numbers
        named, base = {**values, **given}, before.overrides
        refuse_code(out, [*names, *code_in({**base.values, **named})], [*asked, *code_in(named)])
    names = names or list(default)
    overrides = merge(given, values, sets, names, base)
    overrides.values.setdefault("threads", "auto")
    return names, numbers or [0], overrides, before


def output_folder(out: Path | None, prefix: str, *, resume: bool = False) -> Path:
    """Return where results go: ``--out``, or a new folder in runs/."""
    if out is None and resume:
        raise BadInputError("--resume needs --out FOLDER, the folder to continue")
    return out or Path("runs") / f"{prefix}-{time.strftime('%Y%m%d-%H%M%S')}"


def exit_with(statuses: Collection[str], *, interrupted: bool = False) -> None:
    """End the command with an exit code that says how its runs ended."""
    if interrupted:
        raise typer.Exit(130)
    if {"missing", "failed"} & set(statuses):
        raise typer.Exit(UNFINISHED)
    if all(status == "diverged" for status in statuses):
        raise typer.Exit(1)


def table(file: Path | None) -> dict[str, Any]:
    """Read a configuration file, once: it may be a pipe. Names may be written with hyphens, as flags are."""
    return {key.replace("-", "_"): value for key, value in read_toml(file).items()} if file else {}


def listed(text: str, flag: str) -> list[str]:
    """Split a comma-separated flag.

    >>> listed("feddpc, fedavg", "--methods")
    ['feddpc', 'fedavg']
    """
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise BadInputError(f"{flag} {text!r}: write names with commas between them")
    return items


def warn_of_failures(failures: Sequence[str], folder: Path) -> None:
    """Warn in one line that pictures or pages could not be written, and name the command that writes them later."""
    if failures:
        remedy = f"the records are complete, `feddpc report {folder}` draws them later"
        typer.echo(f"warning: {'; '.join(failures)}; {remedy}", err=True)


def method_names(flag: str | None, filed: Any) -> list[str] | None:
    """Return the methods in the flag or, without it, in a file (``filed``); None if neither names any."""
    from feddpc import methods

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
    """Return the seeds in the flag or, without it, in a file (``filed``); None if neither names any."""
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
    """Return the default of ``--at-once``: several small models share a GPU; on a CPU each run is alone."""
    from feddpc import models
    from feddpc.data.specs import SPECS
    from feddpc.resolve import resolve_device

    if not resolve_device(device or "auto").startswith("cuda"):
        return 1
    if model == "auto":
        if data not in SPECS:  # data of the user's own may need a large model
            return 1
        model = models.default_for(classes=SPECS[data].classes, size=SPECS[data].shape[0])
    return 1 if model in models.LARGE else 4
