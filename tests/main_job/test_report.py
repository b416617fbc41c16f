"""The report page and its charts."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from train.evaluate import Result
from train.inference import Inference, Variant
from train.model import Shape
from train.recipe import Recipe
from train.report import ReportData, page
from zengine.inference.quantized import LayerError, QuantizationReport
from zengine.reporting.runs import Event, RecordedRun

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Checker(HTMLParser):
    """Checks that tags close in order; collects the resources that a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.fetched += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open[-1:] == [tag], f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data):
        self.text.append(data)


def make_data(**changes) -> ReportData:
    rows = []
    for step in range(1, 41):
        loss = math.nan if step == 9 else 5.5 - step / 20
        skipped = "gradients are not finite" if step == 9 else ""
        row = {"step": step, "loss": loss, "lr": 1e-3, "grad_norm": loss, "skipped": skipped}
        rows.append({**row, "ms": 100.0, "bytes_per_s": 1000.0, "memory_bytes": 2**28})
        if step % 10 == 0:
            rows.append({"step": step, "validation": math.inf if step == 10 else loss + 0.1})
    recipe = Recipe(
        config={"train_micro_batch_size_per_gpu": 4},
        shape=Shape(),
        seed=0,
        steps=40,
        validate_every=10,
        save_every=10,
        glance_windows=4,
        final_windows=8,
        must_win=False,
    )
    timers = {f"Train/Samples/elapsed_time_ms_{name}": 30.0 for name in ("forward", "backward", "step")}
    values = {**timers, "memory/parameters_bytes": 2.0**20, "memory/process_bytes": 2.0**28}
    events = tuple(Event(step, 4 * step, 0.1 * step, values) for step in range(1, 41))
    result = Result(unigram=4.6, bigram=3.5, model=2.5, step=40, guesses=512, fingerprint="0123456789abcdef")
    data = {
        "name": "a <run>",
        "recipe": recipe,
        "rows": rows,
        "record": RecordedRun(name="record", folder=Path("record"), events=events),
        "result": result,
        "inference": Inference(sample="if a < b & c: </script><script>alert(1)</script>"),
        "environment": {"device": "<cpu>"},
        "corpus": {"source": "/usr/lib"},
    }
    return ReportData(**{**data, **changes})


def checked(text: str) -> Checker:
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert checker.open == []
    return checker


def test_the_page_is_well_formed_and_fetches_nothing():
    text = page(make_data())
    checker = checked(text)
    assert checker.fetched == []
    assert not re.search(r"https?://|@import|url\((?!#)", text)
    assert checker.tags.count("figure") == 7


def test_generated_text_is_escaped():
    text = page(make_data())
    assert "alert(1)</script>" not in text
    assert "&lt;/script&gt;" in text
    assert "a &lt;run&gt;" in text
    assert "&lt;cpu&gt;" in text


def test_the_figures_are_on_the_page():
    text = "".join(checked(page(make_data())).text)
    for figure in ("2.500", "4.600", "3.500", "29%", "1k", "0:04", "it beats", "/usr/lib", "40 of 40"):
        assert figure in text, figure
    beaten = Result(unigram=4.6, bigram=3.5, model=3.6, step=40, guesses=512, fingerprint="")
    assert "does not beat" in page(make_data(result=beaten))


def test_skipped_steps_are_named():
    text = "".join(checked(page(make_data())).text)
    assert "skipped steps9" in text


def test_every_chart_carries_its_points_for_the_cursor():
    charts = re.findall(r'<script type="application/json">(.*?)</script>', page(make_data()))
    for chart in charts:
        plot = json.loads(chart, parse_constant=pytest.fail)  # NaN and Infinity, which browsers reject
        assert plot["x"] == [1, 40]
        assert all(series["points"] for series in plot["series"])


def test_a_run_without_a_record_leaves_its_charts_out():
    assert checked(page(make_data(record=RecordedRun(name="", folder=Path("record"))))).tags.count("figure") == 4


def test_every_tile_has_a_figure_and_its_name():
    def tiles(data: ReportData) -> dict[str, str]:
        return {
            name: value
            for value, name in re.findall(r"<div class=tile><b>([^<]*)</b><span>([^<]*)</span>", page(data))
        }

    assert tiles(make_data()) == {
        "bits per byte, held out": "2.500",
        "better than byte pairs by": "29%",
        "tokens per second, mean of all steps": "1k",
        "training time": "0:04",
    }
    beaten = Result(unigram=4.6, bigram=3.5, model=4.2, step=40, guesses=512, fingerprint="")
    assert tiles(make_data(result=beaten))["worse than byte pairs by"] == "20%"


def test_the_formats_are_in_a_table_with_a_drawing_of_the_errors():
    variants = tuple(
        Variant(
            name=name,
            nbytes=4_000_000 // size,
            bits_per_byte=2.0 + change,
            change=change / 2,
            top_1=1 - change,
            kl_mean=change / 10,
            kept_share=0.0,
            tokens_per_s=100.0 * size,
        )
        for name, size, change in (("fp32", 1, 0.0), ("int8", 4, 0.001), ("int4", 8, 0.02))
    )
    layers = tuple(LayerError(name=f"b.{i}.<up>", format="int4", error=0.08, nbytes=100) for i in range(3))
    report = QuantizationReport(layers=layers, kept=())
    inference = Inference(sample="", variants=variants, num_bytes=512, report=report)
    assert inference.table().splitlines()[-1].split() == ["int4", "2.0200", "+1.00%", "98.00%", "2.0e-03", "800"]
    text = page(make_data(inference=inference))
    checker = checked(text)
    for figure in ("2.0200", "+1.00%", "98.00%", "2.0e-03", "800", "0.50", "512 held-out bytes"):
        assert figure in "".join(checker.text), figure
    assert checker.tags.count("svg") == checked(page(make_data())).tags.count("svg") + 1
    assert text.count("<title>b.") == 3
    assert "&lt;up&gt;" in text
