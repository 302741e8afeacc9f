"""FedAvg as researchers write it, to compare with: nothing here comes from engines, task or faster layers."""

from __future__ import annotations

from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from feddpc import models
from feddpc.experiment import Experiment
from feddpc.models.base import BodyAndHead


class Eager:
    """One module, float images that lie on the device, torch's SGD, state dictionaries; a call is a whole round."""

    def __init__(self, experiment: Experiment) -> None:
        config, data = experiment.config, experiment.data
        self.device = torch.device(config.device)
        self.lr, self.batch_size, self.epochs = config.lr, config.batch_size or 256, config.epochs
        self.sampler, self.partition = experiment.sampler, experiment.partition
        self.x, self.x_test = self._images(data.x_train), self._images(data.x_test)
        self.y, self.y_test = (torch.tensor(y).to(self.device) for y in (data.y_train, data.y_test))
        size, _, channels = data.sample_shape
        shape = {"classes": data.classes, "channels": channels, "size": size}
        net = models.seeded(lambda: models.make(config.model, **shape, **config.model_options), config.seed)
        # Layer by layer, as torch runs it: the network itself may know faster ways.
        self.net = nn.Sequential(*chain(*net.sections()), net.head) if isinstance(net, BodyAndHead) else net
        self.net.to(self.device)
        self.state = {k: v.clone() for k, v in self.net.state_dict().items()}
        self.round = 0

    def __call__(self) -> float:
        """Train the next cohort, average, and return the accuracy on the test set."""
        self.train()
        return self.evaluate()

    def train(self) -> None:
        """Train the next cohort, one client after the other, and average."""
        self.round += 1
        self.net.train()
        locals_ = []
        for client in self.sampler.draw(self.round).answered:
            own = torch.tensor(self.partition[int(client)]).to(self.device)
            self.net.load_state_dict(self.state)
            optimiser = torch.optim.SGD(self.net.parameters(), lr=self.lr)
            for _ in range(self.epochs):
                for batch in torch.split(own[torch.randperm(len(own)).to(self.device)], self.batch_size):
                    optimiser.zero_grad()
                    torch.autograd.backward(F.cross_entropy(self.net(self.x[batch]), self.y[batch]))
                    optimiser.step()
            locals_.append({k: v.detach().clone() for k, v in self.net.state_dict().items()})
        self.state = {k: torch.stack([s[k] for s in locals_]).mean(0) for k in self.state}

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the accuracy on the test set."""
        self.net.load_state_dict(self.state)
        self.net.eval()
        correct = torch.zeros((), dtype=torch.int64, device=self.device)
        for x, y in zip(torch.split(self.x_test, 1000), torch.split(self.y_test, 1000), strict=True):
            correct += (self.net(x).argmax(1) == y).sum()
        return correct.item() / len(self.y_test)

    def _images(self, x: object) -> Tensor:
        images = torch.tensor(x).to(self.device).permute(0, 3, 1, 2).contiguous()
        return (images.float() / 255 - 0.5) / 0.5
