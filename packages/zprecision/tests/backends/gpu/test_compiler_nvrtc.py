"""NVRTC compiles every kernel for three generations of GPUs; ptxas finds registers for them.  Needs no GPU."""

from __future__ import annotations

import functools
import re
import sys
from typing import Any

import pytest

from zprecision.backends.gpu import compiler
from zprecision.backends.gpu.launch import Program

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
# tokens, bits, minima: the kinds of products that models use, and those that need most registers
KINDS = ((1, 4, 0), (1, 8, 1), (8, 4, 0), (8, 8, 1))
PROGRAMS = [
    Program("zq_quantize"),
    *(Program("zq_products", (("ZQ_TOKENS", t), ("ZQ_BITS", b), ("ZQ_MINS", m))) for t, b, m in KINDS),
]
NAMES = ["quantization", *(f"{t} tokens, {b} bits, {m} minima" for t, b, m in KINDS)]
SHARED_BYTES = 48 * 1024  # that a block has without asking for more


@pytest.fixture(scope="module", autouse=True)
def nvrtc() -> Any:
    if "simulated_cuda.library" in sys.modules:
        pytest.skip("the simulated device's compiler is not NVRTC")
    cupy = pytest.importorskip("cupy", reason="cupy-cuda13x is not installed")
    try:
        cupy.cuda.nvrtc.getVersion()
    except Exception as error:
        pytest.skip(f"no NVRTC: {error}")


def kernels_in(log: str) -> dict[str, tuple[int, int, int, int]]:
    """Kernel -> (bytes of stack, bytes spilled, registers, bytes of shared memory), as ptxas reports."""
    pattern = (
        r"entry function '(\w+)' for.*?(\d+) bytes stack frame, (\d+) bytes spill stores.*?"
        r"Used (\d+) registers(?:[^\n]*?(\d+) bytes smem)?"
    )
    found = re.findall(pattern, log, re.DOTALL)
    return {name: (int(a), int(b), int(c), int(d or 0)) for name, a, b, c, d in found}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("program", PROGRAMS, ids=NAMES)
def test_kernels_spill_nothing_and_leave_room_for_more_blocks(program: Program, architecture: str) -> None:
    code, log = compiler.compile_text(program.text(), architecture, ["--ptxas-options=-v"])
    assert code.startswith(b"\x7fELF")
    found = kernels_in(log)
    assert program.kernel in found
    for kernel, (stack, spilled, registers, shared) in found.items():
        assert (stack, spilled) == (0, 0), f"{kernel}: {stack} bytes of stack, {spilled} spilled"
        assert registers <= 80, f"{kernel}: {registers} registers"
        assert shared <= SHARED_BYTES, f"{kernel}: {shared} bytes of shared memory"


@functools.cache
def ptx_of(program: Program) -> str:
    return compiler.compile_text(program.text(), "compute_80")[0].decode()


def test_weights_are_read_16_bytes_at_a_time_and_multiplied_as_bytes() -> None:
    ptx = ptx_of(PROGRAMS[1])
    rows, pieces = 2, 2 * 2  # two fetches, before the loop and in it; an activation of one or two pieces
    assert ptx.count("ld.global.v4.u32") >= rows * 2
    assert ptx.count("dp4a.s32.s32") >= 8 * rows + pieces // 2
    assert "ld.shared.v4.u32" in ptx, "activations are read 16 bytes at a time"


@pytest.mark.parametrize("program", PROGRAMS, ids=NAMES)
def test_nothing_is_contracted_flushed_or_approximated(program: Program) -> None:
    assert not re.search(r"\bfma\.|\.ftz|\.approx|\.full\.", ptx_of(program))
