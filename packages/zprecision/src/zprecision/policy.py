"""Precision policy: the dtype of each tensor in training.

Four dtypes decide: the weights that forward and backward use, the accumulator of micro-step gradients, the
communication dtype of the gradient reduction, and the master copy that the optimizer updates.  They form one frozen
value, fixed before training starts; no other code branches on a dtype.

The defaults follow from `param` alone.  Sums over many steps (accumulator, master) are float32 or better, because
bf16 has 8 significant bits and a sum in it stops moving once a term is 256 times smaller than the sum (Micikevicius
et al. 2018, section 3.1); gradients are reduced in the dtype of the weights.  A narrower master saves memory and
needs an optimizer with stochastic rounding.

Rejected: torch.autocast as the policy.  It picks a dtype per operation and casts the weights again in every forward.
It can still be used on top, with FP32 as the policy.
"""

from __future__ import annotations

import time
from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor, nn

from zprecision import checks
from zprecision.casting import cast, cast_in_place, paired_dtypes
from zprecision.keep_in_fp32 import KeepInFp32, tensors

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def _summing_dtype(policy: Precision) -> torch.dtype | None:
    given = isinstance(policy.param, torch.dtype)  # its own validator rejects anything else
    return torch.promote_types(policy.param, torch.float32) if given and policy.param else None


def _param_dtype(policy: Precision) -> torch.dtype | None:
    return policy.param


_given = attrs.validators.optional(checks.floating)


@attrs.frozen(kw_only=True)
class Precision:
    """Dtypes of training. `Precision()` is the identity: every tensor keeps its dtype.

    Invariant: `accumulate` and `master` hold every value of `param` exactly.

    Raises ValueError for dtypes that break it.
    """

    # weights, activations and gradients of forward and backward; None: each parameter keeps its own
    param: torch.dtype | None = attrs.field(default=None, validator=_given)
    # sums of gradients over micro-steps; float32, or float64 for float64 weights; None: each parameter's own
    accumulate: torch.dtype | None = attrs.field(
        default=attrs.Factory(_summing_dtype, takes_self=True), validator=_given
    )
    # gradients in the reduction; as `param`; may be narrower, to save bandwidth; None: each parameter's own
    reduce: torch.dtype | None = attrs.field(default=attrs.Factory(_param_dtype, takes_self=True), validator=_given)
    # master copy of the optimizer; float32, or float64 for float64 weights; None: each parameter's own
    master: torch.dtype | None = attrs.field(default=attrs.Factory(_summing_dtype, takes_self=True), validator=_given)

    # floating buffers; None: they keep their dtype, but widen with a wider `param`
    buffer: torch.dtype | None = attrs.field(default=None, validator=_given)
    # parameters and buffers that stay in float32 where `param` is narrower; by default those that the model lists
    keep: KeepInFp32 = attrs.field(factory=KeepInFp32, validator=attrs.validators.instance_of(KeepInFp32))

    def __attrs_post_init__(self) -> None:
        for name, dtype in (("accumulate", self.accumulate), ("master", self.master)):
            if dtype and self.param and torch.promote_types(dtype, self.param) != dtype:
                raise ValueError(
                    f"Precision(param={self.param}, {name}={dtype}): {name} cannot hold every value of param;"
                    f" use {torch.promote_types(dtype, self.param)} or omit {name}"
                )

    def cast_module(self, module: ModuleT) -> ModuleT:
        """Cast floating parameters (with their gradients) and buffers in place, except `keep`; return `module`.

        Tensors stay the same objects, so an existing optimizer still holds them. Integer, bool, complex and 8-bit
        tensors are left alone. Tensors that `keep` names are float32 afterwards; for patterns that name whole
        modules, `Fp32Modules` casts their inputs and outputs. For buffers see [Note: buffers are not rounded].
        """
        kept = self.keep.names(module, self.param)
        paired = paired_dtypes(module, self.param, self.buffer) if self.param else {}
        params = {id(param): self.param or param.dtype for param in module.parameters()}
        for name, tensor in tensors(module):
            dtype = paired.get(id(tensor)) or params.get(id(tensor)) or self._of_buffer(tensor)
            cast_in_place(tensor, torch.float32 if name in kept else dtype)
        return module

    def _of_buffer(self, tensor: Tensor) -> torch.dtype:
        becomes_wider = self.param is not None and torch.promote_types(tensor.dtype, self.param) == self.param
        return self.buffer or (self.param if becomes_wider and self.param else tensor.dtype)

    def cast_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return `args` and `kwargs` with every floating tensor in `param`; the inputs are not modified.

        Descends into lists, tuples (named ones too) and dicts at any depth; other objects are returned unchanged.
        """
        if self.param is None:
            return args, kwargs
        return tuple(cast(value, self.param) for value in args), cast(kwargs, self.param)


FP32 = Precision(param=torch.float32)
BF16 = Precision(param=torch.bfloat16)
FP16 = Precision(param=torch.float16)  # its gradients need loss scaling: zprecision.scaling


# --- Speed of bf16 ---------------------------------------------------------------------------------------

_BUDGET_S = 0.05  # of measuring, without the warm-up; a very slow dtype takes longer
_MIN_RUNS = 7  # of each dtype, however slow the machine is
_EDGE_CPU, _EDGE_ELSEWHERE = 512, 2048  # of the square matrices: about a millisecond a product


def measure_bf16_speedup(device: torch.device | str) -> float:
    """Measure the speed of a bf16 matrix product relative to float32 on `device`; above 1 bf16 is faster.

    A CPU without bf16 instructions accepts bf16 but is several times slower in it, so a table is no substitute.
    Takes the best time of each over interleaved runs: other programs can only slow a run down, so on a busy machine
    the best time is the hardware's and a median of ratios is noise.  About 50 ms on an idle machine.  Uses no
    random generator.
    """
    device = torch.device(device)
    edge = _EDGE_CPU if device.type == "cpu" else _EDGE_ELSEWHERE
    wide = torch.full((edge, edge), 0.5, dtype=torch.float32, device=device)
    narrow = wide.bfloat16()
    with torch.no_grad():
        for matrix in (wide, narrow):
            _seconds(matrix)  # the first call chooses and builds kernels
        wide_s: list[float] = []
        narrow_s: list[float] = []
        deadline = time.perf_counter() + _BUDGET_S
        while len(wide_s) < _MIN_RUNS or time.perf_counter() < deadline:
            wide_s.append(_seconds(wide))
            narrow_s.append(_seconds(narrow))
    return min(wide_s) / min(narrow_s)


def _seconds(matrix: Tensor) -> float:
    """Wall time of one matrix @ matrix, with the device idle before and after."""
    _wait(matrix.device)
    start = time.perf_counter()
    torch.mm(matrix, matrix)
    _wait(matrix.device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
