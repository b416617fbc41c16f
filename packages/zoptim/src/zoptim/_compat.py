"""The one file that calls torch's private and functional optimizer API.

Everything here may change with a torch release; `tests/test_compat.py` pins the signatures and
the behaviour relied upon, so a new torch fails there by name rather than in a loss curve.

Two ways to update a list of tensors, with the same meaning:

* fused (`torch._fused_*_`): one pass over memory, reads `grad_scale` and `found_inf` on the device.
* foreach (`torch.optim.<name>.<name>(foreach=True)`): any dtype, layout or device torch can add up.

What torch's fused kernels do that their names do not say (seen in torch 2.13):

* `grad_scale` divides, and the divided gradient is **stored into the gradient tensor**.
* `found_inf` skips only if it is exactly 1.0: callers pass 0.0 or 1.0.  A skip writes nothing.
* both scalars must be float32 and live on the tensors' device.
* the CPU kernels walk memory from `data_ptr` for `numel` elements and never look at strides: tensors
  of different layout give wrong updates, tensors of different size read foreign memory.
* the step count is the caller's to advance.  A step of +inf makes both bias corrections exactly 1.

Rejected: `torch.optim.adam.adam(fused=True)`.  It advances the step by 1 and takes `found_inf` off
again, regroups tensors that are grouped already, and skips for a found_inf of 1.0 only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.optim.adam import adam as _functional_adam
from torch.optim.adamw import adamw as _functional_adamw
from torch.optim.sgd import sgd as _functional_sgd

# Where a fused kernel is right: device type -> dtypes.  Elsewhere the foreach path is used.
FusedOn = Mapping[str, frozenset[torch.dtype]]
_FULL = frozenset({torch.float32, torch.float64})
_HALF = frozenset({torch.bfloat16, torch.float16})
FUSED_ADAM_ON: FusedOn = {"cpu": _FULL | _HALF, "cuda": _FULL | _HALF}
# torch's fused SGD on CPUs leaves low-precision weights as they are, whole vector registers at a time.
FUSED_SGD_ON: FusedOn = {"cpu": _FULL, "cuda": _FULL | _HALF}


@attrs.frozen(eq=False)
class AdamLists:
    """The tensors of one Adam update: lists of equal length, one dtype, one device."""

    params: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    max_exp_avg_sqs: list[Tensor]  # empty without AMSGrad
    steps: list[Tensor]  # () float32 each


@attrs.frozen(eq=False)
class Signals:
    """The two scalars that travel with a step.  () float32 on the tensors' device, or None."""

    grad_scale: Tensor | None = None  # gradients are divided by it
    found_inf: Tensor | None = None  # exactly 0.0 or 1.0; 1.0 means: change nothing


def has_fused_kernel(tensor: Tensor, where: FusedOn) -> bool:
    """Whether the fused kernel that is right on `where` takes tensors of this device and dtype."""
    return tensor.dtype in where.get(tensor.device.type, ())


def fused_adam(group: Mapping[str, Any], lists: AdamLists, signals: Signals) -> None:
    """One fused Adam(W) update in place.  The caller has advanced `lists.steps` already."""
    kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    beta1, beta2 = group["betas"]
    kernel(
        lists.params,
        lists.grads,
        lists.exp_avgs,
        lists.exp_avg_sqs,
        lists.max_exp_avg_sqs,
        lists.steps,
        lr=_lr_beside(group["lr"], lists.params[0]),
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=group["amsgrad"],
        maximize=group["maximize"],
        grad_scale=signals.grad_scale,
        found_inf=signals.found_inf,
    )


def foreach_adam(group: Mapping[str, Any], lists: AdamLists) -> None:
    """One foreach Adam(W) update in place; advances `lists.steps` by one."""
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
    first: bool = False  # the buffers hold nothing yet and receive the gradient undampened


def fused_sgd(group: Mapping[str, Any], lists: SgdLists, signals: Signals) -> None:
    """One fused SGD update in place."""
    torch._fused_sgd_(
        lists.params,
        lists.grads,
        lists.buffers,
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=_lr_beside(group["lr"], lists.params[0]),
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        is_first_step=lists.first,
        grad_scale=signals.grad_scale,
        found_inf=signals.found_inf,
    )


def foreach_sgd(group: Mapping[str, Any], lists: SgdLists) -> list[Tensor]:
    """One foreach SGD update in place; returns the momentum buffers (new ones on the first step)."""
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


def divide_(tensors: Sequence[Tensor], divisor: Tensor) -> None:
    """Divide tensors of one device in place by a () tensor on that device, in one call."""
    if tensors:
        torch._foreach_div_(list(tensors), divisor)


def add_(tensors: Sequence[Tensor], amount: Tensor) -> None:
    """Add a () tensor to tensors of one device in place, in one call."""
    torch._foreach_add_(list(tensors), amount)


def _lr_beside(lr: float | Tensor, param: Tensor) -> Any:
    """A tensor lr on a foreign accelerator would be refused by the kernel; numbers pass."""
    return lr.to(param.device) if isinstance(lr, Tensor) and lr.device.type != "cpu" else lr
