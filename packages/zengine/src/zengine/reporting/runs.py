"""Reader of a run's folder: complete, killed, or partial.

    run.json            written at the start: config, plan with origins, environment
    events.jsonl        a line per step
    flops.json          the FLOPs profile of one step
    comms.rank0.json    the collectives of a rank, and so on for the others
    profile/            traces; listed, not read

A folder of TensorBoard's event files alone is a run too, including DeepSpeed's own.  DeepSpeed's tags lie over
samples, the others over steps.  Every boundary writes both, so the n-th samples belong to the n-th step; without
steps, boundaries are counted from one.

Only a folder with none of these is an error.  Other missing, damaged or malformed files are left out and listed in
`RecordedRun.remarks`, because failed runs are the most interesting ones.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from zengine.flops.profile import FlopsProfile
from zengine.telemetry.comms import Messages
from zengine.telemetry.json_values import read_count
from zengine.telemetry.sinks.tensorboard import tag_of
from zengine.telemetry.stragglers import from_json

__all__ = ["EVENT_FILES", "Event", "NoRunError", "PlanRow", "Points", "RecordedRun", "read_event_files", "read_run"]

RECORD, EVENTS, FLOPS, COMMS, TRACES = "run.json", "events.jsonl", "flops.json", "comms.rank*.json", "profile/*"

EVENT_FILES = "events.out.tfevents.*"
OVER_SAMPLES = "Train/Samples/"  # the family of tags over samples

NAMELESS = ("record", "run", "DeepSpeedJobName")  # names of record folders inside a job's folder

MAX_STEP = 2**53  # larger steps are not distinct as floats

Points = list[tuple[float, float]]  # (step, value), by step
Series = Mapping[int, tuple[float, float]]  # x -> (wall time in seconds, value); the last one written counts


class NoRunError(ValueError):
    """Folder without a run."""


@attrs.frozen
class PlanRow:
    """One resolved value of the run."""

    key: str
    value: str
    origin: str  # "default", "derived", "config.json:12", ...

    @property
    def is_default(self) -> bool:
        return self.origin == "default"


@attrs.frozen
class Event:
    """One step, as recorded by rank 0."""

    step: int
    samples: int
    time_s: float  # since the start of the process
    values: Mapping[str, float]  # by tag; may be non-finite


@attrs.frozen(kw_only=True)
class RecordedRun:
    """Contents of a run's folder."""

    name: str
    folder: Path
    events: tuple[Event, ...] = ()  # by step; of a repeated step, the last run
    seconds: float = 0.0  # total time of these steps, including lost and repeated ones
    started: str = ""
    config: Mapping[str, Any] = attrs.field(factory=dict)  # as given
    plan: tuple[PlanRow, ...] = ()
    environment: Mapping[str, str] = attrs.field(factory=dict)
    flops: tuple[FlopsProfile, ...] = ()  # one or none
    comms: Mapping[int, list[Messages]] = attrs.field(factory=dict)  # by rank
    traces: tuple[str, ...] = ()  # names of files in profile/
    remarks: tuple[str, ...] = ()  # what is missing or damaged, in sentences

    series: Mapping[str, Points] = attrs.field(init=False, repr=False)  # the events by tag, in order of appearance

    @series.default
    def _by_tag(self) -> Mapping[str, Points]:
        found: dict[str, Points] = {}
        for event in self.events:
            for tag, value in event.values.items():
                found.setdefault(tag, []).append((float(event.step), value))
        return found

    def points(self, *tags: str) -> Points:
        """Return the series of the first recorded tag of `tags`."""
        return next((self.series[tag] for tag in tags if tag in self.series), [])

    def tags(self, prefix: str) -> list[str]:
        """Return the tags with a prefix, in order of appearance."""
        return [tag for tag in self.series if tag.startswith(prefix)]


