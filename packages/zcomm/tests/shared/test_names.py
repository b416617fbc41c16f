"""Numbers that Python, C and the ranks share."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from zcomm.shared import names, native

HEADER = Path(names.__file__).parent.parent / "csrc" / "zs_api.h"


def enumerated(first: str) -> list[str]:
    """The names of the C enumeration that begins with `first`, in its order."""
    found = re.search(rf"enum {{ ({first}[^}}]*) }}", HEADER.read_text())
    assert found is not None
    return found.group(1).replace("ZS_", "").lower().split(", ")


def test_operations_and_reductions_are_numbered_as_in_c() -> None:
    assert enumerated("ZS_ALL_REDUCE") == list(names.OPS)
    assert enumerated("ZS_SUM")[:-1] == list(names.REDUCTIONS)


def test_dtypes_that_can_be_reduced_are_numbered_as_in_c() -> None:
    codes = enumerated("ZS_FLOAT32")
    assert codes.pop() == "reducible"
    assert [names.dtype_name(code) for code in range(names.NUM_REDUCIBLE)] == codes


def test_c_counts_as_many_reducible_dtypes() -> None:
    if native.unavailable_reason():
        pytest.skip(native.unavailable_reason())
    assert native.library().lib.zs_num_reducible() == names.NUM_REDUCIBLE


def test_a_dtype_can_be_moved_but_not_reduced_or_neither() -> None:
    assert names.is_supported(torch.float32, reduced=True)
    assert names.is_supported(torch.int16, reduced=False)
    assert not names.is_supported(torch.int16, reduced=True)
    assert not names.is_supported(torch.quint8, reduced=False)
    assert names.dtype_name(-1) == "nothing"
