"""The acceptance on a GPU, apart from its pieces: verdicts, the state file, budgets, reports, READMEs, replays."""

from __future__ import annotations

import json
import re
import sys
import time
import types
from pathlib import Path
from typing import Any

import attrs
import pytest
import repo
import torch

import gpu_acceptance
from acceptance import places, readme
from acceptance.bench import Bench, differing
from acceptance.overlap import hidden_share
from acceptance.pieces.kernels import predicted_us
from acceptance.replay import needed_waits, violations
from acceptance.report import MOST_BYTES, markdown, read_reports, write_report
from acceptance.runner import Memory, Runner, key_of
from acceptance.table import LONGEST_S, PIECES, choose
from acceptance.verdict import Figure, Judgement, State, Verdict

FACTS: dict[str, Any] = {
    "device": "NVIDIA Test 1",
    "capability": "9.0",
    "memory_gib": 80.0,
    "multiprocessors": 132,
    "is_simulated": False,
    "driver": "580.1",
    "versions": {"torch": "2.11.0", "python": "3.12.3"},
    "commit": "abc",
    "sources": "0123",
    "notes": [],
}
SHARE = Figure(name="share", unit="of a copy", measured=0.95, at_least=0.9)


def verdict_of(state: State, piece: str = "timers", **more: Any) -> Verdict:
    return Verdict(piece=piece, state=state, **more)


@pytest.mark.parametrize(
    ("figure", "judgement", "ratio"),
    [
        (SHARE, Judgement.PASSED, None),
        (attrs.evolve(SHARE, measured=0.89), Judgement.FAILED, None),
        (attrs.evolve(SHARE, measured=float("nan")), Judgement.FAILED, None),
        (attrs.evolve(SHARE, measured=None), Judgement.NOT_MEASURED, None),
        (Figure(name="t", unit="ms", measured=3.0, peer=2.0, at_most=1.25), Judgement.FAILED, 1.5),
        (Figure(name="t", unit="ms", measured=3.0, peer=2.0, predicted=3.0), Judgement.MEASURED, 1.5),
        (Figure(name="t", unit="B", measured=95, predicted=100, at_least=0.9, at_most=1.1), Judgement.PASSED, 0.95),
        (Figure(name="t", unit="B", predicted=100, at_least=0.9), Judgement.NOT_MEASURED, None),
    ],
)
def test_a_figure_is_judged_by_its_ratio_and_never_passes_unmeasured(
    figure: Figure, judgement: Judgement, ratio: float | None
) -> None:
    assert (figure.judgement, figure.ratio) == (judgement, ratio)


def test_a_verdict_survives_json() -> None:
    verdict = verdict_of(State.FAILED, reason="r", checks=("a",), figures=(SHARE,), output="o")
    assert Verdict.from_json(json.loads(json.dumps(verdict.to_json()))) == verdict


def test_a_piece_passes_if_all_of_it_ran_and_held(tmp_path: Path) -> None:
    def concluded(*faults: str, figure: Figure = SHARE, skips: str = "", is_simulated: bool = False) -> Verdict:
        bench = Bench(torch.device("cpu"), tmp_path, tmp_path, is_simulated)
        bench.check("it holds", faults)
        bench.figure(figure)
        if skips:
            bench.skip("a part", skips)
        return bench.verdict("timers", 1.0)

    assert concluded().state is State.PASSED
    assert concluded("b").reason == "it holds: b"
    assert concluded(figure=attrs.evolve(SHARE, measured=0.5)).state is State.FAILED
    assert concluded("b", skips="no GPU").state is State.FAILED
    assert concluded(skips="no GPU").reason == "a part: no GPU"
    assert concluded(skips="no GPU").state is State.NOT_RUN
    simulated = concluded(figure=attrs.evolve(SHARE, measured=0.5), is_simulated=True)
    assert simulated.state is State.PASSED
    assert [each.judgement for each in simulated.figures] == [Judgement.NOT_MEASURED]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_bits_differ_where_one_does(dtype: torch.dtype) -> None:
    ours = [torch.arange(6).to(dtype).view(2, 3), torch.ones((), dtype=dtype)]
    theirs = [tensor.clone() for tensor in ours]
    assert differing(ours, theirs) == []
    theirs[0].view(-1).view(torch.uint8)[-1] ^= 1
    assert differing(ours, theirs) == [f"tensor 0 ({dtype}, (2, 3)): 1 bytes differ"]
    assert differing(ours, theirs[:1]) == ["2 tensors instead of 1"]
    assert differing(ours[:1], theirs[1:]) == [f"tensor 0: {dtype} (2, 3) instead of {dtype} ()"]
    nan = torch.full((2,), float("nan"))
    assert differing([nan], [nan.clone()]) == []


