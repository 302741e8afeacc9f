"""The work in pfl: its simulated backend, FederatedAveraging and CentralEvaluationCallback, one process, two threads.

Clients' own metrics before and after training, which pfl computes by default, are switched off: the others have none.
"""

from __future__ import annotations

import time

import common
import numpy as np
import pfl
import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.callback.central_evaluation import CentralEvaluationCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, StringMetricName, Weighted, get_overall_value
from pfl.model.pytorch import PyTorchModel


class Net(torch.nn.Module):
    """LeNet5 with the two functions that pfl wants."""

    def __init__(self) -> None:
        super().__init__()
        self.net = common.lenet5()

    def loss(self, x, y):
        self.train()
        return F.cross_entropy(self.net(x), y)

    @torch.no_grad()
    def metrics(self, x, y):
        self.eval()
        return {"accuracy": Weighted(int((self.net(x).argmax(1) == y).sum()), len(y))}


class Clock(TrainingProcessCallback):
    """Notes when every round ends; comes after the evaluation."""

    def __init__(self) -> None:
        self.times, self.accuracy = [], []

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        self.times.append(time.perf_counter())
        name = StringMetricName("Central val | accuracy")
        if name in aggregate_metrics:
            self.accuracy.append(float(get_overall_value(aggregate_metrics[name])))
        return False, Metrics()


class Shuffled(PyTorchTensorDataset):
    """A client's samples in a new order every pass, as the others have them."""

    def iter(self, batch_size):
        order = torch.randperm(len(self))
        for batch in order.split(batch_size or len(self)):
            yield [t[batch] for t in self.raw_data]


def main() -> None:
    args = common.arguments()
    work = common.Work(args.work)
    net = Net()
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
    rng = np.random.default_rng(0)

    def cohorts():
        while True:
            yield from rng.choice(len(work.owned), common.COHORT, replace=False)

    sampled = cohorts()
    data = FederatedDataset(lambda j: Shuffled(work.client(int(j))), lambda: next(sampled))
    clock = Clock()
    evaluation = CentralEvaluationCallback(
        PyTorchTensorDataset((work.x_test, work.y_test)), NNEvalHyperParams(local_batch_size=1000)
    )
    FederatedAveraging().run(
        # Clients are evaluated in round 0 only; pfl evaluates the model centrally in every round but that one.
        NNAlgorithmParams(args.rounds + 2, args.rounds + 3, common.COHORT, None),
        SimulatedBackend(data, data),
        model,
        NNTrainHyperParams(
            local_batch_size=common.BATCH, local_num_epochs=1, local_learning_rate=common.LR, local_max_grad_norm=None
        ),
        NNEvalHyperParams(local_batch_size=1000),
        callbacks=[evaluation, clock],
        send_metrics_to_platform=False,
    )
    seconds = np.diff(clock.times)[1:].tolist()  # the first of these warms up
    common.report(args.out, f"pfl {pfl.__version__}", seconds, clock.accuracy, threads=torch.get_num_threads())


if __name__ == "__main__":
    main()
