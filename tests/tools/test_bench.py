"""Every page of figures has a command, and the command's parts exist; pages keep what people wrote in them."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import bench
import pytest
import repo

BENCHES, _ = bench.read_table(bench.TABLE.read_text())


def test_every_page_of_figures_has_a_command() -> None:
    assert {each.page for each in BENCHES.values()} == set(repo.ROOT.glob("packages/*/bench/results/*.md"))


@pytest.mark.parametrize("name", BENCHES)
def test_the_script_of_a_page_has_the_options_of_its_command(name: str) -> None:
    for command in BENCHES[name].commands:
        script, *words = command.split()
        path = repo.ROOT / script
        text = path.read_text() if path.parent.name == "bench" else "".join(
            each.read_text() for each in path.parent.glob("*.py")
        )  # fmt: skip
        for word in words:
            assert not word.startswith("--") or f'"{word}"' in text, (script, word)


LINES = "Rerun: `a`.\n2026-11-29, b.\n"
PAGE = "# Title\n\nWhat this is.\n\n## More\n\n```\na block of theirs\n```\n"


def test_a_page_keeps_its_text_and_has_one_block_of_figures() -> None:
    first = bench.placed(PAGE, LINES, "1 ms")
    again = bench.placed(first, LINES.replace("29", "30"), "2 ms")
    assert first == "# Title\n\n" + LINES + "\n```\n1 ms\n```\n" + PAGE.removeprefix("# Title\n")
    assert again == first.replace("29", "30").replace("1 ms", "2 ms")


def test_a_page_that_a_script_writes_gets_the_lines_only() -> None:
    assert bench.placed("# Title\n\n| a |\n", LINES, "") == "# Title\n\n" + LINES + "\n| a |\n"


def make_bench(tmp_path: Path, code: str, prints: bool = True) -> bench.Bench:
    script, page = tmp_path / "script.py", tmp_path / "page.md"
    script.write_text(code)
    page.write_text("# Figures\n\nBy hand.\n")
    return bench.Bench("mine", page, (f"{script} --folder {{folder}}",), 1, prints, "")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / ".cache").mkdir()
    monkeypatch.setattr(bench.repo, "ROOT", tmp_path)
    monkeypatch.setattr(bench, "peers_python", lambda peers: bench.sys.executable)
    monkeypatch.setattr(bench, "adopt_orphans", lambda: None)  # pytest has children of its own
    monkeypatch.setattr(bench, "wait_for_orphans", lambda seconds: None)
    return tmp_path


def test_a_run_puts_the_output_and_the_machine_on_the_page(here: Path) -> None:
    mine = make_bench(here, "import sys, pathlib; print(7, pathlib.Path(sys.argv[2]).is_dir())")
    assert bench.run(mine, bench.sys.executable, 0.1)
    text = mine.page.read_text()
    assert "```\n7 True\n```" in text
    assert text.endswith("By hand.\n")
    assert re.search(r"other processes used 0\.10 cores before the run and \d+\.\d\d in it", text)


def test_what_people_wrote_stays_on_a_page_that_a_script_writes(here: Path) -> None:
    mine = make_bench(
        here, "import pathlib; pathlib.Path(__file__).with_name('page.md').write_text('# New\\n\\n|7|\\n')", False
    )
    mine.page.write_text("# Old\n\n|6|\n\n<!-- by hand -->\n## Why\n\nSo.\n")
    for _ in range(2):
        assert bench.run(mine, bench.sys.executable, 0.1)
        text = mine.page.read_text()
        assert text.startswith("# New\n\nRerun: ")
        assert text.endswith("\n\n|7|\n\n<!-- by hand -->\n## Why\n\nSo.\n")


ORPHAN = """
import subprocess, sys, time
import bench
bench.adopt_orphans()
own = bench.own_seconds()
burn = "import time; time.sleep(0.3)\\nwhile time.process_time() < 0.5: pass"
code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {burn!r}])"
subprocess.run([sys.executable, "-c", code], check=True)
bench.wait_for_orphans(60)
print(bench.own_seconds() - own)
"""


def test_the_time_of_processes_that_outlive_a_script_is_not_that_of_others() -> None:
    environ = {**os.environ, "PYTHONPATH": str(repo.ROOT / "tools")}
    done = subprocess.run(
        [bench.sys.executable, "-c", ORPHAN], env=environ, capture_output=True, text=True, check=True
    )
    assert float(done.stdout) > 0.5


def test_a_run_that_fails_leaves_the_page_and_is_named(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = make_bench(here, "raise SystemExit(3)")
    monkeypatch.setattr(bench, "read_table", lambda text: ({"mine": mine}, []))
    assert bench.main(["mine", "--busy"]) == 1
    assert "exit code 3" in capsys.readouterr().err
    assert mine.page.read_text() == "# Figures\n\nBy hand.\n"


def test_a_busy_machine_is_refused(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "cores_of_others", lambda seconds: 1.5)
    assert bench.main(["exact"]) == 2
    assert "other processes use 1.50 cores" in capsys.readouterr().err


def test_an_unknown_name_is_refused_with_those_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["fast"]) == 2
    assert "choose of save-124m" in capsys.readouterr().err


def test_without_names_the_benches_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([]) == 0
    told = capsys.readouterr().out
    assert all(name in told for name in BENCHES)
