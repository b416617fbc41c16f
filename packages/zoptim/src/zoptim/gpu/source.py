"""The text of the kernels, and which constants it is compiled with."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import attrs
from torch import Tensor

from ..job import FORMAT_OF_DTYPE, NONE, SPLIT, Rule, Streams

__all__ = ["COMMON", "SPAN_NUMEL", "Formats", "Program", "kernels_source"]

SPAN_NUMEL = 16384  # elements of one partial sum (ZK_SPAN)
UPDATE_CHUNK_NUMEL = 8192  # elements that one block updates: small enough to fill a device evenly

# Flags that decide about the text of a rule; the others only about its coefficients.
_FLAGS_IN_TEXT = {Rule.ADAM: Rule.AMSGRAD, Rule.SGD: Rule.NESTEROV, Rule.LAMB: Rule.EPS_INSIDE}


@functools.cache
def kernels_source() -> str:
    """The CUDA text: prelude, formats, rules, kernels, from the package's data, without its own #include lines."""
    folder = Path(__file__).parent.parent / "csrc"
    texts = [(folder / name).read_text() for name in ("zk_gpu.h", "zk_math.h", "zk_rules.h", "zk_gpu.cu")]
    lines = "".join(texts).splitlines()
    return "\n".join(line for line in lines if not line.startswith('#include "')) + "\n"


@attrs.frozen(kw_only=True)
class Formats:
    """Formats of the streams, as zk_math.h numbers them."""

    weight: int
    grad: int
    state: int = NONE
    copy: int = NONE

    @classmethod
    def of(cls, streams: Streams) -> Formats:
        """Those of the dtypes in `streams`."""

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

    kernels: tuple[str, ...]  # names of the kernels in it that are launched
    chunk_numel: int  # elements that one block works on
    defines: tuple[tuple[str, int], ...] = ()  # constants of the text

    @classmethod
    def of(cls, rule: int, flags: int, formats: Formats) -> Program:
        """The update of one rule in the given formats."""
        is_lamb = rule == Rule.LAMB
        chunk_numel = SPAN_NUMEL if is_lamb else UPDATE_CHUNK_NUMEL
        constants = {
            "ZK_RULE": rule,
            "ZK_FLAGS": flags & _FLAGS_IN_TEXT.get(rule, 0),
            "ZK_WEIGHT": formats.weight,
            "ZK_GRAD": formats.grad,
            "ZK_STATE": formats.state,
            "ZK_COPY": formats.copy,
            "ZK_CHUNK": chunk_numel,
        }
        names = ("zk_lamb_sums", "zk_lamb_rows", "zk_lamb_apply") if is_lamb else ("zk_update",)
        return cls(kernels=names, chunk_numel=chunk_numel, defines=tuple(constants.items()))

    def text(self) -> str:
        """What the compiler reads."""
        return "".join(f"#define {name} {value}\n" for name, value in self.defines) + kernels_source()


COMMON = Program(
    kernels=("zk_patch", "zk_prepare_rows", "zk_squares", "zk_squares_final"), chunk_numel=SPAN_NUMEL
)  # needed whatever the rule
