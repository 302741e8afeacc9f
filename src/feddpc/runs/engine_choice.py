"""Which engine runs an experiment: the one that was named, or that of a fixed rule."""

from __future__ import annotations

import dataclasses
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from feddpc import models, sampling
from feddpc.data.partition import Partition
from feddpc.engines.base import Engine
from feddpc.engines.cuda.captured import Cuda
from feddpc.engines.distributed import Distributed, adds_up
from feddpc.engines.loop import Loop
from feddpc.engines.stacked import Stacked
from feddpc.engines.threads import Threads
from feddpc.errors import BadInputError, FeddpcError, unknown
from feddpc.experiment import Experiment
from feddpc.methods.base import Method
from feddpc.policies import Policies, client_optimizer, server_optimizer
from feddpc.ranks import ALONE, Ranks, place
from feddpc.robust.defense import Defense
from feddpc.round.round import RoundRecord, run_round
from feddpc.round.state import RunState

Compile = bool | Literal["auto"]
ENGINES: dict[str, Callable[..., Engine]] = {
    "loop": Loop,
    "threads": Threads,
    "stacked": Stacked,
    "cuda": Cuda,
    "distributed": Distributed,
}
#: On a CPU, clients are stacked while one local step is at most this much work and the cohort at least this large: then
#: calls cost more than arithmetic.
SMALL_STEP, SMALL_COHORT = 1 << 17, 5
#: How closely an engine must agree with ``loop`` on code of the user's own, by precision of the comparison.
TOLERANCE = {"float64": 1e-8, "float32": 1e-4, "tf32": 1e-2, "bf16": 5e-2}
#: Models larger than this are compared in the run's own precision: a copy in float64 could be too much memory.
LARGEST_IN_FLOAT64 = 1 << 24
#: The comparison uses batches of at most this size, and a population of at most this size if all clients are probed.
TRIAL_BATCH, TRIAL_POPULATION = 4, 1000

_compared: dict[object, str | None] = {}
_comparing = threading.Lock()


def choose_engine(
    name: str,
    experiment: Experiment,
    method: Method,
    *,
    compile: Compile | None = None,
    inner: str = "auto",
    ranks: Ranks = ALONE,
) -> Engine:
    """Return the engine ``name``; ``compile`` replaces what the configuration of the experiment says.

    ``auto`` follows :func:`rule`, so that the same command gives the same records. Code of the user's own is compared
    with ``loop`` first: where the two differ, ``auto`` uses ``loop`` and says so, and an engine asked for by name is
    refused. Where several ``ranks`` share the run, ``auto`` is ``distributed``, and ``inner`` names what each of them
    uses.
    """
    if name == "auto" and place() is not None:
        name = "distributed"
    if name == "distributed":
        return _distributed(inner, experiment, method, compile, ranks)
    if ranks.size > 1:
        raise BadInputError(
            f"engine = {name!r}, but {ranks.size} processes were started for this run: leave it out, and give "
            f"inner_engine = {name!r}"
        )
    if inner != "auto":
        raise BadInputError(f"inner_engine = {inner!r} is for the engine distributed: leave it out, or give engine too")
    return _one_process(name, experiment, method, compile)


def _one_process(name: str, experiment: Experiment, method: Method, compile: Compile | None) -> Engine:
    """Return an engine that uses this process alone."""
    compile = experiment.config.compile if compile is None else compile
    _refuse_compile(name, experiment, compile)
    if name != "auto" and name not in ENGINES:
        raise unknown("engine", name, ["auto", *ENGINES])
    engine = make_engine(rule(experiment) if name == "auto" else name, compile)
    why = _objection(engine, experiment, method)
    if why is None:
        return engine
    engine.release()
    if name != "auto":
        raise BadInputError(f"engine {name!r} cannot be used: {why}; use 'loop' or 'auto'")
    warnings.warn(f"using engine 'loop', because {engine.name!r} cannot be used: {why}", stacklevel=2)
    return Loop()


def _distributed(
    inner: str, experiment: Experiment, method: Method, compile: Compile | None, ranks: Ranks
) -> Distributed:
    """Return the engine of several ranks; what a method of the user's own adds up is compared with ``loop``."""
    if inner == "distributed":
        raise BadInputError("inner_engine = 'distributed': a rank trains its clients alone: use auto or another engine")
    each = _one_process(inner, experiment, method, compile)
    if adds_up(method) and not type(method).__module__.startswith("feddpc.methods."):
        why = disagreement(Distributed(Loop(), ALONE, at_once=1), experiment, method)
        if why is not None:
            raise BadInputError(
                f"{method.name} says needs_only_sums = True, but its server's half cannot be added up in parts: {why}. "
                "Leave needs_only_sums out of the class"
            )
    return Distributed(each, ranks)


