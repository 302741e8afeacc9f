"""The configuration of a run: one flat, frozen record, read from TOML and flags, written back complete.

Every key is a field of :class:`Config` and carries its facts as metadata (:class:`Key`): help text, group, choices,
whether it changes the numbers. The flags of the command line, ``--set``, the reference page and the lists of keys that
other modules need are all derived from there.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from feddpc.checks import coerce
from feddpc.errors import BadInputError, unknown
from feddpc.registry import code_names
from feddpc.schedules import name_of_schedule

Options = dict[str, Any]
#: Groups of keys, in the order of the help text and of the reference page.
GROUPS = ("method", "data", "federation", "training", "robustness and privacy", "execution")


@dataclass(frozen=True, kw_only=True)
class Key:
    """The facts about one key of the configuration."""

    help: str  #: one or two sentences for the help text and the reference page
    group: str  #: one of GROUPS
    shown: str | None = None  #: the default in words, where the value alone says too little
    kind: str | None = None  #: the registry from which the value is a name
    choices: tuple[str, ...] = ()  #: names of that registry; a test compares the two
    changes_numbers: bool = True  #: False: decides where and how fast a run computes, not what
    may_change: bool = False  #: a resumed run may have another value
    after_setup: bool = False  #: used only after data, partition and model are built, which runs can therefore share
    tuned: bool = False  #: belongs to what is tuned, as hyper-parameters do; other keys belong to the problem
    per_run: bool = False  #: differs between the runs of one study, which has ``methods`` and ``seeds``
    simulator_only: bool = False  #: a federation over Flower has no such thing, and refuses other values than usual
    options_of: str | None = None  #: a table with the options of this key; ``--set`` reaches it by this name


def about(help: str, group: str, **facts: Any) -> dict[str, Key]:
    """Return the metadata of a field."""
    return {"key": Key(help=help, group=group, **facts)}


def key(default: Any, help: str, group: str, **facts: Any) -> Any:
    """Return a dataclass field with its facts."""
    return field(default=default, metadata=about(help, group, **facts))


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that decides what a run computes. ``auto`` and empty values are filled in before it starts.

    >>> Config.read({"rounds": 5, "method": "fedavg"}).rounds
    5
    """

    method: str = key(
        "feddpc",
        "The method: a name (`feddpc methods` lists them) or FILE.py:CLASS.",
        "method",
        kind="method",
        per_run=True,
        after_setup=True,
    )
    data: str = key(
        "digits",
        "The data set: a name (`feddpc data list`), a path (.npz, folder, archive) or FILE.py:FUNCTION.",
        "data",
        kind="data",
    )
    model: str = key(
        "auto",
        "The network, or FILE.py:NAME for a module class or a function of your own.",
        "method",
        shown="auto, by the kind of data and the size of images",
        kind="model",
        choices=("lenet5", "resnet18", "cnn", "mcmahan-cnn", "mlp", "lstm", "transformer"),
    )
    task: str = key(
        "auto",
        "What is learned, or FILE.py:CLASS.",
        "data",
        shown="auto, by the targets of the data",
        kind="task",
        choices=("classification", "regression", "multilabel", "next-token"),
    )
    loss: str = key(
        "auto",
        "The loss of a sample or token, or FILE.py:FUNCTION of outputs and targets that returns one value for each.",
        "training",
        shown="auto, by the task",
        kind="loss",
        choices=("cross-entropy", "squared", "absolute", "huber", "logistic"),
    )
    metrics: str = key(
        "",
        "What is measured, separated by commas: accuracy, top-5, f1, mse, mae, r2, perplexity, auc, loss, or "
        "FILE.py:FUNCTION of all outputs and targets. The first one says what is best.",
        "training",
        shown="those of the task",
        kind="metric",
    )
    evaluate_every: int = key(
        1, "Evaluate the model after every so many rounds, and always after the last one.", "training"
    )
    evaluate_clients: bool = key(
        False,
        "Also evaluate the model on samples of each client that are held out of its training.",
        "training",
        simulator_only=True,
    )
    client_test: float = key(0.2, "Share of each client's samples that `evaluate_clients` holds out.", "data")
    finetune_steps: int = key(
        0,
        "With `evaluate_clients`, let each client also make so many local steps first: personalization.",
        "training",
        simulator_only=True,
    )
    clients: int = key(100, "Number of clients.", "federation")
    cohort: int = key(10, "Clients that are sampled per round.", "federation")
    partition: str = key(
        "auto",
        "How the training set is split among the clients; also FILE.py:FUNCTION.",
        "data",
        shown="auto: natural where the data say who holds what, dirichlet for classes, else iid",
        kind="partition",
        choices=("dirichlet", "dirichlet-equal", "shards", "quantity", "iid", "natural"),
    )
    alpha: float = key(0.2, "Parameter of the Dirichlet partitions; small values give uneven clients.", "data")
    participation: str = key(
        "uniform",
        "How the cohort of a round is sampled; poisson may sample nobody, and is what privacy needs.",
        "federation",
        kind="sampler",
        choices=("uniform", "bernoulli", "poisson", "cyclic", "markov", "weighted"),
    )
    dropout: float = key(0.0, "Probability that a sampled client never answers.", "federation")
    weighting: Literal["uniform", "samples"] = key(
        "uniform",
        "Weights of the clients in the mean: equal, or proportional to their numbers of samples.",
        "training",
        after_setup=True,
    )
    rule: str = key(
        "mean",
        "A robust rule in place of the mean, with any method.",
        "robustness and privacy",
        kind="rule",
        choices=(*("mean", "median", "trimmed_mean", "krum", "multi_krum"), *("centered_clipping", "geometric_median")),
    )
    rounds: int = key(100, "Communication rounds.", "training", may_change=True, after_setup=True)
    lr: float = key(
        0.1,
        "Learning rate of the clients; `client_lr` in Python means the same.",
        "training",
        after_setup=True,
        tuned=True,
    )
    server_lr: float | None = key(
        None,
        "Learning rate of the server; equal rates are plain averaging.",
        "training",
        shown="that of the clients",
        after_setup=True,
        tuned=True,
    )
    lr_decay: float = key(1.0, "Factor per round on both learning rates.", "training", after_setup=True, tuned=True)
    lr_schedule: str = key(
        "constant",
        "Factor on both learning rates by round, in place of `lr_decay`; in Python also a function of the round.",
        "training",
        choices=("constant", "cosine", "step", "warmup"),
        after_setup=True,
        tuned=True,
    )
    client_optimizer: str = key(
        "sgd",
        "How clients make local steps: by torch's rules, from a state of zero in every round. Options of sgd are "
        "momentum, nesterov and weight_decay.",
        "training",
        choices=("sgd", "adam", "adamw"),
        after_setup=True,
        tuned=True,
    )
    clip_norm: float | None = key(
        None,
        "Shorten the direction of every local step to this length where it is longer.",
        "training",
        shown="no clipping",
        after_setup=True,
        tuned=True,
    )
    server_optimizer: str = key(
        "sgd",
        "How the server steps along the method's direction; sgd is the method's own step. With adam, yogi and adagrad "
        "`server_lr` is 0.01 unless set.",
        "training",
        choices=("sgd", "momentum", "adam", "yogi", "adagrad"),
        after_setup=True,
        tuned=True,
    )
    batch_size: int | None = key(
        None,
        "Samples per local step; the last, smaller batch is kept.",
        "training",
        shown="256, or half a client's samples where those are fewer",
        tuned=True,
    )
    epochs: int = key(1, "Local epochs per round.", "training", tuned=True)
    reserve: float | None = key(
        None,
        "Share of the training set, equal by class, that the server keeps and clients do not get.",
        "data",
        shown="what the method needs; the same for all methods of a comparison",
    )
    validation: float = key(
        0.0, "Share of every class of the training set that nobody trains on, evaluated after every round.", "data"
    )
    seed: int = key(0, "Seed of partition, initial model, cohorts and batches.", "training", per_run=True)
    buffers: Literal["auto", "average", "local", "refuse"] = key(
        "auto",
        "What happens to statistics that a network measures in training, such as BatchNorm's: `average` takes their "
        "mean over the clients, `local` leaves them with each client, `refuse` refuses such networks.",
        "training",
        shown="auto: average, but local with FedBN",
        after_setup=True,
        simulator_only=True,
    )
    keep: Literal["last", "best"] = key(
        "last",
        "The model that a run returns and writes: that of its last round, or of the round with the best primary metric "
        "on validation data; without validation data on the test set, which is then no fair test of that model any "
        "more.",
        "training",
        after_setup=True,
    )
    scaling: Literal["auto", "half", "channel", "unit", "none"] = key(
        "auto",
        "How bytes become network inputs: to [-1, 1], by mean and deviation per channel, to [0, 1], or not at all.",
        "data",
        shown="auto: half for images of bytes, none for floats",
    )
    augment: bool = key(
        False, "Random crops (an eighth of the side, at least 2 pixels) and flips of training images.", "data"
    )
    transform: str = key(
        "",
        "FILE.py:FUNCTION that changes the inputs of every training batch, given uniform random numbers per sample.",
        "data",
        shown="none",
        kind="transform",
    )
    precision: Literal["float32", "float64", "tf32", "bf16"] = key(
        "float32",
        "Arithmetic. float32 is exact float32 also on a GPU; tf32 rounds products to 10 bits; bf16 runs the network in "
        "bfloat16 and keeps parameters, gradients and server in float32.",
        "training",
    )
    device: str = key(
        "auto",
        "The device: cpu, cuda, cuda:1.",
        "execution",
        shown="auto: a GPU if there is one",
        changes_numbers=False,
    )
    engine: str = key(
        "auto",
        "How clients are trained. auto is a fixed rule of device, model size, batch size and cohort; fastest times all "
        "engines, so that last digits may differ between calls.",
        "execution",
        kind="engine",
        choices=("auto", "fastest", "loop", "threads", "stacked", "cuda"),
        changes_numbers=False,
        after_setup=True,
    )
    compile: bool | Literal["auto"] = key(
        "auto",
        "Compile the steps of the engine cuda before round 1, which takes up to minutes; auto does not.",
        "execution",
        choices=("auto", "true", "false"),
        changes_numbers=False,
        after_setup=True,
    )
    data_memory: Literal["auto", "device", "host"] = key(
        "auto",
        "Where training samples lie: on the device, or in host memory (or mapped files), from where those of a cohort "
        "are copied to the device before its steps and those of the next one are read meanwhile.",
        "execution",
        shown="auto: host for mapped files, and where the samples would take more than half of a GPU's free memory",
        changes_numbers=False,
        may_change=True,
        simulator_only=True,
    )
    client_memory: Literal["auto", "device", "host", "disk"] = key(
        "auto",
        "Where per-client states are kept. auto takes the device if all of them fit into a quarter of its free memory, "
        "else the host's memory if they fit into half of that, else the disk.",
        "execution",
        changes_numbers=False,
        may_change=True,
        after_setup=True,
    )
    threads: int | Literal["auto"] | None = key(
        None,
        "CPU threads; auto takes one for small models, where a second gains nothing.",
        "execution",
        shown="auto on the command line, torch's own number in Python",
        changes_numbers=False,
    )
    hyper: Options = field(
        default_factory=dict,
        metadata=about(
            "Hyper-parameters of the method.", "method", options_of="method", per_run=True, after_setup=True
        ),
    )
    model_options: Options = field(
        default_factory=dict, metadata=about("Options of the network.", "method", options_of="model")
    )
    data_options: Options = field(
        default_factory=dict,
        metadata=about("Options of a table or a function: target=price, client=user.", "data", options_of="data"),
    )
    partition_options: Options = field(
        default_factory=dict, metadata=about("Options of the partition.", "data", options_of="partition")
    )
    participation_options: Options = field(
        default_factory=dict, metadata=about("Options of the sampler.", "federation", options_of="participation")
    )
    lr_schedule_options: Options = field(
        default_factory=dict,
        metadata=about("Options of the schedule.", "training", options_of="lr_schedule", after_setup=True),
    )
    client_optimizer_options: Options = field(
        default_factory=dict,
        metadata=about(
            "Options of the clients' optimizer.", "training", options_of="client_optimizer", after_setup=True
        ),
    )
    server_optimizer_options: Options = field(
        default_factory=dict,
        metadata=about(
            "Options of the server's optimizer.", "training", options_of="server_optimizer", after_setup=True
        ),
    )
    privacy: Options = field(
        default_factory=dict,
        metadata=about(
            "Client-level differential privacy, for FedDPC and FedAvg: clip with epsilon or noise, and delta.",
            "robustness and privacy",
            options_of="privacy",
        ),
    )
    rule_options: Options = field(
        default_factory=dict, metadata=about("Options of the robust rule.", "robustness and privacy", options_of="rule")
    )
    screen: Options = field(
        default_factory=dict,
        metadata=about(
            "Reject updates longer than norm times the median norm of the last window (100) updates: norm=5.",
            "robustness and privacy",
            options_of="screen",
        ),
    )
    faults: Options = field(
        default_factory=dict,
        metadata=about(
            "Shares of clients that misbehave: sign_flip=0.2. Also nan, inf, huge, zero, scaled, noise, replayed, "
            "colluding, parallel, straggler.",
            "robustness and privacy",
            options_of="faults",
        ),
    )

    def __post_init__(self) -> None:
        for name in ("clients", "cohort", "rounds", "epochs", "batch_size", "threads", "evaluate_every"):
            value = getattr(self, name)
            _require(value is None or value == "auto" or value >= 1, name, value, "at least 1")
        _require(not isinstance(self.threads, int) or self.threads <= 1024, "threads", self.threads, "at most 1024")
        _require(self.cohort <= self.clients, "cohort", self.cohort, f"at most clients = {self.clients}")
        for name in ("lr", "server_lr", "alpha", "lr_decay", "clip_norm"):
            value = getattr(self, name)
            _require(value is None or 0 < value < math.inf, name, value, "a finite number above 0")
        _require(self.finetune_steps >= 0, "finetune_steps", self.finetune_steps, "at least 0")
        _require(0 < self.client_test < 1, "client_test", self.client_test, "a share of samples above 0 and below 1")
        alone = self.evaluate_clients or not self.finetune_steps
        _require(alone, "finetune_steps", self.finetune_steps, "0 without evaluate_clients = true")
        both = self.lr_decay != 1 and self.lr_schedule != "constant"
        _require(not both, "lr_decay", self.lr_decay, f"left out with lr_schedule = {self.lr_schedule!r}")
        _require(0 <= self.dropout < 1, "dropout", self.dropout, "a probability in [0, 1)")
        reserve = 0.0 if self.reserve is None else self.reserve
        _require(0 <= reserve < 1, "reserve", self.reserve, "a share of the training set in [0, 1)")
        _require(0 <= self.validation < 1, "validation", self.validation, "a share of the training set in [0, 1)")
        alike = self.rule == "mean" or self.weighting == "uniform"
        _require(alike, "weighting", self.weighting, f"uniform with rule = {self.rule!r}, which counts clients alike")
        _require(0 <= self.seed < 2**32, "seed", self.seed, "from 0 to 4294967295")

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Config:
        """Build a configuration from names and values, checking both.

        Where a choice has options, one table can give both: ``{"client_optimizer": {"name": "sgd", "momentum": 0.9}}``.
        """
        hints, values = types_of_keys(), _split_choices(values)
        if isinstance(values.get("metrics"), list | tuple):
            values = {**values, "metrics": ",".join(map(str, values["metrics"]))}
        for key in values:
            if key not in hints:
                raise unknown("key", key, hints)
        return cls(**{k: _fit(k, v, hints[k]) for k, v in values.items()})

    def asdict(self) -> dict[str, Any]:
        """Return names and values; what is unset is left out."""
        return {k: v for k, v in dataclasses.asdict(self).items() if v is not None}

    def differences(self, given: Mapping[str, Any]) -> list[str]:
        """Say where ``given`` asks for something else than this configuration; ``auto`` asks for nothing."""
        own, given = _plain(self.asdict()), _plain(_split_choices(given))
        found = []
        for key, value in given.items():
            if isinstance(value, dict):
                found += [
                    f"{key}.{k} = {v!r}, was {own[key].get(k)!r}" for k, v in value.items() if own[key].get(k) != v
                ]
            elif value != "auto" and own.get(key) != value:
                found.append(f"{key} = {value!r}, was {own.get(key)!r}")
        return found


