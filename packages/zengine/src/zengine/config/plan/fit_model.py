"""Adaptation of the plan to the model: dtypes that the config leaves open, and keys that pipelines do not support.

A model keeps its dtype if no section of the config sets it, and the plan is adapted.  Parameters of 32 and 64 bits
are trained in their dtype.  Those of 16 bits are treated as in DeepSpeed: unchanged at stage 0, which is plain torch;
from stage 1 on with float32 masters, and a dynamic loss scale for float16 gradients.  DeepSpeed gives float64
parameters float32 masters, which loses precision; here masters are float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch

from zengine.config.grammar.errors import ConfigError, Problem
from zengine.config.plan.plan import Plan
from zprecision import DynamicScaling, Unscaled

__all__ = ["adapt_to_model", "check_pipeline_keys"]

_SECTIONS = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def adapt_to_model(plan: Plan, dtypes: Mapping[torch.dtype, str]) -> tuple[Plan, str]:
    """Adapt the plan to a model with trainable parameters of `dtypes` (dtype -> name of one); return it and a notice.

    Returns the same plan and "" if the config sets the dtype of weights, or if no parameter has 16 bits.  Raises
    ConfigError if gradients are summed in float32 and passed to the optimizer in float16.
    """
    narrow = [dtype for dtype in _SECTIONS if dtype in dtypes and plan.precision.param is None]
    if not narrow:
        return plan, ""
    if torch.float16 in narrow:
        _check_sums(plan, dtypes[torch.float16])
    if torch.float16 in narrow and plan.zero.stage and plan.scaling == Unscaled():
        plan = attrs.evolve(plan, scaling=DynamicScaling())
    return plan, _notice(plan, narrow)


def check_pipeline_keys(plan: Plan) -> list[Problem]:
    """Return problems of keys that measure only one rank's layers, which pipelines do not support."""
    if not plan.telemetry.rates.count_flops_at:
        return []
    key = "timers.throughput.count_flops_at"
    return [
        Problem(
            key=key,
            given=plan[key],
            reason="it counts the operations of one rank, and a rank of a PipelineModule has only some of the layers",
            suggestion='Leave it out; "flops_profiler" counts a batch on every stage.',
        )
    ]


def _check_sums(plan: Plan, name: str) -> None:
    sums, given = plan.zero.accumulate_for(torch.float16), plan.zero.master_for(torch.float16)
    if given == torch.float16 and sums != given:
        problem = Problem(
            key="data_types.grad_accum_dtype",
            given=str(plan.zero.accumulate_dtype).removeprefix("torch."),
            reason=f"{name} is float16 and has no master at stage 0, so the optimizer gets gradients in float16, "
            "whose overflow would not be detected",
            suggestion='Leave it out, or write "fp16": {"enabled": true}.',
        )
        raise ConfigError("initialize()", [problem])


def _notice(plan: Plan, narrow: Sequence[torch.dtype]) -> str:
    names = " and ".join(str(dtype).removeprefix("torch.") for dtype in narrow)
    if not plan.zero.stage:
        done = "they are trained without float32 masters or a loss scale, as in plain torch (stage 0)"
    else:
        scale = " and a dynamic loss scale" * (torch.float16 in narrow)
        done = f"they get float32 masters{scale}, as in DeepSpeed (stage {plan.zero.stage})"
    sections = " or ".join(f'"{_SECTIONS[dtype]}": {{"enabled": true}}' for dtype in narrow)
    return (
        f"parameters are {names}, and no section of the config sets the dtype of weights: {done}. To set it, write "
        f"{sections}"
    )
