"""The plan and the model: dtypes that no section decides, and keys that do not fit a pipeline.

A model whose dtype no section decides keeps its own, and the plan follows.

Parameters of 32 and 64 bits are trained as they are.  Those of 16 bits get what DeepSpeed gives them: nothing at
stage 0, which is plain torch; from stage 1 on float32 masters, and a dynamic loss scale for float16 gradients.
DeepSpeed gives float64 parameters float32 masters as well, which is less than they are; here masters are float64.
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
    """Adapt the plan to a model with trainable parameters of `dtypes` (dtype -> name of one); with a notice, or "".

    The same plan and "" if the config says what weights are, or if there is nothing to be said.  Raises ConfigError
    for sums in float32 of gradients that the optimizer gets in float16.
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
    """Problems of keys that look at the layers of one rank only, while a pipeline has several ranks."""
    if not plan.telemetry.rates.count_flops_at:
        return []
    key = "timers.throughput.count_flops_at"
    return [
        Problem(
            key=key,
            given=plan[key],
            reason="the operations of one rank are counted, and the model is a PipelineModule, whose ranks hold some "
            "of the layers",
            suggestion='Leave it out; "flops_profiler" counts a batch on every stage.',
        )
    ]


def _check_sums(plan: Plan, name: str) -> None:
    sums, given = plan.zero.accumulate_for(torch.float16), plan.zero.master_for(torch.float16)
    if given == torch.float16 and sums != given:
        problem = Problem(
            key="data_types.grad_accum_dtype",
            given=str(plan.zero.accumulate_dtype).removeprefix("torch."),
            reason=f"{name} is float16 and has no master at stage 0, so the optimizer is given gradients in float16, "
            "and what overflows there would not be seen",
            suggestion='Leave it out, or write "fp16": {"enabled": true}.',
        )
        raise ConfigError("initialize()", [problem])


def _notice(plan: Plan, narrow: Sequence[torch.dtype]) -> str:
    names = " and ".join(str(dtype).removeprefix("torch.") for dtype in narrow)
    if not plan.zero.stage:
        done = "they are trained as they are, without float32 masters or a loss scale, as in plain torch (stage 0)"
    else:
        scale = " and a dynamic loss scale" * (torch.float16 in narrow)
        done = f"they have float32 masters{scale}, as in DeepSpeed (stage {plan.zero.stage})"
    sections = " or ".join(f'"{_SECTIONS[dtype]}": {{"enabled": true}}' for dtype in narrow)
    return (
        f"parameters are {names}, and no section of the config says what weights are: {done}. To decide it, write "
        f"{sections}"
    )
