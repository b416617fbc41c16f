"""Constants of GPUs, each with its source, and the number of blocks that fit on a multiprocessor.

Sources by name: "datasheet" is NVIDIA's product brief of that GPU; "guide" the CUDA C++ Programming Guide (tables
"Technical Specifications per Compute Capability" and "Throughput of Native Arithmetic Instructions"); "Luo" is Luo et
al., "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture via Microbenchmarking", arXiv 2402.13499;
"assumed" is this project's guess, which a first run on the device replaces.  Where a figure is uncertain, `low` and
`high` of a Guess bound it, and predictions are made for both ends.
"""

from __future__ import annotations

import attrs

__all__ = ["DEVICES", "LIMITS", "PIPES", "Device", "Guess", "Limits", "Occupancy", "fit", "pipe_of"]


@attrs.frozen
class Guess:
    """A figure between a pessimistic and an optimistic end."""

    low: float  # gives the longest time
    value: float
    high: float  # gives the shortest time


@attrs.frozen(kw_only=True)
class Limits:
    """What a multiprocessor holds; source: guide."""

    warps: int
    blocks: int
    registers: int
    shared_bytes: int  # for all its blocks together
    # A block reserves 1 KiB of shared memory for the system since 8.0; allocation units: guide, occupancy calculator.
    reserved_bytes: int = 1024
    shared_unit: int = 128
    register_unit: int = 256  # registers of a warp are allocated in these units


LIMITS = {
    80: Limits(warps=64, blocks=32, registers=65536, shared_bytes=164 * 1024),
    90: Limits(warps=64, blocks=32, registers=65536, shared_bytes=228 * 1024),
    100: Limits(warps=64, blocks=32, registers=65536, shared_bytes=228 * 1024),
}


@attrs.frozen
class Occupancy:
    """The blocks of a kernel that are resident on a multiprocessor."""

    blocks: int
    warps: int
    share: float  # of the warps that fit
    limit: str  # registers, shared memory, warps or blocks


def fit(limits: Limits, *, threads: int, registers: int, shared_bytes: int) -> Occupancy:
    """Return how many blocks of `threads` fit; `registers` are per thread, `shared_bytes` per block.

    `shared_bytes` includes what the system reserves, as cubins state it.
    """
    warps = -(-threads // 32)
    per_warp = _up(32 * registers, limits.register_unit)
    # Registers belong to one of four sub-partitions, so warps are counted by fours.
    by = {
        "registers": 4 * (limits.registers // 4 // per_warp) // warps,
        "shared memory": limits.shared_bytes // _up(max(shared_bytes, 1), limits.shared_unit),
        "warps": limits.warps // warps,
        "blocks": limits.blocks,
    }
    limit = min(by, key=lambda name: by[name])
    return Occupancy(by[limit], by[limit] * warps, by[limit] * warps / limits.warps, limit)


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


# Pipelines of a scheduler: cycles that an instruction of a warp occupies one, from the guide's results per clock and
# multiprocessor (32 lanes * 4 schedulers / results).  Pipes that an architecture lists differently follow after `/`.
PIPES: dict[int, dict[str, float]] = {
    80: {"fma": 2, "imad": 2, "alu": 2, "xu": 8, "fp64": 4, "lsu": 4, "uniform": 2, "control": 1},
    90: {"fma": 1, "imad": 2, "alu": 2, "xu": 8, "fp64": 2, "lsu": 4, "uniform": 2, "control": 1},
    100: {"fma": 1, "imad": 2, "alu": 2, "xu": 8, "fp64": 2, "lsu": 4, "uniform": 2, "control": 1},
}

_PIPE_OF = {
    "fma": "FADD FMUL FFMA HADD2 HMUL2 HFMA2",
    "imad": "IMAD",  # the heavy half of the FMA pipe on 9.0
    "xu": "MUFU F2F F2I I2F FCHK FRND POPC FLO BREV",
    "fp64": "DADD DMUL DFMA DSETP",
    "lsu": "LDG STG LD ST LDS STS LDL STL SHFL LDC LDCU ATOM RED LDSM BAR S2R S2UR",
    "control": "BRA BRX EXIT BSSY BSYNC BREAK NOP YIELD WARPSYNC CALL RET DEPBAR ERRBAR MEMBAR BMOV",
}
_PIPES = {op: pipe for pipe, ops in _PIPE_OF.items() for op in ops.split()}


def pipe_of(opcode: str) -> str:
    """Return the pipe of an opcode; integers, logic, comparisons, selections and moves share the ALU."""
    if opcode in _PIPES:
        return _PIPES[opcode]
    return "uniform" if opcode.startswith("U") or opcode == "R2UR" else "alu"


@attrs.frozen(kw_only=True)
class Device:
    """One GPU.  Times are in cycles of its clock unless a name has a unit."""

    name: str
    sm: int
    multiprocessors: int  # datasheet
    nominal: float  # bytes/s, datasheet
    attainable: Guess  # bytes/s of a copy
    clock: Guess  # Hz
    l2_bytes: int  # datasheet
    memory_ns: Guess = Guess(850, 570, 273)  # Luo: 479 cycles idle at 1.755 GHz; under load twice that: assumed
    launch_us: Guess = Guess(4.0, 2.5, 1.5)  # from the end of a kernel to the next one's, if empty: assumed
    l2_cycles: int = 263  # Luo
    shared_cycles: int = 29  # Luo
    xu_cycles: int = 23  # Jia et al. for Volta; assumed unchanged
    special_cycles: int = 40  # S2R, LDC, BAR: assumed
    block_cycles: int = 300  # from a block's end to the first instruction of the next: assumed


DEVICES = {
    "h100": Device(
        name="H100 SXM 80 GB (HBM3)", sm=90, multiprocessors=132, nominal=3.35e12,
        attainable=Guess(2.85e12, 3.0e12, 3.1e12),  # 0.896 of nominal, as the copy on H200
        clock=Guess(1.59e9, 1.755e9, 1.98e9),  # base; assumed; 67 TFLOPS / (132 * 128 * 2): datasheet
        l2_bytes=50 << 20,
    ),
    "h200": Device(
        name="H200 SXM 141 GB (HBM3e)", sm=90, multiprocessors=132, nominal=4.8e12,
        attainable=Guess(4.1e12, 4.3e12, 4.4e12),  # a device copy, measured on one H200
        clock=Guess(1.59e9, 1.755e9, 1.98e9),  # as for H100: the same datasheet TFLOPS
        l2_bytes=50 << 20,
    ),
}  # fmt: skip
