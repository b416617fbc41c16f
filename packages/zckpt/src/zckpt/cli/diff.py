"""`zckpt diff A B`: tensors and objects that differ between two checkpoints."""

from __future__ import annotations

import argparse
import math
from typing import Any

from zckpt.cli.output import DIFFERS, OK, Progress, count_text, print_json, some, table
from zckpt.cli.resolve import resolve
from zckpt.loading.compare import Comparison, compare


def run(arguments: argparse.Namespace) -> int:
    a, b = resolve(arguments.a), resolve(arguments.b)
    with Progress(_common_nbytes(a.manifest.tensors, b.manifest.tensors), "comparing") as progress:
        found = compare(a, b, by_checksum=not arguments.read, on_progress=progress.advance)
    if arguments.tensors_only:
        found = Comparison(found.only_a, found.only_b, found.retyped, found.different, found.equal, ())
    status = OK if found.is_same(arguments.atol) else DIFFERS
    if arguments.json:
        print_json({"a": str(a.path), "b": str(b.path), "same": status == OK, **_as_json(found)})
    else:
        print(f"A {a.path}  (step {a.step:,})\nB {b.path}  (step {b.step:,})")
        print("\n".join(_lines(found, arguments.limit)))
    return status


def _common_nbytes(a: dict[str, Any], b: dict[str, Any]) -> int:
    return sum(math.prod(entry.shape) * entry.dtype.itemsize for name, entry in a.items() if name in b)


def _lines(found: Comparison, limit: int) -> list[str]:
    lines = [f"{count_text(len(found.equal), 'tensor')} equal bit for bit"]
    for title, names in (
        ("only in A", found.only_a),
        ("only in B", found.only_b),
        ("of another shape or dtype (A -> B)", found.retyped),
        ("with other values", _difference_rows(found)),
    ):
        if names:
            count = len(names) - (title == "with other values")  # minus the heading of its table
            shown = some(names, limit and limit + len(names) - count)
            lines += [f"{count_text(count, 'tensor')} {title}:", *(f"  {name}" for name in shown)]
    if found.objects:
        shown = some(found.objects, limit)
        lines += [f"{count_text(len(found.objects), 'difference')} in objects:", *(f"  {each}" for each in shown)]
    return lines


def _difference_rows(found: Comparison) -> list[str]:
    if not found.different:
        return []
    rows = [["name", "elements", "different", "max |A - B|"]]
    for each in sorted(found.different, key=lambda each: (not math.isnan(each.max_abs), -each.max_abs, each.name)):
        rows.append([each.name, f"{each.numel:,}", f"{each.different_numel:,}", f"{each.max_abs:.4g}"])
    return table(rows, right=(1, 2, 3))


def _as_json(found: Comparison) -> dict[str, Any]:
    return {
        "only_a": found.only_a,
        "only_b": found.only_b,
        "retyped": found.retyped,
        "different": [
            {
                "name": each.name,
                "elements": each.numel,
                "different": each.different_numel,
                "max_abs": each.max_abs if math.isfinite(each.max_abs) else str(each.max_abs),
            }
            for each in found.different
        ],
        "equal": len(found.equal),
        "objects": found.objects,
    }