def read_run(folder: Path) -> RecordedRun:
    """Read `folder`, or the single run inside it.  Raises NoRunError if there is none, or more than one."""
    if not folder.is_dir():
        raise NoRunError(f"{folder}: no such folder. Give the folder of a run, which contains {EVENTS}")
    name, folder = _name(folder.resolve()), _find_run(folder)
    reader = _Reader(folder)
    events, seconds = reader.events()
    record = reader.object(RECORD, "config and environment are unknown")
    run = RecordedRun(
        name=name,
        folder=folder,
        events=events,
        seconds=seconds,
        started=str(record.get("started", "")),
        config=_mapping(record.get("config")),
        plan=_plan(record.get("plan")),
        environment={str(key): _text(value) for key, value in _mapping(record.get("environment")).items()},
        flops=reader.flops(),
        comms=reader.comms(),
        traces=tuple(sorted(path.name for path in folder.glob(TRACES))),
        remarks=tuple(reader.remarks),
    )
    if not (events or record or run.flops or run.comms):
        raise NoRunError(
            f"{folder}: no record of a run ({'; '.join(run.remarks)}). To record a run, set "
            '"jsonl_monitor": {"enabled": true, "output_path": "runs", "job_name": "name"}'
        )
    return run


def _name(folder: Path) -> str:
    """Return the name of the run in a folder."""
    return folder.parent.name if folder.name in NAMELESS and folder.parent.name else folder.name


def _find_run(folder: Path) -> Path:
    """Return the folder itself, or the single run in it.  Raises NoRunError if there are several."""
    if (folder / EVENTS).exists() or any(folder.glob(EVENT_FILES)):
        return folder
    runs = sorted(path.parent for path in folder.glob(f"*/{EVENTS}"))
    if len(runs) > 1:
        names = " ".join(str(run) for run in runs[:8]) + (" ..." if len(runs) > 8 else "")
        raise NoRunError(f"{folder} contains {len(runs)} runs. Give one of them, or several to compare: {names}")
    return runs[0] if runs else folder


@attrs.define
class _Reader:
    """Reads files and collects remarks."""

    folder: Path
    remarks: list[str] = attrs.field(factory=list)

    def text(self, name: str) -> str:
        """Return the text of a file; invalid UTF-8, which a crash can leave, is replaced.  Raises OSError."""
        return (self.folder / name).read_text(encoding="utf-8", errors="replace")

    def object(self, name: str, without: str) -> dict[str, Any]:
        """Return the JSON object of a file; {} and a remark if it has none."""
        try:
            found = json.loads(self.text(name))
        except FileNotFoundError:
            self.remarks.append(f"there is no {name}: {without}")
            return {}
        except (OSError, ValueError, RecursionError) as error:
            self.remarks.append(f"{name} cannot be read ({error}): {without}")
            return {}
        if isinstance(found, dict):
            return found
        self.remarks.append(f"{name} does not hold an object: {without}")
        return {}

    def events(self) -> tuple[tuple[Event, ...], float]:
        """Return the steps, and the seconds they took."""
        if not (self.folder / EVENTS).exists() and any(self.folder.glob(EVENT_FILES)):
            self.remarks.append(f"there is no {EVENTS}: the curves come from TensorBoard's event files")
            return _deduplicate(filter(None, map(_event, read_event_files(self.folder))))
        try:
            lines = self.text(EVENTS).splitlines(keepends=True)
        except OSError as error:
            is_absent = isinstance(error, FileNotFoundError)
            reason = f"there is no {EVENTS}" if is_absent else f"{EVENTS} cannot be read ({error})"
            self.remarks.append(f"{reason}: there are no curves")
            return (), 0.0
        found = [_event(line) for line in lines]
        if found and found[-1] is None and not lines[-1].endswith("\n"):
            found.pop()
            self.remarks.append(f"the last line of {EVENTS} is incomplete: the run was killed while writing it")
        damaged = [str(number) for number, event in enumerate(found, 1) if event is None]
        if damaged:
            those = ", ".join(damaged[:5]) + (", ..." if len(damaged) > 5 else "")
            self.remarks.append(f"{EVENTS} has lines that cannot be read and are left out: {those} of {len(lines)}")
        return _deduplicate([event for event in found if event is not None])

    def flops(self) -> tuple[FlopsProfile, ...]:
        if not (self.folder / FLOPS).exists():
            return ()
        fields = self.object(FLOPS, "the FLOPs by module are left out")
        try:
            return (FlopsProfile.from_json(fields),) if fields else ()
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            self.remarks.append(f"{FLOPS} has another form (at {error}): the FLOPs by module are left out")
            return ()

    def comms(self) -> dict[int, list[Messages]]:
        ranks = {}
        for path in sorted(self.folder.glob(COMMS)):
            fields = self.object(path.name, "its rank is left out")
            try:
                ranks[read_count(fields["rank"])] = [from_json(each) for each in fields["messages"]]
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                if fields:
                    self.remarks.append(f"{path.name} has another form (at {error}): its rank is left out")
        return dict(sorted(ranks.items()))


