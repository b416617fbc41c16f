"""The tables of a page."""

from __future__ import annotations

import math
import re
from pathlib import Path

from zengine.flops.profile import FlopsProfile, ModuleCost
from zengine.reporting.runs import Event, PlanRow, RecordedRun
from zengine.reporting.tables import comms_section, config_sections, flops_section, group_modules, skipped_section
from zengine.telemetry.comms import Messages, Tally


def run_of(**parts: object) -> RecordedRun:
    return RecordedRun(name="r", folder=Path("r"), **parts)


def cost(path: str, kind: str, flops: int) -> ModuleCost:
    return ModuleCost(path=path, kind=kind, params=10, flops=flops, ms=1.0, calls=1)


PROFILE = FlopsProfile(
    modules=(
        cost("", "GPT", 400),
        cost("blocks", "ModuleList", 300),
        *(cost(f"blocks.{i}", "Block", 100) for i in range(3)),
        *(cost(f"blocks.{i}.mlp2", "Linear", 40) for i in range(3)),
        cost("head", "Linear", 100),
        ModuleCost(path="drop", kind="Dropout", params=0),
    )
)


def words(text: str) -> list[str]:
    return re.sub(r"<[^>]*>", " ", text).split()


def test_blocks_that_are_alike_are_one_row() -> None:
    groups = {group.pattern: (group.count, group.cost.flops, group.cost.params) for group in group_modules(PROFILE)}
    assert groups == {
        "blocks": (1, 300, 10),
        "blocks.*": (3, 300, 30),
        "blocks.*.mlp2": (3, 120, 30),
        "head": (1, 100, 10),
    }


def test_shares_are_of_the_whole_model() -> None:
    text = flops_section(run_of(flops=(PROFILE,)))
    assert "75.0%" in text
    assert "&times;3" in text
    assert flops_section(run_of()) == ""


def messages(wait: float) -> list[Messages]:
    return [Messages("all_reduce", 2048, 2, Tally(count=3, nbytes=6144, ms=wait + 1, wait_ms=wait))]


def test_the_ranks_are_held_against_each_other() -> None:
    text = comms_section(run_of(comms={0: messages(5.0), 3: messages(2.0)}))
    assert "Rank 3 waits least: other ranks wait for it, up to 3.00 ms longer" in text
    assert words(text)[-6:] == ["0", "5.0", "3.0", "3", "2.0", "0.0"]
    assert '<tr class="warn"><td>3</td>' in text
    assert "Waits by rank" not in comms_section(run_of(comms={0: messages(5.0)}))
    assert comms_section(run_of(comms={0: []})) == ""


def test_skipped_steps_are_listed_with_what_was_wrong() -> None:
    events = [
        Event(step, step, step, {"train/loss": loss, "Train/Samples/skipped_steps": count})
        for step, loss, count in ((1, 2.0, 0), (2, math.nan, 1), (3, 1.0, 1))
    ]
    assert words(skipped_section(run_of(events=tuple(events))))[-4:] == ["2", "nan", "&ndash;", "&ndash;"]
    assert skipped_section(run_of()) == ""


def test_defaults_and_changes_are_told_apart() -> None:
    plan = (PlanRow("a.b", "1", "default"), PlanRow("c", "<2>", "config.json:3"))
    text = "".join(config_sections(run_of(plan=plan, config={"c": "</pre><script>"})))
    assert '<tr class="default"><td><code>a.<wbr>b</code>' in text
    assert '<tr class="changed"><td><code>c</code></td><td>&lt;2&gt;</td>' in text
    assert "1 of 2 values are not defaults" in text
    assert "<script" not in text
