"""Products with quantized weights beside torch and a read loop, in turns, in one process.

    python packages/zprecision/bench/products.py [--threads 1] [--seconds 60]

Every round measures each case once, so all see the same machine; a figure is the best of the rounds.  The read loop
is the kernel of `zprecision.inspect`, which reads float32 in order.  Weights do not fit the caches.  The share is
bytes of weights a second over bytes a second of the read loop.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

import zprecision
from zprecision.backends import native
from zprecision.backends.squares import sum_of_squares

ROWS, COLUMNS, MATRICES = 4096, 4096, 8
TOKENS = (1, 4, 16)


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def at_level(level: str, work: Callable[[], object]) -> Callable[[], object]:
    def call() -> None:
        with native.use_level(level):
            work()

    return call


def cases() -> dict[str, tuple[float, Callable[[], object]]]:
    """Return name -> bytes or operations, and the work."""
    read = torch.randn(60_000_000)
    plain = torch.randn(ROWS, COLUMNS)
    found: dict[str, tuple[float, Callable[[], object]]] = {
        "read loop": (read.nbytes, lambda: sum_of_squares([read])),
        "inspect, 60M float32": (read.nbytes, lambda: zprecision.inspect([read])),
        "quantize int4": (plain.nbytes, lambda: zprecision.pack(zprecision.quantize(plain, "int4"))),
        "quantize int8": (plain.nbytes, lambda: zprecision.pack(zprecision.quantize(plain, "int8"))),
    }
    x = {count: torch.randn(count, COLUMNS) for count in (*TOKENS, 512)}
    operations = 2.0 * 512 * plain.numel()
    found["torch float32, 512 tokens"] = (operations, lambda: torch.nn.functional.linear(x[512], plain))
    for name in ("int4", "int8"):
        weights = [zprecision.pack(zprecision.quantize(plain, name)) for _ in range(MATRICES)]
        for level in (level for level in zprecision.kernels().levels if level != "sse2"):
            for count in TOKENS:
                work = at_level(level, lambda w=weights, t=x[count]: [zprecision.linear(t, each) for each in w])
                found[f"{name} {level}, {count} tokens"] = (sum(each.nbytes for each in weights), work)
            many = at_level(level, lambda w=weights[0], t=x[512]: zprecision.linear(t, w))
            found[f"{name} {level}, 512 tokens"] = (operations, many)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    table = cases()
    best = dict.fromkeys(table, float("inf"))
    begin, rounds = time.perf_counter(), 0
    while rounds < 2 or time.perf_counter() - begin < options.seconds:
        for name, (_, work) in table.items():
            best[name] = min(best[name], seconds(work))
        rounds += 1
    print(f"threads {options.threads}, rounds {rounds}, {zprecision.kernels()}, torch {torch.__version__}\n")
    print("| case | ms | G/s | of the read loop, or x torch |\n|---|---|---|---|")
    rate = {name: table[name][0] / best[name] / 1e9 for name in table}
    for name in table:
        peer = rate["torch float32, 512 tokens" if name.endswith("512 tokens") else "read loop"]
        print(f"| {name} | {1e3 * best[name]:.2f} | {rate[name]:.1f} | {rate[name] / peer:.2f} |")


if __name__ == "__main__":
    main()
