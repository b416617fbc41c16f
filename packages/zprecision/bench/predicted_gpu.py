#!/usr/bin/env python3
"""Predict the time of products with quantized weights on GPUs from their machine code, without a GPU.

    python packages/zprecision/bench/predicted_gpu.py --nvdisasm PATH > results/predicted-gpu.md

Needs CuPy with NVRTC, nvdisasm (pip install nvidia-cuda-nvdisasm, in any environment), and the cost model of zoptim's
bench.  Not predicted: the launch that quantizes several tokens, and what blocks of threads that end last wait for the
sum of their terms.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "zoptim" / "bench"))

from gpumodel import cubin  # noqa: E402
from gpumodel.hardware import DEVICES, LIMITS, Device, fit  # noqa: E402
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
    add = inner_loop(*listing, "FADD", 16)
    # of one token, element by element: more than with aligned rows; more tokens are quantized by a launch before
    quantize = inner_loop(*listing, "FCHK", 2, longest=True) if tokens == 1 else []
    outer = bodies(*listing)[0]
    inner = {i.address for path in (run, add, quantize) for i in path}
    between = [i for i in outer.loop if i.address not in inner]  # copies of activations, barriers
    chunk = 128 if tokens == 1 else 256 // tokens
    blocks = COLUMNS // 32
    chunks = -(-blocks // chunk)
    body = Body(
        before=(*outer.before, *(quantize * (chunk * 4 // 256) + between) * chunks), loop=tuple(run),
        after=tuple(add * (blocks // 16))[::WARPS], fewest=len(run),
    )  # fmt: skip
    work = Work(
        body=body, elements=2 * RUN, passes=COLUMNS // RUN, block_elements=PANEL * COLUMNS, block_warps=WARPS,
        bytes_per_element=bits / 8 + 2 / 32,
    )  # fmt: skip
    return work, int(used[1]), int(used[2]) + 1024


HEAD = f"""# Predicted times of products with quantized weights

**Predicted, not measured**, by `python packages/zprecision/bench/predicted_gpu.py` for symmetric formats in groups
of 32 and rows of {COLUMNS} elements.  A cell is the time of a launch in us, and its share of the bandwidth of a copy;
bytes are those of codes and scales, which no cache holds.  A launch alone is 2.5 us of it.  A block of threads
quantizes or copies the activation, multiplies its rows, and adds their terms, which occupies one warp of eight.
"""


def table(device: Device, works: Mapping[tuple[int, int], tuple[Work, int, int]]) -> list[str]:
    """Return the lines of a table: bits, tokens, and a column for each number of rows."""
    lines = [
        f"\n## {device.name}, {device.attainable.value / 1e12} TB/s\n",
        f"| bits | tokens | {' | '.join(f'{rows} rows' for rows in ROWS)} | limit | warps |",
        "|--:|--:|" + "--:|" * len(ROWS) + "---|--:|",
    ]
    for (tokens, bits), (work, registers, shared) in works.items():
        resident = fit(LIMITS[SM], threads=32 * WARPS, registers=registers, shared_bytes=shared)
        at = point(device)
        cells = []
        for rows, time in zip(ROWS, seconds(work, resident, at, [rows * COLUMNS for rows in ROWS]), strict=True):
            share = rows * COLUMNS * work.bytes_per_element / time / device.attainable.value
            cells.append(f"{time * 1e6:.1f}, {share:.0%}")
        limit = bounds(work, resident, at).limit
        lines.append(f"| {bits} | {tokens} | {' | '.join(cells)} | {limit} | {resident.warps} |")
    return lines


def main() -> int:
    """Print a table for each device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvdisasm", help="path of nvdisasm; default: on PATH or in this environment's wheels")
    nvdisasm = cubin.find_nvdisasm(parser.parse_args().nvdisasm)
    works = {(tokens, bits): work_of(tokens, bits, nvdisasm) for bits in (4, 8) for tokens in (1, 2, 4, 8)}
    print("\n".join([HEAD.rstrip(), *(line for device in DEVICES.values() for line in table(device, works))]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