def test_every_piece_ends_in_eight_minutes_and_concerns_a_package() -> None:
    assert all(piece.limit_s <= LONGEST_S == 480 for piece in PIECES)
    assert all(piece.packages for piece in PIECES)
    assert len({piece.name for piece in PIECES}) == len(PIECES)
    with pytest.raises(ValueError, match=r"no such piece; choose from kernel-bits, "):
        choose("kernels")


@attrs.define(eq=False, kw_only=True)
class FakeRunner(Runner):
    """Runs nothing: children answer from a table."""

    answers: dict[str, Verdict]
    asked: list[str] = attrs.field(factory=list)

    def _child(self, name: str, limit_s: float) -> tuple[dict[str, Any] | None, str]:
        self.asked.append(name)
        found = self.answers.get(name)
        return (None, "boom\nthe process ended with code -11") if found is None else (found.to_json(), "text")


def runner(answers: dict[str, Verdict], seconds: float = 1e6, **more: Any) -> FakeRunner:
    deadline = time.monotonic() + seconds
    return FakeRunner(
        environ={}, results=Path("unused"), deadline=deadline, log=lambda _: None, answers=answers, **more
    )


def test_only_what_has_not_passed_runs_again(tmp_path: Path) -> None:
    pieces = choose("timers,loaders,disk")
    answers = {"timers": verdict_of(State.PASSED), "loaders": verdict_of(State.FAILED, "loaders", reason="bits")}
    first, path = runner(answers), tmp_path / "state.json"
    found = first.run(pieces, Memory.open(path), "key", again=False)
    assert [found[name].state for name in ("timers", "loaders", "disk")] == [State.PASSED, State.FAILED, State.FAILED]
    assert found["disk"].reason == "the process ended with code -11"
    assert "boom" in found["disk"].output
    second = runner(answers)
    assert second.run(pieces, Memory.open(path), "key", again=False)["timers"].state is State.PASSED
    assert second.asked == ["loaders", "disk"]
    for key, again in (("key", True), ("another commit", False)):
        third = runner(answers)
        third.run(pieces, Memory.open(path), key, again)
        assert third.asked == ["timers", "loaders", "disk"]


def test_a_piece_that_could_end_too_late_is_not_started(tmp_path: Path) -> None:
    state = Memory.open(tmp_path / "state.json")
    short = runner({"timers": verdict_of(State.PASSED)}, seconds=100)
    found = short.run(choose("disk,timers"), state, "key", again=False)
    assert short.asked == ["timers"]
    assert found["disk"].state is State.NOT_RUN
    assert "disk" not in Memory.open(tmp_path / "state.json").of("key")


