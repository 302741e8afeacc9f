"""FedAvg as researchers write it, to compare with: nothing here comes from engines, task or faster layers.

Networks are made of torch's own layers, with the weights that the library's network starts from.
"""

from __future__ import annotations

from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from feddpc import models
from feddpc.data.array_checks import IGNORED
from feddpc.experiment import Experiment
from feddpc.models.base import BodyAndHead
from feddpc.models.text import Transformer, TransformerBlock
from feddpc.resolve import resolve_device


class Eager:
    """One module, samples that lie on the device, torch's SGD, state dictionaries; a call is a whole round."""

    def __init__(self, experiment: Experiment) -> None:
        config, data = experiment.config, experiment.data
        self.device = torch.device(resolve_device(config.device))
        self.lr, self.batch_size, self.epochs = config.lr, config.batch_size or 256, config.epochs
        self.sampler, self.partition = experiment.sampler, experiment.partition
        self.x, self.x_test = self._samples(data.x_train), self._samples(data.x_test)
        self.y, self.y_test = (torch.tensor(y).to(self.device) for y in (data.y_train, data.y_test))
        self.net = plain(models.make_for(data, config.model, config.model_options, config.seed))
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
                    scores, y = self.net(self.x[batch]), self.y[batch]
                    torch.autograd.backward(F.cross_entropy(scores.flatten(0, -2), y.flatten(), ignore_index=IGNORED))
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
            correct += (self.net(x).argmax(-1) == y).sum()
        return correct.item() / int((self.y_test != IGNORED).sum())

    def _samples(self, x: object) -> Tensor:
        samples = torch.tensor(x).to(self.device)
        if samples.dtype != torch.uint8:
            return samples
        return (samples.permute(0, 3, 1, 2).contiguous().float() / 255 - 0.5) / 0.5


def plain(net: nn.Module) -> nn.Module:
    """Return ``net`` layer by layer, as torch runs it: the network itself may know faster ways."""
    if isinstance(net, Transformer):
        return PlainTransformer(net)
    return nn.Sequential(*chain(*net.sections()), net.head) if isinstance(net, BodyAndHead) else net


class PlainTransformer(nn.Module):
    """The causal transformer as torch's documentation builds it, with the weights of ``net``."""

    def __init__(self, net: Transformer) -> None:
        super().__init__()
        width, heads = net.embedding.embedding_dim, net.heads
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.embedding, self.head = net.embedding, net.head
        self.positions = nn.Embedding(len(net.positions), width, _weight=net.positions.detach().clone())
        self.encoder = nn.TransformerEncoder(layer, len(net.blocks), net.norm, enable_nested_tensor=False)
        for own, block in zip(self.encoder.layers, net.blocks, strict=True):
            assert isinstance(block, TransformerBlock)
            parts: dict[str, nn.Module] = {
                "self_attn.in_proj_": block.queries_keys_values,
                "self_attn.out_proj.": block.mixed,
                "linear1.": block.up,
                "linear2.": block.down,
                "norm1.": block.norm1,
                "norm2.": block.norm2,
            }
            own.load_state_dict({name + key: v for name, part in parts.items() for key, v in part.state_dict().items()})

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, ``[n, T, vocabulary]``."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        h = self.embedding(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        out: Tensor = self.head(self.encoder(h, mask=mask, is_causal=True))
        return out
