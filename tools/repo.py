"""Layout of this repository: paths, packages and dependencies, for the checks, the tests and the release tools.

Standard library only.  Functions read the tree on every call and change nothing.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("zcomm", "zprecision", "zpartition", "zoptim", "zckpt", "zengine")  # leaves first
# Distribution names: "zcomm" and "zengine" on PyPI are unrelated projects.
DISTRIBUTIONS = {name: f"{name}-torch" if name in ("zcomm", "zengine") else name for name in PACKAGES}
_IGNORED = {".git", ".venv", ".cache", "__pycache__", "runs"}
_OUTPUTS = {"build", "dist"}  # at the top of the repository or of a package; deeper ones are sources


def package_folder(name: str) -> Path:
    return ROOT / "packages" / name


def source_folder(name: str) -> Path:
    return package_folder(name) / "src" / name


def files(*suffixes: str, under: Path = ROOT) -> list[Path]:
    """Return every file that git tracks or would track, sorted, with one of `suffixes` (default: all)."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", str(under)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode == 0:
        found = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:  # an unpacked archive
        found = [path for path in under.rglob("*") if not _is_ignored(path.relative_to(ROOT).parts)]
    return sorted(path for path in found if path.is_file() and (not suffixes or path.suffix in suffixes))


def _is_ignored(parts: tuple[str, ...]) -> bool:
    top = parts[2:3] if parts[0] == "packages" else parts[:1]
    return bool(_IGNORED.intersection(parts) or _OUTPUTS.intersection(top))


def source_modules(name: str) -> list[Path]:
    """Return the Python files of a package's `src`."""
    return files(".py", under=source_folder(name))


def module_name(path: Path) -> str:
    """Convert a path: `packages/zcomm/src/zcomm/testing/__init__.py` -> `zcomm.testing`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[parts.index("src") + 1 :]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sibling_dependencies(name: str) -> list[str]:
    """Return the packages of this repository that `name` declares as dependencies, in the order of `PACKAGES`."""
    declared = {re.split(r"[\s<>=!~;\[]", line, maxsplit=1)[0] for line in declared_dependencies(name)}
    return [other for other in PACKAGES if DISTRIBUTIONS[other] in declared]


def closure(names: Sequence[str]) -> list[str]:
    """Return `names` and their dependencies in this repository, leaves first."""
    wanted = set(names)
    for name in reversed(PACKAGES):  # a package only depends on earlier ones
        if name in wanted:
            wanted.update(sibling_dependencies(name))
    return [name for name in PACKAGES if name in wanted]


def declared_dependencies(name: str) -> list[str]:
    """Return the strings of `[project] dependencies`, read without a TOML parser, which Python 3.10 lacks."""
    text = (package_folder(name) / "pyproject.toml").read_text()
    block = re.search(r"^dependencies = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    return re.findall(r'"([^"]+)"', block.group(1)) if block else []
