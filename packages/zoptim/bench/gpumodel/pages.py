"""The report of predictions: a table for readers (Markdown) and one for programs (JSON)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gpumodel.cubin import Compiled
from gpumodel.hardware import DEVICES, Occupancy
from gpumodel.warps import Work

from zoptim.backends.gpu.source import kernels_source

__all__ = ["Code", "Row", "Times", "digest", "document", "markdown", "read", "to_json"]

GOAL = 0.9  # of the attainable bandwidth


class Code(NamedTuple):
    """A kernel compiled for one architecture."""

    registers: int
    shared_bytes: int
    spilled_bytes: int
    warps: int  # resident on a multiprocessor
    instructions: float  # per element, on the fast path
    mix: dict[str, int]  # opcode -> instructions of one pass

    @classmethod
    def of(cls, made: Compiled, work: Work, resident: Occupancy) -> Code:
        """Summarize a compilation."""
        mix: dict[str, int] = {}
        for i in work.body.loop:
            mix[i.name] = mix.get(i.name, 0) + 1
        each = len(work.body.loop) / (work.elements / 32)
        return cls(made.registers, made.shared_bytes, made.spilled_bytes, resident.warps, each, mix)


class Times(NamedTuple):
    """A kernel on one device, for each number of elements."""

    seconds: list[float]
    shares: list[float]  # of the attainable bandwidth
    limits: list[str]
    low: float  # 100M elements at the pessimistic end of the constants
    high: float
    cycles: dict[str, float]  # of one scheduler for one pass of one warp, by resource


class Row(NamedTuple):
    """One kernel."""

    name: str
    bytes_per_element: float
    codes: dict[int, Code]
    times: dict[str, Times]


def digest() -> str:
    """Return a digest of the kernels' text, which the table keeps: a changed text needs a new table."""
    return hashlib.sha256(kernels_source().encode()).hexdigest()[:16]


def document(rows: Sequence[Row], numels: Sequence[int], versions: Mapping[str, str]) -> dict[str, Any]:
    """Return the table for programs; a kernel on a device is [us, share, limit] for each number of elements."""
    devices = {
        key: {"name": d.name, "nominal": d.nominal, "attainable": d.attainable.value, "l2_bytes": d.l2_bytes}
        for key, d in DEVICES.items()
    }
    kernels = {}
    for row in rows:
        kernels[row.name] = {"bytes": row.bytes_per_element} | {
            f"sm_{sm}": [code.registers, code.warps, round(code.instructions, 1)] for sm, code in row.codes.items()
        } | {
            key: [[_round(s * 1e6), round(share, 3), limit] for s, share, limit in zip(t.seconds, t.shares, t.limits)]
            for key, t in row.times.items()
        } | {f"{key}_range": [_round(t.high * 1e6), _round(t.low * 1e6)] for key, t in row.times.items()}  # fmt: skip
    return {
        "versions": dict(versions), "text": digest(), "devices": devices, "numels": list(numels), "kernels": kernels,
        "fields": {
            "sm_*": "registers, resident warps, instructions per element",
            "device": "us, share of attainable bandwidth, limit; for each of numels",
            "*_range": "us for 100M elements at the optimistic and pessimistic end of the constants",
        },
    }  # fmt: skip


def to_json(made: Mapping[str, Any]) -> str:
    """Return `made` with a line for each kernel."""
    head = {key: value for key, value in made.items() if key != "kernels"}
    lines = [
        f" {json.dumps(name)}: {json.dumps(row, separators=(',', ':'))}" for name, row in made["kernels"].items()
    ]
    return json.dumps(head, indent=1)[:-2] + ',\n"kernels": {\n' + ",\n".join(lines) + "\n}}\n"


