"""Fingerprints of small runs, to the last bit, for refactorings that must leave numbers as they are.

    python tools/fingerprints.py record before.json      # before the first change
    python tools/fingerprints.py compare before.json     # after every step: names what differs, exit code 1

Every method and variant runs in ``loop`` and float64 with two seeds and partial participation, and again with sample
weights, drop-outs and a decaying rate, with faults, with a robust rule, and where possible with privacy. A fingerprint
is a hash of all records but their seconds, and of the final model. Other versions of torch or another processor may
give other bits, so the file belongs to the machine it was made on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

import feddpc
from feddpc.errors import FeddpcError

#: Methods with hyper-parameters that make them small, and variants that take another way through the code.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in feddpc.methods.names()} | {
    "clusterfedvarp": ("clusterfedvarp", {"clusters": 3}),
    "faug": ("faug", {"gan_steps": 3, "seeds": 2}),
    "feddpc streaming": ("feddpc", {"form": "streaming"}),
    "feddpc client": ("feddpc", {"form": "client"}),
    "feddpc no scaling": ("feddpc", {"scaling": False}),
    "feddpc neither": ("feddpc", {"scaling": False, "projection": False}),
    "feddpc bounded": ("feddpc", {"max_scale": 3.0}),
    "fedexp pair": ("fedexp", {"evaluate": "pair"}),
    "fedexp code": ("fedexp", {"eps_times_m": True}),
    "fedga fresh": ("fedga", {"variant": "fresh"}),
    "fedbr mixture": ("fedbr", {"mixture": True, "pseudo": 5}),
    "scaffold I": ("scaffold", {"option": "I"}),
    "scaffold warm": ("scaffold", {"warm": True}),
    "feddyn clients": ("feddyn", {"evaluate": "clients"}),
    "fedspeed paper": ("fedspeed", {"server": "paper"}),
    "fedamd sequential": ("fedamd", {"anchors": "sequential", "every": 2}),
    "feddc paper": ("feddc", {"form": "paper", "evaluate": "clients"}),
    "mifa wait": ("mifa", {"table": "wait"}),
    "datasharing cold": ("datasharing", {"warmup": 0}),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "seed 1": {"seed": 1},
    "all": {"weighting": "samples", "dropout": 0.3, "lr_decay": 0.9, "augment": True, "validation": 0.1},
    "faults": {"faults": {"sign_flip": 0.2, "nan": 0.1, "straggler": 0.1, "replayed": 0.1}, "screen": {"norm": 3.0}},
    "rule": {"rule": "median", "faults": {"colluding": 0.2}},
    "krum": {"rule": "multi_krum"},
    "private": {"participation": "poisson", "privacy": {"clip": 0.6, "noise": 0.8}},
    "float32": {"precision": "float32"},
}
COMMON: dict[str, Any] = {
    "data": "digits", "model": "mlp", "clients": 24, "cohort": 6, "rounds": 4, "client_lr": 0.1, "batch_size": 16,
    "precision": "float64", "engine": "loop", "device": "cpu", "threads": 1,
}  # fmt: skip


def fingerprint(method: str, hyper: dict[str, Any], **values: Any) -> str:
    """Return the hash of a run, or the error that it ends with."""
    try:
        result = feddpc.simulate(method=method, hyper=hyper, **{**COMMON, **values})
    except FeddpcError as error:
        return type(error).__name__
    digest = hashlib.blake2b(digest_size=16)
    for record in result.records:
        digest.update(json.dumps({k: v for k, v in record.items() if k != "seconds"}, sort_keys=True).encode())
    for name, value in sorted(result.state_dict.items()):
        digest.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def everything() -> dict[str, str]:
    """Return all fingerprints by name."""
    torch.set_num_threads(1)
    found = {}
    for name, (method, hyper) in VARIANTS.items():
        for setting, values in SETTINGS.items():
            if setting == "private" and method not in ("fedavg", "feddpc"):
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found[f"{name}, {setting}"] = fingerprint(method, hyper, **values)
    return found


def main() -> int:
    """Record or compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("action", choices=["record", "compare"])
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    now = everything()
    if arguments.action == "record":
        arguments.file.write_text(json.dumps(now, indent=1) + "\n")
        print(f"{len(now)} fingerprints in {arguments.file}")
        return 0
    before = json.loads(arguments.file.read_text())
    different = sorted(name for name in before | now if before.get(name) != now.get(name))
    for name in different:
        print(f"different: {name}")
    print(f"{len(now) - len(different)} of {len(before)} fingerprints are as before")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
