"""Whole pages: well formed, complete, harmless."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from random import Random
from typing import Any

import pytest

from zengine.reporting import NoRunError, write_report
from zengine.reporting.page import duration, number_names

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
VOID = {"meta", "link", "br", "img", "input", "hr", "wbr"}


class Checker(HTMLParser):
    """Complains about tags that are not closed in order; collects tags, text and what a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str | None] = []
        self.tags: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        self.fetched += [name for name, _ in attrs if name.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1:] == [tag], f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def checked(text: str) -> Checker:
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert checker.open == []
    assert checker.fetched == []
    assert not re.search(r"https?://|@import|url\((?!#)", text)
    return checker


def make_run(folder: Path, steps: int = 40, name: str = "torch") -> Path:
    """A folder with everything, in which whoever could has written mischief."""
    folder.mkdir(parents=True)
    with (folder / "events.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            skipped = step == 9
            values = {
                "train/loss": "NaN" if skipped else 5.5 - step / 20,
                "train/learning_rate": 1e-3,
                "train/grad_norm": "Infinity" if skipped else 1.0,
                "Train/Samples/skipped_steps": float(step >= 9),
                "Train/Samples/loss_scale": 2.0 ** (16 - (step >= 9)),
                "perf/step_time_ms": 50.0,
                "perf/tokens_per_second": 12_345.0,
                "perf/tflops": 1.5,
                "perf/mfu": 0.415,
                "memory/cuda_bytes": 3e9,
                "memory/cuda_peak_bytes": 4 * 2.0**30,
                "memory/parameters_bytes": 1e9,
                f"memory/{EVIL}_bytes": 1e9,
            }
            timers = {
                f"Train/Samples/elapsed_time_ms_{name}": 10.0 for name in ("forward", "backward", "step", "data")
            }
            event = {"step": step, "samples": step * 8, "time_s": step * 0.5, "values": {**values, **timers}}
            file.write(json.dumps(event) + "\n")
    record = {
        "started": "2026-11-21T17:00:00",
        "config": {"optimizer": {"type": EVIL}},
        "plan": [
            ["zero_optimization.stage", 3, "config.json:4"],
            [EVIL, EVIL, EVIL],
            ["dump_state", False, "default"],
        ],
        "environment": {name: "2.13", EVIL: EVIL},
    }
    modules = [{"path": "", "kind": EVIL, "params": 7_000, "flops": 64_000, "ms": 2.0, "calls": 1}]
    modules += [{**modules[0], "path": f"{EVIL}.{i}", "params": 2_500, "flops": 32_000, "ms": 1.0} for i in range(2)]
    flops = {"modules": modules, "operations": {"mm": 64_000}, "backward_flops": 128_000, "recompute_factor": 0.0}
    message = {"op": EVIL, "size_bytes": 2048, "group_size": 2, "count": 3, "nbytes": 6144, "ms": 3.0}
    files = {"run.json": record, "flops.json": {**flops, "step": 1}}
    for rank, wait_ms in enumerate((2.0, 0.5)):
        files[f"comms.rank{rank}.json"] = {"rank": rank, "messages": [{**message, "wait_ms": wait_ms}]}
    for file_name, content in files.items():
        (folder / file_name).write_text(json.dumps(content))
    return folder


def page_of(*folders: Path) -> str:
    out = folders[0] / "made" / "page.html"
    write_report(folders, out)
    assert [path.name for path in out.parent.iterdir()] == ["page.html"]
    return out.read_text()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return page_of(make_run(tmp_path_factory.mktemp("runs") / "a <run>"))


def test_the_page_is_well_formed_and_fetches_nothing(page: str) -> None:
    checker = checked(page)
    assert checker.tags.count("figure") == 10
    assert checker.tags.count("h1") == 1


def test_the_figures_are_on_the_page(page: str) -> None:
    text = " ".join(checked(page).text)
    figures = ["39", "12.3k", "1.5", "41.5%", "4 GiB", "3.5", "64 kFLOPs", "7 k parameters", "2.00 times", "0:20"]
    figures += ["2 KiB", "Rank 1 waits least", "2026-11-21T17:00:00", "config.json:4", "40 steps, 1 skipped"]
    for figure in figures:
        assert figure in text, figure


def test_every_tile_says_what_its_figure_is(page: str) -> None:
    tiles = dict(re.findall(r"<div class=tile><b>([^<]*)</b><span>([^<]*)</span>", page))
    assert tiles == {
        "39": "steps applied",
        "1": "steps skipped",
        "3.5": "loss, last step",
        "12.3k": "tokens per second, median",
        "50": "ms per step, median",
        "1.5": "TFLOPS per device, median",
        "41.5%": "of the device&#x27;s peak (MFU), median",
        "4 GiB": "memory of rank 0, peak",
    }


def test_medians_say_which_steps_they_are_of(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=12)
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    for line in lines[:3]:  # warm-up: nothing is measured
        line["values"] = {tag: value for tag, value in line["values"].items() if not tag.startswith("perf/")}
    for line, ms in zip(lines[3:], (10, 20, 30, 40, 90, 91, 92, 93, 94)):
        line["values"]["perf/step_time_ms"] = float(ms)
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = page_of(folder)
    assert "Medians are over the measured steps, 4 to 12." in text
    assert "<b>90</b><span>ms per step, median</span>" in text
    assert "Medians" not in page_of(make_bare(tmp_path / "bare"))


def make_bare(folder: Path) -> Path:
    """A run whose speed was not measured."""
    folder.mkdir()
    event = {"step": 1, "samples": 4, "time_s": 0.1, "values": {"train/loss": 2.5}}
    (folder / "events.jsonl").write_text(json.dumps(event) + "\n")
    return folder


def test_the_sentence_and_the_tile_tell_the_same_last_loss(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=2500)  # so long that a smoothed curve is thinned first
    text = page_of(folder)
    told = re.search(r"the loss went from \S+ to (\S+),", text)
    assert told is not None
    assert f"<b>{told[1]}</b><span>loss, last step</span>" in text


def test_curves_are_of_each_step_where_ours_is_a_mean(tmp_path: Path) -> None:
    folder = make_bare(tmp_path / "run")
    event = {"step": 1, "samples": 4, "time_s": 0.1, "values": {"train/loss": 2.5, "Train/Samples/train_loss": 1.25}}
    (folder / "events.jsonl").write_text(json.dumps(event) + "\n")
    assert "<b>1.25</b><span>loss, last step</span>" in page_of(folder)


def test_every_quantity_has_its_chart(page: str) -> None:
    titles = re.findall(r"<figcaption><b>([^<]*)</b>", page)
    assert titles == [
        *("Loss", "Throughput", "Step time by phase", "Gradient norm", "Learning rate", "Memory by owner"),
        *("Total memory", "Compute", "Model FLOPs utilisation", "Loss scale"),
    ]


def test_nothing_that_was_recorded_becomes_markup(page: str) -> None:
    checker = checked(page)
    assert "img" not in checker.tags
    assert checker.tags.count("script") == 10 + 1  # one a chart, and the page's own
    assert "alert(1)</script>" not in page
    assert page.count("&lt;img") > 8


def test_every_chart_carries_its_points_for_the_cursor(page: str) -> None:
    for chart in re.findall(r'<script type="application/json">(.*?)</script>', page):
        plot = json.loads(chart, parse_constant=pytest.fail)  # NaN and Infinity, which a browser refuses
        assert plot["x"] == [1, 40]
        assert all(series["points"] for series in plot["series"])


@pytest.mark.parametrize("kept", ["events.jsonl", "run.json", "flops.json", "comms.rank0.json"])
def test_any_part_of_a_run_makes_a_page_that_says_what_is_missing(tmp_path: Path, kept: str) -> None:
    folder = make_run(tmp_path / "run")
    for path in folder.iterdir():
        if path.name != kept:
            path.unlink()
    text = page_of(folder)
    checked(text)
    assert "Missing data" in text


@pytest.mark.parametrize("length", [0, 1, 100, 5_000])
def test_a_run_that_was_killed_anywhere_makes_a_page(tmp_path: Path, length: int) -> None:
    folder = make_run(tmp_path / "run")
    events = (folder / "events.jsonl").read_bytes()
    (folder / "events.jsonl").write_bytes(events[:length])
    text = page_of(folder)
    checked(text)
    assert ("is incomplete: the run was killed" in text) is bool(length)


def test_one_step_is_a_run_too(tmp_path: Path) -> None:
    text = page_of(make_run(tmp_path / "run", steps=1))
    checked(text)
    assert "1 step, none skipped" in text


def test_several_runs_lie_over_each_other(tmp_path: Path) -> None:
    first, second = make_run(tmp_path / "x" / "run"), make_run(tmp_path / "y" / "run", steps=20)
    record = json.loads((second / "run.json").read_text())
    record["plan"][0][1] = 2
    record["environment"]["torch"] = "2.12"
    (second / "run.json").write_text(json.dumps(record))
    text = page_of(first, second)
    assert checked(text).tags.count("figure") == 5
    assert "<h1>x / y</h1>" in text
    differences = text[text.index("Config differences") : text.index("Environment differences")]
    assert "zero_optimization.stage" in differences
    assert "dump_state" not in differences


def test_a_folder_without_a_run_leaves_no_page(tmp_path: Path) -> None:
    with pytest.raises(NoRunError):
        write_report([tmp_path], tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == []


def test_names_that_are_equal_get_a_number() -> None:
    assert number_names(["a", "b", "a"]) == ["a (1)", "b", "a (3)"]


def test_durations_are_hours_minutes_and_seconds() -> None:
    assert [duration(seconds) for seconds in (0.4, 187, 7387)] == ["0:00", "3:07", "2:03:07"]


ODD = [None, True, -1, 0, 1e308, -1e308, 5e-324, "NaN", "Infinity", "x", "", [], {}, 10**400, 2**60, [[]], {"a": 1}]


def mutated(value: Any, random: Random) -> Any:
    """`value` with one in ten of its parts replaced by something else."""
    if random.random() < 0.1:
        return random.choice(ODD)
    if isinstance(value, dict):
        return {key: mutated(item, random) for key, item in value.items()}
    return [mutated(item, random) for item in value] if isinstance(value, list) else value


def test_no_content_of_the_files_stops_the_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=4)
    whole = {path: [json.loads(line) for line in path.read_text().splitlines()] for path in folder.iterdir()}
    for seed in range(40):
        random = Random(seed)
        for path, objects in whole.items():
            path.write_text("".join(json.dumps(mutated(item, random)) + "\n" for item in objects))
        try:
            write_report([folder], tmp_path / "page.html")
        except NoRunError:
            continue
        checked((tmp_path / "page.html").read_text())
