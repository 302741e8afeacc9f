"""FedDPC's server step at ResNet18 size, against the time to read the updates twice.

THP_MEM_ALLOC_ENABLE=1, which the feddpc command sets, puts large vectors on huge pages: everything gets faster, reading
most of all.
"""

from __future__ import annotations

import argparse

import torch

from feddpc.bench.server_times import RESNET18, ServerWorkload
from feddpc.methods import create
from feddpc.methods._feddpc_stream import Stream
from scale_laws import peak_memory


def plain(w, g, u, lam=1.0, lr=0.1):
    """The rule written as it reads, residuals and all."""
    D = u / lr
    r = D - ((D @ g) / (g @ g))[:, None] * g
    v = (lam + D.norm(dim=1) / r.norm(dim=1))[:, None] * r
    return w - lr * v.mean(0)


def streaming_memory(g: torch.Tensor, clients: int) -> float:
    """Peak memory beyond g and the model, in multiples of d, while updates arrive one by one (Linux only)."""

    def arrive() -> None:
        stream = Stream(create("feddpc"), g)
        for seed in range(clients):
            stream.add(torch.randn(len(g), generator=torch.Generator().manual_seed(seed)))
        stream.result()

    return (peak_memory(arrive) or float("nan")) / (4 * len(g))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=RESNET18)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    d, m = args.parameters, args.clients
    step = ServerWorkload(d, m)
    ways = {
        "FedAvg": step.of("fedavg"),
        "FedDPC, matrix": step.of("feddpc"),
        "FedDPC, streaming": step.of("feddpc", form="streaming"),
        "FedDPC, written plainly": lambda: plain(step.w, step.g, step.u),
    }
    print(f"d = {d:,}, {m} clients, float32, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(
        f"{'way':26}{'ms':>8}{'over two reads':>16}   (medians of {args.repeats}; each timed beside its own two reads)"
    )
    for name, work in ways.items():
        found = step.measure(work, args.repeats if "plainly" not in name else 3)
        print(f"{name:26}{1e3 * found['seconds']:8.1f}{found['over']:16.2f}")
    print(f"streaming, one update in memory at a time: {streaming_memory(step.g, m):.2f} d of extra memory at the peak")


if __name__ == "__main__":
    main()
