"""Several methods over several seeds, on the same partitions, initial models, participants and batches."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

import torch

from feddpc import methods
from feddpc.checks import check_int
from feddpc.config import MAY_CHANGE, PARTS, Config
from feddpc.errors import BadInputError, RunFolderError, unknown
from feddpc.experiment import Setting, make_method, prepare
from feddpc.method_setup import with_reserve
from feddpc.privacy.mechanism import check as check_private
from feddpc.runs.concurrent import clone_for_thread, run_concurrently
from feddpc.runs.record import is_blank, is_run, load_config
from feddpc.runs.runner import CHECKPOINT_SECONDS, Outcome, Stop, execute
from feddpc.runs.tracking import Track, check
from feddpc.storage import make_folder, replace_text
from feddpc.torch_globals import preserve_torch_globals

INDEX = "compare.json"
_KEYS = {k for k in Config.__dataclass_fields__ if k not in ("hyper", *PARTS.values())}


class Listener(Protocol):
    """Somebody who wants to see a comparison progress."""

    def begin(self, config: Config) -> None:
        """A run starts or goes on."""

    def round(self, record: dict[str, Any]) -> None:
        """A round is finished."""

    def end(self, summary: dict[str, Any]) -> None:
        """A run has ended."""

    def another(self) -> Listener:
        """Return a listener for a run beside this one."""


@dataclass
class Overrides:
    """What flags and files ask for: configuration values, and hyper-parameters that belong to one method only."""

    values: dict[str, Any] = field(default_factory=dict)
    hyper: dict[str, dict[str, Any]] = field(default_factory=dict)

    def set(self, key: str, value: Any, names: Sequence[str]) -> None:
        """Apply one ``--set``: a hyper-parameter, METHOD.KEY, PART.KEY, or any other key of the configuration."""
        part, dot, rest = key.rpartition(".")
        having = [n for n in names if key in hyper_names(n)]
        named = [n for n in names if part in (n, methods.get(n).name)]
        if dot and named:
            if rest not in hyper_names(named[0]):
                raise unknown(f"hyper-parameter of {part}", rest, hyper_names(named[0]))
            self.hyper.setdefault(named[0], {})[rest] = value
        elif key in ("method", "seed"):
            raise BadInputError(f"--set {key}=...: use --{key}, or --{key}s in a comparison")
        elif dot and part in PARTS:
            self.values.setdefault(PARTS[part], {})[rest] = value
        elif having:
            for name in having:
                self.hyper.setdefault(name, {})[key] = value
        elif key in _KEYS:
            self.values[key] = value
        else:
            known = {k for n in names for k in hyper_names(n)} | _KEYS | {f"{p}.*" for p in PARTS}
            raise unknown("key", key, known)

    def absorb(self, table: Mapping[str, Any], names: Sequence[str]) -> None:
        """Take in the contents of a TOML file; ``[hyper]`` may hold ``[hyper.METHOD]`` tables."""
        for key, value in table.items():
            if key == "hyper":
                if not isinstance(value, dict):
                    raise BadInputError(f"hyper = {value!r} must be a table of names and values")
                for name, inner in value.items():
                    self._absorb_hyper(name, inner, names)
            else:
                self.values[key] = dict(value) if isinstance(value, dict) else value

    def config(self, method: str, seed: int | None = None) -> Config:
        """Return the configuration of one method and seed."""
        values = {**self.values, "method": method, "hyper": self.hyper.get(method, {})}
        return Config.read(values if seed is None else {**values, "seed": seed})

    def _absorb_hyper(self, key: str, value: Any, names: Sequence[str]) -> None:
        if isinstance(value, dict):
            methods.get(key)  # a table for a method that does not run is fine, for one that does not exist it is not
            for inner, v in value.items() if key in names else ():
                self.set(f"{key}.{inner}", v, names)
        elif any(key in hyper_names(n) for n in names):
            self.set(key, value, names)
        else:
            raise unknown("hyper-parameter", key, {k for n in names for k in hyper_names(n)})


@dataclass(frozen=True)
class ComparePlan:
    """What a comparison sets out to do; it is written down, so that the comparison can be continued without flags."""

    methods: list[str]
    seeds: list[int]
    wishes: Overrides


def hyper_names(method: str) -> list[str]:
    """Return the names of a method's hyper-parameters."""
    return [f.name for f in dataclasses.fields(methods.get(method))]


def run_name(method: str, seed: int) -> str:
    """Return the folder name of a run inside a comparison.

    >>> run_name("feddpc", 0)
    'feddpc-seed0'
    """
    return f"{methods.get(method).name}-seed{seed}"


