"""FedDPC's server step at ResNet18 size, against the time to read the updates twice.

THP_MEM_ALLOC_ENABLE=1, which the feddpc command sets, puts large vectors on huge pages: everything gets faster, reading
most of all.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from feddpc.methods import create
from feddpc.methods.base import Cohort
from feddpc.methods.feddpc import Stream

F64 = torch.float64


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def plain(w, g, u, lam=1.0, lr=0.1):
    """The rule written as it reads, residuals and all."""
    D = u / lr
    r = D - ((D @ g) / (g @ g))[:, None] * g
    v = (lam + D.norm(dim=1) / r.norm(dim=1))[:, None] * r
    return w - lr * v.mean(0)


def streaming_memory(g: torch.Tensor, clients: int) -> float:
    """Peak memory beyond g and the model, in multiples of d, while updates arrive one by one (Linux only)."""

    def status(field: str) -> int:
        text = Path("/proc/self/status").read_text()
        return 1024 * int(text.split(f"{field}:")[1].split()[0])

    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = status("VmRSS")
    stream = Stream(create("feddpc"), g)
    for seed in range(clients):
        stream.add(torch.randn(len(g), generator=torch.Generator().manual_seed(seed)))
    stream.result()
    return (status("VmHWM") - before) / (4 * len(g))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=11_227_812)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    d, m = args.parameters, args.clients
    gen = torch.Generator().manual_seed(0)
    u, g, w = torch.randn(m, d, generator=gen), torch.randn(d, generator=gen), torch.randn(d, generator=gen)
    cohort = Cohort(2, torch.arange(m), m, torch.full((m,), 1 / m, dtype=F64), torch.ones(m, dtype=F64), 0.1, 0.1)

    def step(name: str, **hyper: object) -> Callable[[], object]:
        method = create(name, **hyper)
        server = {"delta": g} if name == "feddpc" else {}
        return lambda: method.aggregate(w, server, {"delta": u}, cohort).apply_(w)

    ways = {
        "FedAvg": step("fedavg"),
        "FedDPC, matrix": step("feddpc"),
        "FedDPC, streaming": step("feddpc", form="streaming"),
        "FedDPC, written plainly": lambda: plain(w, g, u),
    }
    print(f"d = {d:,}, {m} clients, float32, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(
        f"{'way':26}{'ms':>8}{'over two reads':>16}   (medians of {args.repeats}; each timed beside its own two reads)"
    )
    for name, work in ways.items():
        work()
        times, ratios = [], []
        for _ in range(args.repeats if "plainly" not in name else 3):
            floor = seconds(u.sum) + seconds(u.sum)
            times.append(seconds(work))
            ratios.append(times[-1] / floor)
        print(f"{name:26}{1e3 * statistics.median(times):8.1f}{statistics.median(ratios):16.2f}")
    print(f"streaming, one update in memory at a time: {streaming_memory(g, m):.2f} d of extra memory at the peak")


if __name__ == "__main__":
    main()
