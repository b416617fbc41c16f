"""A model whose dtype no section of the config decides: it keeps its own, and the plan follows.

Parameters of 32 and 64 bits are trained as they are.  Those of 16 bits get what DeepSpeed gives them: nothing at
stage 0, which is plain torch; from stage 1 on float32 masters, and a dynamic loss scale for float16 gradients.  DeepSpeed
gives float64 parameters float32 masters as well, which is less than they are; here masters are float64.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import attrs
import torch
from torch import nn

import zcomm
from zengine.config import Plan
from zprecision import DynamicScaling, Unscaled

__all__ = ["dtype_of", "follow_model"]

log = logging.getLogger("zengine")

_SECTIONS = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def follow_model(model: nn.Module, plan: Plan) -> Plan:
    """The plan as it is for the dtypes of `model`; the same plan if the config says what weights are.

    Raises ValueError for sums in float32 of gradients that the optimizer gets in float16.
    """
    if plan.precision.param is not None:
        return plan
    found = {param.dtype: name for name, param in model.named_parameters() if param.requires_grad}
    narrow = [dtype for dtype in _SECTIONS if dtype in found]
    _refuse_wide_sums(found, plan)
    if narrow and zcomm.detect().rank == 0:
        log.warning("%s", _notice(narrow, plan))
    if torch.float16 in narrow and plan.zero.stage and plan.scaling == Unscaled():
        return attrs.evolve(plan, scaling=DynamicScaling())
    return plan


def dtype_of(model: nn.Module) -> torch.dtype:
    """Of its first floating parameter, by which DeepSpeed goes too; float32 without one."""
    return next((param.dtype for param in model.parameters() if param.is_floating_point()), torch.float32)


def _refuse_wide_sums(found: dict[torch.dtype, str], plan: Plan) -> None:
    zero = plan.zero
    if torch.float16 in found and zero.master_for(torch.float16) != zero.accumulate_for(torch.float16):
        if zero.master_dtype is None:
            raise ValueError(
                f"data_types.grad_accum_dtype = {str(zero.accumulate_dtype).removeprefix('torch.')}: parameters such as "
                f"{found[torch.float16]} are float16 and have no masters at stage 0, so the optimizer is given "
                'gradients in float16, and what overflows there would not be seen. Leave grad_accum_dtype out, or write '
                '"fp16": {"enabled": true}'
            )


def _notice(narrow: Sequence[torch.dtype], plan: Plan) -> str:
    names = " and ".join(str(dtype).removeprefix("torch.") for dtype in narrow)
    if not plan.zero.stage:
        done = "they are trained as they are, without float32 masters or a loss scale, as in plain torch (stage 0)"
    else:
        scale = " and a dynamic loss scale" * (torch.float16 in narrow)
        done = f"they have float32 masters{scale}, as in DeepSpeed (stage {plan.zero.stage})"
    sections = " or ".join(f'"{_SECTIONS[dtype]}": {{"enabled": true}}' for dtype in narrow)
    return f"parameters are {names}, and no section of the config says what weights are: {done}. {sections} says more"
