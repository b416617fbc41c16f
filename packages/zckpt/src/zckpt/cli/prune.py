"""`zckpt prune`: delete checkpoints that no rule wants."""

from __future__ import annotations

import argparse
from typing import Any

from zckpt.cli.output import CORRUPT, OK, count_text, print_json, table
from zckpt.cli.resolve import existing_root
from zckpt.errors import CheckpointNotFound
from zckpt.saving.prune import PruneReport, prune
from zckpt.saving.retention import Best, Retention


def run(arguments: argparse.Namespace) -> int:
    keep = Retention(
        last=arguments.last,
        every=arguments.every,
        best=[Best.parse(text) for text in arguments.best],
        tags=arguments.keep_tag,
    )
    root, storage = existing_root(arguments.root)
    done = prune(root, keep, storage=storage, dry_run=arguments.dry_run)
    if not done.decisions and not done.damaged:
        raise CheckpointNotFound(f"{root} holds no committed checkpoint")
    if arguments.json:
        print_json({"root": str(root), "dry_run": arguments.dry_run, **_as_json(done)})
    else:
        _print(done, "would go" if arguments.dry_run else "removed")
    return CORRUPT if done.damaged else OK


def _print(done: PruneReport, gone: str) -> None:
    rows = [
        [each.candidate.tag, f"{each.candidate.step:,}", gone if each.is_removed else "kept", each.reason]
        for each in done.decisions
    ]
    if rows:
        print("\n".join(table([["tag", "step", "", "because"], *rows], right=(1,))))
    for line in done.damaged:
        print(f"left alone, as it is damaged: {line}")
    print(f"{count_text(len(done.removed), 'checkpoint')} {gone}, {len(done.decisions) - len(done.removed):,} kept")


def _as_json(done: PruneReport) -> dict[str, Any]:
    kept = {each.candidate.tag: each.reason for each in done.decisions if not each.is_removed}
    return {"removed": done.removed, "kept": kept, "damaged": done.damaged}
