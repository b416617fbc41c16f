from __future__ import annotations

import re
import sys
from pathlib import Path

import matrix
import pytest
import release
import repo

TABLE = matrix.TABLE.read_text()


def test_classifiers_name_exactly_the_pythons_with_a_recorded_pass() -> None:
    passed = {f"Programming Language :: Python :: {pair.python}" for pair in matrix.pairs(TABLE) if pair.passed}
    for name in repo.PACKAGES:
        classifiers = release.settings(name)["classifiers"]
        assert isinstance(classifiers, list)
        assert {text for text in classifiers if re.search(r":: 3\.\d+$", text)} == passed, name


def test_lower_bounds_are_the_oldest_pair_with_a_recorded_pass() -> None:
    def numbers(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(".")))

    oldest = min((pair for pair in matrix.pairs(TABLE) if pair.passed), key=lambda pair: numbers(pair.python))
    for name in repo.PACKAGES:
        assert release.settings(name)["requires-python"] == f">={oldest.python}", name
        (torch,) = [line for line in repo.declared_dependencies(name) if re.match(r"torch\b", line)]
        assert torch == f"torch>={'.'.join(oldest.torch.split('.')[:2])}", name


def test_a_pass_is_recorded_once_and_replaces_an_older_one() -> None:
    pair = next(pair for pair in matrix.pairs(TABLE) if not pair.passed)
    text = matrix.record(matrix.record(TABLE, pair, "2030-01-02"), pair, "2030-02-03")
    assert matrix.Pair(pair.python, pair.torch, "2030-02-03") in matrix.pairs(text)
    assert len(matrix.pairs(text)) == len(matrix.pairs(TABLE))
    assert "2030-01-02" not in text


def test_a_smoke_test_is_recorded_apart_and_ends_with_a_pass_of_all() -> None:
    pair = next(pair for pair in matrix.pairs(TABLE) if not pair.passed)
    text = matrix.record(matrix.record(TABLE, pair, "2030-01-02", smoke=True), pair, "2030-02-03", smoke=True)
    assert matrix.pairs(text) == matrix.pairs(TABLE), "no pass"
    assert text.count('smoke = "2030-02-03"') == 1
    assert "2030-01-02" not in text
    passed = matrix.record(text, pair, "2030-03-04")
    assert "2030-02-03" not in passed
    old = next(pair for pair in matrix.pairs(TABLE) if pair.passed)
    assert matrix.pairs(matrix.record(TABLE, old, "2030-01-02", smoke=True)) == matrix.pairs(TABLE)


def test_an_interpreter_counts_only_if_it_starts_and_has_the_version(tmp_path: Path) -> None:
    here = "{}.{}".format(*sys.version_info[:2])
    assert matrix.find_interpreter(here) == sys.executable
    shim = tmp_path / "python"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    assert not matrix.runs(shim, here)
    assert not matrix.runs(tmp_path / "absent", here)
    assert not matrix.runs(sys.executable, "2.7")


def test_pythons_that_are_missing_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(matrix, "find_interpreter", lambda python: None)
    assert matrix.main(["--python", "3.13"]) == 0
    assert "matrix: Python 3.13, torch 2.13.0: not run: no python3.13 here" in capsys.readouterr().out
    assert matrix.main(["--python", "2.7"]) == 2
    assert "--python 2.7: supported.toml has 3.11, 3.12, 3.13" in capsys.readouterr().err
