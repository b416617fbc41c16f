"""What the network bench found: the fastest rounds and their ratios to floors, as a table and as a picture.

Two floors.  The law: max(arithmetic + CPU of the transport, bytes / bandwidth).  The schedule: the same for each
phase of a step, because no gradient exists before backward, and the weights of stages 1 and 2 change after it:

    forward + max(backward and update + CPU, bytes of gradients / bandwidth) + bytes of updated weights / bandwidth

and at stage 3, which gathers during forward, max(...) of both phases.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from html import escape
from typing import Any

import attrs
from network_contenders import ARITHMETIC, FORWARD, PEER, TRANSPORT, Setting
from network_link import LinkSpec

__all__ = ["Run", "picture", "table"]

FLOORS = (FORWARD, ARITHMETIC, TRANSPORT)
LEFT, BAR, WIDTH = 250, 16, 900
COLOURS = {"ours": "#d6336c", "DDP": "#1c7ed6", "DeepSpeed": "#f08c00"}


@attrs.frozen
class Found:
    """One contender over one link: a step of the fastest round."""

    s: float  # of the slowest rank
    cpu_s: float  # of a rank, all threads
    sent: float  # bytes that leave a namespace


@attrs.frozen
class Run:
    """All contenders over one link."""

    link: LinkSpec
    ranks: int
    setting: Setting
    found: dict[str, Found]
    options: str  # of the command

    @classmethod
    def of(cls, link: LinkSpec, ranks: int, setting: Setting, lines: Sequence[dict[str, Any]], options: str) -> Run:
        """Take the lines of rank 0."""
        rounds: dict[str, list[Found]] = {}
        for line in lines:
            columns = {key: [rank[key] for rank in line["ranks"]] for key in ("s", "cpu_s", "sent")}
            seen = Found(max(columns["s"]), statistics.mean(columns["cpu_s"]), columns["sent"][0])
            rounds.setdefault(line["name"], []).append(seen)
        found = {name: min(seen, key=lambda each: each.s) for name, seen in rounds.items()}
        return cls(link, ranks, setting, found, options)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Run:
        """Inverse of `attrs.asdict` and JSON."""
        found = {name: Found(**each) for name, each in fields["found"].items()}
        setting = Setting.from_json(fields["setting"])
        return cls(LinkSpec(**fields["link"]), fields["ranks"], setting, found, fields["options"])

    def with_rounds_of(self, other: Run) -> Run:
        """Return both runs as one: the faster round of each contender.  The floors are those of both, too."""
        names = [*other.found, *(name for name in self.found if name not in other.found)]
        both = {name: [run.found[name] for run in (other, self) if name in run.found] for name in names}
        found = {name: min(seen, key=lambda each: each.s) for name, seen in both.items()}
        return attrs.evolve(self, found=found)

    @property
    def title(self) -> str:
        """The link, the ranks and the micro-steps."""
        return f"{self.link}, {self.ranks} ranks" + (
            f", {self.setting.accumulation} micro-steps" if self.setting.accumulation > 1 else ""
        )

    def floors_s(self, name: str) -> tuple[float, ...]:
        """Seconds of the law and of the schedule; none if their parts were not measured."""
        if not set(FLOORS) <= set(self.found):
            return ()
        sent, transport, whole_s = self.found[name].sent, self.found[TRANSPORT], self.found[ARITHMETIC].s
        cpu_s, wire_s = transport.cpu_s * sent / transport.sent, self.link.seconds(sent)
        last = 1 / self.setting.accumulation  # of the arithmetic: gradients travel beside the last micro-step
        forward_s = self.found[FORWARD].s
        backward_s = (whole_s - forward_s) * last
        before_s = whole_s - forward_s * last - backward_s
        first, middle, after = _shares(name)
        schedule_s = (
            before_s
            + max(forward_s * last + cpu_s * first, wire_s * first)
            + max(backward_s + cpu_s * middle, wire_s * middle)
            + wire_s * after
        )
        return max(whole_s + cpu_s, wire_s), schedule_s


def _shares(name: str) -> tuple[float, float, float]:
    """Parts of the bytes that can travel beside forward, beside backward, and only afterwards."""
    if "stage 1" in name or "stage 2" in name:
        return (0.0, 0.5, 0.5)
    if "stage 3" in name or "ZeRO++" in name:
        return (0.5, 0.5, 0.0)
    return (0.0, 1.0, 0.0)


def table(runs: Sequence[Run]) -> list[str]:
    """Markdown: one table for every link."""
    lines = []
    for run in runs:
        batch = f"{run.setting.accumulation} x {run.setting.micro_batch} x {run.setting.tokens} tokens a rank"
        lines += [f"### {run.title}", "", f"{batch}; `python packages/zengine/bench/network.py {run.options}`", ""]
        lines += ["| | ms | x DDP | CPU ms | sent MB | x law | x schedule |", "| --- |" + " ---: |" * 6]
        for name, found in run.found.items():
            cells = [
                name,
                f"{found.s * 1e3:.0f}",
                f"{found.s / run.found[PEER].s:.2f}" if PEER in run.found else "",
                f"{found.cpu_s * 1e3:.0f}",
                f"{found.sent / 1e6:.1f}",
            ]
            ratios = [found.s / floor_s for floor_s in run.floors_s(name)] if name not in FLOORS else []
            cells += [f"{ratio:.2f}" for ratio in ratios] or ["", ""]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return lines


def picture(runs: Sequence[Run]) -> str:
    """SVG: a bar for the step of each contender over each link, with ticks at its two floors."""
    parts, y = [_text(12, 22, "Step time over a network; dark tick: the law, light tick: the schedule", 15)], 50.0
    for run in runs:
        shown = {name: found for name, found in run.found.items() if name not in FLOORS}
        longest_s = max(found.s for found in shown.values())
        parts.append(_text(12, y, run.title, 13))
        for name, found in shown.items():
            y += BAR + 4
            scale = (WIDTH - LEFT - 90) / longest_s
            colour = next((colour for start, colour in COLOURS.items() if name.startswith(start)), "#868e96")
            parts.append(_text(LEFT - 8, y - 4, name, 11, "end"))
            parts.append(_box(LEFT, y - BAR, found.s * scale, BAR, colour))
            parts.append(_text(LEFT + found.s * scale + 6, y - 4, f"{found.s * 1e3:.0f} ms", 11))
            for floor_s, tick in zip(run.floors_s(name), ("#212529", "#ced4da")):
                parts.append(_box(LEFT + floor_s * scale - 1, y - BAR - 1, 2, BAR + 2, tick))
        y += 40
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y:.0f}" style="font-family:sans-serif">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{y:.0f}" fill="#fff"/>', *parts, "</svg>", ""])


def _text(x: float, y: float, words: str, size: int, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{escape(words)}</text>'


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'
