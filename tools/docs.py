#!/usr/bin/env python3
"""Build the documentation site, check its links, and run its code.

    python3 tools/dev.py docs            .cache/site/index.html; an error for a broken link, anything from a network,
                                         or a search (by Chromium, if there is one) that finds nothing offline
    python3 tools/dev.py docs --run      runs every Python block of docs/pages, page by page
    python3 tools/dev.py docs --serve    builds again whenever a page changes, at http://127.0.0.1:8000

MkDocs and its plugins (docs/requirements.txt) are installed into .cache/docs, apart from .venv.  Scripts that pages
show by `--8<--` are run by tests/docs/test_site_examples.py, and READMEs by tests/docs/test_examples.py.

Standard library only.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import venv
from collections.abc import Sequence
from pathlib import Path

import devenv
import repo

DOCS = repo.ROOT / "docs"
PAGES = DOCS / "pages"
TOOLS = repo.ROOT / ".cache" / "docs"
SITE = repo.ROOT / ".cache" / "site"
SEARCHED = "reduce_scatter"  # a word that pages have
FENCE = re.compile(r"^( *)```(\w+)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
# What a browser fetches by itself: scripts, styles, pictures, fonts; not the links that a reader may follow.
FETCHED = re.compile(
    r'<(?:script|img|iframe|source)\b[^>]*\bsrc="(https?://[^"]+)"'
    r'|<link\b(?=[^>]*\brel="(?:stylesheet|preconnect|icon)")[^>]*\bhref="(https?://[^"]+)"'
)
FETCHED_BY_STYLE = re.compile(r"url\(['\"]?(https?://[^)'\"]+)|@import ['\"](https?://[^'\"]+)")


def blocks(text: str, language: str = "python") -> list[str]:
    """Return the code blocks of a page, without those that show a file."""
    found = [textwrap.dedent(code) for _, name, code in FENCE.findall(text) if name == language]
    return [code for code in found if "--8<--" not in code]


def scripts() -> dict[str, str]:
    """Return page -> its Python blocks as one script, for pages that have some."""
    texts = {path.relative_to(PAGES).as_posix(): path.read_text(encoding="utf-8") for path in PAGES.rglob("*.md")}
    return {page: "\n".join(blocks(text)) for page, text in sorted(texts.items()) if blocks(text)}


def run_blocks() -> int:
    """Run the script of every page in a process and an empty folder of its own; return the number that fail."""
    environ, failed = os.environ | {"OMP_NUM_THREADS": "1"}, 0
    for page, script in scripts().items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "page.py"
            path.write_text(script, encoding="utf-8")
            command = [sys.executable, str(path)]
            done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
        failed += done.returncode != 0
        print(f"docs: {page}: {'ok' if done.returncode == 0 else 'FAILED'}", flush=True)
        if done.returncode:
            print(done.stdout + done.stderr, flush=True)
    return failed


def install() -> str:
    """Install the tools if they are missing or older than their list; return their interpreter."""
    python, stamp, wanted = TOOLS / "bin" / "python", TOOLS / "stamp", (DOCS / "requirements.txt").read_text()
    if devenv.read_text(stamp) != wanted:
        with devenv.step("installing MkDocs into .cache/docs"):
            venv.create(TOOLS, with_pip=True, clear=True)
            command = [str(python), "-m", "pip", "install", "-q", "-r", str(DOCS / "requirements.txt")]
            environ = devenv.child_environment()
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
        if done.returncode:
            raise devenv.SetupError(devenv.explain("installing MkDocs", done.returncode, done.stdout + done.stderr))
        stamp.write_text(wanted)
    return str(python)


def fetched(folder: Path) -> list[str]:
    """Return what a page of a built site would fetch from a network while it is read."""
    found = []
    for path in sorted(folder.rglob("*")):
        pattern = {".html": FETCHED, ".css": FETCHED_BY_STYLE}.get(path.suffix)
        if pattern is not None:
            text = path.read_text(encoding="utf-8", errors="replace")
            found += [f"{path.relative_to(folder)}: {''.join(match)}" for match in pattern.findall(text)]
    return found


def search(folder: Path, word: str, browser: str) -> int:
    """Search for `word` as a reader of the folder does, without a server and a network; return the number of results.

    The theme's search needs a worker, which browsers refuse to pages of a folder (assets/folder-worker.js).
    """
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND"]
    with tempfile.TemporaryDirectory() as profile:
        address = f"{(folder / 'index.html').as_uri()}?q={word}"
        command = [browser, *options, f"--user-data-dir={profile}", "--timeout=20000", "--dump-dom", address]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    return done.stdout.count('class="md-search-result__item"')


def find_browser() -> str | None:
    """Return the path of a Chromium, if this machine has one."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def mkdocs(*arguments: str) -> int:
    """Run MkDocs."""
    environ = devenv.child_environment() | {"NO_MKDOCS_2_WARNING": "1"}
    command = [install(), "-m", "mkdocs", *arguments, "-f", str(DOCS / "mkdocs.yml")]
    return subprocess.run(command, cwd=DOCS, env=environ, check=False).returncode  # snippets are found from there


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="dev.py docs", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", action="store_true", help="run every Python block of the pages")
    parser.add_argument("--serve", action="store_true", help="show the site, and build it again on every change")
    options = parser.parse_args(argv)
    if options.run:
        return 1 if run_blocks() else 0
    try:
        code = mkdocs("serve") if options.serve else mkdocs("build", "--strict", "-q")
    except devenv.SetupError as error:
        print(f"docs: {error}", file=sys.stderr)
        return 2
    if code or options.serve:
        return code
    strangers = fetched(SITE)
    if strangers:
        print("\n".join(["docs: pages fetch from a network:", *strangers]), file=sys.stderr)
        return 1
    browser = find_browser()
    if browser is None:
        print("docs: no Chromium on PATH: search without a network was not tried")
    elif not search(SITE, SEARCHED, browser):
        print(f"docs: a search for {SEARCHED} in {SITE}/index.html, as a file, finds nothing", file=sys.stderr)
        return 1
    num_pages = len(list(SITE.rglob("*.html")))
    print(f"docs: {num_pages} pages, no broken link: {SITE.relative_to(repo.ROOT)}/index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
