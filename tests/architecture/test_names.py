"""Required names and files of every package, and the mirror between source and test folders."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import repo

# Folders that mirror DeepSpeed's paths; one test file above them covers all names.
MIRRORED_ABOVE = {
    ("deepspeed", "launcher"),
    ("deepspeed", "profiling"),
    ("data_pipeline", "data_sampling"),
    ("runtime", "pipe"),
    # sections of the config, tested in runtime/test_config.py
    *(("deepspeed", name) for name in ("autotuning", "compile", "datastates")),
    *(("runtime", name) for name in ("model_checkpointing", "swap_tensor", "tensor_parallel")),
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
    assert re.findall(r"^dynamic = .*", settings(package), re.MULTILINE) == ['dynamic = ["readme"]']
    version = value(package, "version")
    assert f'\n__version__ = "{version}"\n' in (repo.source_folder(package) / "__init__.py").read_text()
    headings = re.findall(r"^## (\S+)", (repo.package_folder(package) / "CHANGELOG.md").read_text(), re.MULTILINE)
    newest = [heading for heading in headings if heading != "Unreleased"][:1]
    assert newest == [version], f"the newest heading of packages/{package}/CHANGELOG.md must be {version}"


@each_package
def test_siblings_are_required_by_distribution_name_with_a_range_that_holds_now(package: str) -> None:
    for line in repo.declared_dependencies(package):
        name = re.split(r"[<>=!~;\[ ]", line, maxsplit=1)[0]
        assert name not in ("zcomm", "zengine"), f"{package} requires {line!r}, which is an unrelated project on PyPI"
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
def test_the_changelog_has_a_line_for_the_present_version(package: str) -> None:
    text = (repo.package_folder(package) / "CHANGELOG.md").read_text()
    entry = text.partition(f"## {value(package, 'version')}")[2].partition("\n## ")[0]
    assert re.search(r"^- \S", entry, re.MULTILINE), f"packages/{package}/CHANGELOG.md: no line for this version"


def test_packages_with_kernels_share_one_build_hook() -> None:
    """Packages are built separately, so each has a copy; what differs is in `[tool.zbuild]` of its pyproject.toml."""
    hooks = {path.parent.name: path.read_text() for path in repo.ROOT.glob("packages/*/hatch_build.py")}
    assert sorted(hooks) == ["zcomm", "zoptim", "zprecision"]
    assert len(set(hooks.values())) == 1, "copy the changed packages/*/hatch_build.py over the others"


@pytest.mark.parametrize("package", ["zcomm", "zoptim", "zprecision"])
def test_the_settings_of_the_kernels_end_the_file(package: str) -> None:
    """The digest of an extension includes pyproject.toml from `[tool.zbuild]` on, and so no version and no link."""
    tables = re.findall(r"^\[([^\]]+)\]$", settings(package), re.MULTILINE)
    assert [name for name in tables[tables.index("tool.zbuild") :] if not name.startswith("tool.zbuild")] == []


GPU_FILES = ("src/{}/backends/gpu/compiler.py", "src/{}/csrc/zk_gpu.h", "tests/shim/cuda_shim.h", "tests/shim/shim.c")


@pytest.mark.parametrize("file", GPU_FILES)
def test_packages_with_gpu_kernels_share_prelude_compiler_and_shim(file: str) -> None:
    """Each has a copy, as of the build hook."""
    copies = [repo.package_folder(name) / file.format(name) for name in ("zoptim", "zprecision")]
    assert copies[0].read_text() == copies[1].read_text(), f"copy the changed {file} over the other"


@each_package
def test_test_folders_are_no_packages_and_share_no_conftest(package: str) -> None:
    tests = repo.package_folder(package) / "tests"
    assert not [path for path in repo.files(".py", under=tests) if path.name == "__init__.py"]


def mirror_of(package: str, folder: Path) -> Path:
    """Return the test folder that mirrors a source folder."""
    return repo.package_folder(package) / "tests" / folder.relative_to(repo.source_folder(package))


@each_package
def test_every_folder_of_sources_has_a_folder_of_tests(package: str) -> None:
    folders = {path.parent for path in repo.source_modules(package) if path.name != "__init__.py"}
    missing = [
        f"{folder.relative_to(repo.ROOT)} -> {mirror_of(package, folder).relative_to(repo.ROOT)}"
        for folder in sorted(folders)
        if not any(mirror_of(package, folder).rglob("test_*.py")) and folder.parts[-2:] not in MIRRORED_ABOVE
    ]
    assert not missing, "\n".join(["no test files for:", *missing])


@each_package
def test_every_folder_of_tests_mirrors_a_folder_of_sources(package: str) -> None:
    source, tests = repo.source_folder(package), repo.package_folder(package) / "tests"
    folders = {path.parent for path in repo.files(".py", under=tests) if path.name.startswith("test_")}
    strays = [
        folder.relative_to(repo.ROOT).as_posix()
        for folder in sorted(folders)
        if not (source / folder.relative_to(tests)).is_dir()
    ]
    assert not strays, f"no folder of sources for: {strays}"