@functools.cache
def keys() -> dict[str, Key]:
    """Return the facts about every key, in the order of the fields."""
    return {f.name: f.metadata["key"] for f in dataclasses.fields(Config)}


@functools.cache
def execution_keys() -> tuple[str, ...]:
    """Return the keys that decide where and how fast a run computes, but not what.

    >>> execution_keys()
    ('device', 'engine', 'compile', 'data_memory', 'client_memory', 'threads')
    """
    return tuple(name for name, facts in keys().items() if not facts.changes_numbers)


@functools.cache
def per_run_keys() -> tuple[str, ...]:
    """Return the keys that differ between the runs of one study.

    >>> per_run_keys()
    ('method', 'seed', 'hyper')
    """
    return tuple(name for name, facts in keys().items() if facts.per_run)


@functools.cache
def after_setup_keys() -> tuple[str, ...]:
    """Return the keys that may differ between runs that share data, partition and model.

    >>> "lr" in after_setup_keys(), "clients" in after_setup_keys()
    (True, False)
    """
    return tuple(name for name, facts in keys().items() if facts.after_setup)


@functools.cache
def tuned_keys() -> tuple[str, ...]:
    """Return the keys that are tuned by default, besides the hyper-parameters.

    >>> tuned_keys()
    ('lr', 'server_lr', 'lr_decay', 'lr_schedule', 'client_optimizer', 'clip_norm', 'server_optimizer', 'batch_size', \
'epochs')
    """
    return tuple(name for name, facts in keys().items() if facts.tuned)


