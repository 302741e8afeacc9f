"""What a round under secure aggregation costs beside the plain one: seconds, and bytes that a client gets and sends.

LeNet5 (62,006 parameters) on random images, FedDPC, all clients in one process and one after the other, so that the
seconds are the sum over server and clients. Messages are turned into bytes and back, and these bytes are counted.
"""

from __future__ import annotations

import argparse
import logging
import statistics

import numpy as np
import torch
from flwr.app import Message
from flwr.common.serde import message_to_proto

from feddpc import flower
from feddpc.build import build
from feddpc.config import Config
from feddpc.data import Dataset
from feddpc.data.partition import Partition
from feddpc.experiment import Experiment


class Counting(flower.InProcessGrid):
    """A grid that counts the bytes of training."""

    down = up = 0

    def deliver(self, message: Message) -> list[Message]:
        replies = super().deliver(message)
        if message.metadata.message_type == "train":
            self.down += message_to_proto(message).ByteSize()
            self.up += sum(message_to_proto(reply).ByteSize() for reply in replies)
        return replies


def setting_of(clients: int, samples: int) -> Experiment:
    rng = np.random.default_rng(0)
    n = clients * samples
    x, y = rng.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8), rng.integers(10, size=n)
    data = Dataset.from_arrays(x, y, x[:10], y[:10], name="random", classes=10)
    config = Config.read({"model": "lenet5", "clients": clients, "cohort": clients, "batch_size": 32, "device": "cpu"})
    return build(config, data=data, partition=Partition.from_sizes(np.arange(n), np.full(clients, samples)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", default="4,7,10")
    parser.add_argument("--samples", type=int, default=64, help="of each client")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    print("| clients | way | ms per round, median (spread) | kB down per client | kB up per client |")
    print("|---|---|---|---|---|")
    for clients in map(int, args.clients.split(",")):
        halves = flower.app_arguments(setting_of(clients, args.samples))
        for way, app, make in (
            ("plain", flower.client_app, flower.strategy),
            ("secure", flower.secure_client_app, flower.secure_strategy),
        ):
            grid = Counting(app(**halves.client()), clients)
            strategy = make("feddpc", **halves.server())
            strategy.start(grid, strategy.initial_arrays(), num_rounds=args.rounds + 1)
            ms = [1e3 * record.seconds for record in strategy.records[1:]]  # the first one warms up
            share = 1e-3 / clients / (args.rounds + 1)
            cost = f"{statistics.median(ms):.0f} ({min(ms):.0f} to {max(ms):.0f})"
            print(f"| {clients} | {way} | {cost} | {grid.down * share:.0f} | {grid.up * share:.0f} |")


if __name__ == "__main__":
    main()