def _refuse_compile(name: str, experiment: Experiment, compile: Compile) -> None:
    """Raise if compiling was asked for and the engine, or the one of the rule, has nothing to compile."""
    if compile is not True or name == "cuda":
        return
    if name != "auto":
        raise BadInputError(
            f"compile = true, but the engine {name!r} compiles nothing: leave compile out, or use engine = 'cuda'"
        )
    if experiment.w0.device.type != "cuda":
        raise BadInputError(
            f"compile = true, but only the engine 'cuda' compiles, and the device is {experiment.w0.device}: leave "
            "compile out, or run on a GPU"
        )


def make_engine(name: str, compile: Compile) -> Engine:
    """Return the engine ``name``; ``auto`` compiles nothing, because that takes longer than most runs."""
    if name == "distributed":
        return Distributed(Loop(), ALONE, at_once=1)
    return ENGINES[name](compile=compile is True) if name == "cuda" else ENGINES[name]()


def rule(experiment: Experiment) -> str:
    """Return the name of the engine that ``auto`` stands for: a function of device, model, batch and cohort."""
    cohort, device = experiment.config.cohort, experiment.w0.device.type
    if device == "cuda":
        return "cuda"
    if device != "cpu" or cohort == 1:
        return "loop"
    small = experiment.step_work <= SMALL_STEP and cohort >= SMALL_COHORT
    traits = experiment.task.traits
    able = models.vectorizes(experiment.task.module) and not (traits.mixes_samples or traits.statistics)
    return "stacked" if small and able else "threads"


def _objection(engine: Engine, experiment: Experiment, method: Method) -> str | None:
    """Say why ``engine`` must not run this experiment, or return None."""
    if engine.name == "loop":
        return None
    return engine.refuses(experiment.task) or disagreement(engine, experiment, method)


# Code that the library's own equality tests have not seen.


def covered(experiment: Experiment, method: Method) -> bool:
    """Say whether model, method, loss and transform are the library's own, whose equality in all engines is tested."""
    if experiment.task.transform is not None:
        return False
    own = ("feddpc.models.", "feddpc.methods.", "torch.nn.modules.")
    modules = (type(part).__module__ for part in experiment.task.module.modules())
    known = experiment.config.model in models.names() and all(name.startswith(own) for name in modules)
    task = (type(experiment.task), experiment.task.sample_loss)
    learned = all(getattr(part, "__module__", "").startswith("feddpc.tasks.") for part in task)
    return known and learned and type(method).__module__.startswith("feddpc.methods.")


def disagreement(engine: Engine, experiment: Experiment, method: Method) -> str | None:
    """Say how ``engine`` fails or differs from ``loop`` on code of the user's own; None if they agree.

    Two whole rounds with two clients, one of which has a partial batch and fewer steps, in float64 if the code can.
    """
    if covered(experiment, method):
        return None
    key = _key(engine, experiment, method)
    with _comparing:  # one at a time: several runs may begin at once, and the filters of warnings are global
        if key not in _compared:
            # On an engine of its own: what it learns of memory that does not suffice is not for the run.
            _compared[key] = _compare(make_engine(engine.name, _compiles(engine)), experiment, method)
    return _compared[key]


def _compare(engine: Engine, experiment: Experiment, method: Method) -> str | None:
    precisions = ["float64", experiment.config.precision] if experiment.task.d <= LARGEST_IN_FLOAT64 else []
    for precision in dict.fromkeys([*precisions, experiment.config.precision]):
        try:
            reference = _two_rounds(Loop(), experiment, method, precision)
        except Exception as error:
            if isinstance(error, FeddpcError) and precision == experiment.config.precision:
                raise
            why = f"a trial round fails in 'loop' too: {_short(error)}"
            continue
        break
    else:
        return why
    try:
        other = _two_rounds(engine, experiment, method, precision)
    except Exception as error:
        return f"a trial round fails there: {_short(error)}"
    finally:
        engine.release()
    tolerance = TOLERANCE[precision]
    for (what, mine), (_, theirs) in zip(reference, other, strict=True):
        off = _difference(mine, theirs)
        if not off <= tolerance:
            return (
                f"a trial of two rounds differs from 'loop' by {off:.1e} in {what} (allowed in {precision}: "
                f"{tolerance:g}). A loss that is not averaged with batch.mean counts padding, and layers that mix the "
                "samples of a batch see it"
            )
    return None


