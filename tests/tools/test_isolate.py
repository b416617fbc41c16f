from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import isolate
import pytest
import repo
from isolate import IsolationError


def test_a_package_brings_the_siblings_it_depends_on_and_no_other() -> None:
    assert repo.closure(["zoptim"]) == ["zoptim"]
    assert repo.closure(["zpartition"]) == ["zcomm", "zpartition"]
    assert repo.closure(["zengine"]) == list(repo.PACKAGES)


def test_the_report_of_the_tests_is_counted_with_the_reasons_of_skips(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        "<testsuites><testsuite>"
        "<testcase name='a'/><testcase name='b'/>"
        "<testcase name='c'><skipped message='could not import zcomm'/></testcase>"
        "<testcase name='d'><failure/></testcase><testcase name='e'><error/></testcase>"
        "</testsuite></testsuites>"
    )
    assert isolate.read_counts(report) == (2, 2, ["could not import zcomm"])


def test_the_probe_passes_without_siblings_and_names_one_that_is_importable() -> None:
    def probe(absent: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-I", "-c", isolate.PROBE, absent, ""]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert probe("no_such_package").returncode == 0
    assert "json is importable but not a dependency" in probe("json").stderr


def make_wheel(path: Path, *names: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "")
    return path


def test_a_wheel_must_hold_the_type_marker_and_nothing_beside_the_package(tmp_path: Path) -> None:
    isolate.check_wheel("zx", make_wheel(tmp_path / "good-none-any.whl", "zx/py.typed", "zx-1.dist-info/METADATA"))
    with pytest.raises(IsolationError, match=r"lacks zx/py\.typed"):
        isolate.check_wheel("zx", make_wheel(tmp_path / "untyped.whl", "zx/__init__.py"))
    with pytest.raises(IsolationError, match=r"outside zx/: \['tests/test_a\.py'\]"):
        isolate.check_wheel("zx", make_wheel(tmp_path / "stray.whl", "zx/py.typed", "tests/test_a.py"))


def test_a_wheel_has_kernels_and_a_platform_exactly_when_the_package_builds_some(tmp_path: Path) -> None:
    kernels = ("zoptim/py.typed", "zoptim/_kernels.abi3.so")
    isolate.check_wheel("zoptim", make_wheel(tmp_path / "zoptim-cp310-abi3-linux_x86_64.whl", *kernels))
    for name, files in (("zoptim-cp310-abi3-linux_x86_64.whl", kernels[:1]), ("zoptim-py3-none-any.whl", kernels)):
        with pytest.raises(IsolationError, match=r"must have an \.so and the tag of a platform"):
            isolate.check_wheel("zoptim", make_wheel(tmp_path / name, *files))
    with pytest.raises(IsolationError, match=r"must have no \.so and the tag none-any"):
        isolate.check_wheel("zx", make_wheel(tmp_path / "zx-py3-none-any.whl", "zx/py.typed", "zx/stray.so"))


def test_the_fresh_environment_sees_nothing_of_this_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(repo.ROOT / "tools"))
    environ = isolate.environment(tmp_path)
    assert not [value for value in environ.values() if str(repo.ROOT / ".venv") in value]
    assert "PYTHONPATH" not in environ
    assert environ["PATH"].startswith(str(tmp_path / "bin"))


def test_a_step_that_fails_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    with pytest.raises(IsolationError, match=r"installing failed \(exit code 3\)\n    the reason"):
        isolate.run(["sh", "-c", "echo the reason; exit 3"], "installing", tmp_path, {"PATH": "/usr/bin:/bin"})


def test_an_unknown_package_is_rejected_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        isolate.main(["zoptimm"])
    assert "choose from zcomm, zprecision" in capsys.readouterr().err
