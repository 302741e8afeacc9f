"""The work in Flower's simulation: 100 nodes on Ray, an actor with one thread for each core, evaluation on the server.

The server looks for replies every 5 ms instead of every 100, which makes Flower faster than it is by default.
"""

from __future__ import annotations

import os
import time
import warnings
from itertools import pairwise
from pathlib import Path

HERE = Path(__file__).parent
os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])  # for Ray's processes

import common  # noqa: E402
import flwr  # noqa: E402
import torch  # noqa: E402
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.serverapp import ServerApp  # noqa: E402
from flwr.serverapp.strategy import FedAvg  # noqa: E402
from flwr.simulation import run_simulation  # noqa: E402


class Counting(FedAvg):
    """FedAvg that counts answers: Flower leaves out clients that failed, and a round without any looks fast."""

    answers = 0

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        self.answers += sum(not r.has_error() for r in replies)
        return super().aggregate_train(server_round, replies)


client = ClientApp()


@client.train()
def train(message, context):
    torch.set_num_threads(1)
    net = common.lenet5()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = common.work().client(int(context.node_config["partition-id"]))
    common.train(net, x, y)
    content = {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord({"num-examples": 1})}
    return Message(RecordDict(content), reply_to=message)


def main() -> None:
    args = common.arguments()
    os.environ["PEERS_WORK"] = str(args.work.resolve())
    clients, cores = len(common.work().owned), os.cpu_count() or 1
    times: list[float] = []
    accuracy: list[float] = []
    answers: list[int] = []
    server = ServerApp()

    def evaluate(_: int, arrays: ArrayRecord) -> MetricRecord:
        net = common.lenet5()
        net.load_state_dict(arrays.to_torch_state_dict())
        right = common.correct(net, common.work().x_test, common.work().y_test) / len(common.work().y_test)
        times.append(time.perf_counter())
        accuracy.append(right)
        return MetricRecord({"accuracy": right})

    @server.main()
    def serve(grid, _context):
        grid.pull_interval = 0.005
        strategy = Counting(
            fraction_train=common.COHORT / clients,
            fraction_evaluate=0.0,
            min_train_nodes=common.COHORT,
            min_available_nodes=clients,
        )
        strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(common.lenet5().state_dict()),
            num_rounds=args.rounds + 2,
            evaluate_fn=evaluate,
        )
        answers.append(strategy.answers)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_simulation(
            server,
            client,
            clients,
            backend_config={
                "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
                "init_args": {"num_cpus": cores, "include_dashboard": False, "logging_level": "ERROR"},
            },
        )
    # The first two rounds start processes and read data.
    seconds = [b - a for a, b in pairwise(times[2:])]
    if len(seconds) != args.rounds or answers != [common.COHORT * (args.rounds + 2)]:
        raise SystemExit(f"Flower made {len(seconds)} of {args.rounds} rounds with {answers} answers")
    common.report(args.out, f"Flower {flwr.__version__}", seconds, accuracy, actors=cores, threads=1)


if __name__ == "__main__":
    main()
