"""The rules of csrc/rules, and the text generated from them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from zoptim.backends import sources
from zoptim.backends.contract import BLOCK_NUMEL, SPAN_NUMEL, Flag


def test_rules_are_numbered_in_the_order_of_their_names() -> None:
    names = [rule.name for rule in sources.kernel_rules()]
    assert names == sorted(names)
    assert [sources.rule_number(name) for name in names] == list(range(len(names)))
    assert f"#define ZK_SGD {names.index('sgd')}\n" in sources.rules_text(include=True)


def test_only_lamb_is_not_elementwise() -> None:
    assert [rule.name for rule in sources.kernel_rules() if not rule.is_elementwise] == ["lamb"]


def test_flags_that_select_a_loop_are_read_from_the_header() -> None:
    found = {rule.name: rule.loop_flags for rule in sources.kernel_rules()}
    assert found["adam"] == ("AMSGRAD",)
    assert found["lion"] == ()
    assert all(flag in Flag.__members__ for flags in found.values() for flag in flags)


def test_numbers_are_those_of_the_headers() -> None:
    text = "".join((sources.CSRC / name).read_text() for name in ("zk_rules.h", "zk_math.h", "zk_api.h"))
    defined = {name: int(value) for name, value in re.findall(r"#define ZK_(\w+) (\d+)", text)}
    assert {flag.name: defined[str(flag.name)] for flag in Flag} == {flag.name: flag.value for flag in Flag}
    assert (defined["BLOCK"], defined["SPAN"]) == (BLOCK_NUMEL, SPAN_NUMEL)


def test_a_header_without_loops_is_rejected_by_name(tmp_path: Path) -> None:
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules" / "toy.h").write_text("/* nothing */\n")
    with pytest.raises(ValueError, match=r"toy\.h does not define ZK_TOY_LOOPS\(X\)"):
        sources.kernel_rules(tmp_path)
