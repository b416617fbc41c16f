"""Tables of a report as HTML: FLOPs by module, collectives and stragglers, skipped steps, the config."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterator, Sequence

import attrs

from zengine.flops.profile import FlopsProfile, ModuleCost, format_amount
from zengine.reporting.curves import LOSS, NORM, SCALE, skipped_steps
from zengine.reporting.document import allow_breaks, bar, bars, details, section, shorten, table
from zengine.reporting.runs import PlanRow, RecordedRun
from zengine.telemetry.comms import Messages, size_text
from zengine.telemetry.stragglers import RankWait, name_straggler, rank_waits

__all__ = ["comms_section", "config_sections", "flops_section", "skipped_section"]

MAX_ROWS = 60  # of FLOPs, collectives, skipped steps; a note counts the rest


def flops_section(run: RecordedRun) -> str:
    """Tabulate FLOPs, parameters and time by kind of module; equal blocks share a row."""
    if not run.flops:
        return ""
    profile = run.flops[0]
    total = profile.total
    groups = group_modules(profile)
    rows = [_flops_row(group, total) for group in groups[:MAX_ROWS]]
    header = ("module", "class", "parameters", "FLOPs forward", "", "share", "ms forward", "share")
    sentence = (
        f"One forward of one rank's micro-batch: {format_amount(total.flops, 'FLOPs')}, "
        f"{format_amount(total.params)} parameters. "
        "Matrix products, convolutions and attention are counted; modules whose names differ in numbers share a row."
    )
    if profile.backward_flops and total.flops:
        sentence += f" Its backward took {profile.backward_flops / total.flops:.2f} times as many FLOPs."
    if len(groups) > MAX_ROWS:
        sentence += f" The first {MAX_ROWS} of {len(groups)} rows."
    return section("FLOPs by module", table(header, rows, num_texts=2), note=sentence)


@attrs.frozen
class Group:
    """Modules whose paths differ in numbers only."""

    pattern: str  # with "*" in place of the numbers
    count: int
    cost: ModuleCost  # all of them added up


def group_modules(profile: FlopsProfile) -> list[Group]:
    """Group the modules of a profile, in the order of their first members, without the model itself."""
    groups: dict[tuple[str, str], Group] = {}
    for cost in profile.modules[1:]:
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", cost.path)
        before = groups.get((pattern, cost.kind))
        groups[pattern, cost.kind] = Group(pattern, 1, cost) if before is None else _joined(before, cost)
    return [group for group in groups.values() if group.cost.flops or group.cost.params or group.cost.ms]


def _joined(group: Group, cost: ModuleCost) -> Group:
    sums = {name: getattr(group.cost, name) + getattr(cost, name) for name in ("params", "flops", "ms", "calls")}
    return Group(group.pattern, group.count + 1, attrs.evolve(group.cost, **sums))


def _flops_row(group: Group, total: ModuleCost) -> tuple[str, list[str]]:
    cost, share = group.cost, _share(group.cost.flops, total.flops)
    indent = f'<span style="padding-left:{14 * (cost.depth - 1)}px">{html.escape(_last(group.pattern))}</span>'
    kind = html.escape(cost.kind) + (f" <i>&times;{group.count}</i>" if group.count > 1 else "")
    numbers = [
        format_amount(cost.params) if cost.params else "",
        format_amount(cost.flops) if cost.flops else "",
        bar(share),
    ]
    times = [f"{cost.ms:.2f}", f"{_share(cost.ms, total.ms):.1%}"] if cost.ms else ["", ""]
    return f"depth{min(cost.depth, 3)}", [indent, kind, *numbers, f"{share:.1%}" if cost.flops else "", *times]


def _last(pattern: str) -> str:
    """Return the name in the parent; a bare number is preceded by the parent's name."""
    head, _, name = pattern.rpartition(".")
    return f"{head.rpartition('.')[2]}.*" if name == "*" and head else name


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def comms_section(run: RecordedRun) -> str:
    """Tabulate the collectives of the first rank, and each rank's waits for the others."""
    if not any(run.comms.values()):
        return ""
    first, messages = next(iter(run.comms.items()))
    most = max((each.tally.ms for each in messages), default=0.0)
    header = ("operation", "size", "ranks", "count", "ms", "", "waited", "algbw GB/s", "busbw GB/s")
    body = table(header, [("", _comms_row(each, most)) for each in messages[:MAX_ROWS]])
    note = f"Rank {first}; host time, from issue to the end of the wait. Longest first."
    return section("Communication", body, note=note) + straggler_section(run)