def test_a_planted_fault_leaves_no_verdict(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    runner({"timers": verdict_of(State.FAILED)}, plant="batch-bit").run(
        choose("timers"), Memory.open(path), "k", False
    )
    assert not path.exists()


def test_a_file_of_something_else_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_text("[1]")
    with pytest.raises(ValueError, match="is no state of this script"):
        Memory.open(path)


def test_verdicts_are_comparable_for_the_same_sources_device_and_versions() -> None:
    for change in ({"sources": "9"}, {"device": "other"}, {"driver": "1"}, {"versions": {"torch": "2.12"}}):
        assert key_of(FACTS | change) != key_of(FACTS)
    assert key_of(FACTS | {"commit": "def"}) == key_of(FACTS)


def test_a_report_has_every_piece_with_its_verdict(tmp_path: Path) -> None:
    failed = verdict_of(State.FAILED, "loaders", reason="a | b", output="x" * 4000)
    known = {"timers": verdict_of(State.PASSED, checks=("c",), figures=(SHARE,)), "loaders": failed}
    text, data = write_report(tmp_path, FACTS, known)
    report = json.loads(data.read_text())
    assert [each["piece"] for each in report["pieces"]] == [piece.name for piece in PIECES]
    assert data.stat().st_size <= MOST_BYTES
    page = text.read_text()
    assert page == markdown(report)
    assert "| telemetry's timers | passed | 0 | c |" in page
    assert "| batches copied ahead | failed | 0 | a \\| b |" in page
    assert "| not run | 0 | it was not asked for |" in page
    assert "| timers | share | of a copy | 0.95 |  |  |  | at least 0.9 | passed |" in page


def test_nothing_is_measured_in_a_report_of_the_simulated_device(tmp_path: Path) -> None:
    figure = attrs.evolve(SHARE, measured=None)
    verdict = verdict_of(State.PASSED, checks=("c",), figures=(figure,))
    text, _ = write_report(tmp_path, FACTS | {"is_simulated": True}, {"timers": verdict})
    assert "| timers | share | of a copy | not measured |  |  |  | at least 0.9 | not measured |" in text.read_text()
    assert read_reports(tmp_path) == [], "READMEs quote GPUs only"


def test_the_newest_report_of_each_device_counts(tmp_path: Path) -> None:
    write_report(tmp_path, FACTS, {"timers": verdict_of(State.PASSED)})
    (data,) = tmp_path.glob("*.json")
    older = json.loads(data.read_text()) | {"date": "2020-01-01"}
    (tmp_path / "nvidia-test-1-2020-01-01.json").write_text(json.dumps(older))
    (tmp_path / "nvidia-test-1-trace.json").write_text("{}")
    assert [report["date"] for report in read_reports(tmp_path)] == [json.loads(data.read_text())["date"]]


def test_readmes_say_what_the_reports_say() -> None:
    reports = read_reports(places.RESULTS)
    for path, package in readme.pages().items():
        text = path.read_text(encoding="utf-8")
        remedy = "run: python tools/gpu_acceptance.py --write-readme"
        assert text == readme.with_block(text, readme.block(reports, package)), remedy


CLAIM = re.compile(
    r"\b(?:A100|H100|H200|B200|L40S?|RTX)\b|\b(?:measured|proved|ran|run|tested) on (?:a |an |one |the )?"
    r"(?:NVIDIA |CUDA )?GPUs?\b",
    re.IGNORECASE,
)
DENIAL = re.compile(r"\b(?:no|not|never|nothing|until|predict\w*)\b", re.IGNORECASE)


def claims_of(text: str) -> list[str]:
    """Return the sentences outside a block that claim a run on a GPU."""
    blocks = re.compile(f"{re.escape(readme.BEGIN)}.*?{re.escape(readme.END)}", re.DOTALL)
    sentences = re.split(r"(?<=[.:;])\s+|\n\s*\n", blocks.sub("", text))
    return [each for each in sentences if CLAIM.search(" ".join(each.split())) and not DENIAL.search(each)]


def test_no_page_claims_a_run_on_a_gpu_outside_its_block() -> None:
    assert claims_of("It is fast. It was measured on\nan NVIDIA GPU.") == ["It was measured on\nan NVIDIA GPU."]
    assert claims_of("No kernel has run on a GPU. A model predicts it for the H200.") == []
    pages = [*readme.pages(), repo.ROOT / "ARCHITECTURE.md", *repo.ROOT.glob("packages/*/DESIGN.md")]
    found = {str(page): claims_of(page.read_text(encoding="utf-8")) for page in pages}
    assert not any(found.values()), found


def test_a_block_names_device_and_verdicts() -> None:
    pieces = [verdict_of(State.PASSED).to_json(), verdict_of(State.FAILED, "loaders", reason="x").to_json()]
    report = {**FACTS, "date": "2027-01-02", "pieces": pieces}
    text = " ".join(readme.block([report], "zengine").split())
    assert text.startswith("- **NVIDIA Test 1**, 2027-01-02, torch 2.11.0, driver 580.1: passed: telemetry's timers;")
    assert "failed: batches copied ahead." in text
    assert "Other CUDA paths of this package have not run on a GPU." in text
    assert "telemetry" not in readme.block([report], "zoptim")
    assert "passed: 1 of " in readme.block([report])
    assert readme.block([]).startswith("No GPU has run this code")
    with pytest.raises(ValueError, match="has no block about GPUs"):
        readme.with_block("# A page\n", "text")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--only", "x"], "no such piece"), (["--plant", "x"], "no such fault; choose from kernel-bit")],
)
def test_a_wrong_name_is_told_before_anything_runs(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_acceptance.main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_acceptance.main(["--results", str(tmp_path)]) == 2
    assert "sees no CUDA device. Install a CUDA build of torch" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_list_names_every_piece(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_acceptance.main(["--list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == [piece.name for piece in PIECES]


def test_the_cost_model_is_asked_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def predicted(kernel: str, numel: int, device: str | None) -> types.SimpleNamespace:
        return types.SimpleNamespace(us={"adam: f32 f32 f32": 700.0}[kernel] * numel if device == "h200" else 1 / 0)

    monkeypatch.setitem(sys.modules, "predicted", None)
    assert predicted_us("adamw", 1, "NVIDIA H200") is None
    model = types.SimpleNamespace(predicted=predicted, device_of=lambda name: name.lower()[-4:])
    monkeypatch.setitem(sys.modules, "predicted", model)
    assert predicted_us("adamw", 2, "NVIDIA H200") == 1400.0
    assert predicted_us("lion", 2, "NVIDIA H200") is None
    assert predicted_us("lamb", 2, "NVIDIA H200") is None


# A copy on stream 1 of what stream 0 makes, read by the host: events 0 and 1 order it.
IN_ORDER = [
    ["allocate", 0, 0, 64],
    ["launch", 0, "fill", [], [[0, 64]]],
    ["record", 0, 0],
    ["wait", 1, 0],
    ["launch", 1, "copy", [[0, 64]], [[512, 576]]],
    ["record", 1, 1],
    ["wait host", 1],
    ["host", "sum", [[512, 576]], []],
    ["use", 1, 0, 64],
    ["allocate", 0, 32, 64],
]


def test_a_record_with_its_waits_is_ordered() -> None:
    assert violations(IN_ORDER) == []
    assert needed_waits(IN_ORDER) == (2, 3), "the host has waited, so record_stream is not needed"


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("wait", "copy on stream 1 reads memory that fill on the default stream writes, and nothing orders the two"),
        ("wait host", "sum on the host reads memory that copy on stream 1 writes, and nothing orders the two"),
    ],
)
def test_a_missing_wait_is_found(kind: str, found: str) -> None:
    assert found in violations([entry for entry in IN_ORDER if entry[0] != kind])


def test_memory_freed_in_use_needs_record_stream() -> None:
    unread = [entry for entry in IN_ORDER if entry[0] not in ("wait host", "host")]
    assert violations(unread) == []
    assert needed_waits(unread) == (2, 2)
    without = [entry for entry in unread if entry[0] != "use"]
    assert violations(without) == ["memory is freed while copy on stream 1 uses it: call record_stream"]


def test_a_write_waits_for_reads_and_two_reads_for_nothing() -> None:
    reads = [["launch", 0, "a", [[0, 8]], []], ["launch", 1, "b", [[0, 8]], []]]
    assert violations(reads) == []
    assert len(violations([*reads, ["launch", 2, "c", [], [[4, 6]]]])) == 2
    assert violations([*reads, ["launch", 2, "c", [], [[8, 9]]]]) == []
    assert violations([*reads, ["wait all"], ["launch", 2, "c", [], [[4, 6]]]]) == []


def test_an_entry_of_an_unknown_kind_is_rejected() -> None:
    with pytest.raises(ValueError, match="entry 0 is of kind 'lunch'; allowed: launch, "):
        violations([["lunch", 0]])


def test_the_share_of_copies_beside_kernels_is_that_of_their_time() -> None:
    def event(category: str, begin: float, length: float) -> dict[str, Any]:
        return {"ph": "X", "cat": category, "ts": begin, "dur": length}

    kernels = [event("kernel", 0, 10), event("kernel", 5, 10), event("kernel", 100, 1)]
    copies = [event("gpu_memcpy", 10, 10), event("gpu_memcpy", 30, 10)]
    assert hidden_share([*kernels, *copies, {"ph": "M"}]) == pytest.approx(5 / 20)
    assert hidden_share(kernels) is None
