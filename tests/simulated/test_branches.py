"""Branches on the device's type: the list of `branches.txt` is complete, and names tests that exist."""

from __future__ import annotations

import ast
from pathlib import Path

from simulated_cuda.branches import NOT_TAKEN, _Finder, find_sites, read_list
from simulated_cuda.environment import SELECTION

ROOT = Path(__file__).parents[2]


def test_the_list_has_every_branch_and_nothing_else() -> None:
    listed, sites = set(read_list()), {str(site) for site in find_sites()}
    remedy = "write the list again: see the module simulated_cuda.branches"
    assert sites - listed == set(), remedy
    assert listed - sites == set(), remedy


def test_every_branch_is_taken_on_the_device() -> None:
    assert [site for site, test in read_list().items() if test == NOT_TAKEN] == []


def test_entries_of_the_config_are_no_branches() -> None:
    finder = _Finder("a.py")
    finder.visit(
        ast.parse('zero.offload_param.device == "cpu" or words.get("device", "") == "cpu" or x.device.type != "cuda"')
    )
    assert [site.text for site in finder.found] == ["x.device.type != 'cuda'"]


def test_the_tests_that_take_branches_are_selected() -> None:
    outside = [test for test in read_list().values() if not test.startswith(SELECTION)]
    assert outside == []


def test_the_tests_that_take_branches_exist() -> None:
    tests = {test for test in read_list().values() if test != NOT_TAKEN}
    assert tests
    for test in sorted(tests):
        path, _, name = test.partition("::")
        assert f"def {name.rpartition('::')[2].partition('[')[0]}(" in (ROOT / path).read_text(), test
