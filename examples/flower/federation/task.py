"""What is trained, and on what: the file to change for a model and data of your own."""

import torch
from numpy.typing import NDArray
from torch import nn

from feddpc.data import load
from feddpc.data.schemes import make

CLASSES = 10


def model() -> nn.Module:
    """Return the network. The server begins with these weights, so they must be the same every time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def data(client: int, clients: int) -> tuple[NDArray, NDArray]:
    """Return samples and labels of one node: `client` is its partition-id, from 0 to `clients` - 1.

    Images of bytes are (samples, height, width, channels), anything else is floats in any shape. Here every node has a
    copy of scikit-learn's digits and takes its own share, so that the app runs anywhere. On your machines, read the
    node's own file instead and leave the arguments alone:

        with np.load("/data/train.npz") as mine:
            return mine["x"], mine["y"]
    """
    digits = load("digits")
    mine = make("dirichlet", digits.y_train, clients, seed=0, alpha=0.5)[client]
    return digits.x_train[mine], digits.y_train[mine]


def test() -> tuple[NDArray, NDArray]:
    """Return the samples and labels on which the server evaluates the model after every round."""
    digits = load("digits")
    return digits.x_test, digits.y_test
