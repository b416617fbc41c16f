"""NVRTC compiles every kernel for three generations of GPUs; ptxas finds registers for them.  Needs no GPU."""

from __future__ import annotations

import re
from typing import Any

import pytest

from zoptim.backends.gpu import compiler
from zoptim.backends.gpu.source import COMMON, Formats, Program

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
PROGRAMS = [
    "adam: f32 f32 f32",
    "adam: f32 bf16 f32 bf16",
    "adam: split bf16 bf16",
    "adam: bf16 bf16 bf16",
    "adam: f32 bf16 q8 bf16",
    "adam: split bf16 q8",
    "adam amsgrad: f32 bf16 q8 bf16",
    "adam amsgrad: split f16 q8 f16",
    "sgd nesterov: f32 f16 f32 f16",
    "sgd: bf16 bf16 -",
    "adagrad: bf16 f32 q8",
    "lion: split f16 bf16",
    "lamb: f32 bf16 q8 bf16",
    "lamb eps_inside: split f32 f32",
]


@pytest.fixture(scope="module", autouse=True)
def nvrtc() -> Any:
    cupy = pytest.importorskip("cupy", reason="cupy-cuda13x is not installed")
    try:
        cupy.cuda.nvrtc.getVersion()
    except Exception as error:
        pytest.skip(f"no NVRTC: {error}")


def text_of(name: str, make_case: Any) -> str:
    if name == "common":
        return COMMON.text()
    case = make_case(name)
    streams = case.streams()
    return Program.of(case.rule, case.flags, Formats.of(streams)).text()


def kernels_in(log: str) -> dict[str, tuple[int, int, int]]:
    """Kernel -> (bytes of stack, bytes spilled, registers), as ptxas reports."""
    pattern = r"entry function '(\w+)' for.*?(\d+) bytes stack frame, (\d+) bytes spill stores.*?Used (\d+) registers"
    return {name: (int(a), int(b), int(c)) for name, a, b, c in re.findall(pattern, log, re.DOTALL)}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", ["common", *PROGRAMS])
def test_kernels_spill_nothing_and_leave_room_for_four_blocks(name: str, architecture: str, make_case: Any) -> None:
    code, log = compiler.compile_text(text_of(name, make_case), architecture, ["--ptxas-options=-v"])
    assert code.startswith(b"\x7fELF")
    found = kernels_in(log)
    assert found
    for kernel, (stack, spilled, registers) in found.items():
        has_three_blocks = kernel == "zk_lamb_sums" or (
            "amsgrad" in name and "q8" in name and architecture == "sm_100"
        )
        most = 80 if has_three_blocks else 64
        assert (stack, spilled) == (0, 0), f"{kernel}: {stack} bytes of stack, {spilled} spilled"
        assert registers <= most, f"{kernel}: {registers} registers"


def ptx_of(name: str, make_case: Any) -> str:
    return compiler.compile_text(text_of(name, make_case), "compute_80")[0].decode()


def test_float32_moves_16_bytes_at_a_time(make_case: Any) -> None:
    ptx = ptx_of("adam: f32 f32 f32", make_case)
    assert ptx.count("ld.global.v4.u32") == 4, "weight, gradient, two moments"
    assert ptx.count("st.global.v4.u32") == 3


def test_16_bit_formats_are_converted_by_the_device_s_instructions(make_case: Any) -> None:
    ptx = ptx_of("adam: f16 f16 f16", make_case)
    assert ptx.count("cvt.f32.f16") >= 4 * 8, "weight, gradient, two moments of 8 elements"
    assert ptx.count("cvt.rn.f16.f32") >= 3 * 8
    assert ptx_of("adam: f32 bf16 f32 bf16", make_case).count("cvt.rn.bf16.f32") >= 4


def test_short_elements_move_four_at_a_time(make_case: Any) -> None:
    ptx = ptx_of("adam: split bf16 q8 bf16", make_case)
    assert ptx.count("ld.global.v2.u32") == 2 * 3, "two runs of weight, remainder, gradient"
    assert ptx.count("st.global.v2.u32") == 2 * 3, "two runs of weight, remainder, copy"


@pytest.mark.parametrize("name", ["common", *PROGRAMS])
def test_nothing_is_contracted_flushed_or_approximated(name: str, make_case: Any) -> None:
    ptx = ptx_of(name, make_case)
    assert not re.search(r"\bfma\.|\.ftz|\.approx|\.full\.", ptx)


def test_an_error_of_the_text_is_quoted() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)for sm_90.*identifier \"zk_nonsense\" is undefined"):
        compiler.compile_text("__global__ void k() { zk_nonsense(); }", "sm_90")
