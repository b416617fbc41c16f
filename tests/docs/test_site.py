"""The site's own pages: their code runs, what they show exists, and pictures are those of the planner.

Links and the whole site are checked by `tools/dev.py docs`, which needs MkDocs.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import docs
import pytest
import repo

from zcomm.testing import run_ranks

HANG = "hang.py"
PAGES = sorted(docs.PAGES.rglob("*.md"))
SCRIPTS = docs.scripts()


def place(path: Path) -> str:
    return path.relative_to(docs.PAGES).as_posix()


def run_page(script: str, folder: str) -> str:
    """Run a page's blocks on this rank, in an empty folder."""
    path = Path(folder) / "page.py"
    path.write_text(script, encoding="utf-8")
    printed = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        runpy.run_path(str(path), run_name="__main__")
    return printed.getvalue()


def run_example(name: str) -> list[str]:
    """Run the `main` of an example on this rank; return what it does."""
    found: list[str] = runpy.run_path(str(repo.ROOT / "examples" / f"{name}.py"))["main"]()
    return found


# that page starts ranks itself, which a rank may not: `dev.py docs --run` runs it
@pytest.mark.parametrize("page", [page for page in SCRIPTS if "run_ranks" not in SCRIPTS[page]])
def test_the_code_of_a_page_runs(page: str, tmp_path: Path) -> None:
    run_ranks(run_page, 1, SCRIPTS[page], str(tmp_path))


def test_pages_have_code() -> None:
    assert {"index.md", "start.md", "tutorials/one-layer.md"} <= set(SCRIPTS)


@pytest.mark.parametrize("path", PAGES, ids=place)
def test_files_and_sections_that_a_page_shows_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for name in re.findall(r'--8<-- "([^"]+)"', text):
        assert (repo.ROOT / name).is_file() or (docs.DOCS / name).is_file(), name
    for source, heading in re.findall(r"<!-- section: (\S+) (#+ .+?) -->", text):
        assert f"\n{heading}\n" in (repo.ROOT / source).read_text(encoding="utf-8"), heading


def test_the_first_example_is_that_of_the_readme() -> None:
    readme = (repo.ROOT / "README.md").read_text(encoding="utf-8")
    loop = docs.blocks(readme)[0].partition("    report = engine.step()")[0]
    assert SCRIPTS["index.md"].startswith(loop)


def without_numbers_of_a_run(text: str) -> str:
    """Replace seconds, process numbers and the limits of this machine, which differ from run to run."""
    limits = r"(?m)^Limits:\n(?:  .*\n)+"
    text = re.sub(limits, "Limits: L\n", re.sub(r"\(process \d+\)", "(process N)", text))
    return re.sub(r"\d+\.\d s\b", "N s", text).strip()


@pytest.mark.parametrize("mistake", ["save", "stuck"])
def test_the_page_shows_what_a_hang_says(mistake: str, tmp_path: Path) -> None:
    page = (docs.PAGES / "tutorials/debugging.md").read_text(encoding="utf-8").partition("## A hang")[2]
    shown = page.partition(f"examples/{HANG} {mistake}\n```")[2].partition('rank 0" }\n')[2].partition("\n```")[0]
    (tmp_path / "examples").symlink_to(
        repo.ROOT / "examples"
    )  # it writes beside the folder, and names relative paths
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environ = os.environ | {"ZCOMM_TIMEOUT_S": "10", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, f"examples/{HANG}", mistake],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert without_numbers_of_a_run(done.stdout) == without_numbers_of_a_run(shown), done.stderr


def test_the_page_shows_what_too_little_memory_says() -> None:
    page = (docs.PAGES / "tutorials/debugging.md").read_text(encoding="utf-8")
    shown = page.partition('title="too little memory" }\n')[2].partition("\n```")[0]
    [said] = run_ranks(run_example, 1, "debugging")
    assert without_numbers_of_a_run(said[-1]) == without_numbers_of_a_run(shown)


def test_the_picture_of_zero_is_what_the_planner_says() -> None:
    assert runpy.run_path(str(docs.DOCS / "pictures.py"))["main"]([]) == 0, "run python docs/pictures.py --write"


def test_pages_that_fetch_from_a_network_are_found(tmp_path: Path) -> None:
    (tmp_path / "good.html").write_text('<a href="https://x.test/">x</a><script src="assets/a.js"></script>')
    assert docs.fetched(tmp_path) == []
    style = '<link href="https://x.test/a.css" rel="stylesheet">'
    (tmp_path / "bad.html").write_text(f'<script src="https://x.test/a.js"></script>{style}')
    (tmp_path / "bad.css").write_text("@font-face { src: url(https://x.test/a.woff2) }")
    assert docs.fetched(tmp_path) == [
        "bad.css: https://x.test/a.woff2",
        "bad.html: https://x.test/a.js",
        "bad.html: https://x.test/a.css",
    ]


@pytest.mark.skipif(docs.find_browser() is None, reason="Chromium is not installed")
def test_a_worker_of_a_page_in_a_folder_answers_and_its_absence_is_found(tmp_path: Path) -> None:
    (tmp_path / "worker.js").write_text("addEventListener('message', event => postMessage(event.data + '!'))")
    shutil.copy(docs.PAGES / "assets/folder-worker.js", tmp_path / "shim.js")
    page = """<body><script{shim}></script><script>
      const worker = new Worker("worker.js")
      worker.addEventListener("message", event => {{
        document.body.className = event.data == "word!" ? "md-search-result__item" : "wrong"
      }})
      worker.postMessage(new URLSearchParams(location.search).get("q"))
    </script></body>"""
    for shim, found in ((' src="shim.js"', 1), ("", 0)):
        (tmp_path / "index.html").write_text(page.format(shim=shim))
        assert docs.search(tmp_path, "word", docs.find_browser() or "") == found


def test_blocks_that_show_a_file_and_other_languages_are_no_scripts() -> None:
    text = '```python\na = 1\n```\n\n    ```python title="b.py"\n    --8<-- "b.py"\n    ```\n\n```text\nc\n```\n'
    assert docs.blocks(text) == ["a = 1\n"]
