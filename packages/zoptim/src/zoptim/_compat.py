"""torch's private and functional optimizer API: the only file that calls it.

It may change with a torch release; `tests/test__compat.py` pins the signatures and the behaviour that zoptim relies
on, so an incompatible torch fails there.

foreach (`torch.optim.<name>.<name>(foreach=True)`) is the torch path of Adam and SGD if states have the parameter's
dtype: a few kernels for a list of tensors, on any device of torch.  Everything else without a kernel uses the pure
rule (`updates/fallback.py`).

Rejected: torch's fused kernels as a third path.  They store the divided gradient into `p.grad`, skip only for a
found_inf of exactly 1.0, ignore strides, and their SGD ignores most of a bf16 weight on CPUs (torch 2.13).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch.optim._adafactor import adafactor as _functional_adafactor
from torch.optim.adam import adam as _functional_adam
from torch.optim.adamw import adamw as _functional_adamw
from torch.optim.optimizer import _global_optimizer_post_hooks as _all_post_hooks
from torch.optim.optimizer import _global_optimizer_pre_hooks as _all_pre_hooks
from torch.optim.sgd import sgd as _functional_sgd


def add_param_group(optimizer: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
    """Call torch's `add_param_group` without its decorator, whose first call imports torch._dynamo: 1 s and 65 MB."""
    method = torch.optim.Optimizer.add_param_group
    plain = method if torch.compiler.is_compiling() else getattr(method, "__wrapped__", method)
    plain(optimizer, param_group)


def skip_idle_hooks(cls: type[torch.optim.Optimizer]) -> None:
    """Call `cls.step` without torch's wrapper for hooks and profiles (15 us) while there are none.

    torch wraps the method of a class when the first optimizer of the class is made.
    """
    full: Any = cls.step
    plain: Any = getattr(full, "__wrapped__", None)
    if plain is None or getattr(full, "skips_idle_hooks", False):
        return

    @functools.wraps(plain)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (full if _is_observed(self) else plain)(self, *args, **kwargs)

    step.__dict__.update(hooked=True, skips_idle_hooks=True)
    cls.step = step  # type: ignore[method-assign]


def _is_observed(optimizer: Any) -> bool:
    local = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(local or _all_pre_hooks or _all_post_hooks or _profiler_enabled())


@attrs.frozen(eq=False)
class AdamLists:
    """The tensors of one Adam update: lists of equal length, one dtype, one device."""

    params: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    max_exp_avg_sqs: list[Tensor]  # empty without AMSGrad
    steps: list[Tensor]  # () float32 each


def foreach_adam(group: Mapping[str, Any], lists: AdamLists) -> None:
    """Update by foreach Adam(W) in place; advance `lists.steps` by one."""
    function = _functional_adamw if group["decoupled_weight_decay"] else _functional_adam
    beta1, beta2 = group["betas"]
    function(
        lists.params,
        lists.grads,
        lists.exp_avgs,
        lists.exp_avg_sqs,
        lists.max_exp_avg_sqs,
        lists.steps,
        foreach=True,
        fused=False,
        amsgrad=group["amsgrad"],
        beta1=beta1,
        beta2=beta2,
        lr=float(group["lr"]),
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
    )


@attrs.frozen(eq=False)
class SgdLists:
    """The tensors of one SGD update: lists of equal length, one dtype, one device."""

    params: list[Tensor]
    grads: list[Tensor]
    buffers: list[Tensor]  # empty without momentum
    first: bool = False  # the first update: buffers receive the gradient undampened


def foreach_sgd(group: Mapping[str, Any], lists: SgdLists) -> list[Tensor]:
    """Update by foreach SGD in place; return the momentum buffers (new ones on the first update)."""
    given: list[Tensor | None] = [None] * len(lists.params) if lists.first else [*lists.buffers]
    buffers = given or [None] * len(lists.params)
    _functional_sgd(
        lists.params,
        lists.grads,
        buffers,
        foreach=True,
        fused=False,
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=float(group["lr"]),
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
    )
    return [buffer for buffer in buffers if buffer is not None]


@attrs.frozen(eq=False)
class AdafactorLists:
    """The tensors of one Adafactor update: lists of equal length; None for a moment that a tensor's state lacks."""

    params: list[Tensor] = attrs.field(factory=list)
    grads: list[Tensor] = attrs.field(factory=list)
    row_vars: list[Tensor | None] = attrs.field(factory=list)
    col_vars: list[Tensor | None] = attrs.field(factory=list)
    variances: list[Tensor | None] = attrs.field(factory=list)
    steps: list[Tensor] = attrs.field(factory=list)  # () float32 each

    def add(self, param: Tensor, grad: Tensor, state: Mapping[str, Any]) -> None:
        """Append a tensor; `state` has torch's names."""
        self.params.append(param)
        self.grads.append(grad)
        self.row_vars.append(state.get("row_var"))
        self.col_vars.append(state.get("col_var"))
        self.variances.append(state.get("variance"))
        self.steps.append(state["step"])


def adafactor(group: Mapping[str, Any], lists: AdafactorLists) -> None:
    """Update by Adafactor in place; advance `lists.steps` by one."""
    _functional_adafactor(
        lists.params,
        lists.grads,
        lists.row_vars,
        lists.col_vars,
        lists.variances,
        lists.steps,
        foreach=group["foreach"],
        d=group["d"],
        lr=group["lr"],
        beta2_decay=group["beta2_decay"],
        weight_decay=group["weight_decay"],
        eps1=group["eps"][0],
        eps2=group["eps"][1],
        maximize=group["maximize"],
    )


def divide(tensors: Sequence[Tensor], divisor: Tensor | None) -> list[Tensor]:
    """Divide tensors of one device by a () tensor on that device, in one call; return them unchanged for None."""
    return list(tensors) if divisor is None or not tensors else list(torch._foreach_div(list(tensors), divisor))


def divide_(tensors: Sequence[Tensor], divisor: Tensor) -> None:
    """Divide tensors of one device in place by a () tensor on that device, in one call."""
    if tensors:
        torch._foreach_div_(list(tensors), divisor)
