"""The public API of every package, frozen in public_api.txt beside this file.

A new or removed name must appear in a diff of that list:

    python tests/architecture/test_public_api.py --write
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

if __name__ == "__main__":  # pytest has tools/ on its path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import repo
import sources

FROZEN = Path(__file__).with_name("public_api.txt")
HEADER = (
    "# Public names: `__all__` of every package and sub-package that has one.\n"
    "# Made by: python tests/architecture/test_public_api.py --write\n"
)


def public_modules(package: str) -> list[Path]:
    """Return each `__init__.py` with an `__all__`, except in folders whose names begin with `_`."""
    found = [path for path in repo.source_modules(package) if path.name == "__init__.py"]
    visible = [path for path in found if not any(part.startswith("_") for part in repo.module_name(path).split("."))]
    return [path for path in visible if sources.public_names(path) is not None]


def present_names() -> list[str]:
    return [
        f"{repo.module_name(path)}.{name}"
        for package in repo.PACKAGES
        for path in public_modules(package)
        for name in sorted(importlib.import_module(repo.module_name(path)).__all__)
    ]


def frozen_names() -> list[str]:
    return [line for line in FROZEN.read_text().splitlines() if line and not line.startswith("#")]


def test_the_public_names_are_the_frozen_ones() -> None:
    present, frozen = set(present_names()), set(frozen_names())
    assert present == frozen, (
        f"new: {sorted(present - frozen)}; gone: {sorted(frozen - present)}; if that is meant, say so in the "
        f"CHANGELOG and run: python {Path(__file__).relative_to(repo.ROOT)} --write"
    )


def test_every_package_has_a_public_list_and_a_version() -> None:
    for package in repo.PACKAGES:
        module = importlib.import_module(package)
        assert "__all__" in vars(module), f"{package} has no __all__"
        assert isinstance(module.__version__, str)


def test_every_public_name_exists_and_is_listed_once() -> None:
    for package in repo.PACKAGES:
        for path in public_modules(package):
            module = importlib.import_module(repo.module_name(path))
            names = sources.public_names(path) or []
            assert len(names) == len(set(names)), f"{module.__name__}.__all__ repeats a name"
            missing = [name for name in names if not hasattr(module, name)]
            assert not missing, f"{module.__name__}.__all__ lists {missing}, which it does not have"


def test_every_public_name_has_a_docstring() -> None:
    bare = [
        f"{module.__name__}.{name}"
        for package in repo.PACKAGES
        for module in [importlib.import_module(repo.module_name(path)) for path in public_modules(package)]
        for name in module.__all__
        if callable(getattr(module, name)) and not getattr(module, name).__doc__
    ]
    assert not bare, f"public, and without a docstring: {bare}"


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(f"usage: python {sys.argv[0]} --write")
    FROZEN.write_text(HEADER + "".join(f"{name}\n" for name in present_names()))
    print(f"wrote {len(frozen_names())} names to {FROZEN.relative_to(repo.ROOT)}")
