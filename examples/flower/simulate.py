"""The same experiment without machines: `python simulate.py` gives the numbers that the federation will give.

It needs the samples of all nodes in one place, so it is for trying things out before the data are elsewhere.
"""

import tomllib
from pathlib import Path

import numpy as np
from federation import task

import feddpc

#: What only a federation has.
ONLY_THERE = ("folder", "min-replies", "prometheus")


def settings() -> dict:
    """Return the app's configuration as `feddpc.simulate` takes it."""
    text = (Path(__file__).parent / "pyproject.toml").read_text(encoding="utf-8")
    config = tomllib.loads(text)["tool"]["flwr"]["app"]["config"]
    return {key.replace("-", "_"): value for key, value in config.items() if key not in ONLY_THERE}


def simulate(**changes) -> feddpc.Result:
    """Return what the federation will give; `changes` are settings to have otherwise."""
    values = settings() | changes
    clients = values.pop("clients")
    # METHOD.NAME is a hyper-parameter of one method.
    own = {key: values.pop(key) for key in list(values) if "." in key}
    hyper = {key.partition(".")[2]: value for key, value in own.items() if key.startswith(f"{values['method']}.")}
    parts = [task.data(client, clients) for client in range(clients)]
    x, y = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    ends = np.cumsum([len(labels) for _, labels in parts])
    whole = feddpc.Dataset.from_arrays(x, y, *task.test(), classes=task.CLASSES)
    partition = np.split(np.arange(len(y)), ends[:-1])
    fixed = {"data": whole, "model": task.model(), "partition": partition, "engine": "loop", "device": "cpu"}
    return feddpc.simulate(**fixed, **{"hyper": hyper} | values)


if __name__ == "__main__":
    for record in simulate().records:
        print(f"round {record['round']:3d}  test accuracy {100 * record['test_accuracy']:.2f}%")
