"""Rules of zero_optimization.zenflow: what it needs, and what it cannot be combined with."""

from __future__ import annotations

from zengine.config.grammar.errors import Problem
from zengine.config.keys.zero import ZenFlow
from zengine.config.reading.load import Config, at, violation

__all__ = ["check_zenflow", "interval_problem"]

_SECTION = "zero_optimization.zenflow"
_ADAM = ("", "adam", "adamw", "fusedadam", "deepspeedcpuadam", "muadam", "muadamw")  # "": the caller's


def check_zenflow(config: Config) -> Problem | None:
    """Reject ZenFlow without an optimizer on the CPU, beside others that change weights, and odd intervals."""
    zero = config.settings.zero_optimization
    zenflow, interval = zero.zenflow, f"{_SECTION}.select_interval"
    if not zenflow.topk_ratio:
        return None
    if problem := _check_needs(config) or _check_others(config):
        return problem
    if zenflow.select_strategy == "step" and not zenflow.select_interval:
        return violation(
            config,
            f"{_SECTION}.select_strategy",
            f'{at(config, f"{_SECTION}.select_strategy")} = "step" needs {interval}, the steps between selections',
            "Give it a number, at least update_interval.",
        )
    unit = 1 if zenflow.select_strategy == "step" else zenflow.steps_per_epoch
    if too_long := interval_problem(zenflow, unit):
        return violation(config, f"{_SECTION}.update_interval", *too_long)
    return None


def interval_problem(zenflow: ZenFlow, unit: int) -> tuple[str, str] | None:
    """Return a reason and a suggestion if an interval of updates is longer than that of selections; else None.

    unit: steps that select_interval counts; 0: unknown.
    """
    steps = (zenflow.select_interval or 1) * unit
    if not 0 < steps < zenflow.update_interval:
        return None
    return (
        f"{_SECTION}.update_interval = {zenflow.update_interval} steps are more than the {steps} from one selection "
        "of columns to the next, which ends an interval",
        f"Set update_interval to at most {steps}, or raise select_interval.",
    )


def _check_needs(config: Config) -> Problem | None:
    settings, zero = config.settings, config.settings.zero_optimization
    key = "zero_optimization.offload_optimizer.device"
    if zero.offload_optimizer.device != "cpu":
        return violation(
            config,
            f"{_SECTION}.topk_ratio",
            f'zenflow updates the rest of the weights on the CPU, and {at(config, key)} is "'
            f'{zero.offload_optimizer.device}"',
            'Add "offload_optimizer": {"device": "cpu"} to zero_optimization, or leave zenflow out.',
        )
    if not zero.stage:
        key = "zero_optimization.stage"
        return violation(
            config, key, f"{at(config, key)} = 0 offloads nothing that zenflow could update", "Use stage 1, 2 or 3."
        )
    if settings.optimizer.type.lower() not in _ADAM:
        key = "optimizer.type"
        return violation(
            config,
            key,
            f"zenflow carries the moments of Adam between the device and the CPU, and {at(config, key)} is "
            f'"{settings.optimizer.type}"',
            'Use "Adam" or "AdamW", or leave zenflow out.',
        )
    return None


def _check_others(config: Config) -> Problem | None:
    settings, zero = config.settings, config.settings.zero_optimization
    rounding = settings.compression_training.weight_quantization.shared_parameters
    others = {
        "zero_optimization.offload_optimizer.ratio": (
            zero.offload_optimizer.ratio < 1,
            "keeps some states on the device",
        ),
        "zero_optimization.offload_optimizer.super_offload": (
            zero.offload_optimizer.super_offload,
            "updates everything during backward",
        ),
        "zero_optimization.offload_param.device": (
            zero.stage == 3 and zero.offload_param.device != "none",
            "takes the columns off the device",
        ),
        "diloco.sync_every": (settings.diloco.sync_every > 0, "replaces masters while an update may be under way"),
        "quantize_training.enabled": (settings.quantize_training.enabled, "rounds weights after whole updates"),
        "compression_training.weight_quantization.shared_parameters.enabled": (
            rounding.enabled and not rounding.quantize_weight_in_forward,
            "(with quantize_weight_in_forward false) rounds weights after whole updates",
        ),
    }
    for key, (is_on, why) in others.items():
        if is_on:
            return violation(config, key, f"{at(config, key)} {why}, and zenflow is on", "Leave one of the two out.")
    return None
