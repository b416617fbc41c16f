#!/usr/bin/env python3
"""Draw docs/pages/assets/zero.svg from the memory planner: the bytes of each of four ranks, at each ZeRO stage.

    python docs/pictures.py [--write]      without --write it only compares (exit code 1 if they differ)

The model is the shape of GPT-2 124M on the meta device, in bf16 with fp32 masters, with AdamW.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import zoptim
import zpartition
from zpartition import ReduceAt, ZeroPolicy

TARGET = Path(__file__).resolve().parent / "pages" / "assets" / "zero.svg"
WORLD = 4
OWNERS = (  # attribute of the plan, what the picture says, colour
    ("parameters", "weights (bf16)", "#5c6bc0"),
    ("masters", "masters (fp32)", "#26a69a"),
    ("states", "optimizer states (fp32)", "#ffa726"),
    ("accumulators", "gradients", "#ef5350"),
    ("buckets", "gradients in flight", "#ab47bc"),
    ("gathered_units", "gathered weights", "#9ccc65"),
)
SCALE = 250  # points per gigabyte


def make_model() -> nn.Module:
    with torch.device("meta"):
        blocks = [nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True) for _ in range(12)]
        return nn.ModuleList([nn.Embedding(50257, 768), nn.Embedding(1024, 768), *blocks]).bfloat16()


def plans() -> list[zpartition.MemoryPlan]:
    model = make_model()
    moments = (ReduceAt.BOUNDARY, ReduceAt.BOUNDARY, ReduceAt.MICRO_STEP, ReduceAt.MICRO_STEP)  # as a config has them
    policies = [ZeroPolicy(stage=stage, reduce_at=moment) for stage, moment in enumerate(moments)]
    arguments = {"world_size": WORLD, "optimizer": zoptim.AdamW, "num_backwards": 4}
    return [zpartition.plan(model, policy=policy, **arguments) for policy in policies]


def bar(plan: zpartition.MemoryPlan, y: int) -> list[str]:
    """Return the rectangles of one rank."""
    x, out = 150.0, []
    for owner, _, colour in OWNERS:
        width = getattr(plan, owner) / 1e9 * SCALE
        if width > 0.05:
            out.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="13" fill="{colour}"/>')
        x += width
    return out


def draw() -> str:
    """Return the picture; texts have the colour of the page."""
    out, y = [], 20
    found = plans()
    for stage, plan in enumerate(found):
        out.append(f'<text x="0" y="{y + 30}" font-size="14" font-weight="bold">stage {stage}</text>')
        for rank in range(WORLD):
            out.append(f'<text x="88" y="{y + 11}" font-size="10">rank {rank}</text>')
            out += bar(plan, y)
            y += 17
        end = 156 + plan.total_bytes / 1e9 * SCALE
        out.append(f'<text x="{end:.0f}" y="{y - 28}" font-size="12">{plan.total_bytes / 1e9:.2f} GB</text>')
        y += 14
    for index, (_, label, colour) in enumerate(OWNERS):
        x, line = 150 + index % 3 * 190, y + 8 + index // 3 * 20
        out.append(f'<rect x="{x}" y="{line}" width="12" height="12" fill="{colour}"/>')
        out.append(f'<text x="{x + 18}" y="{line + 10}" font-size="12">{label}</text>')
    wide = int(156 + max(plan.total_bytes for plan in found) / 1e9 * SCALE + 70)
    head = f'<div class="figure">\n<svg role="img" viewBox="0 0 {wide} {y + 50}" xmlns="http://www.w3.org/2000/svg">'
    title = "<title>Memory of each of four ranks at ZeRO stages 0 to 3, by owner</title>"
    return "\n".join([head, title, *out, "</svg>", "</div>", ""])


def main(argv: list[str]) -> int:
    text = draw()
    if "--write" in argv:
        TARGET.write_text(text, encoding="utf-8")
        return 0
    if not TARGET.exists() or TARGET.read_text(encoding="utf-8") != text:
        print("docs/pages/assets/zero.svg is not what the planner says: run python docs/pictures.py --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