@preserve_torch_globals()
def compare(
    wishes: Overrides,
    names: Sequence[str],
    seeds: Sequence[int],
    out: Path,
    *,
    resume: bool = False,
    listener: Listener | None = None,
    stop: Stop | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    at_once: int = 1,
    track: Track = (),
) -> list[Outcome]:
    """Run every method with every seed into sub-folders of ``out``, ``at_once`` of them at a time.

    A run that diverges is kept as it is and the others go on; a wish to stop ends the comparison after the round.
    The first run is alone in any case: it finds out which engine is fastest, and all others use that.
    """
    stop = stop or Stop()
    check_int("at_once", at_once, 1)
    if not names or not seeds:
        raise BadInputError("a comparison needs at least one method and one seed")
    for what, values in (("methods", names), ("seeds", seeds)):
        if len(set(values)) < len(values):
            raise BadInputError(f"{what} = {', '.join(map(str, values))}: one of them is there twice")
    made = [methods.create(name, **wishes.config(name).hyper) for name in names]
    configs = [with_reserve(_checked(wishes.config(name, seed)), made) for seed in seeds for name in names]
    folders = [run_name(name, seeds[0]) for name in names]
    if len(set(folders)) < len(folders):
        raise BadInputError(f"methods = {', '.join(names)}: two of them have the same name")
    trackers = check(track, out if resume else None)
    _claim(out, ComparePlan(list(names), list(seeds), wishes), resume)
    first, *rest = configs
    lock = threading.Lock()

    @lru_cache(maxsize=at_once)
    def shared(seed: int) -> Setting:
        return prepare(dataclasses.replace(wanted[seed], hyper={}))

    wanted = {config.seed: config for config in reversed([_stored(c, out, wishes, resume) for c in configs])}
    known = [load_config(out / run_name(c.method, c.seed)).engine for c in configs if resume and is_run(_at(out, c))]

    def run(config: Config, engine: str | None, listener: Listener | None) -> Outcome | None:
        if stop.wanted:
            return None
        config = _stored(config, out, wishes, resume)
        with lock:
            setting = shared(config.seed)
            setting = dataclasses.replace(setting, config=_filled(setting.config, config))
            setting = clone_for_thread(setting) if at_once > 1 else setting
        if listener:
            listener.begin(config)
        outcome = execute(
            setting,
            engine=engine,
            out=_at(out, config),
            resume=resume,
            on_round=listener.round if listener else None,
            stop=stop,
            checkpoint_seconds=checkpoint_seconds,
            track=trackers,
        )
        if listener:
            listener.end(outcome.summary)
        return outcome

    one = run(first, known[0] if known else None, listener)
    # One engine for all, so that seconds a round can be compared.
    engine = one.config.engine if one else None
    apart = listener if at_once == 1 else None
    jobs = [partial(run, c, engine, apart or (listener and listener.another())) for c in rest]
    return [outcome for outcome in (one, *run_concurrently(jobs, at_once)) if outcome]


def _at(out: Path, config: Config) -> Path:
    return out / run_name(config.method, config.seed)


def _stored(config: Config, out: Path, wishes: Overrides, resume: bool) -> Config:
    """Return the configuration that a run to be continued was made with, with what may change."""
    if not (resume and is_run(_at(out, config))):
        return config
    stored = load_config(_at(out, config))
    return Config.read(stored.asdict() | {k: wishes.values[k] for k in MAY_CHANGE if k in wishes.values})


def _checked(config: Config) -> Config:
    """Return a configuration with all hyper-parameters, after everything that can be checked without data was."""
    method, config = make_method(config)
    method.init_server(torch.zeros(1), config.clients)
    if config.privacy:
        check_private(method)
    return config


def _filled(shared: Config, wanted: Config) -> Config:
    """Return the complete shared configuration with what belongs to one method."""
    own = {key: getattr(wanted, key) for key in ("method", "hyper", *MAY_CHANGE)}
    return dataclasses.replace(shared, **own)


def _refuse_changes(folder: Path, asked: Config, wishes: Overrides) -> None:
    given = {k: v for k, v in wishes.values.items() if k not in (*MAY_CHANGE, "hyper")}
    given |= {"hyper": asked.hyper, "seed": asked.seed}
    if different := load_config(folder).differences(given):
        raise RunFolderError(
            f"{folder} was made with another configuration ({'; '.join(different)}): choose another --out"
        )


def _claim(out: Path, plan: ComparePlan, resume: bool) -> None:
    """Make the folder of a comparison, or check that the one there may be continued, and write down what is planned."""
    if not is_blank(out):
        if not (out / INDEX).exists():
            raise RunFolderError(f"{out} exists and holds something that is no comparison: choose another --out")
        if not resume:
            raise RunFolderError(
                f"{out} already holds a comparison: add --resume to continue it, or choose another --out"
            )
    runs = {run_name(name, seed): (name, seed) for seed in plan.seeds for name in plan.methods}
    for name, (method, seed) in runs.items():
        if is_run(out / name):
            _refuse_changes(out / name, plan.wishes.config(method, seed), plan.wishes)
    make_folder(out)
    replace_text(out / INDEX, json.dumps({"runs": list(runs), **asdict(plan)}, indent=1) + "\n")


def stored_plan(out: Path) -> ComparePlan | None:
    """Return what the comparison in ``out`` set out to do, or None if there is none."""
    try:
        plan = json.loads((out / INDEX).read_text(encoding="utf-8"))
        wishes = Overrides(
            dict(plan["wishes"]["values"]), {str(k): dict(v) for k, v in plan["wishes"]["hyper"].items()}
        )
        return ComparePlan([str(n) for n in plan["methods"]], [int(s) for s in plan["seeds"]], wishes)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise RunFolderError(f"{out / INDEX} cannot be read: {error}") from None
