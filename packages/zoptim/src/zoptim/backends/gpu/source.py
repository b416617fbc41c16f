"""The CUDA text of the kernels, and the constants of each compilation."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import attrs
from torch import Tensor

from zoptim.backends.contract import FORMAT_OF_DTYPE, NONE, SPAN_NUMEL, SPLIT, Flag, Streams
from zoptim.backends.sources import CSRC, kernel_rules, rule_number, rules_text

__all__ = ["COMMON", "Formats", "Program", "kernels_source"]

UPDATE_CHUNK_NUMEL = 8192  # elements per block: few enough to balance the blocks of a device

_TWO_PASSES = ("sums", "rows", "apply")  # kernels of a rule that is not elementwise: LAMB


@functools.cache
def kernels_source() -> str:
    """Return the CUDA text, from the package's data: prelude, formats, rules, kernels, without #include lines."""
    parts = {name: (CSRC / name).read_text() for name in ("zk_gpu.h", "zk_math.h", "zk_rules.h")}
    parts["zk_table.h"] = rules_text(include=False)
    parts |= {name: (CSRC / name).read_text() for name in ("zk_prepare.h", "zk_gpu.cu")}
    lines = "".join(parts.values()).splitlines()
    return "\n".join(line for line in lines if not line.startswith('#include "')) + "\n"


@attrs.frozen(kw_only=True)
class Formats:
    """The formats of the streams, by their numbers in zk_math.h."""

    weight: int
    grad: int
    state: int = NONE
    copy: int = NONE

    @classmethod
    def of(cls, streams: Streams) -> Formats:
        """Return the formats of `streams`."""
        states = streams.states[0] if streams.states else []
        return cls(
            weight=SPLIT if streams.remainders else _format_of(streams.weights),
            grad=_format_of(streams.grads),
            state=_format_of(states),
            copy=_format_of(streams.copies),
        )


def _format_of(tensors: Sequence[Tensor]) -> int:
    return FORMAT_OF_DTYPE[tensors[0].dtype] if tensors else NONE


@attrs.frozen(kw_only=True)
class Program:
    """One compilation of the text."""

    kernels: tuple[str, ...]  # names of its kernels that are launched
    chunk_numel: int  # elements that one block works on
    defines: tuple[tuple[str, int | str], ...] = ()  # constants of the text

    @classmethod
    def of(cls, rule: str, flags: int, formats: Formats) -> Program:
        """Return the program that updates by one rule in the given formats."""
        kernel_rule = kernel_rules()[rule_number(rule)]
        chunk_numel = UPDATE_CHUNK_NUMEL if kernel_rule.is_elementwise else SPAN_NUMEL
        name = rule.upper()
        constants: dict[str, int | str] = {
            "ZK_RULE": f"ZK_{name}",
            "ZK_LOOPS": f"ZK_{name}_LOOPS",
            "ZK_SQUARES": f"ZK_{name}_SQUARES",
            "ZK_UPDATE": f"zk_{rule}",
            "ZK_FLAGS": flags & sum(Flag[flag] for flag in kernel_rule.loop_flags),
            "ZK_WEIGHT": formats.weight,
            "ZK_GRAD": formats.grad,
            "ZK_STATE": formats.state,
            "ZK_COPY": formats.copy,
            "ZK_CHUNK": chunk_numel,
        }
        names = ("zk_update",) if kernel_rule.is_elementwise else tuple(f"zk_{rule}_{k}" for k in _TWO_PASSES)
        return cls(kernels=names, chunk_numel=chunk_numel, defines=tuple(constants.items()))

    def text(self) -> str:
        """Return the text with its constants."""
        return "".join(f"#define {name} {value}\n" for name, value in self.defines) + kernels_source()


COMMON = Program(
    kernels=("zk_patch", "zk_prepare_rows", "zk_squares", "zk_squares_final"), chunk_numel=SPAN_NUMEL
)  # needed by every rule