@functools.cache
def may_change() -> tuple[str, ...]:
    """Return the keys that a resumed run may have otherwise than before.

    >>> may_change()
    ('rounds', 'data_memory', 'client_memory')
    """
    return tuple(name for name, facts in keys().items() if facts.may_change)


@functools.cache
def option_tables() -> dict[str, str]:
    """Return the tables of options by the name that ``--set NAME.KEY=VALUE`` uses; hyper-parameters are not among them.

    >>> option_tables()["model"], option_tables()["privacy"]
    ('model_options', 'privacy')
    """
    tables = {facts.options_of: name for name, facts in keys().items() if facts.options_of}
    return {part: name for part, name in tables.items() if name != "hyper"}


@functools.cache
def options_by_choice() -> dict[str, str]:
    """Return which table goes with which choice: another model needs other options.

    >>> options_by_choice()["method"], "privacy" in options_by_choice()
    ('hyper', False)
    """
    return {facts.options_of: name for name, facts in keys().items() if facts.options_of not in (None, name)}


@functools.cache
def plain_keys() -> tuple[str, ...]:
    """Return the keys whose value is no table: those that ``--set KEY=VALUE`` and flags set directly."""
    return tuple(name for name, facts in keys().items() if not facts.options_of)


def code_in(values: Mapping[str, Any]) -> list[str]:
    """Return which values of a configuration are code in a file.

    >>> code_in({"model": "mine.py:Net", "data": "digits", "rounds": 3})
    ['mine.py:Net']
    """
    return code_names([values[name] for name, facts in keys().items() if facts.kind and name in values])