def _two_rounds(engine: Engine, experiment: Experiment, method: Method, precision: str) -> list[tuple[str, Tensor]]:
    """Run two rounds of a small copy of the experiment; return what they led to, by name."""
    small = _small(experiment, method, precision)
    state = RunState.of(small, method)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run itself will repeat them
        records = [run_round(small, method, engine, state) for _ in range(2)]
    return list(_outcome(state, records))


def _small(real: Experiment, method: Method, precision: str) -> Experiment:
    """Return an experiment in which two clients hold a few samples of the real one."""
    task = real.task.reduced(precision)
    batch = min(real.planner.batch_size, TRIAL_BATCH)
    population = len(real.population)
    if method.surveys:
        population = min(population, TRIAL_POPULATION)
    sizes = np.full(population, real.planner.smallest, dtype=np.int64)
    partial = max(real.planner.smallest, batch // 2)
    sizes[-1], sizes[0] = partial, 2 * batch + partial
    partition = Partition.from_sizes(np.resize(real.planner.partition.order, int(sizes.sum())), sizes)
    clients = sorted({0, population - 1})
    return dataclasses.replace(
        real,
        task=task,
        planner=dataclasses.replace(real.planner, partition=partition, batch_size=batch, epochs=1),
        sampler=sampling.make("fixed", population=population, cohort=len(clients), seed=0, schedule=[clients, clients]),
        validate=None,
        client_tests=None,
        w0=real.w0.to(task.dtype),
        one_time_payload={
            k: v.to(task.dtype) if v.is_floating_point() else v for k, v in real.one_time_payload.items()
        },
        policies=Policies(Defense() if real.policies else None),  # with one, rounds are not captured as a whole
    )


def _outcome(state: RunState, records: list[RoundRecord]) -> Iterator[tuple[str, Tensor]]:
    yield "the model", state.w
    for record in records:
        yield "the training loss", torch.tensor(record.train_loss)
        if (loss := record.metrics.get("test_loss")) is not None:
            yield "the test loss", torch.tensor(loss)
    for name, value in state.server.items():
        yield f"the server's {name}", value
    for memory in (state.slots, state.clients):
        for name, value in memory.export()[1].items():
            yield f"the memory {name}", value


def _difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference, over the largest number where that is above 1; NaN where one is NaN alone."""
    if a.shape != b.shape:
        return float("inf")
    a, b = (torch.as_tensor(x).detach().double().cpu().reshape(-1) for x in (a, b))
    equal = (a == b) | (a.isnan() & b.isnan())
    off = torch.where(equal, 0.0, (a - b).abs())
    finite = a[a.isfinite()].abs()
    return float(off.max() / max(1.0, float(finite.max()) if len(finite) else 1.0)) if len(off) else 0.0


def _key(engine: Engine, experiment: Experiment, method: Method) -> object:
    """Return what a comparison depends on: code, simple attributes and shapes."""
    config, task = experiment.config, experiment.task
    parts = tuple((name, *_code(part)) for name, part in task.module.named_modules())
    shapes = tuple((name, tuple(p.shape), p.requires_grad) for name, p in task.module.named_parameters())
    samples = (tuple(task.x.shape[1:]), str(task.x.dtype), task.classes)
    about = (config.precision, str(experiment.w0.device), config.weighting, config.batch_size)
    rules = (repr(client_optimizer(config)), repr(server_optimizer(config)), experiment.population.rates_change)
    policies = bool(config.faults or config.screen or config.privacy or config.rule != "mean")
    functions = (task.sample_loss, task.transform)
    learned = (type(task), _source(type(task)), *functions, *map(_source, functions))
    code = (type(method), _source(type(method)), repr(method.hyper()), parts, learned)
    return (engine.name, _compiles(engine), code, shapes, samples, about, rules, policies, len(experiment.population))


def _compiles(engine: Engine) -> bool:
    return bool(getattr(engine, "compile", False))


def _code(part: nn.Module) -> tuple[Any, ...]:
    simple = {k: v for k, v in vars(part).items() if isinstance(v, bool | int | float | str) and k != "training"}
    return type(part), _source(type(part)), repr(sorted(simple.items()))


def _source(kind: Any) -> str:
    """Return the code of a class or function; in a notebook one of the same name may have been written again."""
    if getattr(kind, "__module__", "").startswith(("torch.", "feddpc.")):
        return ""
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return str(id(kind))


def _short(error: BaseException) -> str:
    """Return the first line of an error, cut to what fits a message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__
