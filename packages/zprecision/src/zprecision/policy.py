"""Which dtype each number of training has.

Four numbers decide: the weights that forward and backward use, the accumulator that micro-steps add their
gradients to, the wire of the gradient reduction, and the master copy that the optimizer updates.  They are one
frozen value, fixed before training starts; nothing elsewhere branches on a dtype.

The defaults follow from `param` alone.  What is summed over many steps (accumulator, master) is float32 or
better, because bf16 has 8 significant bits and a sum in it stops moving once a term is 256 times smaller than
the sum (Micikevicius et al. 2018, section 3.1); the wire carries what the weights are in.  A narrower master is
possible for those who need its memory, with an optimizer that rounds stochastically.

Rejected: torch.autocast as the policy.  It picks a dtype per operation and casts the weights again in every
forward.  It can still be used on top; FP32 is the right policy then.
"""

from __future__ import annotations

import time
from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor, nn

from zprecision import checks
from zprecision.buffers import beside_weights
from zprecision.casting import cast, cast_in_place
from zprecision.keeping import Keep, tensors

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def _summing_dtype(policy: Precision) -> torch.dtype | None:
    given = isinstance(policy.param, torch.dtype)  # anything else is refused by its own field
    return torch.promote_types(policy.param, torch.float32) if given and policy.param else None


def _param_dtype(policy: Precision) -> torch.dtype | None:
    return policy.param


_given = attrs.validators.optional(checks.floating)


@attrs.frozen(kw_only=True)
class Precision:
    """The dtypes of training. `Precision()` is the identity: every tensor keeps the dtype that it has.

    Invariant: `accumulate` and `master` hold every value of `param` exactly.
    """

    # weights, activations and gradients of forward and backward; None: each parameter keeps its own
    param: torch.dtype | None = attrs.field(default=None, validator=_given)
    # sums of gradients over micro-steps; float32, or float64 for float64 weights; None: each parameter's own
    accumulate: torch.dtype | None = attrs.field(
        default=attrs.Factory(_summing_dtype, takes_self=True), validator=_given
    )
    # gradients on the wire; as `param`; may be coarser, to save bandwidth; None: each parameter's own
    reduce: torch.dtype | None = attrs.field(default=attrs.Factory(_param_dtype, takes_self=True), validator=_given)
    # the copy that the optimizer updates; float32, or float64 for float64 weights; None: each parameter's own
    master: torch.dtype | None = attrs.field(default=attrs.Factory(_summing_dtype, takes_self=True), validator=_given)

    # floating buffers; None: they keep theirs, but become as wide as a wider `param`
    buffer: torch.dtype | None = attrs.field(default=None, validator=_given)
    # parameters and buffers that stay in float32 where `param` is narrower; those that the model lists, unless told
    keep: Keep = attrs.field(factory=Keep, validator=attrs.validators.instance_of(Keep))

    def __attrs_post_init__(self) -> None:
        for name, dtype in (("accumulate", self.accumulate), ("master", self.master)):
            if dtype and self.param and torch.promote_types(dtype, self.param) != dtype:
                raise ValueError(
                    f"Precision(param={self.param}, {name}={dtype}): {name} cannot hold every value of param;"
                    f" use {torch.promote_types(dtype, self.param)} or leave {name} out"
                )

    def cast_module(self, module: ModuleT) -> ModuleT:
        """Casts floating parameters (with their gradients) and buffers in place, but for `keep`; returns `module`.

        Tensors stay the same objects, so an optimizer made before still holds them. Integer, bool, complex and 8-bit
        ones are left alone, and so is whatever already has the dtype. What `keep` names is float32 afterwards; where
        patterns name whole modules, `Islands` casts what goes in and out of them. For buffers see
        [Note: state is not rounded].
        """
        kept = self.keep.names(module, self.param)
        paired = beside_weights(module, self.param, self.buffer) if self.param else {}
        params = {id(param): self.param or param.dtype for param in module.parameters()}
        for name, tensor in tensors(module):
            dtype = paired.get(id(tensor)) or params.get(id(tensor)) or self._of_buffer(tensor)
            cast_in_place(tensor, torch.float32 if name in kept else dtype)
        return module

    def _of_buffer(self, tensor: Tensor) -> torch.dtype:
        becomes_wider = self.param is not None and torch.promote_types(tensor.dtype, self.param) == self.param
        return self.buffer or (self.param if becomes_wider and self.param else tensor.dtype)

    def cast_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """`args` and `kwargs` with every floating tensor in `param`; nothing that was given is modified.

        Looks into lists, tuples (named ones too) and dicts at any depth; other objects pass as they are.
        """
        if self.param is None:
            return args, kwargs
        return tuple(cast(value, self.param) for value in args), cast(kwargs, self.param)


FP32 = Precision(param=torch.float32)
BF16 = Precision(param=torch.bfloat16)
FP16 = Precision(param=torch.float16)  # its gradients need loss scaling: zprecision.scaling


# --- Is bf16 worth it here? ------------------------------------------------------------------------------

_BUDGET_S = 0.05  # of measuring; the warm-up, and a dtype that is very slow, come on top
_MIN_RUNS = 7  # of each dtype, however slow the machine is
_EDGE_CPU, _EDGE_ELSEWHERE = 512, 2048  # of the square matrices: about a millisecond a product


def measure_bf16_speedup(device: torch.device | str) -> float:
    """How many times faster a bf16 matrix product is than a float32 one on `device`; > 1: bf16 is faster.

    Measured, not looked up: a CPU without bf16 instructions accepts bf16 and is several times slower in it.
    The best time of each over interleaved runs: other programs can only make a run slower, so on a busy machine the
    best is what the hardware does, where a median of ratios is anything. About 50 ms in all when the machine is
    idle. Draws nothing from any random generator.
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
    """Wall time of one matrix @ matrix, from an idle device to an idle device."""
    _wait(matrix.device)
    start = time.perf_counter()
    torch.mm(matrix, matrix)
    _wait(matrix.device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
