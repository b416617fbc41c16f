#!/usr/bin/env python3
"""Predict the time of zoptim's GPU kernels from their machine code, without a GPU.

    python packages/zoptim/bench/sass.py --nvdisasm PATH            # all kernels: results/predicted-gpu.md and .json
    python packages/zoptim/bench/sass.py --only "adam: f32 f32 f32" # one kernel, to the terminal

Needs CuPy with NVRTC, and nvdisasm (pip install nvidia-cuda-nvdisasm, in any environment).  The parts are in
gpumodel/: `variants` (kernels and the bytes they move), `cubin` (compile, disassemble), `listing` (the fast path),
`hardware` (constants and their sources), `warps` (bounds and simulation), `pages` (report).  `predicted.py` reads the
table for those who measure.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from gpumodel import cubin, pages, variants
from gpumodel.hardware import DEVICES, LIMITS, fit
from gpumodel.warps import Bounds, bounds, point, seconds

NUMELS = (1_000_000, 10_000_000, 100_000_000, 1_000_000_000)
RANGE_NUMEL = 100_000_000  # for which both ends of the guesses are computed
THREADS = 256  # of a block


def measure(kernel: variants.Kernel, nvdisasm: str) -> pages.Row:
    """Compile a kernel for every architecture and predict it on every device."""
    codes, on_devices = {}, {}
    for sm, limits in LIMITS.items():
        made = cubin.compile_program(kernel.program.text(), sm, nvdisasm)[kernel.function]
        work = kernel.work(made.bodies)
        resident = fit(limits, threads=THREADS, registers=made.registers, shared_bytes=made.shared_bytes)
        codes[sm] = pages.Code.of(made, work, resident)
        for key, device in DEVICES.items():
            if device.sm != sm:
                continue
            at = point(device)
            found = bounds(work, resident, at)
            times = seconds(work, resident, at, NUMELS)
            ends = [seconds(work, resident, point(device, end), [RANGE_NUMEL])[0] for end in ("low", "high")]
            shares = [kernel.bytes_per_element * n / t / device.attainable.value for n, t in zip(NUMELS, times)]
            limits_of = [_limit(found, share, shares[-1]) for share in shares]
            on_devices[key] = pages.Times(times, shares, limits_of, ends[0], ends[1], dict(found.cycles))
    return pages.Row(kernel.name, kernel.bytes_per_element, codes, on_devices)


def _limit(found: Bounds, share: float, at_most: float) -> str:
    """Name what limits: launch and fill if only the size does; the second resource too if two are close."""
    if share < 0.9 <= at_most:
        return "launch"
    first, second = sorted(found.cycles, key=lambda name: -found.cycles[name])[:2]
    is_close = at_most < 0.9 and found.cycles[second] > 0.6 * found.cycles[first]
    return f"{first}+{second}" if is_close else first


def parse_options(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvdisasm", help="path of nvdisasm; default: on PATH or in this environment's wheels")
    parser.add_argument("--only", help="names of kernels, separated by ';', printed and not written")
    parser.add_argument("--results", type=Path, default=Path(__file__).resolve().parent / "results")
    parser.add_argument("--before", type=Path, help="an older predicted-gpu.json to compare with in the report")
    parser.add_argument("--processes", type=int, default=1)
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    """Predict, print, write."""
    options = parse_options(words)
    try:
        nvdisasm = cubin.find_nvdisasm(options.nvdisasm)
        chosen = variants.select(options.only) if options.only else variants.KERNELS
        before = pages.read(options.before) if options.before else None
    except (FileNotFoundError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    start = time.monotonic()
    with ProcessPoolExecutor(options.processes) as pool:
        rows = list(pool.map(measure, chosen, [nvdisasm] * len(chosen)))
    made = pages.document(rows, NUMELS, cubin.versions(nvdisasm))
    if options.only:
        print(pages.markdown(rows, made, None))
        return 0
    (options.results / "predicted-gpu.json").write_text(pages.to_json(made))
    (options.results / "predicted-gpu.md").write_text(pages.markdown(rows, made, before))
    print(f"{len(rows)} kernels in {time.monotonic() - start:.0f} s; results in {options.results}")
    spilled = [row.name for row in rows if any(code.spilled_bytes for code in row.codes.values())]
    if spilled:
        print(f"registers spill in: {', '.join(spilled)}", file=sys.stderr)
    return 1 if spilled else 0


if __name__ == "__main__":
    sys.exit(main())
