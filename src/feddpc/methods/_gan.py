"""A conditional GAN that learns from few samples in seconds: what FAug's server trains and its clients draw from.

Hinge loss and a projection discriminator with spectral normalisation (Miyato, Koyama 2018). Against collapse it scores
small packs of one class and sees how much the samples of a pack differ (as PacGAN, Lin et al. 2018); against memorising
it sees them shifted and blurred by noise. The generator that is kept is a running mean of the trained one.
"""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.nn.utils.parametrizations import spectral_norm

from feddpc.data import Dataset
from feddpc.rng import generator as keyed_generator
from feddpc.rng import torch_seed
from feddpc.tasks.base import forked
from feddpc.tasks.host_samples import sample_tensor

LATENT = 32  #: numbers of noise that make a sample
WIDTH = 32  #: channels at half the image's size; twice as many each time it is halved, up to 128
HIDDEN = 128
BATCH = 64
PACK = 4  #: samples of one class that are scored together
RATE, BETAS = 2e-3, (0.5, 0.999)  #: of Adam, for both networks
BLUR = 0.1  #: of the noise on what the discriminator sees, falling to 0; a sample is -1..1
KEEP = 0.99  #: memory of the running mean
CHUNK = 512  #: samples drawn at a time
CPU = torch.device("cpu")

Array = NDArray[Any]
Ids = NDArray[np.int64]


