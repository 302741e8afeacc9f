"""Models for text: their sizes, what a position may see, and the same numbers under function transforms."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

from feddpc import models
from feddpc.errors import BadInputError
from feddpc.models import CharacterLSTM, Transformer, seeded, vectorizes
from feddpc.models.flat import Flat
from feddpc.models.text import unrolled

VOCABULARY, LENGTH = 11, 7


def small_lstm():
    return CharacterLSTM(VOCABULARY, embedding=3, hidden=5, layers=2)


def small_transformer():
    return Transformer(VOCABULARY, (LENGTH,), width=12, heads=3, layers=2)


BOTH = pytest.mark.parametrize("build", [small_lstm, small_transformer])


def parameters(model):
    return sum(p.numel() for p in model.parameters())


def tokens(*shape):
    return torch.from_numpy(np.random.default_rng(0).integers(VOCABULARY, size=shape))


def loss(flat, w, x, y):
    return F.cross_entropy(flat(w, x).flatten(0, 1), y.flatten(), ignore_index=-100)


def test_the_lstm_has_the_size_of_its_layers():
    layers = sum(4 * 256 * (before + 256 + 2) for before in (8, 256))
    assert parameters(CharacterLSTM(65)) == 65 * 8 + layers + 257 * 65
    assert parameters(CharacterLSTM(5, embedding=2, hidden=3, layers=1)) == 5 * 2 + 12 * (2 + 3 + 2) + 4 * 5


@pytest.mark.parametrize(("width", "heads", "layers"), [(64, 4, 2), (8, 1, 3)])
def test_the_transformer_has_the_size_of_its_layers(width, heads, layers):
    block = (width + 1) * 3 * width + (width + 1) * width + (width + 1) * 4 * width + (4 * width + 1) * width
    norms = 2 * width * (2 * layers + 1)
    by_hand = (65 + 80) * width + layers * block + norms + (width + 1) * 65
    assert parameters(Transformer(65, (80,), width=width, heads=heads, layers=layers)) == by_hand


@BOTH
@pytest.mark.parametrize("changed", [1, 4, LENGTH - 1])
def test_outputs_depend_on_no_later_token(build, changed):
    net, x = seeded(build, 0).double(), tokens(2, LENGTH)
    other = x.clone()
    other[:, changed] = (other[:, changed] + 1) % VOCABULARY
    before, after = net(x), net(other)
    torch.testing.assert_close(after[:, :changed], before[:, :changed], rtol=0, atol=1e-14)
    assert not torch.allclose(after[:, changed:], before[:, changed:])
    assert not torch.allclose(after[:, -1], before[:, -1], atol=1e-9)


def test_positions_matter_and_shorter_sequences_are_prefixes():
    net, x = seeded(small_transformer, 0).double(), tokens(2, LENGTH)
    same = net(torch.zeros(1, LENGTH, dtype=torch.int64))[0]
    assert not torch.allclose(same[0], same[1])
    torch.testing.assert_close(net(x[:, :3]), net(x)[:, :3], rtol=0, atol=1e-14)


def test_a_block_is_torchs_encoder_layer():
    block = seeded(small_transformer, 0).double().blocks[0]
    layer = nn.TransformerEncoderLayer(12, 3, 48, 0.0, batch_first=True, norm_first=True).double()
    attention = {"in_proj_": block.queries_keys_values, "out_proj.": block.mixed}
    others = {"linear1.": block.up, "linear2.": block.down, "norm1.": block.norm1, "norm2.": block.norm2}
    parts = {f"self_attn.{name}": part for name, part in attention.items()} | others
    layer.load_state_dict({name + key: v for name, part in parts.items() for key, v in part.state_dict().items()})
    h = torch.randn(2, LENGTH, 12, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=torch.float64)
    torch.testing.assert_close(block(h), layer(h, src_mask=mask, is_causal=True), rtol=0, atol=1e-12)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_unrolled_lstm_is_torchs(layers):
    lstm = nn.LSTM(3, 5, layers, batch_first=True).double()
    x = torch.randn(4, LENGTH, 3, dtype=torch.float64, requires_grad=True)
    own, reference = unrolled(lstm, x), lstm(x)[0]
    torch.testing.assert_close(own, reference, rtol=0, atol=1e-13)
    wanted = [x, *lstm.parameters()]
    for a, b in zip(*(torch.autograd.grad(out.square().sum(), wanted) for out in (own, reference)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@BOTH
def test_functional_calls_use_the_given_parameters(build):
    net, other, x = seeded(build, 0).double(), seeded(build, 1).double(), tokens(2, LENGTH)
    expected = other(x)
    torch.testing.assert_close(functional_call(net, dict(other.named_parameters()), (x,)), expected)
    torch.testing.assert_close(Flat(net)(Flat(other).vector(), x), expected)
    torch.testing.assert_close(net(x), seeded(build, 0).double()(x))


@BOTH
@pytest.mark.filterwarnings("error")  # such as those of vmap that an operation runs one by one
def test_stacked_gradients_are_those_of_the_loop(build):
    flat = Flat(seeded(build, 0).double())
    w = torch.stack([Flat(seeded(build, seed).double()).vector() for seed in range(3)])
    x, y = tokens(3, 4, LENGTH), tokens(3, 4, LENGTH).flip(0)
    y[:, :, -2:] = -100
    stacked = vmap(grad(lambda w, x, y: loss(flat, w, x, y)))(w, x, y)
    for own, start, *batch in zip(stacked, w, x, y, strict=True):
        leaf = start.clone().requires_grad_()
        (reference,) = torch.autograd.grad(loss(flat, leaf, *batch), leaf)
        assert reference.abs().max() > 1e-3
        torch.testing.assert_close(own, reference, rtol=0, atol=1e-10)


@BOTH
def test_models_for_text_learn_something(build):
    net, x = seeded(build, 0), tokens(8, LENGTH)
    y = (x + 3) % VOCABULARY
    optimiser = torch.optim.Adam(net.parameters(), lr=0.05)
    for _ in range(100):
        optimiser.zero_grad()
        F.cross_entropy(net(x).flatten(0, 1), y.flatten()).backward()
        optimiser.step()
    assert (net(x).argmax(-1) == y).float().mean() > 0.95


def test_models_without_torchs_recurrent_layers_vectorize():
    assert vectorizes(small_transformer())
    assert vectorizes(models.make("cnn", classes=2, channels=1, size=8))
    assert not vectorizes(small_lstm())
    assert not vectorizes(nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"deep": nn.GRU(2, 2)})))


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (Transformer, {"heads": 5}, "heads = 5"),
        (Transformer, {"layers": 0}, "layers = 0"),
        (Transformer, {"width": 1.5}, "width = 1.5"),
        (CharacterLSTM, {"hidden": 0}, "hidden = 0"),
        (CharacterLSTM, {"embedding": -1}, "embedding = -1"),
        (CharacterLSTM, {"vocabulary": 0}, "vocabulary = 0"),
    ],
)
def test_bad_options_are_named(model, options, message):
    with pytest.raises(BadInputError, match=message):
        model(**({"vocabulary": 5} | options))
