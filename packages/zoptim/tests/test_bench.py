"""The benchmark runs, its contenders agree, and its reports describe the measurement.  No test asserts a time."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parent.parent / "bench"
CASES = ("adamw", "offload", "boundary", "split", "bf16", "8bit", "lamb", "lion", "adagrad", "sgd")

pytestmark = [
    pytest.mark.skipif(not BENCH.is_dir(), reason="the bench is part of the repository, not of the wheel"),
    pytest.mark.skipif(sys.platform == "win32", reason="the bench asks POSIX for the machine's load"),
]


def run_step(folder: Path, *options: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """step.py at a tiny size; DeepSpeed would compile for minutes."""
    fixed = [
        "--without",
        "DeepSpeed",
        "--warm",
        "--rounds",
        "1",
        "--threads",
        "1",
        "--results",
        str(folder),
        "--name",
        "tiny",
    ]
    return subprocess.run(
        [sys.executable, str(BENCH / "step.py"), *fixed, *options],
        env={**os.environ, **environ}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


def run_in_bench(code: str) -> None:
    """Run `code` in another process that can import the modules of the benchmark."""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(BENCH)},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the reports of one tiny run over all cases and shapes."""
    folder = tmp_path_factory.mktemp("bench")
    done = run_step(folder, "--only", ",".join(CASES), "--total", "20k")
    assert done.returncode == 0, done.stderr
    assert "AdamW, float32; 20k in 292 tensors; 28 B/parameter" in done.stdout
    return folder


def test_every_case_has_a_figure_for_ours_and_for_the_floor(ran: Path) -> None:
    tables = json.loads((ran / "tiny.json").read_text())["tables"]
    assert [(t["case"], t["shape"]) for t in tables] == [(c, s) for c in CASES for s in ("flat", "gpt2")]
    assert all(table["num_tensors"] == {"flat": 1, "gpt2": 292}[table["shape"]] for table in tables)
    for table in tables:
        assert min(table["seconds"]["ours"]) > 0
        if shutil.which("cc"):
            assert min(table["seconds"]["floor"]) > 0, table["notes"]
            assert table["x_floor"]["ours"] > 0


def test_the_bytes_of_a_case_are_those_that_its_step_must_move(ran: Path) -> None:
    tables = json.loads((ran / "tiny.json").read_text())["tables"]
    found = {table["case"]: table["bytes_per_param"] for table in tables}
    expected = {"adamw": 28, "offload": 28, "boundary": 30, "split": 26, "bf16": 20, "8bit": 16, "lamb": 40}
    assert found == {**expected, "lion": 20, "adagrad": 20, "sgd": 20}


def test_torch_in_its_three_ways_is_among_the_contenders(ran: Path) -> None:
    tables = json.loads((ran / "tiny.json").read_text())["tables"]
    for case in ("adamw", "offload", "boundary", "adagrad", "sgd"):
        names = {name for table in tables if table["case"] == case for name in table["seconds"]}
        assert {"ours", "torch fused", "torch foreach", "torch for"} <= names


def test_the_report_names_machine_and_versions_and_the_picture_is_xml(ran: Path) -> None:
    page = (ran / "tiny.md").read_text()
    assert all(word in page for word in ("processor:", "versions: torch", "kernels: ", "load average"))
    dots = ElementTree.parse(ran / "tiny.svg").getroot().iter("{http://www.w3.org/2000/svg}circle")
    if shutil.which("cc"):
        assert any("ours: " in "".join(dot.itertext()) for dot in dots)


def test_without_a_compiler_the_report_explains_the_missing_floor(tmp_path: Path) -> None:
    done = run_step(tmp_path, "--only", "lion", "--total", "2k", "--shapes", "flat", PATH=str(tmp_path), CC="")
    assert done.returncode == 0, done.stderr
    (table,) = json.loads((tmp_path / "tiny.json").read_text())["tables"]
    assert "floor" not in table["seconds"]
    assert any(note.startswith("floor: there is no C compiler") for note in table["notes"])


