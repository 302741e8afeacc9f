"""Repeating a run from its folder: what must be the same, what differs, and how alike the records came out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from feddpc import models
from feddpc.config import OPTIONS_BY_CHOICE, Config
from feddpc.data import names
from feddpc.data.loading import is_own
from feddpc.errors import BadInputError, RunFolderError
from feddpc.experiment import Experiment
from feddpc.registry import is_code
from feddpc.runs.environment import environment
from feddpc.runs.provenance import hashes_of
from feddpc.runs.record import config_digest, load_config, read_json, read_records, without_former_last

#: What of the surroundings may change a result, if only its last digits.
SURROUNDINGS = ("feddpc", "python", "torch", "numpy", "processor", "device", "threads")
#: Parts of an experiment that a configuration only names; with others, a run cannot be repeated.
NAMED_PARTS = ("data", "all data", "partition")


@dataclass(frozen=True)
class RerunReport:
    """How a repeated run compares with the first one."""

    like: str  #: the folder of the first one
    changed: list[str]  #: keys of the configuration that were changed
    differs: list[str]  #: what else differs: versions, machine, what the configuration names
    rounds: int  #: rounds that both have
    identical: bool  #: in these rounds every number is the same to the last bit, but for the seconds
    tolerance: float | None  #: else the largest difference, over max(1, size); None where something is no number,
    #: 0 where one of them only notes more than the other
    where: str = ""  #: the key and the round of that difference

    def __str__(self) -> str:
        if not self.rounds:
            return f"{self.like} has no records to compare with"
        rounds = f"the {self.rounds} rounds that both have"
        if self.identical:
            return f"records bit-identical to those of {self.like} in {rounds}"
        if self.tolerance == 0:
            return f"records equal those of {self.like} in {rounds}, in everything that both note"
        if self.tolerance is None:
            return f"records differ from those of {self.like}: {self.where}"
        return f"records equal those of {self.like} to {self.tolerance:.1e} in {rounds}; most in {self.where}"

    def asdict(self) -> dict[str, Any]:
        """Return names and values."""
        return asdict(self)


@dataclass(frozen=True)
class RerunPlan:
    """The run in ``folder`` to be repeated, with ``changed`` keys if any; ``tell`` is called with what else differs."""

    folder: Path
    config: Config
    environment: dict[str, Any]
    changed: list[str]
    tell: Callable[[str], None]
    differs: list[str] = field(default_factory=list)

    @classmethod
    def plan(cls, folder: Path, given: Mapping[str, Any], tell: Callable[[str], None]) -> RerunPlan:
        """Read a run folder, and put what is ``given`` in the place of what its configuration says."""
        stored, about = load_config(folder), _environment(folder)
        if stored.engine == "flower":
            raise BadInputError(f"{folder} is of a federation over Flower, whose clients' data are not on this machine")
        if about["fingerprint"].get("configuration") != config_digest(stored):
            raise RunFolderError(f"{folder}: config.toml and environment.json do not belong together: restore them")
        values = {"threads": about["threads"], **stored.asdict()}  # the number of threads decides how sums are split
        base = Config.read(values)
        for key, options in OPTIONS_BY_CHOICE.items():
            if given.get(key, values[key]) != values[key]:
                values[options] = {}
        if given.get("method", stored.method) != stored.method:
            values.pop("reserve", None)  # each method needs its own
        if given.get("alpha", stored.alpha) != stored.alpha:
            values["partition_options"] = {k: v for k, v in values["partition_options"].items() if k != "alpha"}
        for key, value in given.items():
            both = isinstance(value, dict) and isinstance(values.get(key), dict)
            values[key] = {**values[key], **value} if both else value
        config = Config.read(values)
        changed = base.differences(given)
        changed += [f"{k} = 'auto', was {getattr(base, k)!r}" for k, v in given.items() if v == "auto"]
        return cls(folder, config, about, changed, tell)

    def refuse_missing(self, *, data: bool, model: bool, partition: bool) -> None:
        """Raise if the run was made of things that its folder only names, and that are not given here."""
        config, elsewhere = self.config, "give it to feddpc.rerun in Python, or choose another here"
        if not data and not (config.data in names() or is_own(config.data) or Path(config.data).expanduser().exists()):
            raise BadInputError(
                f"{self.folder} was made with the data {config.data!r}, not found on this machine: {elsewhere}"
            )
        if not model and config.model not in models.names() and not is_code(config.model):
            raise BadInputError(f"{self.folder} was made with a module given as an object, {config.model}: {elsewhere}")
        if not partition and config.partition == "given":
            raise BadInputError(f"{self.folder} was made with index lists, which it does not hold: {elsewhere}")

    def examine(self, experiment: Experiment) -> None:
        """Compare versions, machine and what the configuration names with those of the first run.

        Other data or another partition are an error, unless the configuration was changed too.
        """
        before, print_before = self.environment, self.environment["fingerprint"]
        now, print_now = environment(self.config.engine, str(experiment.w0.device)), hashes_of(experiment)
        other = [part for part in print_now if part in print_before and print_before[part] != print_now[part]]
        if not self.changed and (wrong := [part for part in NAMED_PARTS if part in other]):
            raise RunFolderError(
                f"other {' and '.join(wrong)} than {self.folder} was made with, by their fingerprints: restore them, "
                f"or run its settings on what is here with --config {self.folder / 'config.toml'}"
            )
        self.differs.extend(f"other {part}" for part in other)
        self.differs.extend(
            f"{key} {now[key]}, was {before.get(key, 'not recorded')}"
            for key in SURROUNDINGS
            if now[key] != before.get(key)
        )
        if self.changed or self.differs:
            notes = {"changed from": self.changed, "differs from": self.differs}
            self.tell("; ".join(f"{how} {self.folder}: {', '.join(what)}" for how, what in notes.items() if what))

    def compare(self, records: Sequence[dict[str, Any]]) -> RerunReport:
        """Say how alike ``records`` are to the first ones."""
        damage: list[str] = []
        first = without_former_last(load_config(self.folder), read_records(self.folder / "rounds.jsonl", damage=damage))
        for text in damage:
            self.tell(text)
        pairs = list(zip(first, records, strict=False))
        identical = all(_text(a) == _text(b) for a, b in pairs)
        tolerance, where = (0.0, "") if identical else _largest(pairs)
        return RerunReport(str(self.folder), self.changed, self.differs, len(pairs), identical, tolerance, where)


def _environment(folder: Path) -> dict[str, Any]:
    path = folder / "environment.json"
    remedy = f"restore it, or run the settings alone with --config {folder / 'config.toml'}"
    if not path.is_file():
        raise RunFolderError(f"{path} is missing, which says what the run was made with: {remedy}")
    try:
        value = read_json(path)
    except RunFolderError as error:
        raise RunFolderError(f"{error}; {remedy}") from None
    if not isinstance(value.get("fingerprint"), dict) or not isinstance(value.get("threads"), int):
        raise RunFolderError(f"{path} does not say what the run was made with: {remedy}")
    return value


def _text(record: dict[str, Any]) -> str:
    return json.dumps({k: v for k, v in record.items() if k != "seconds"}, sort_keys=True)


def _largest(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> tuple[float | None, str]:
    """Return the largest difference of two numbers, and where; None where it is not one of numbers."""
    largest, where = 0.0, ""
    for one, other in pairs:
        for key in sorted({*one, *other} - {"seconds"}):
            if key not in one or key not in other:
                continue  # one version notes more than the other
            a, b, place = one[key], other[key], f"{key} of round {one['round']}"
            if a == b:
                continue
            if not isinstance(a, int | float) or not isinstance(b, int | float):
                return None, place
            if (gap := abs(a - b) / max(1.0, abs(a), abs(b))) >= largest:
                largest, where = gap, place
    return largest, where
