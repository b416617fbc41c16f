"""No file contains a path of the machine that it was written on.

The paths come from the machine that runs the test: the folder of the checkout and its parent, the interpreter's
prefix, pip's local indexes.  Home folders are rejected everywhere.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import repo

HOMES = re.compile(r"(?<![\w.~-])/(?:home|root|Users)/(?!\.\.\.)\w")
# Folders that may be named although a checkout can be in them.
COMMON = {"/", "/tmp", "/var/tmp", "/usr", "/usr/local", "/opt", "/srv", "/home", "/root", "/mnt", "/data"}
PIP_SETTINGS = ("PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CERT")
BINARY = (".png", ".safetensors", ".bin", ".pt", ".gguf")
FOREIGN = {"latest", "latest_universal"}  # of checkpoint fixtures written by DeepSpeed
FILES = [
    path for path in repo.files() if path.suffix not in BINARY and path.name not in FOREIGN and not path.is_symlink()
]


def machine_paths() -> list[str]:
    """Return folders of this machine that no file may name."""
    settings = " ".join(os.environ.get(name, "") for name in PIP_SETTINGS).split()
    folders = [str(repo.ROOT), str(repo.ROOT.parent), sys.base_prefix, *settings]
    return [folder.rstrip("/") for folder in folders if folder.rstrip("/") not in COMMON and len(folder) > 3]


def place(path: Path) -> str:
    return path.relative_to(repo.ROOT).as_posix()


def machine_names(text: str) -> list[str]:
    patterns = [HOMES.pattern, *(rf"(?<![\w.~-]){re.escape(folder)}(?![\w-])" for folder in machine_paths())]
    return sorted({match.group() for pattern in patterns for match in re.finditer(pattern, text)})


def test_no_file_names_a_folder_of_a_machine() -> None:
    found = [f"{place(path)}: {name}" for path in FILES for name in machine_names(path.read_text(encoding="utf-8"))]
    assert not found, "\n".join(found)


def test_every_file_is_utf8_with_unix_lines_and_a_last_newline() -> None:
    bad = [place(path) for path in FILES if not is_plain(path.read_bytes())]
    assert not bad


def is_plain(content: bytes) -> bool:
    content.decode("utf-8")
    return b"\r" not in content and (not content or content.endswith(b"\n"))


def test_git_ignores_no_source() -> None:
    """Ignored sources would be missing in clones and wheels."""
    if not (repo.ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listing = ["git", "ls-files", "--others", "--ignored", "--exclude-standard", "--", "packages", "tests", "tools"]
    ignored = subprocess.run(listing, cwd=repo.ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    assert [path for path in ignored if path.endswith(".py")] == []
