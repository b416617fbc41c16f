"""Workflows: what they run exists here, and their lists are those of the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import dev
import matrix
import pytest
import release
import repo

yaml = pytest.importorskip("yaml")
FOLDER = repo.ROOT / ".github" / "workflows"
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.yml"))}
WITH_KERNELS = [name for name in repo.PACKAGES if (repo.package_folder(name) / "hatch_build.py").exists()]


def commands(workflow: dict[str, Any]) -> list[str]:
    """Return the lines of shell of every step."""
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    return [line.strip() for step in steps for line in step.get("run", "").splitlines()]


def test_a_command_of_a_workflow_exists() -> None:
    found = [line for workflow in WORKFLOWS.values() for line in commands(workflow)]
    scripts = [match for line in found for match in re.findall(r"(?:python|bash) (\S*/\S+)(?: (\w+))?", line)]
    assert {"tools/dev.py", "tools/release.py", "tools/smoke_wheel.py", ".ci/run"} <= {path for path, _ in scripts}
    verbs = {
        "tools/dev.py": set(dev.VERBS),
        "tools/release.py": set(release.parser()._subparsers._group_actions[0].choices),
    }  # type: ignore[union-attr]
    for path, verb in scripts:
        assert (repo.ROOT / path).is_file(), path
        assert verb in verbs.get(path, {verb}), (path, verb)
    for path in re.findall(r"packages/[\w/]+tests/[\w/.]*", "\n".join(found)):
        assert (repo.ROOT / path).exists(), path


def test_the_weekly_matrix_runs_every_supported_python() -> None:
    listed = WORKFLOWS["check"]["jobs"]["matrix"]["strategy"]["matrix"]["python"]
    assert listed == list(dict.fromkeys(pair.python for pair in matrix.pairs(matrix.TABLE.read_text())))


def test_packages_with_kernels_are_emulated_and_compiled_for_each_platform() -> None:
    emulated = next(line for line in commands(WORKFLOWS["check"]) if line.startswith("for name in "))
    assert sorted(re.findall(r"z\w+", emulated)) == sorted(WITH_KERNELS)
    condition = WORKFLOWS["wheels"]["jobs"]["compiled"]["if"]
    assert sorted(re.findall(r"\bz\w+", condition)) == sorted(WITH_KERNELS)


def test_a_tag_of_each_package_starts_the_release_of_this_package() -> None:
    (pattern,) = WORKFLOWS["wheels"][True]["push"]["tags"]  # "on" is a boolean in YAML 1.1
    text = "|".join(commands(WORKFLOWS["wheels"]))
    assert "${PACKAGE%-[0-9]*}" in text
    for name in repo.PACKAGES:
        tag = f"{name}-1.20.3"
        assert re.fullmatch(pattern.replace(".", r"\.").replace("*", ".*"), tag)
        assert re.sub(r"-[0-9].*$", "", tag) == name


def test_the_image_copies_what_exists() -> None:
    folder = repo.ROOT / "examples" / "cluster"
    text = (folder / "Dockerfile").read_text(encoding="utf-8")
    copied = [source for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE) for source in line.split()[:-1]]
    assert copied
    assert [source for source in copied if not (repo.ROOT / source).exists()] == []
    job = yaml.safe_load((folder / "pytorchjob.yaml").read_text(encoding="utf-8"))
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        (container,) = replica["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"  # the operator looks for this name
        (script,) = [word for word in container["command"] if word.endswith(".py")]
        assert Path(script).parts[0] in copied
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        assert mounts == {volume["name"] for volume in replica["template"]["spec"]["volumes"]}
