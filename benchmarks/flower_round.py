"""What a round costs over Flower: feddpc's FedDPC against Flower's own FedAvg, same clients, same model.

    python benchmarks/flower_round.py [--model resnet18] [--replies 10] [--rounds 7] [--threads 1]
    python benchmarks/flower_round.py --one-by-one [--model lenet5 --replies 1000]

The grid runs in one process and turns every message into bytes and back, as a network would. Clients add noise to the
weights, drawn once, so the clients' share of a round is as small as it can be: messages and server are measured. Rounds
of both strategies alternate; the median and the quartiles over rounds are printed, and by how many models of d numbers
the process grows at most while the server aggregates. With ``--one-by-one`` the grid brings replies as the server asks
for them, and the memory is that of the whole round: clients, messages and server.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import logging
import statistics
import time
from pathlib import Path

import flwr
import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from feddpc import flower, models

#: How many different clients there are; more would fill the memory with their noise.
KINDS = 10


def noisy_app() -> ClientApp:
    app = ClientApp()

    @functools.cache
    def noise(kind: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
        return 0.01 * np.random.default_rng([kind, len(name)]).standard_normal(shape, dtype=np.float32)

    @app.train()
    def train(message: Message, _: Context) -> Message:
        kind, sent = message.metadata.dst_node_id % KINDS, message.content["arrays"]
        arrays = {name: Array(a.numpy() - noise(kind, name, tuple(a.shape))) for name, a in sent.items()}
        metrics = MetricRecord({"num-examples": 100})
        return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=message)

    return app


def measured(
    strategy: FedAvg, grid: flower.InProcessGrid, arrays: ArrayRecord, t: int
) -> tuple[ArrayRecord, list[float]]:
    """Run one round; return the new model, and the seconds of the whole round and of the aggregation alone."""
    began = time.perf_counter()
    replies = grid.send_and_receive(strategy.configure_train(t, arrays, ConfigRecord(), grid))
    received = time.perf_counter()
    made, _ = strategy.aggregate_train(t, replies)
    ended = time.perf_counter()
    assert made is not None
    return made, [ended - began, ended - received]


def growth(strategy: FedAvg, grid: flower.InProcessGrid, arrays: ArrayRecord) -> int:
    """Return by how many bytes the process grows, at most, while replies are aggregated (Linux).

    Where these come one by one, that is the whole round.
    """
    replies = grid.send_and_receive(strategy.configure_train(99, arrays, ConfigRecord(), grid))
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # give back what others used, or it would hide what is used now
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    before = status("VmRSS")
    strategy.aggregate_train(99, replies)
    return status("VmHWM") - before


def status(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.split(f"{field}:")[1].split()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["lenet5", "resnet18"], default="resnet18")
    parser.add_argument("--replies", type=int, default=10)
    parser.add_argument("--one-by-one", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(args.threads)
    module = models.make(args.model, classes=100 if args.model == "resnet18" else 10, channels=3, size=32)
    first = ArrayRecord({n: Array(p.detach().numpy()) for n, p in module.named_parameters()})
    d = sum(p.numel() for p in module.parameters())
    grid = flower.InProcessGrid(noisy_app(), args.replies, one_by_one=args.one_by_one)
    everybody = {"min_train_nodes": args.replies, "min_available_nodes": args.replies, "fraction_evaluate": 0.0}
    ours = {"screen": None} if args.one_by_one else {}  # the bound needs the norms of all replies first
    strategies = {"Flower FedAvg": FedAvg(**everybody), "feddpc FedDPC": flower.FedDPC(**everybody, **ours)}
    model = dict.fromkeys(strategies, first)
    seconds: dict[str, list[list[float]]] = {name: [] for name in strategies}
    for t in range(1, args.rounds + 2):
        for name, strategy in strategies.items():
            model[name], took = measured(strategy, grid, model[name], t)
            if t > 1:  # the first warms up
                seconds[name].append(took)
    print(
        f"{args.model}, d = {d:,}, {args.replies} replies, {args.rounds} rounds, flwr {flwr.__version__}, "
        f"torch {torch.__version__}, {args.threads} threads"
    )
    medians = {}
    for name, rows in seconds.items():
        columns = list(zip(*rows, strict=True))
        medians[name] = [statistics.median(column) for column in columns]
        spread = [statistics.quantiles(column, n=4) for column in columns]
        text = ", ".join(
            f"{what} {median:.3f} s ({low:.3f} to {high:.3f})"
            for what, median, (low, _, high) in zip(("round", "aggregation"), medians[name], spread, strict=True)
        )
        grown = growth(strategies[name], grid, model[name]) / d / 4
        print(f"{name}: {text}, memory beyond {'the model' if args.one_by_one else 'the replies'} {grown:.1f} d")
    ours, theirs = medians["feddpc FedDPC"], medians["Flower FedAvg"]
    print(f"ratio: round {ours[0] / theirs[0]:.2f}, aggregation {ours[1] / theirs[1]:.2f}")


if __name__ == "__main__":
    main()