def read(path: Path) -> dict[str, Any]:
    """Return an older table."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _round(us: float) -> float:
    return float(f"{us:.4g}")


def markdown(rows: Sequence[Row], made: Mapping[str, Any], before: Mapping[str, Any] | None) -> str:
    """Return the report for readers."""
    said = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    parts = [
        "# Predicted times of the GPU kernels\n",
        "**Predicted, not measured.** No kernel of this table had run on a GPU when it was written.  Made by",
        f"`python packages/zoptim/bench/sass.py` ({said}; text {made['text']}); how: `gpumodel/warps.py`,",
        "constants and their sources: `gpumodel/hardware.py`.  A launch finds none of its data in a cache.",
        "Shares are of the attainable bandwidth: " + "; ".join(
            f"{d['name']} {d['attainable'] / 1e12:.2g} of nominal {d['nominal'] / 1e12:.3g} TB/s"
            for d in made["devices"].values()
        ) + ".\n",
        f"The goal of the optimizers is {GOAL:.0%} measured.  It is open until a run states predicted against",
        "measured; an error over 15% is a defect of the model (`predicted.py`).\n",
    ]  # fmt: skip
    parts += [_summary(rows), *(_device(rows, key, made) for key in DEVICES), _codes(rows)]
    if before:
        parts.append(_compared(made, before))
    return "\n".join(parts) + _NOTES


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---" + "|--:" * (len(head) - 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(cells) + " |" for cells in body)]) + "\n"


def _summary(rows: Sequence[Row]) -> str:
    lines = []
    for key, device in DEVICES.items():
        below = [row for row in rows if row.times[key].shares[-1] < GOAL]
        reasons: dict[str, int] = {}
        for row in below:
            reasons[row.times[key].limits[-1]] = reasons.get(row.times[key].limits[-1], 0) + 1
        said = ", ".join(f"{limit} {count}" for limit, count in sorted(reasons.items(), key=lambda x: -x[1]))
        lines.append(
            f"- {device.name}: {len(rows) - len(below)} of {len(rows)} kernels reach {GOAL:.0%} at 1G elements"
            + (f"; of the others, limited by: {said}." if below else ".")
        )
    return "\n".join(lines) + "\n"


def _device(rows: Sequence[Row], key: str, made: Mapping[str, Any]) -> str:
    sizes = [f"{n // 10**6}M" if n < 10**9 else f"{n // 10**9}G" for n in made["numels"]]
    head = ["kernel", "B", *(f"us {s}" for s in sizes), *(f"share {s}" for s in sizes[1:]), "us 100M, range", "limit"]
    body = []
    for row in rows:
        t = row.times[key]
        body.append([
            row.name, f"{row.bytes_per_element:.4g}", *(f"{s * 1e6:.4g}" for s in t.seconds),
            *(f"{share:.0%}" for share in t.shares[1:]), f"{t.high * 1e6:.0f} to {t.low * 1e6:.0f}", t.limits[-1],
        ])  # fmt: skip
    return f"## {DEVICES[key].name}\n\n{_table(head, body)}"


CLASSES = {
    "FP32": "FADD FMUL FFMA", "FP64": "DADD DMUL DFMA", "MUFU, check, convert": "MUFU FCHK F2F F2FP HADD2 I2F F2I",
    "global": "LDG STG LD ST", "shared": "LDS STS SHFL", "control": "BRA BSSY BSYNC EXIT YIELD BAR NOP BREAK",
}  # fmt: skip


def _codes(rows: Sequence[Row]) -> str:
    head = [
        "kernel",
        *(f"sm_{sm}: registers, warps, instructions" for sm in (80, 90, 100)),
        *CLASSES,
        "integer, other",
    ]
    body = []
    for row in rows:
        code = row.codes[90]
        each = code.instructions / sum(code.mix.values())
        counts = [sum(code.mix.get(op, 0) for op in ops.split()) * each for ops in CLASSES.values()]
        body.append([
            row.name,
            *(f"{c.registers}, {c.warps}, {c.instructions:.1f}" for _, c in sorted(row.codes.items())),
            *(f"{count:.1f}" for count in counts), f"{code.instructions - sum(counts):.1f}",
        ])  # fmt: skip
    spilled = [row.name for row in rows if any(code.spilled_bytes for code in row.codes.values())]
    said = f"Registers spill in: {', '.join(spilled)}." if spilled else "No kernel spills registers."
    return f"## Machine code\n\nInstructions per element on the fast path, classes for sm_90.  {said}\n\n" + _table(
        head, body
    )


def _compared(made: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    body = []
    for name, row in made["kernels"].items():
        old = before["kernels"].get(name)
        if old:
            body.append([
                name, f"{old['sm_90'][2]} -> {row['sm_90'][2]}",
                *(f"{old[key][2][1]:.0%} -> {row[key][2][1]:.0%}" for key in DEVICES),
            ])  # fmt: skip
    head = ["kernel", "instructions per element", *(f"share of {key}, 100M" for key in DEVICES)]
    return (
        f"## Before and after\n\nThe text before ({before['text']}) and after the changes that this model led to: "
        "32-bit offsets, all loads of a group before its first use, hardware conversions of float16 and bfloat16, "
        "packing by byte permutation, norms without bounds inside a span.\n\n" + _table(head, body)
    )


_NOTES = """
## Limits of the model

- Fast path only: aligned rows and whole groups.  A root of 0 or a quotient out of range (moments of elements that
  have never had a gradient) takes a subroutine, which costs more than the rest of the element.
- Not predicted: kernels of one block, which every step, norm and LAMB has besides (`zk_prepare_rows`,
  `zk_squares_final`, `zk_lamb_rows`; a few microseconds each, growing with rows or elements).
- At 1M elements, and at 10M of narrow formats, data stays in the second-level cache between steps: a loop that
  measures the same tensors is faster than predicted.
- Clocks, latency under load and launch gaps are assumed (see `hardware.py`); the range column has both ends.
- Muon and Adafactor run torch operators and have no kernels here.  Clipping is a factor that the update applies.
"""