def _comms_row(each: Messages, most: float) -> list[str]:
    tally = each.tally
    counts = [html.escape(each.op), size_text(each.size_bytes), str(each.group_size), f"{tally.count:,}"]
    times = [f"{tally.ms:,.1f}", bar(_share(tally.ms, most)), f"{tally.wait_ms:,.1f}"]
    return [*counts, *times, f"{tally.gb_per_s:.3g}", f"{each.bus_gb_per_s:.3g}"]


def straggler_section(run: RecordedRun) -> str:
    """Tabulate waits by rank; "" with fewer than two ranks."""
    if len(run.comms) < 2:
        return ""
    waits = [attrs.evolve(wait, rank=rank) for rank, wait in zip(run.comms, rank_waits(list(run.comms.values())))]
    most = max(wait.wait_ms for wait in waits)
    rows = [(_kind(wait, waits), _wait_row(wait, most)) for wait in waits]
    note = (
        f"{_sentence(name_straggler(waits))} The least wait over all ranks is the communication itself; any longer "
        "wait is for other ranks."
    )
    return section("Waits by rank", table(("rank", "waited ms", "", "for others ms"), rows), note=note)


def _kind(wait: RankWait, waits: Sequence[RankWait]) -> str:
    """Return the CSS class that highlights the straggler's row."""
    return "warn" if wait.spread_ms > 0 and wait.spread_ms == max(each.spread_ms for each in waits) else ""


def _wait_row(wait: RankWait, most: float) -> list[str]:
    width = _share(wait.wait_ms, most)
    own = _share(wait.least_ms, most)
    track = bars([(own, 1), (width - own, 2)])
    return [str(wait.rank), f"{wait.wait_ms:,.1f}", track, f"{wait.for_others_ms:,.1f}"]


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def skipped_section(run: RecordedRun) -> str:
    """List the skipped steps."""
    skipped = skipped_steps(run)
    if not skipped:
        return ""
    columns = [dict(run.points(*tags)) for tags in (LOSS, NORM, SCALE)]
    rows = [("", [f"{step:.0f}", *(_number(each.get(step)) for each in columns)]) for step in skipped[:MAX_ROWS]]
    more = f" The first {MAX_ROWS} of {len(skipped)}." if len(skipped) > MAX_ROWS else ""
    note = f"Updates skipped because of non-finite gradients; the weights did not change.{more}"
    return section("Skipped steps", table(("step", "loss", "gradient norm", "loss scale"), rows), note=note)


def _number(value: float | None) -> str:
    if value is None:
        return "&ndash;"
    return f"{value:.6g}" if math.isfinite(value) else f"<b class=bad>{value}</b>"


def config_sections(run: RecordedRun) -> Iterator[str]:
    """Tabulate every value of the run with its origin, and the given config."""
    if run.plan:
        changed = sum(not row.is_default for row in run.plan)
        box = "<label class='switch'><input type=checkbox id=changed> only values that are not defaults</label>"
        rows = [(_row_kind(row), _plan_row(row)) for row in run.plan]
        body = f"{box}{table(('key', 'value', 'from'), rows, num_texts=3)}"
        yield section("Configuration", body, note=f"{changed} of {len(run.plan)} values are not defaults.")
    if run.config:
        text = json.dumps(run.config, indent=2, ensure_ascii=False)
        yield details("The config as it was given", f"<pre>{html.escape(text)}</pre>")


def _row_kind(row: PlanRow) -> str:
    return "default" if row.is_default else "changed"


def _plan_row(row: PlanRow) -> list[str]:
    return [f"<code>{allow_breaks(row.key[:200])}</code>", shorten(row.value), f"<i>{shorten(row.origin, 80)}</i>"]
