"""Models for text: they read tokens ``[n, T]`` and give the logits of the next token at every position.

Their outputs are ``[n, T, vocabulary]``. They have no ``features``, which is one row per sample for the methods that
ask for it, so these methods refuse them.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from feddpc.checks import check_int
from feddpc.errors import BadInputError


class CharacterLSTM(nn.Module):
    """An embedding, stacked LSTM layers and a linear head: the usual model for Shakespeare's plays.

    The defaults are McMahan's and LEAF's: an embedding of 8 numbers and two layers of 256 units. These predict one
    character after 80; here every position is predicted from those up to it, so a sequence has 80 losses instead of
    one. torch's LSTM has two vectors of biases per layer where theirs has one.

    References: McMahan et al., "Communication-efficient learning of deep networks from decentralized data", 2017;
    Caldas et al., "LEAF: A benchmark for federated settings", 2018.

    >>> sum(p.numel() for p in CharacterLSTM(65).parameters())
    815945
    >>> CharacterLSTM(65, hidden=16)(torch.zeros(2, 80, dtype=torch.int64)).shape
    torch.Size([2, 80, 65])
    """

    def __init__(self, vocabulary: int, *, embedding: int = 8, hidden: int = 256, layers: int = 2) -> None:
        super().__init__()
        for field, value in (("vocabulary", vocabulary), ("embedding", embedding)):
            check_int(field, value, 1)
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, check_int("hidden", hidden, 1), check_int("layers", layers, 1), batch_first=True)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, ``[n, T, vocabulary]``."""
        h = self.embedding(x)
        # torch's own layers are the fastest for one client, but function transforms cannot take them apart: on a CPU
        # vmap runs them one client at a time, and on a GPU none of the transforms works.
        transformed = torch._C._functorch.is_functorch_wrapped_tensor(h)
        states = unrolled(self.lstm, h) if transformed else self.lstm(h)[0]
        out: Tensor = self.head(states)
        return out


def unrolled(lstm: nn.LSTM, x: Tensor) -> Tensor:
    """Return what ``lstm`` makes of ``x``, ``[n, T, features]``, in plain operations, one step after the other.

    >>> lstm, x = nn.LSTM(3, 4, 2, batch_first=True), torch.randn(2, 5, 3)
    >>> torch.allclose(unrolled(lstm, x), lstm(x)[0], atol=1e-6)
    True
    """
    for weight_x, weight_h, bias_x, bias_h in lstm.all_weights:
        from_x = F.linear(x, weight_x, bias_x + bias_h)
        state = cell = x.new_zeros(len(x), lstm.hidden_size)
        states = []
        for at_t in from_x.unbind(1):
            into, forget, new, out = (at_t + F.linear(state, weight_h)).chunk(4, 1)
            cell = forget.sigmoid() * cell + into.sigmoid() * new.tanh()
            state = out.sigmoid() * cell.tanh()
            states.append(state)
        x = torch.stack(states, 1)
    return x


class Transformer(nn.Module):
    """A small causal transformer with learned positions: at every position it sees only tokens up to this one.

    Each block is attention and a layer of ``4 * width`` units with ReLU, both behind a LayerNorm and added to their
    input; one more LayerNorm comes before the linear head. There is no dropout. Embeddings and positions start with
    standard deviation 0.02, all else as torch starts it. ``shape`` is the shape of a sample, ``(T,)``.

    References: Vaswani et al., "Attention is all you need", 2017; Radford et al., "Language models are unsupervised
    multitask learners", 2019, for the place of the LayerNorms.

    >>> sum(p.numel() for p in Transformer(65).parameters())
    113601
    >>> Transformer(65, (7,))(torch.zeros(2, 7, dtype=torch.int64)).shape
    torch.Size([2, 7, 65])
    """

    def __init__(
        self, vocabulary: int, shape: tuple[int, ...] = (80,), *, width: int = 64, heads: int = 4, layers: int = 2
    ) -> None:
        super().__init__()
        check_int("vocabulary", vocabulary, 1)
        if check_int("width", width, 1) % check_int("heads", heads, 1):
            raise BadInputError(f"heads = {heads} does not divide width = {width}: choose a divisor")
        self.heads = heads
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.empty(*shape, width))
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(check_int("layers", layers, 1))))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        for table in (self.embedding.weight, self.positions):
            nn.init.normal_(table, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, ``[n, T, vocabulary]``."""
        h = self.embedding(x) + self.positions[: x.shape[1]]
        out: Tensor = self.head(self.norm(self.blocks(h)))
        return out


class TransformerBlock(nn.Module):
    """Causal attention, then two linear layers position by position."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.mixed = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, h: Tensor) -> Tensor:
        """Return the input with both added, ``[n, T, width]``."""
        h = h + self.mixed(self._attention(self.queries_keys_values(self.norm1(h))))
        out: Tensor = h + self.down(self.up(self.norm2(h)).relu())
        return out

    def _attention(self, h: Tensor) -> Tensor:
        """Return what every head reads at every position, side by side; ``h`` holds queries, keys and values.

        In training in plain products: torch's fused attention has no rule for ``vmap`` on a CPU, nor second
        derivatives. Without gradients it is faster.
        """
        n, t, width = h.shape
        q, k, v = h.view(n, t, 3, self.heads, width // 3 // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        if not (self.training or torch.is_grad_enabled()):
            read = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return read.transpose(1, 2).reshape(n, t, width // 3)
        scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-1, -2)
        later = torch.full((t, t), -math.inf, dtype=scores.dtype, device=scores.device).triu(1)
        read = (scores + later).softmax(-1) @ v
        return read.transpose(1, 2).reshape(n, t, width // 3)