def test_import_costs_are_measured_in_new_interpreters() -> None:
    run_in_bench(
        "import machine\n"
        "report = 'import time: self [us] | cumulative | imported package\\nimport time:  1 |  2500 |   zoptim\\n'\n"
        "assert machine._cumulative_us(report) == {'zoptim': 2500}\n"
        "cost = machine.import_cost(runs=1)\n"
        "assert cost['zoptim_ms'] > 0 and cost['torch_ms'] > 0\n"
    )


def test_an_unknown_case_raises_with_the_known_ones(tmp_path: Path) -> None:
    done = run_step(tmp_path, "--only", "adamw,rprop")
    assert done.returncode == 2
    assert "rprop: it takes adamw,offload" in done.stderr.replace(", ", ",").replace("rprop:it", "rprop: it")


def test_the_shapes_add_up_and_have_no_empty_tensor() -> None:
    run_in_bench(
        "from arena import SHAPES, numels_of\n"
        "assert len(SHAPES['gpt2']) == 292 and sum(SHAPES['gpt2']) == 354_823_168\n"
        "for shape in SHAPES:\n"
        "    for total in (20_000, 1_000_000, 123_456_789):\n"
        "        found = numels_of(shape, total)\n"
        "        assert sum(found) == total and min(found) >= 1 and len(found) == len(SHAPES[shape])\n"
    )


@pytest.mark.skipif(not shutil.which("cc"), reason="floors are compiled")
def test_a_floor_changes_no_value_but_those_it_only_writes() -> None:
    run_in_bench(
        "import torch\n"
        "from arena import Arena\n"
        "from cases import CASES\n"
        "from floors import LOOPS, cpu_floor\n"
        "for case in CASES:\n"
        "    arena = Arena((70_000, 1, 257), torch.device('cpu'))\n"
        "    streams = [arena.get(stream.name, stream.dtype) for stream in case.streams]\n"
        "    before = [[tensor.clone() for tensor in stream] for stream in streams]\n"
        "    step = cpu_floor(case.loop, streams)\n"
        "    step()\n"
        "    for stream, now, then in zip(case.streams, streams, before):\n"
        "        assert all(map(torch.equal, now, then)), (case.name, stream.name)\n"
    )


def test_a_contender_that_computes_something_else_is_left_out() -> None:
    run_in_bench(
        "import attrs, torch\n"
        "from agree import drop_disagreeing\n"
        "from cases import CASES\n"
        "from contenders import Contender\n"
        "def prepare(arena):\n"
        "    return lambda: torch._foreach_add_(arena.get('weight'), 1e-3)\n"
        "ours, fused = CASES[0].contenders[:2]\n"
        "liar, cpu = Contender('liar', prepare), torch.device('cpu')\n"
        "case, notes = drop_disagreeing(attrs.evolve(CASES[0], contenders=(ours, fused, liar)), cpu)\n"
        "assert case.contenders == (ours, fused) and notes[0].startswith('liar is left out'), notes\n"
        "try:\n"
        "    drop_disagreeing(attrs.evolve(CASES[0], contenders=(ours, liar)), cpu)\n"
        "except RuntimeError as error:\n"
        "    assert 'no contender agrees with zoptim on adamw' in str(error), error\n"
        "else:\n"
        "    raise SystemExit('nobody noticed')\n"
    )


@pytest.mark.skipif(not shutil.which("cc"), reason="floors are compiled")
def test_the_bench_of_small_lists_reports_every_part_over_its_floor() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH / "small.py"), "--total", "20k", "--norm", "20k", "--rounds", "3"],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    tables = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith("|")]
    rows = [cells for cells in tables if cells[0].strip(" -")]
    assert len(rows) == 12
    assert all(float(cell) > 0 for row in rows for cell in row[1:])
    assert "floor with a norm" in done.stdout
