#!/usr/bin/env python3
"""Predict the time of products with quantized weights on GPUs from their machine code, without a GPU.

    python packages/zprecision/bench/predicted_gpu.py --nvdisasm PATH      # prints the tables of results/

Needs CuPy with NVRTC, nvdisasm (pip install nvidia-cuda-nvdisasm, in any environment), and the cost model of zoptim's
bench.  Rows of 4096 elements; bytes are those of codes and scales, each read once.  A block of threads takes the path
of aligned rows in groups of 32: the quantization of the activation, the runs of its rows, and the sum of their terms.
One warp of eight adds terms, so a warp is given an eighth of these instructions; the last block of threads waits for
all, about 0.3 us, which is not in the figures.  Neither are barriers.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "zoptim" / "bench"))

from gpumodel import cubin  # noqa: E402
from gpumodel.hardware import DEVICES, LIMITS, fit  # noqa: E402
from gpumodel.listing import Body, bodies, inner_loop, parse  # noqa: E402
from gpumodel.warps import Work, bounds, point, seconds  # noqa: E402

from zprecision.backends.gpu import compiler  # noqa: E402
from zprecision.backends.gpu.launch import Program  # noqa: E402

COLUMNS = 4096
ROWS = (4096, 28672, 131072)  # a projection, gate and up, a vocabulary
SM = 90
PANEL, WARPS, RUN = 16, 8, 1024  # rows of a block of threads; warps; elements of a row and run


def work_of(tokens: int, bits: int, nvdisasm: str) -> tuple[Work, int, int]:
    """Return the work of a block of threads, its registers and its bytes of shared memory."""
    program = Program("zq_products", (("ZQ_TOKENS", tokens), ("ZQ_BITS", bits), ("ZQ_MINS", 0)))
    code, log = compiler.compile_text(program.text(), f"sm_{SM}", ["--ptxas-options=-v"])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        command = [nvdisasm, "-c", "-hex", file.name]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    listing = parse(listed)["zq_products"]
    used = re.search(r"Used (\d+) registers.*?(\d+) bytes smem", log)
    assert used is not None
    run = inner_loop(*listing, "IDP", 16 * tokens)
    quantize = inner_loop(*listing, "FCHK", 2, longest=True)  # element by element: more than with aligned rows
    add = inner_loop(*listing, "FADD", 16)
    chunk = 128 if tokens == 1 else 256 // tokens
    blocks = COLUMNS // 32
    quantizations = tokens * chunk * 4 // 256 * -(-blocks // chunk)
    entry = bodies(*listing)[0].before
    print(
        f"{tokens} tokens, {bits} bits: {len(run)} instructions a run, {len(quantize)} a quantization",
        file=sys.stderr,
    )
    body = Body(
        before=(*entry, *quantize * quantizations), loop=tuple(run), after=tuple(add * (blocks // 16))[::WARPS],
        fewest=len(run),
    )  # fmt: skip
    work = Work(
        body=body, elements=2 * RUN, passes=COLUMNS // RUN, block_elements=PANEL * COLUMNS, block_warps=WARPS,
        bytes_per_element=bits / 8 + 2 / 32,
    )  # fmt: skip
    return work, int(used[1]), int(used[2]) + 1024


def main() -> int:
    """Print a table for each device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvdisasm", help="path of nvdisasm; default: on PATH or in this environment's wheels")
    nvdisasm = cubin.find_nvdisasm(parser.parse_args().nvdisasm)
    works = {(tokens, bits): work_of(tokens, bits, nvdisasm) for bits in (4, 8) for tokens in (1, 2, 4, 8)}
    for device in DEVICES.values():
        print(
            f"\n## {device.name}\n\nus, and share of the bandwidth of a copy ({device.attainable.value / 1e12} TB/s)\n"
        )
        print(f"| bits | tokens | {' | '.join(f'{rows} x {COLUMNS}' for rows in ROWS)} | limit | warps |")
        print("|--:|--:|" + "--:|" * len(ROWS) + "---|--:|")
        for (tokens, bits), (work, registers, shared) in works.items():
            resident = fit(LIMITS[SM], threads=32 * WARPS, registers=registers, shared_bytes=shared)
            at = point(device)
            times = seconds(work, resident, at, [rows * COLUMNS for rows in ROWS])
            moved = [rows * COLUMNS * work.bytes_per_element for rows in ROWS]
            cells = [
                f"{t * 1e6:.1f}, {m / t / device.attainable.value:.0%}" for t, m in zip(times, moved, strict=True)
            ]
            print(
                f"| {bits} | {tokens} | {' | '.join(cells)} | {bounds(work, resident, at).limit} | {resident.warps} |"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