def _event(line: str | dict[str, Any]) -> Event | None:
    """Parse one line; None if it is not a step."""
    try:
        fields = json.loads(line) if isinstance(line, str) else line
        values = {str(tag): math.nan if value is None else float(value) for tag, value in fields["values"].items()}
        event = Event(int(fields["step"]), int(fields["samples"]), float(fields["time_s"]), values)
        return event if abs(event.step) < MAX_STEP else None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


def _deduplicate(events: Iterable[Event]) -> tuple[tuple[Event, ...], float]:
    """Deduplicate steps: a repeated step replaces itself and all later ones.  Also return the total time."""
    kept: list[Event] = []
    seconds = before = 0.0
    for event in events:
        while kept and kept[-1].step >= event.step:
            kept.pop()
        seconds += event.time_s - before if event.time_s >= before else event.time_s  # less: another process
        before = event.time_s
        kept.append(event)
    return tuple(kept), seconds if math.isfinite(seconds) else 0.0


def _plan(rows: Any) -> tuple[PlanRow, ...]:
    """Return rows of three values; others are dropped."""
    if not isinstance(rows, list):
        return ()
    return tuple(PlanRow(*map(_text, row)) for row in rows if isinstance(row, list) and len(row) == 3)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def read_event_files(folder: Path) -> list[dict[str, Any]]:
    """Return rows as in events.jsonl, in the order of the steps.  Raises ImportError without tensorboard."""
    scalars = _scalars(folder)
    families: list[dict[str, Series]] = [
        {tag: series for tag, series in scalars.items() if tag.startswith(OVER_SAMPLES) is over_samples}
        for over_samples in (False, True)
    ]
    steps, samples = (sorted({x for series in family.values() for x in series}) for family in families)
    by_samples = dict(zip(steps if len(steps) == len(samples) else range(1, len(samples) + 1), samples))
    axis = by_samples if samples and (not steps or len(steps) == len(samples)) else dict.fromkeys(steps, 0)
    begin = min((when for series in scalars.values() for when, _ in series.values()), default=0.0)
    lines = []
    for step, at in axis.items():
        found = {tag: series[x] for family, x in zip(families, (step, at)) for tag, series in _at(family, x)}
        time_s = max((when for when, _ in found.values()), default=begin) - begin
        values = {tag: value for tag, (_, value) in found.items()}
        lines.append({"step": step, "samples": at, "time_s": time_s, "values": values})
    return lines


def _at(family: Mapping[str, Series], x: int) -> Iterable[tuple[str, Series]]:
    """Return the series that have a point at x."""
    return ((tag, series) for tag, series in family.items() if x in series)


def _scalars(folder: Path) -> dict[str, Series]:
    from tensorboard.backend.event_processing import event_accumulator  # slow to import

    reader: Any = event_accumulator.EventAccumulator(str(folder), size_guidance={event_accumulator.SCALARS: 0})
    reader.Reload()
    names = {name: tag_of(name) for name in reader.Tags()[event_accumulator.SCALARS]}
    return {
        tag: {point.step: (point.wall_time, point.value) for point in reader.Scalars(name)}
        for name, tag in names.items()
        if tag
    }
