"""Names and files that every package has, and the mirror between sources and tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import repo

# Modules without a test file of their own, and why.  A module below MIN_LINES needs none.
MIN_LINES = 25
_KEY_TABLE = "a table of config keys; tests/config/test_known.py goes through every entry"
UNTESTED_ALONE: dict[str, str] = {
    "zengine.config.compat_compression": _KEY_TABLE,
    "zengine.config.compat_features": _KEY_TABLE,
    "zengine.config.compat_parallel": _KEY_TABLE,
    "zengine.config.compat_training": _KEY_TABLE,
    "zengine.config.data_settings": "settings classes without behaviour; tests/config/test_data.py fills them",
    "zengine.config.pipeline_settings": "settings classes alone; tests/config/test_pipeline.py fills them",
    "zengine.config.schema": "settings classes without behaviour; tests/config/test_structure.py fills them",
    "zengine.config.table": "the entries' classes; tests/config/test_known.py and test_structure.py walk them",
    "zengine.telemetry.plans": "structural types only",
}
# Test files that mirror no single module, and why.
MIRROR_NOTHING: dict[str, str] = {
    "packages/zckpt/tests/test_format.py": "a reader written from FORMAT.md alone",
    "packages/zoptim/tests/test_bench.py": "runs the scripts of packages/zoptim/bench at a tiny size",
    "packages/zpartition/tests/test_endurance.py": "whole partitions: nothing is left behind, hangs are told",
}

each_package = pytest.mark.parametrize("package", repo.PACKAGES)


def settings(package: str) -> str:
    return (repo.package_folder(package) / "pyproject.toml").read_text()


def value(package: str, key: str) -> str:
    found = re.search(rf'^{key} = "([^"]+)"$', settings(package), re.MULTILINE)
    assert found, f"packages/{package}/pyproject.toml has no static `{key}`"
    return found.group(1)


@each_package
def test_the_distribution_name_is_ours(package: str) -> None:
    assert value(package, "name") == repo.DISTRIBUTIONS[package]


@each_package
def test_the_version_is_static_and_the_same_in_the_code_and_the_changelog(package: str) -> None:
    assert "dynamic" not in settings(package)
    version = value(package, "version")
    assert f'\n__version__ = "{version}"\n' in (repo.source_folder(package) / "__init__.py").read_text()
    headings = re.findall(r"^## (\S+)", (repo.package_folder(package) / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[:1] == [version], f"the newest heading of packages/{package}/CHANGELOG.md must be {version}"


@each_package
def test_siblings_are_required_by_distribution_name_with_a_range_that_holds_now(package: str) -> None:
    for line in repo.declared_dependencies(package):
        name = re.split(r"[<>=!~;\[ ]", line, maxsplit=1)[0]
        assert name not in ("zcomm", "zengine"), f"{package} requires {line!r}, which a stranger publishes"
        if name in repo.DISTRIBUTIONS.values():
            sibling = next(key for key, dist in repo.DISTRIBUTIONS.items() if dist == name)
            bounds = re.fullmatch(rf"{name}>=(\d+)\.(\d+),<(\d+)\.(\d+)", line)
            assert bounds, f"{package} requires {line!r}; write it as {name}>=A.B,<C.D"
            low, high = tuple(map(int, bounds.groups()[:2])), tuple(map(int, bounds.groups()[2:]))
            present = tuple(map(int, value(sibling, "version").split(".")[:2]))
            assert low <= present < high, f"{package} requires {line!r}, but {sibling} is {present}"


@each_package
def test_every_dependency_has_a_lower_bound(package: str) -> None:
    assert all(">=" in line for line in repo.declared_dependencies(package)), repo.declared_dependencies(package)


@each_package
def test_a_package_has_its_files(package: str) -> None:
    folder, source = repo.package_folder(package), repo.source_folder(package)
    wanted = [
        folder / "README.md",
        folder / "CHANGELOG.md",
        source / "__init__.py",
        source / "py.typed",
        folder / "tests",
    ]
    missing = [path.relative_to(repo.ROOT).as_posix() for path in wanted if not path.exists()]
    assert not missing
    assert [p.name for p in repo.files(".py", under=folder / "tests") if p.name.startswith("test_")], "no tests"


@each_package
def test_the_changelog_says_something_about_the_present_version(package: str) -> None:
    text = (repo.package_folder(package) / "CHANGELOG.md").read_text()
    entry = text.partition(f"## {value(package, 'version')}")[2].partition("\n## ")[0]
    assert re.search(r"^- \S", entry, re.MULTILINE), f"packages/{package}/CHANGELOG.md: no line for this version"


@each_package
def test_test_folders_are_no_packages_and_share_no_conftest(package: str) -> None:
    tests = repo.package_folder(package) / "tests"
    assert not [path for path in repo.files(".py", under=tests) if path.name == "__init__.py"]


def num_code_lines(path: Path) -> int:
    lines = [line.strip() for line in path.read_text().splitlines()]
    return sum(bool(line) and not line.startswith("#") for line in lines)


def mirrors(subject: str, stem: str) -> bool:
    """Whether test_<subject>.py tests <stem>.py: the same name, an aspect of it, or one file for a family."""
    return subject == stem or subject.startswith(f"{stem}_") or stem.startswith(f"{subject}_")


@each_package
def test_every_source_file_of_weight_has_a_test_file_at_the_mirrored_path(package: str) -> None:
    source, tests = repo.source_folder(package), repo.package_folder(package) / "tests"
    missing = []
    for path in repo.source_modules(package):
        if path.name == "__init__.py" or num_code_lines(path) < MIN_LINES or repo.module_name(path) in UNTESTED_ALONE:
            continue
        folder = tests / path.relative_to(source).parent
        stem = path.stem.lstrip("_")
        if not any(mirrors(test.stem.removeprefix("test_"), stem) for test in folder.glob("test_*.py")):
            missing.append(f"{path.relative_to(repo.ROOT)} -> {(folder / f'test_{stem}.py').relative_to(repo.ROOT)}")
    assert not missing, "\n".join(["no test file for:", *missing])


@each_package
def test_every_test_file_mirrors_a_source_file(package: str) -> None:
    source, tests = repo.source_folder(package), repo.package_folder(package) / "tests"
    strays = []
    for path in repo.files(".py", under=tests):
        place = path.relative_to(repo.ROOT).as_posix()
        if not path.name.startswith("test_") or place in MIRROR_NOTHING:
            continue
        folder = source / path.relative_to(tests).parent
        stems = {p.stem.lstrip("_") for p in folder.glob("*.py")} | {p.name for p in folder.glob("*") if p.is_dir()}
        subject = path.stem.removeprefix("test_")
        if not any(mirrors(subject, stem) for stem in stems | {package}):
            strays.append(place)
    assert not strays, f"no source file of that name: {strays}"


def test_the_exceptions_still_exist() -> None:
    modules = {repo.module_name(path) for package in repo.PACKAGES for path in repo.source_modules(package)}
    assert set(UNTESTED_ALONE) <= modules
    assert all((repo.ROOT / place).exists() for place in MIRROR_NOTHING)
