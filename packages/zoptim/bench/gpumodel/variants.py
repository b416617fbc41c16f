"""The kernels that the library compiles for the optimizers' common formats, by name, with the bytes they move.

A name is that of the tests: rule and flags, then weight, gradient, state and copy, as in
"adam amsgrad: split bf16 q8 bf16".  LAMB has a kernel for each half.  Muon and Adafactor have no kernel text: their
steps are torch operators.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from gpumodel.listing import Body
from gpumodel.warps import Work

from zoptim.backends.contract import BLOCK_NUMEL, Flag
from zoptim.backends.gpu.source import COMMON, Formats, Program

__all__ = ["KERNELS", "Kernel", "kernel", "select"]

NUMBERS = {"-": 0, "f32": 1, "bf16": 2, "f16": 3, "split": 4, "q8": 5}  # zk_math.h
WIDTHS = {"-": 0, "f32": 4, "bf16": 2, "f16": 2, "split": 4, "q8": 1}  # bytes; split: weight and remainder

FORMATS = (  # of Adam: weight, gradient, state, copy
    *("f32 f32 f32", "f32 bf16 f32 bf16", "f32 f16 f32 f16", "split bf16 f32"),
    *("f32 f32 bf16", "f32 bf16 bf16 bf16", "split bf16 bf16", "bf16 bf16 bf16", "f16 f16 f16"),
    *("f32 f32 q8", "f32 bf16 q8 bf16", "split bf16 q8", "bf16 bf16 q8"),
)
EVERY_STATE = (  # of the other rules
    *("f32 f32 f32", "f32 bf16 f32 bf16", "split bf16 f32", "bf16 bf16 bf16", "f16 f16 f16"),
    *("f32 f32 q8", "f32 bf16 q8 bf16"),
)
WITHOUT_STATE = ("f32 f32 -", "f32 bf16 - bf16", "split bf16 -", "bf16 bf16 -", "f16 f16 -")
A_FEW = ("f32 f32 f32", "bf16 bf16 bf16", "f32 f32 q8")  # of rules that differ by a flag
RULES = {
    "adam": FORMATS,
    "adagrad": EVERY_STATE,
    "lion": EVERY_STATE,
    "sgd": EVERY_STATE + WITHOUT_STATE,
    "lamb": EVERY_STATE,
    "adam amsgrad": A_FEW,
    "sgd nesterov": A_FEW,
    "lamb eps_inside": A_FEW,
}
BLOCK_WARPS = 8  # ZK_WARPS
SQUARES_PER_PASS = 512  # 16 elements of a thread, by ZK_UNROLL_16


@attrs.frozen(kw_only=True)
class Kernel:
    """One kernel of one compilation."""

    name: str  # of the report
    function: str
    program: Program
    bytes_per_element: float

    def work(self, bodies: Sequence[Body]) -> Work:
        """Return the work of the loop that updates whole groups, or sums whole spans of this format."""
        if self.function == "zk_squares":
            return self._work(self._summing(bodies), SQUARES_PER_PASS)
        body = bodies[0]
        moved = sum(i.access_bytes for i in body.loop if i.is_wide)
        # a run is 4 elements of a thread, and a group one run or two; scales are beside the wide accesses
        runs = max(1, round(moved / (4 * self.bytes_per_element)))
        expected = 4 * runs * self.bytes_per_element - self._scales() * runs
        if moved != round(expected):
            raise ValueError(
                f"the loop of {self.name} moves {moved} bytes a thread by wide accesses; its formats need "
                f"{expected:g} for {runs} runs.  Is {self.function}'s fast path still the one with LDG and STG?"
            )
        return self._work(body, 128 * runs)

    def _work(self, body: Body, elements: int) -> Work:
        chunk = self.program.chunk_numel
        return Work(
            body=body, elements=elements, passes=chunk // (BLOCK_WARPS * elements), block_elements=chunk,
            block_warps=BLOCK_WARPS, bytes_per_element=self.bytes_per_element,
        )  # fmt: skip

    def _scales(self) -> float:
        """Bytes of scales for 4 elements."""
        return 4 * (self.bytes_per_element % 1)

    def _summing(self, bodies: Sequence[Body]) -> Body:
        """The loop without bounds (no guards) whose loads have the format's width; only float16 needs HADD2."""
        name = self.name.removeprefix("squares: ")
        for body in bodies:
            loads = [i for i in body.loop if i.is_global]
            converts = any(i.name == "HADD2" for i in body.loop)
            if (
                all(i.access_bytes == WIDTHS[name] and not i.guard for i in loads)
                and converts == (name == "f16")
                and len(loads) == SQUARES_PER_PASS // 32
            ):
                return body
        raise ValueError(f"zk_squares has no loop over a whole span of {name}.")


def kernel(name: str, function: str = "zk_update") -> Kernel:
    """Return the kernel of a name.  Raises ValueError that lists the formats for a name that is none."""
    try:
        what, formats = name.split(":")
        rule, *flags = what.split()
        weight, grad, state, copy, *more = [*formats.split(), "-"][:5]
        if more and more != ["-"]:
            raise ValueError
        chosen = Formats(weight=NUMBERS[weight], grad=NUMBERS[grad], state=NUMBERS[state], copy=NUMBERS[copy])
        program = Program.of(rule, sum(Flag[flag.upper()] for flag in flags), chosen)
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"{name!r} names no kernel; give RULE [FLAG...]: WEIGHT GRAD STATE [COPY] with formats of "
            f"{', '.join(NUMBERS)}, for example 'adam amsgrad: f32 bf16 q8 bf16'."
        ) from error
    states = 0 if state == "-" else {"adam": 2 + ("amsgrad" in flags), "lamb": 2}.get(rule, 1)
    of_state = WIDTHS[state] + (4 / BLOCK_NUMEL if state == "q8" else 0)
    moved = {
        "zk_update": 2 * WIDTHS[weight] + WIDTHS[grad] + 2 * states * of_state + WIDTHS[copy],
        "zk_lamb_sums": WIDTHS[weight] + WIDTHS[grad] + 2 * states * of_state,
        "zk_lamb_apply": 2 * WIDTHS[weight] + states * of_state + WIDTHS[copy],
    }
    if function not in program.kernels or function not in moved:
        raise ValueError(f"{name!r} has the kernels {', '.join(program.kernels)}, and no {function}.")
    half = function.removeprefix("zk_lamb_") if rule == "lamb" else ""
    return Kernel(
        name=f"{what}{' ' * bool(half)}{half}:{formats}", function=function, program=program,
        bytes_per_element=moved[function],
    )  # fmt: skip


def _kernels() -> tuple[Kernel, ...]:
    found = []
    for rule, formats in RULES.items():
        functions = ("zk_lamb_sums", "zk_lamb_apply") if rule.startswith("lamb") else ("zk_update",)
        found += [kernel(f"{rule}: {f}", function) for f in formats for function in functions]
    return tuple(found)


_SQUARES = tuple(
    Kernel(name=f"squares: {name}", function="zk_squares", program=COMMON, bytes_per_element=WIDTHS[name])
    for name in ("f32", "bf16", "f16")
)
KERNELS = (*_kernels(), *_SQUARES)


def select(names: str) -> tuple[Kernel, ...]:
    """Return the kernels of names separated by ';'.  Raises ValueError for an unknown one."""
    known = {found.name: found for found in KERNELS}
    return tuple(known.get(name.strip()) or kernel(name.strip()) for name in names.split(";"))
