"""The cost model of the GPU kernels: arithmetic against hand-computed and published figures, a listing, the table.

Nothing here needs nvdisasm or a GPU, but for the last test, which compares the committed table with a compilation.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest

BENCH = Path(__file__).resolve().parent.parent / "bench"
if not BENCH.is_dir():
    pytest.skip("the bench is part of the repository, not of the wheel", allow_module_level=True)
sys.path.append(str(BENCH))

import predicted as table_of_predictions  # noqa: E402
from gpumodel import cubin, pages, variants  # noqa: E402
from gpumodel.hardware import DEVICES, LIMITS, Guess, fit, pipe_of  # noqa: E402
from gpumodel.listing import Body, Instruction, bodies, inner_loop, parse  # noqa: E402
from gpumodel.warps import Work, alone, bounds, point, seconds  # noqa: E402
from predicted import device_of, error, predicted, verdict  # noqa: E402

# Cut from the listing of zk_update (Adagrad, float32, sm_90): a check of bounds, the loop with its slow and its fast
# path, a root with its subroutine, and the tail of a shuffle.  Control words are the compiler's.
LISTING = """
	.target	sm_90
//--------------------- .text.zk_update           --------------------------
zk_update:
.text.zk_update:
        /*0000*/                   LDC R1, c[0x0][0x28] ;                  /* 0x00000a00ff017b82 */
                                                                           /* 0x000fe20000000800 */
        /*0010*/                   LDG.E R2, desc[UR6][R2.64] ;            /* 0x0000000602027981 */
                                                                           /* 0x001ea4000c1e1900 */
        /*0020*/               @P0 EXIT ;                                  /* 0x000000000000094d */
                                                                           /* 0x000fea0003800000 */
.L_x_1:
        /*0030*/                   LDS.64 R10, [UR4] ;                     /* 0x00000004ff0a7984 */
                                                                           /* 0x000e280008000a00 */
        /*0040*/              @!P0 BRA P1, `(.L_x_2) ;                     /* 0x0000000000048947 */
                                                                           /* 0x000fea0000800000 */
        /*0050*/              @!P2 LD.E R31, desc[UR6][R14.64] ;           /* 0x000000060e1f8980 */
                                                                           /* 0x000ea2000c101900 */
        /*0060*/              @!P3 LD.E R41, desc[UR6][R14.64+0x80] ;      /* 0x000000060e298980 */
                                                                           /* 0x000ea2000c101900 */
        /*0070*/                   BRA `(.L_x_3) ;                         /* 0x0000000000047947 */
                                                                           /* 0x000fea0003800000 */
.L_x_2:
        /*0080*/                   LDG.E.128 R20, desc[UR6][R24.64] ;      /* 0x0000000618147981 */
                                                                           /* 0x000ea4000c1e1d00 */
        /*0090*/                   FSETP.NEU.AND P4, PT, R25, RZ, PT ;     /* 0x000000ff1900720b */
                                                                           /* 0x004fe20003f8d000 */
        /*00a0*/              @!P4 BRA `(.L_x_4) ;                         /* 0x0000000000048947 */
                                                                           /* 0x000fea0003800000 */
        /*00b0*/                   FMUL R0, R20, R31 ;                     /* 0x0000001f14007220 */
                                                                           /* 0x000fe20000400000 */
.L_x_4:
        /*00c0*/                   MUFU.RSQ R35, R36 ;                     /* 0x0000002400237308 */
                                                                           /* 0x000e620000001400 */
        /*00d0*/              @!P4 BRA `(.L_x_5) ;                         /* 0x0000000000048947 */
                                                                           /* 0x002fea0003800000 */
        /*00e0*/                   CALL.REL.NOINC `($__internal_0_$sqrt_slowpath) ;  /* 0x0000000000047944 */
                                                                           /* 0x000fea0003c00000 */
        /*00f0*/                   BRA `(.L_x_6) ;                         /* 0x0000000000047947 */
                                                                           /* 0x000fea0003800000 */
.L_x_5:
        /*0100*/                   FMUL.FTZ R39, R36, R35 ;                /* 0x0000002324277220 */
                                                                           /* 0x000fc80000410000 */
.L_x_6:
        /*0110*/                   STG.E.128 desc[UR6][R24.64], R20 ;      /* 0x0000001418007986 */
                                                                           /* 0x0001e4000c101d06 */
.L_x_3:
        /*0120*/              @!P0 BRA `(.L_x_1) ;                         /* 0x0000000000048947 */
                                                                           /* 0x000fea0003800000 */
        /*0130*/                   EXIT ;                                  /* 0x000000000000794d */
                                                                           /* 0x000fea0003800000 */
        .weak           $__internal_0_$sqrt_slowpath
$__internal_0_$sqrt_slowpath:
        /*0140*/                   RET.REL.NODEC R28 `(zk_update) ;        /* 0x000000001c047950 */
                                                                           /* 0x000fea0003c3ffff */