def choices_of(name: str) -> tuple[str, ...]:
    """Return the values that the help text lists for a key, the empty tuple where it takes any.

    >>> choices_of("weighting"), choices_of("lr")
    (('uniform', 'samples'), ())
    """
    hint = types_of_keys()[name]
    return typing.get_args(hint) if typing.get_origin(hint) is Literal else keys()[name].choices


def default_of(name: str) -> str:
    """Return a key's default in words.

    >>> default_of("rounds"), default_of("dropout"), default_of("server_lr"), default_of("privacy")
    ('100', '0', 'that of the clients', 'none')
    """
    facts, value = keys()[name], getattr(Config(), name)
    if facts.shown is not None:
        return facts.shown
    if value is None or value == {}:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)


@functools.cache
def types_of_keys() -> dict[str, Any]:
    """Return the types of all keys; looking them up takes longer than reading a configuration."""
    return typing.get_type_hints(Config)


#: Derived: the tables that `--set PREFIX.KEY=VALUE` reaches, and what a resumed run may have otherwise than before.
PARTS = option_tables()
MAY_CHANGE = may_change()


def _plain(value: Any) -> Any:
    """Return ``value`` as TOML would give it back: lists for tuples."""
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def _split_choices(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` with name and options apart where a table gives both; a function of the rounds by its name.

    >>> _split_choices({"server_optimizer": {"name": "adam", "tau": 0.01}})
    {'server_optimizer': 'adam', 'server_optimizer_options': {'tau': 0.01}}
    """
    split = dict(values)
    for key, table in options_by_choice().items():
        value = values.get(key)
        if key == "lr_schedule" and callable(value):
            split[key] = name_of_schedule(value)
        elif isinstance(value, Mapping) and key in ("lr_schedule", "client_optimizer", "server_optimizer"):
            if "name" not in value:
                raise BadInputError(f"{key} = {dict(value)} has no name: write name = one of {choices_of(key)}")
            options = {name: option for name, option in value.items() if name != "name"}
            split |= {key: value["name"], table: {**options, **values.get(table, {})}}
    return split


def _fit(key: str, value: Any, hint: Any) -> Any:
    if hint == Options:
        if not isinstance(value, dict):
            raise BadInputError(f"{key} = {value!r} must be a table of names and values")
        return dict(value)
    return coerce(key, value, hint)


def _require(holds: bool, name: str, value: object, domain: str) -> None:
    if not holds:
        raise BadInputError(f"{name} = {value!r}: must be {domain}")


def read_toml(path: Path) -> dict[str, Any]:
    """Return the contents of a TOML file, or say where it is wrong."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInputError(f"there is no file {path}") from None
    except (ValueError, RecursionError, OSError) as error:  # a number may be too long, a list too deep
        raise BadInputError(f"{path} cannot be read as TOML: {error}") from None


def parse_set(text: str) -> tuple[str, Any]:
    """Split ``KEY=VALUE``; the value is read as TOML where that works, else as a plain word.

    >>> parse_set("lam=0.5"), parse_set("variant=fresh"), parse_set("scaling=false")
    (('lam', 0.5), ('variant', 'fresh'), ('scaling', False))
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise BadInputError(f"--set {text!r}: write KEY=VALUE")
    try:
        parsed = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError):
        return key.strip(), value.strip()
    plain = parsed.get("value")
    return key.strip(), plain if isinstance(plain, bool | int | float | str | list) and len(
        parsed
    ) == 1 else value.strip()


def write_toml(values: Mapping[str, Any]) -> str:
    """Return TOML text: plain values first, then one table for each dictionary.

    >>> print(write_toml({"lr": 0.1, "hyper": {"lam": 1.0, "guard": "zero"}}))
    lr = 0.1
    <BLANKLINE>
    [hyper]
    lam = 1.0
    guard = "zero"
    <BLANKLINE>
    """
    plain = [f"{k} = {_toml(v)}" for k, v in values.items() if not isinstance(v, dict)]
    tables = [
        "\n".join([f"[{k}]", *(f"{key} = {_toml(value)}" for key, value in v.items())])
        for k, v in values.items()
        if isinstance(v, dict) and v
    ]
    return "\n\n".join(["\n".join(plain), *tables]) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    # Strings, whole numbers and booleans are written alike in both, but for one control character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
