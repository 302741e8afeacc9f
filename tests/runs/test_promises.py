"""What a process that calls the library may rely on: its own state is left alone, and results do not depend on it.

That runs are bit-identical, engines equal, and resumed runs too, is in tests/methods/test_contract.py and
test_run_folder.py, for every method.
"""

import hashlib
import json
import logging
import os
import random
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import feddpc
from feddpc import methods
from feddpc.study import run_study
from feddpc.study.compare import Overrides, compare
from sweeping import specs

QUICK = {"clients": 20, "cohort": 2, "rounds": 2, "model": "mlp"}
HERE = Path(__file__).parents[1]


def state():
    """All that belongs to the process, by name."""
    backends = torch.backends
    return {
        "random of torch": torch.get_rng_state().tolist(),
        "random of numpy": repr(np.random.get_state()),  # noqa: NPY002
        "random of Python": random.getstate(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "default dtype and device": (torch.get_default_dtype(), torch.get_default_device()),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "matrix units": (backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32),
        "order of sums": backends.cudnn.deterministic,
        "precision of products": torch.get_float32_matmul_precision(),
        "deterministic": (torch.are_deterministic_algorithms_enabled(), backends.cudnn.benchmark),
        "errors of numpy": np.geterr(),
        "warnings": (list(warnings.filters), warnings.showwarning),
        "logging": (logging.root.level, list(logging.root.handlers)),
        "environment": dict(os.environ),
        "folder": Path.cwd(),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "modules are found in": list(sys.path),
    }


def simulated(out, **more):
    feddpc.simulate(**{**QUICK, **more}, out=out)


def compared(out, **more):
    compare(Overrides({**QUICK, **more}), ["feddpc", "moon"], [0, 1], out)


def swept(out, **more):
    run_study(specs(rounds=2, **more), out)


def rerun(out, **more):
    first = feddpc.simulate(**{**QUICK, **more})
    simulated(out, **more)
    assert feddpc.rerun(out).records[-1]["test_loss"] == first.records[-1]["test_loss"]


@pytest.mark.parametrize("work", [simulated, compared, swept, rerun])
def test_a_process_is_left_as_it_was(work, tmp_path, monkeypatch):
    """Also where settings ask for threads and rounding of their own. What libraries do when imported is theirs."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)  # as torch has it
    work(tmp_path / "imports", engine="stacked")
    before = state()
    work(tmp_path / "usual")
    work(tmp_path / "special", threads=torch.get_num_threads() + 1, precision="tf32")
    after = state()
    assert [name for name in before if before[name] != after[name]] == []


def test_a_failure_leaves_the_process_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    before = state()

    def fail(record):
        raise KeyError(record["round"])

    with pytest.raises(KeyError):
        feddpc.simulate(**QUICK, threads=torch.get_num_threads() + 1, on_round=fail)
    after = state()
    assert [name for name in before if before[name] != after[name]] == []


def test_the_digits_are_read_without_what_importing_scikit_learn_does():
    """It sets environment variables, and what it imports draws from Python's random numbers."""
    code = (
        "import os, random, sys, feddpc.data; state = lambda: (dict(os.environ), random.getstate()); before = state(); "
        "feddpc.data.load('digits'); assert state() == before; assert 'sklearn' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def fates() -> dict[str, str]:
    """A digest of what every method does in two rounds."""
    found = {}
    for name in methods.names():
        result = feddpc.simulate(method=name, **QUICK, engine="loop", threads=1, hyper=CHEAPER.get(name, {}))
        numbers = json.dumps([{k: v for k, v in r.items() if k != "seconds"} for r in result.records], sort_keys=True)
        bits = b"".join(tensor.numpy().tobytes() for tensor in result.state_dict.values())
        found[name] = hashlib.sha256(numbers.encode() + bits).hexdigest()
    return found


CHEAPER = {"faug": {"gan_steps": 3, "seeds": 2}, "clusterfedvarp": {"clusters": 3}}


def test_another_process_with_other_generators_has_the_same_bits():
    """Another order of sets (PYTHONHASHSEED), another state of all global generators: every method, to the last bit."""
    code = "import random, numpy, torch; random.seed(1); numpy.random.seed(2); torch.manual_seed(3); import json; "
    code += "from runs.test_promises import fates; print(json.dumps(fates()))"
    env = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=env, text=True) as other:
        here = fates()
        assert json.loads(other.communicate()[0]) == here