def halvings(height: int, width: int) -> list[tuple[int, int]]:
    """Return the sizes of an image and of its maps, down to one of at most 4 x 4.

    >>> halvings(28, 28)
    [(28, 28), (14, 14), (7, 7), (4, 4)]
    """
    sizes = [(height, width)]
    while max(sizes[-1]) > 4 or len(sizes) == 1:
        sizes.append(((sizes[-1][0] + 1) // 2, (sizes[-1][1] + 1) // 2))
    return sizes


def channels(sizes: list[tuple[int, int]], image: int) -> list[int]:
    """Return the numbers of channels that go with these sizes; the image has ``image``."""
    return [image, *(min(WIDTH << level, 128) for level in range(len(sizes) - 1))]


class Generator(nn.Module):
    """Noise ``[n, LATENT]`` and labels ``[n]`` to samples, in units where ``centre + spread * sample`` is data.

    Convolutions for images ``(channels, height, width)``, whose values end at -1 and 1; else a perceptron.
    """

    def __init__(self, shape: tuple[int, ...], classes: int, *, image: bool) -> None:
        super().__init__()
        self.shape, self.sizes = shape, halvings(*shape[1:]) if image else []
        # Not trained, but parameters: the receiver of the generator needs them.
        units = torch.full((1,), 127.5) if image else torch.ones(shape)
        self.centre, self.spread = (nn.Parameter(units.clone(), requires_grad=False) for _ in range(2))
        self.label = nn.Embedding(classes, LATENT)
        if image:
            widths = channels(self.sizes, shape[0])[::-1]
            self.first = nn.Linear(2 * LATENT, widths[0] * math.prod(self.sizes[-1]))
            self.body = nn.ModuleList(
                nn.Sequential(nn.GroupNorm(1, a), nn.ReLU(), nn.ConvTranspose2d(a, b, 4, stride=2, padding=1))
                for a, b in itertools.pairwise(widths)
            )
        else:
            self.first, last = nn.Linear(2 * LATENT, HIDDEN), nn.Linear(HIDDEN, math.prod(shape))
            self.body = nn.ModuleList([nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), last])

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        """Return one sample for each row of noise and label."""
        h: Tensor = self.first(torch.cat([z, self.label(y)], 1))
        if not self.sizes:
            for layer in self.body:
                h = layer(h)
            return h.reshape(-1, *self.shape)
        h = torch.unflatten(h, 1, (-1, *self.sizes[-1]))
        for double, (height, width) in zip(self.body, self.sizes[-2::-1], strict=True):
            h = double(h)[..., :height, :width]
        return torch.tanh(h)


class Discriminator(nn.Module):
    """How real samples look for their labels; each PACK of them, one after the other, has one label."""

    def __init__(self, shape: tuple[int, ...], classes: int, *, image: bool) -> None:
        super().__init__()
        sizes = halvings(*shape[1:]) if image else []
        widths = channels(sizes, shape[0]) if image else [math.prod(shape), HIDDEN]
        layers: list[nn.Module] = [] if image else [nn.Flatten()]
        for a, b in itertools.pairwise(widths):
            layer = nn.Conv2d(a, b, 3, stride=2, padding=1) if image else nn.Linear(a, b)
            layers += [spectral_norm(layer), nn.LeakyReLU(0.2)]
        wide = widths[-1] * math.prod(sizes[-1] if image else ())
        self.body = nn.Sequential(*layers, nn.Flatten(), spectral_norm(nn.Linear(wide, HIDDEN)), nn.LeakyReLU(0.2))
        self.real = spectral_norm(nn.Linear(2 * HIDDEN, 1))
        self.label = spectral_norm(nn.Embedding(classes, 2 * HIDDEN))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return one score per sample."""
        h = self.body(x)
        differ = h.unflatten(0, (-1, PACK)).var(1, correction=0).add(1e-4).sqrt()
        h = torch.cat([h, differ.repeat_interleave(PACK, 0)], 1)
        return self.real(h)[:, 0] + (h * self.label(y)).sum(1)  # type: ignore[no-any-return]


def train(data: Dataset, x: Array, y: Ids, *, steps: int, seed: int, device: torch.device) -> Tensor:
    """Return a generator's parameters, on the CPU, trained on samples ``x`` like those of ``data``, with labels ``y``.

    All classes in ``y`` count alike, however few samples they have: it draws classes, then samples of them. Random
    numbers are drawn on the CPU, the same for all devices, and torch's global generators stay as they were.
    """
    rng = keyed_generator(seed, "gan")
    with forked(CPU, torch_seed(seed, "gan")), CPU:
        generator = Generator(_shape(data), data.classes, image=data.is_image)
        discriminator = Discriminator(_shape(data), data.classes, image=data.is_image)
    real = sample_tensor(data, x)
    if not data.is_image:
        generator.centre.copy_(real.mean(0))
        generator.spread.copy_(real.std(0, correction=0))
    real, generator, discriminator = real.to(device), generator.to(device), discriminator.to(device)
    kept, scale = copy.deepcopy(generator), torch.where(generator.spread > 0, generator.spread, 1.0)
    trained, discriminating = [p for p in generator.parameters() if p.requires_grad], list(discriminator.parameters())
    rules = [torch.optim.Adam(parameters, RATE, BETAS, fused=True) for parameters in (trained, discriminating)]
    order, (classes, counts) = np.argsort(y, kind="stable"), np.unique(y, return_counts=True)

    def noise(*shape: int) -> Tensor:
        return torch.from_numpy(rng.standard_normal(shape, np.float32)).to(device)

    for step in range(steps):
        which = rng.integers(len(classes), size=BATCH // PACK).repeat(PACK)
        picked = order[counts.cumsum()[which] - 1 - rng.integers(counts[which])]
        label = torch.from_numpy(classes[which]).to(device)
        truth = (real[torch.from_numpy(picked).to(device)].float() - generator.centre) / scale
        both = torch.cat([truth, generator(noise(BATCH, LATENT), label)])
        both = _shifted(both, rng) if data.is_image else both
        blurred = both + BLUR * (1 - step / steps) * noise(*both.shape)
        score_real, score_made = discriminator(blurred, label.repeat(2)).chunk(2)
        lost = F.relu(1 - score_real).mean() + F.relu(1 + score_made).mean()
        torch.autograd.backward(lost, inputs=discriminating, retain_graph=True)
        torch.autograd.backward(-score_made.mean(), inputs=trained)
        for rule in rules:
            rule.step()
            rule.zero_grad()
        with torch.no_grad():
            for mean, now in zip(kept.parameters(), generator.parameters(), strict=True):
                mean.lerp_(now, 1 - min(KEEP, step / (9 + step)))
    return parameters_to_vector(kept.parameters()).detach().cpu()


def _shifted(x: Tensor, rng: np.random.Generator) -> Tensor:
    """Move images over a dark border, all by the same few pixels."""
    height, width = x.shape[-2:]
    reach = max(height, width) // 8
    top, left = rng.integers(2 * reach + 1, size=2).tolist()
    return F.pad(x, (reach,) * 4, value=-1.0)[..., top : top + height, left : left + width]


def draw(data: Dataset, parameters: Tensor, z: Array, y: Ids) -> Array:
    """Return a sample of ``data``'s shape and type for each row of noise ``z`` and label in ``y``.

    On the CPU and in float64, so that rounding to the data's type hides in what machines differ.
    """
    with forked(CPU), CPU:
        generator = Generator(_shape(data), data.classes, image=data.is_image).requires_grad_(False)
    vector_to_parameters(parameters, generator.parameters())
    generator.double()
    x = np.empty((len(y), *_shape(data)), data.x_train.dtype)
    for a in range(0, len(y), CHUNK):
        samples = generator(torch.from_numpy(z[a : a + CHUNK]), torch.from_numpy(y[a : a + CHUNK]))
        samples = generator.centre + generator.spread * samples
        x[a : a + CHUNK] = samples.round() if data.is_image else samples
    return x.transpose(0, 2, 3, 1) if data.is_image else x


def variety(x: Array) -> float:
    """Return the mean distance between two of the samples ``x``, NaN if there are fewer than two.

    >>> variety(np.array([[0.0, 0.0], [3.0, 4.0]]))
    5.0
    """
    return float(F.pdist(torch.from_numpy(x.reshape(len(x), -1).astype(np.float64))).mean())


def _shape(data: Dataset) -> tuple[int, ...]:
    return data.sample_shape[-1:] + data.sample_shape[:-1] if data.is_image else data.sample_shape
