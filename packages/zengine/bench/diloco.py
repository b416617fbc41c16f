"""Bytes between replica groups: DiLoCo against gradients in each step, counted by the communication log.

    python packages/zengine/bench/diloco.py [--groups 2 4] [--round 50] [--fragments 4]

Trains a small GPT for one round on CPU ranks, one rank a group, and adds up what a rank sends to the others: the
payload of each logged collective times the share of it that a ring sends (telemetry/comms.py: "bus").  The peak is
the most in one step.
"""

from __future__ import annotations

import argparse
from typing import Any

import attrs
import models
import torch

import zcomm
import zengine
from zcomm.testing import run_ranks

SHAPE = models.Shape(depth=4, width=64, heads=4, vocabulary=256, context=32)
RING = {"all_reduce": 2.0, "reduce_scatter": 1.0, "all_gather": 1.0, "all_to_all": 1.0}
SMALL = 1024  # bytes: norms and flags, which are no gradients


@attrs.frozen(kw_only=True)
class Row:
    """One way to train."""

    name: str
    diloco: dict[str, Any]  # empty: gradients in each step


def sent_in_steps(diloco: dict[str, Any], steps: int) -> list[float]:
    """Return the bytes that this rank sends in each step, for weights or gradients."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        **({"diloco": diloco} if diloco else {}),
    }
    engine = zengine.initialize(model=models.GPT(SHAPE), config=config)[0]
    logs = []
    for step in range(steps):
        tokens = torch.randint(
            SHAPE.vocabulary, (1, SHAPE.context), generator=torch.Generator().manual_seed(step + zcomm.group_rank())
        )
        with zcomm.traced([]) as log:
            engine.backward(engine(tokens))
            engine.step()
        logs.append(log)  # a delayed message is logged in the step that sent it, once it has arrived
    engine.close()
    return [sum(map(sent_bytes, log)) for log in logs]


def sent_bytes(record: zcomm.Record) -> float:
    """Return what a rank sends on a ring; 0 for norms and flags."""
    if record.nbytes <= SMALL:
        return 0.0
    return record.nbytes * RING[record.op] * (record.group_size - 1) / record.group_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--round", type=int, default=50)
    parser.add_argument("--fragments", type=int, default=4)
    options = parser.parse_args()
    every, fragments = options.round, options.fragments
    rows = (
        Row(name="gradients in each step", diloco={}),
        Row(name=f"diloco, sync_every {every}", diloco={"sync_every": every}),
        Row(name=f"{fragments} fragments", diloco={"sync_every": every, "fragments": fragments}),
        Row(name="4 bits", diloco={"sync_every": every, "quantize_bits": 4}),
        Row(
            name=f"4 bits, {fragments} fragments, sync_delay 5",
            diloco={
                "sync_every": every,
                "fragments": fragments,
                "quantize_bits": 4,
                "sync_delay": 5,
                "merge_alpha": 0.5,
            },
        ),
    )
    numel = sum(param.numel() for param in models.GPT(SHAPE).parameters())
    print(f"{numel:,} parameters; bytes that a rank sends to other groups\n")
    print("| groups | | bytes in a round | fewer | peak of a step | of the whole |")
    print("| ---: | --- | ---: | ---: | ---: | ---: |")
    for groups in options.groups:
        sent = [run_ranks(sent_in_steps, groups, row.diloco, every + 5, timeout_s=600)[0] for row in rows]
        plain = sum(sent[0][:every])
        whole = max(sent[1])
        for row, each in zip(rows, sent):
            total, peak = sum(each[: every + 5 * bool(row.diloco)]), max(each)
            base = whole if "4 bits" not in row.name else max(sent[3])
            print(
                f"| {groups} | {row.name} | {total:,.0f} | {plain / total:.1f} | {peak:,.0f} | "
                f"{peak / base if row.diloco else 1:.3f} |"
            )


if __name__ == "__main__":
    main()
