"""Pages name files that exist and keep their size; the first example of the README runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import repo

PAGES = [repo.ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")]
DESIGNS = [repo.package_folder(package) / "DESIGN.md" for package in repo.PACKAGES]
MAX_ARCHITECTURE_BYTES = 20_000
MAX_README_LINES = 120
MAX_LINE = 120  # characters, except tables and lines that cannot be broken
PATH = re.compile(r"`([\w./-]+\.(?:py|h|c|cu))`")


def place(path: Path) -> str:
    return path.relative_to(repo.ROOT).as_posix()


def roots(page: Path) -> list[Path]:
    """Return the folders below which a page may name a file."""
    if page.parent != repo.ROOT:
        sources = repo.source_folder(page.parent.name)
        return [page.parent, sources, *(path for path in sources.iterdir() if path.is_dir()), *roots(PAGES[0])]
    return [
        repo.ROOT,
        repo.ROOT / "tests",
        repo.ROOT / "tests/contract",
        *repo.ROOT.glob("packages/*/src"),
        *repo.ROOT.glob("packages/*/src/*"),
    ]


@pytest.mark.parametrize("page", [*PAGES, *DESIGNS], ids=place)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    missing = [name for name in PATH.findall(text) if not any((root / name).is_file() for root in roots(page))]
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    missing += [link for link in links if link and not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", [*PAGES, *DESIGNS], ids=place)
def test_lines_of_pages_are_short(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if len(line) > MAX_LINE and " " in line.strip() and line[0] != "|"]


def test_the_architecture_and_the_readme_are_short() -> None:
    assert len(PAGES[1].read_bytes()) <= MAX_ARCHITECTURE_BYTES
    assert len(PAGES[0].read_text(encoding="utf-8").splitlines()) <= MAX_README_LINES


def test_the_first_example_of_the_readme_runs_as_typed(tmp_path: Path) -> None:
    text = PAGES[0].read_text(encoding="utf-8")
    script = tmp_path / "train.py"
    script.write_text(text.partition("```python\n")[2].partition("```")[0] + "assert report, report\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