"""


def test_a_listing_gives_instructions_with_their_control_bits_and_no_subroutines() -> None:
    ((name, (code, labels)),) = parse(LISTING).items()
    assert name == "zk_update"
    assert [i.address for i in code] == [16 * k for k in range(20)], "the subroutine at 0x140 is not part of it"
    assert labels[".L_x_3"] == 0x120
    load = code[1]
    assert (load.op, load.name, load.access_bytes, load.is_wide) == ("LDG.E", "LDG", 4, True)
    # 0x001ea4000c1e1900: bits 41 to 44 are 2, 46 to 48 are 2, 52 to 57 are 1
    assert (load.stall, load.write_barrier, load.wait_mask) == (2, 2, 1)
    assert code[5].guard == "!P2"
    assert not code[5].is_wide


def test_the_fast_path_has_the_wide_accesses_no_call_and_the_longer_of_equal_ways() -> None:
    (body,) = bodies(*parse(LISTING)["zk_update"])
    assert [i.op for i in body.loop if i.is_global] == ["LDG.E.128", "STG.E.128"]
    assert "CALL" not in {i.name for i in body.loop}
    assert {i.address for i in body.loop} >= {0xB0, 0x100}, "with decay, and the root within range"
    assert body.fewest == len(body.loop) - 1
    assert [i.op for i in body.before] == ["LDC", "LDG.E", "EXIT"]


def test_the_smallest_loop_with_an_opcode_is_found_and_its_shorter_path() -> None:
    code, labels = parse(LISTING)["zk_update"]
    loop = inner_loop(code, labels, "MUFU", 1)
    assert (loop[0].address, loop[-1].address) == (0x30, 0x120), "what is before and after the loop is not part of it"
    assert {i.op for i in loop if i.is_global} == {"LDG.E.128", "STG.E.128"}
    assert 0xB0 not in {i.address for i in loop}
    assert 0xB0 in {i.address for i in inner_loop(code, labels, "MUFU", 1, longest=True)}
    with pytest.raises(ValueError, match="no loop has 2 instructions MUFU"):
        inner_loop(code, labels, "MUFU", 2)


def test_text_that_is_no_listing_raises() -> None:
    with pytest.raises(ValueError, match="nvdisasm -c -hex"):
        parse("cubin")


@pytest.mark.parametrize(
    ("threads", "registers", "blocks", "share"),
    # NVIDIA's CUDA C++ Best Practices Guide, "Calculating Occupancy", for 65,536 registers and 64 warps
    [(128, 37, 12, 0.75), (320, 37, 4, 0.625), (256, 32, 8, 1.0), (256, 64, 4, 0.5), (256, 80, 3, 0.375)],
)
def test_occupancy_by_registers_is_that_of_the_guide(threads: int, registers: int, blocks: int, share: float) -> None:
    found = fit(LIMITS[90], threads=threads, registers=registers, shared_bytes=1024)
    assert (found.blocks, found.share) == (blocks, share)


def test_occupancy_by_shared_memory_counts_what_the_system_reserves() -> None:
    # 228 KiB hold two blocks of 113 KiB with 1 KiB reserved each, and only one of 113.5 KiB
    for size, blocks in ((113, 2), (113.5, 1)):
        found = fit(LIMITS[90], threads=128, registers=32, shared_bytes=int((size + 1) * 1024))
        assert (found.blocks, found.limit) == (blocks, "shared memory")


def op(name: str, **more: Any) -> Instruction:
    return Instruction(address=0, op=name, **more)


def work_of(loop: list[Instruction], elements: int, bytes_per_element: float, passes: int = 8) -> Work:
    body = Body(before=(), loop=tuple(loop), after=(), fewest=len(loop))
    return Work(
        body=body, elements=elements, passes=passes, block_elements=8 * passes * elements, block_warps=8,
        bytes_per_element=bytes_per_element,
    )  # fmt: skip


RESIDENT = fit(LIMITS[90], threads=256, registers=64, shared_bytes=1024)  # 8 warps a scheduler
EXACT = attrs.evolve(  # round figures: 4 * 132 schedulers, each with 8 bytes a cycle
    DEVICES["h200"], attainable=Guess(1, 4 * 132 * 8e9, 1), clock=Guess(1, 1e9, 1), memory_ns=Guess(1, 1000, 1),
    launch_us=Guess(0, 0, 0), block_cycles=0,
)  # fmt: skip


def test_bounds_are_bytes_over_bandwidth_issue_slots_pipes_and_little_s_law() -> None:
    load = op("LDG.E.128", write_barrier=0)
    use = op("FADD", wait_mask=1, stall=4)
    work = work_of([load, use, op("MUFU.RCP"), op("MUFU.RSQ"), op("LOP3.LUT")], 128, 4.0)
    found = bounds(work, RESIDENT, point(EXACT)).cycles
    assert found["memory"] == 512 / 8
    assert found["issue"] == 5
    assert (found["xu"], found["alu"], found["fma"]) == (16, 2, 1)
    # alone: the load issues at 0, its use at 1000 and the rest at 1004, 1012 (the pipe) and 1013; 8 warps share it
    assert found["latency"] == pytest.approx(1014 / 8)


def test_a_warp_alone_takes_its_stalls_and_latencies() -> None:
    at = point(EXACT)
    assert alone([op("FADD", stall=4)] * 10, at) == 40
    assert alone([op("LDG.E", write_barrier=2), op("FADD", wait_mask=0b100)], at) == pytest.approx(1001)
    assert alone([op("LDS.64", write_barrier=1), op("FADD", wait_mask=0b10)], at) == EXACT.shared_cycles + 1


def big(work: Work) -> float:
    """Cycles of a pass of a warp on one scheduler, of a launch long enough that ends do not matter."""
    numel = 400 * 132 * work.block_elements
    (took,) = seconds(work, RESIDENT, point(EXACT), [numel])
    passes = numel / work.elements / (4 * 132)
    return took * 1e9 / passes


def test_a_kernel_with_little_to_compute_runs_at_the_bandwidth() -> None:
    work = work_of([op("LDG.E.128", write_barrier=0)] * 4 + [op("FADD", wait_mask=1)], 128, 16.0)
    assert big(work) == pytest.approx(2048 / 8, rel=0.01)


def test_a_kernel_with_much_to_compute_runs_at_the_issue_rate_or_its_pipe() -> None:
    issue = work_of([op("LDG.E", write_barrier=0), *[op("FADD")] * 999], 32, 4.0)
    assert big(issue) == pytest.approx(1000, rel=0.01)
    pipe = work_of([op("LDG.E", write_barrier=0), *[op("MUFU.RSQ")] * 100], 32, 4.0)
    assert big(pipe) == pytest.approx(800, rel=0.01)


def test_a_kernel_with_too_few_loads_in_flight_runs_at_the_latency() -> None:
    work = work_of([op("LDG.E", write_barrier=0), op("FADD", wait_mask=1)], 32, 4.0)
    assert bounds(work, RESIDENT, point(EXACT)).limit == "latency"
    assert big(work) == pytest.approx(1001 / 8, rel=0.02)


def test_a_launch_has_no_more_blocks_than_elements_and_costs_its_gap() -> None:
    device = attrs.evolve(EXACT, launch_us=Guess(2, 2, 2))
    work = work_of([op("LDG.E", write_barrier=0), op("FADD", wait_mask=1)], 32, 4.0)
    one, also_one, more = seconds(work, RESIDENT, point(device), [1, work.block_elements, 132 * work.block_elements])
    assert one == also_one
    assert 2e-6 + 8 * 1001e-9 <= one < more < one * 1.5


def test_every_pipe_of_an_opcode_has_a_rate() -> None:
    from gpumodel.hardware import PIPES

    for opcode in ("FFMA", "IMAD", "LOP3", "MUFU", "DADD", "LDG", "UIADD3", "BRA", "SOMETHING"):
        assert all(pipe_of(opcode) in pipes for pipes in PIPES.values())


@pytest.mark.parametrize(
    ("name", "expected"),  # the README's table, with the gradient
    [
        ("adam: f32 f32 f32", 28), ("adam: f32 bf16 f32 bf16", 28), ("adam: split bf16 f32", 26),
        ("adam: f32 f32 bf16", 20), ("adam: split bf16 bf16", 18), ("adam: bf16 bf16 bf16", 14),
        ("adam: f32 f32 q8", 16.0625), ("sgd: f32 f32 -", 12), ("lion: bf16 bf16 bf16", 10),
        ("adam amsgrad: f32 f32 f32", 36),
    ],
)  # fmt: skip
def test_a_kernel_moves_the_bytes_of_its_formats(name: str, expected: float) -> None:
    assert variants.kernel(name).bytes_per_element == expected


def test_the_halves_of_lamb_move_what_the_bench_counts() -> None:
    sums = variants.kernel("lamb: f32 f32 f32", "zk_lamb_sums").bytes_per_element
    apply = variants.kernel("lamb: f32 f32 f32", "zk_lamb_apply").bytes_per_element
    assert (sums, apply, sums + apply) == (24, 16, 40)


@pytest.mark.parametrize("name", ["adam", "rprop: f32 f32 f32", "adam: f32 f32 q4", "adam: f32 f32 f32 f32 f32"])
def test_a_name_that_is_no_kernel_raises_with_an_example(name: str) -> None:
    with pytest.raises(ValueError, match="amsgrad: f32 bf16 q8 bf16"):
        variants.kernel(name)


def test_a_path_that_moves_other_bytes_than_the_formats_raises() -> None:
    body = Body(before=(), loop=(op("LDG.E.128"), op("STG.E.64")), after=(), fewest=2)
    with pytest.raises(ValueError, match="moves 24 bytes a thread by wide accesses; its formats need 112 for 1 run"):
        variants.kernel("adam: f32 f32 f32").work([body])


# The committed table ------------------------------------------------------------------------------------


def test_the_table_is_that_of_the_kernels_text() -> None:
    assert table_of_predictions.table()["text"] == pages.digest(), (
        "the text of the kernels has changed: run packages/zoptim/bench/sass.py and commit its table before the "
        "kernels run on a GPU"
    )


def test_the_table_has_every_kernel_on_every_device_and_is_small() -> None:
    table = table_of_predictions.table()
    assert list(table["kernels"]) == [kernel.name for kernel in variants.KERNELS]
    assert table_of_predictions.TABLE.stat().st_size <= 100_000
    for kernel in variants.KERNELS:
        row = table["kernels"][kernel.name]
        assert row["bytes"] == kernel.bytes_per_element
        for key, device in table["devices"].items():
            for numel, (us, share, limit) in zip(table["numels"], row[key]):
                assert share == pytest.approx(row["bytes"] * numel / us * 1e6 / device["attainable"], rel=0.01)
                assert limit
            low, high = row[f"{key}_range"]
            assert low <= row[key][2][0] <= high


def test_the_report_says_that_nothing_is_measured() -> None:
    page = (BENCH / "results" / "predicted-gpu.md").read_text()
    assert "**Predicted, not measured.**" in page
    assert table_of_predictions.table()["text"] in page


def test_a_prediction_between_two_sizes_is_between_their_times() -> None:
    name = "adam: f32 f32 f32"
    small, between, large = (predicted(name, n, "h200").us for n in (10**7, 55 * 10**6, 10**8))
    assert between == pytest.approx((small + large) / 2)
    assert predicted(name, 2 * 10**9, "h200").us == pytest.approx(2 * predicted(name, 10**9, "h200").us)
    assert predicted(name, 10, "h200").us == predicted(name, 10**6, "h200").us


def test_an_error_over_15_percent_is_a_defect_and_cached_sizes_are_not_compared() -> None:
    guess = predicted("adam: f32 f32 f32", 10**8, "h100")
    assert error(guess, guess.us * 1.1) == pytest.approx(0.1)
    assert verdict(guess, guess.us * 1.14).endswith("measured +14%; within 15%")
    assert verdict(guess, guess.us * 1.16).endswith("measured +16%; MODEL DEFECT, over 15%")
    assert verdict(guess, guess.us * 0.84).endswith("measured -16%; MODEL DEFECT, over 15%")
    small = predicted("adam: f32 f32 f32", 10**6, "h100")  # 28 MB of 50 MiB
    assert verdict(small, small.us / 3).endswith("caches hold it, not compared")


def test_devices_are_found_by_torch_s_names() -> None:
    assert device_of("NVIDIA H200") == "h200"
    assert device_of("NVIDIA H100 80GB HBM3") == "h100"
    assert device_of("NVIDIA A100-SXM4-80GB") is None


def test_an_unknown_kernel_raises_with_the_known_ones() -> None:
    with pytest.raises(KeyError, match="there are h100, h200 and the kernels adam: f32 f32 f32, "):
        predicted("adam: f64 f64 f64", 10, "h200")


def test_the_table_is_what_the_tools_say_now(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("cupy", reason="cupy-cuda13x is not installed")
    try:
        said = cubin.versions(cubin.find_nvdisasm())
    except Exception as error:
        pytest.skip(f"no NVRTC or no nvdisasm: {error}")
    if said["nvrtc"] != table_of_predictions.table()["versions"]["nvrtc"]:
        pytest.skip("another version of the compiler makes other machine code")
    import sass

    assert sass.main(["--only", "adam: f32 f32 f32"]) == 0
    row = json.loads(table_of_predictions.TABLE.read_text())["kernels"]["adam: f32 f32 f32"]
    assert (
        f"| adam: f32 f32 f32 | 28 | {' | '.join(f'{us:.4g}' for us, _, _ in row['h200'])} |"
        in capsys.readouterr().out
    )
