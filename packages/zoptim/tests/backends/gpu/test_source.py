from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zoptim
from zoptim.backends.contract import Flag, Streams
from zoptim.backends.gpu import kernels_source
from zoptim.backends.gpu.source import COMMON, Formats, Program
from zoptim.backends.sources import kernel_rules

CSRC = Path(zoptim.__file__).parent / "csrc"


def test_the_source_holds_every_file_and_includes_none_of_them() -> None:
    source = kernels_source()
    for guard in ("ZK_GPU_H", "ZK_MATH_H", "ZK_RULES_H", "zk_prepare_rows"):
        assert guard in source
    assert '#include "' not in source


def test_the_formulas_are_the_very_text_of_the_c_kernels() -> None:
    for name in ("zk_math.h", "zk_rules.h", "zk_prepare.h", *(f"rules/{rule.name}.h" for rule in kernel_rules())):
        lines = [line for line in (CSRC / name).read_text().splitlines() if not line.startswith('#include "')]
        assert "\n".join(lines) in kernels_source()


def test_formats_are_read_from_dtypes() -> None:
    half, byte = [torch.ones(1, dtype=torch.bfloat16)], [torch.zeros(1, dtype=torch.uint8)]
    split = Streams(weights=half, grads=half, remainders=[torch.zeros(1, dtype=torch.int16)], states=(byte,))
    assert Formats.of(split) == Formats(weight=4, grad=2, state=5, copy=0)
    plain = Streams(weights=[torch.ones(1)], grads=[torch.ones(1, dtype=torch.float16)], copies=half)
    assert Formats.of(plain) == Formats(weight=1, grad=3, state=0, copy=2)


@pytest.mark.parametrize(
    ("rule", "flags", "in_text"),
    [
        ("adam", Flag.DECOUPLED | Flag.AMSGRAD | Flag.MAXIMIZE, Flag.AMSGRAD),
        ("sgd", Flag.NESTEROV | Flag.MAXIMIZE, Flag.NESTEROV),
        ("lamb", Flag.NO_CORRECTION | Flag.EPS_INSIDE, Flag.EPS_INSIDE),
        ("lion", Flag.DECOUPLED, 0),
    ],
)
def test_flags_that_only_change_coefficients_share_a_program(rule: str, flags: int, in_text: int) -> None:
    program = Program.of(rule, flags, Formats(weight=1, grad=1, state=1))
    assert dict(program.defines)["ZK_FLAGS"] == in_text
    assert program == Program.of(rule, in_text, Formats(weight=1, grad=1, state=1))


def test_chunks_are_whole_groups_of_a_block() -> None:
    for rule in ("adam", "lamb"):
        assert Program.of(rule, 0, Formats(weight=1, grad=1, state=5)).chunk_numel % 2048 == 0


def test_kernels_of_a_program_stand_in_its_text(shim: Any) -> None:
    lamb = Program.of("lamb", 0, Formats(weight=1, grad=1, state=1))
    for program in (COMMON, lamb, Program.of("sgd", 0, Formats(weight=1, grad=1))):
        assert set(shim.load(program)) == set(program.kernels)
