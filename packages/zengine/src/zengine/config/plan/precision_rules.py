"""Rules between the keys of precision; rules.py has the others."""

from __future__ import annotations

from zengine.config.grammar.errors import NOWHERE, Problem, shown
from zengine.config.plan.dtype_names import autocast_of, param_dtypes
from zengine.config.plan.facts import Facts
from zengine.config.reading.choices import accepts_option
from zengine.config.reading.load import Config, at, violation

__all__ = ["PRECISION_RULES", "check_fp8_device"]


def check_one_half_precision(config: Config) -> Problem | None:
    """Reject fp16 and bf16 together, even if bf16 is "auto"."""
    if not (config.settings.fp16.enabled and config.settings.bf16.enabled):
        return None
    fp16, bf16 = at(config, "fp16.enabled"), at(config, "bf16.enabled")
    return violation(config, "fp16.enabled", f"{fp16} and {bf16} are both on", "Keep one of them.")


def check_grad_accum_dtype(config: Config) -> Problem | None:
    """Require an accumulator dtype that represents the gradients exactly."""
    settings = config.settings
    chosen = settings.data_types.grad_accum_dtype
    model = param_dtypes(settings)
    holds_all = chosen == "float64" or (chosen == "float32" and "float64" not in model)
    if not chosen or holds_all or model == {chosen}:
        return None
    return violation(
        config,
        "data_types.grad_accum_dtype",
        f"{at(config, 'data_types.grad_accum_dtype')} = {chosen} cannot hold gradients in "
        f"{' or '.join(sorted(model))} exactly",
        f'Use "{"fp64" if "float64" in model else "fp32"}", or leave it out.',
    )


def check_amp(config: Config) -> Problem | None:
    """Reject amp, which is read as torch_autocast in float16, together with the other sections."""
    settings = config.settings
    others = {
        "torch_autocast.enabled": settings.torch_autocast.enabled,
        "fp16.enabled": settings.fp16.enabled,
        "bf16.enabled": settings.bf16.enabled,
    }
    on = [at(config, key) for key, is_on in others.items() if is_on]
    if not settings.amp.enabled or settings.amp.opt_level == "O0" or not on:
        return None
    return violation(
        config,
        "amp.enabled",
        f"{at(config, 'amp.enabled')} and {' and '.join(on)} are on: amp would be read as torch_autocast in fp16",
        "Remove the amp section.",
    )


def check_autocast_weights(config: Config) -> Problem | None:
    """Reject autocast beside float64 weights, and amp beside weights of 16 bits."""
    settings = config.settings
    model, is_amp = param_dtypes(settings), settings.amp.enabled and settings.amp.opt_level != "O0"
    rejected = sorted(model - {"float32", *(() if is_amp else ("float16", "bfloat16"))})
    if not autocast_of(settings).enabled or not rejected or settings.fp16.enabled or settings.bf16.enabled:
        return None  # beside amp, check_amp reports the sections
    switch = "amp.enabled" if is_amp else "torch_autocast.enabled"
    wide, dtype = rejected == ["float64"], at(config, "data_types.param_dtype")
    return violation(
        config,
        switch,
        f"{at(config, switch)} is incompatible with weights in {rejected[0]} ({dtype}): "
        + ("autocast does not cast operations on float64" if wide else "amp casts weights in float32"),
        "Remove one of the two." if wide else 'Use "torch_autocast", which casts weights of any dtype but float64.',
    )


def check_param_dtype(config: Config) -> Problem | None:
    """Reject data_types.param_dtype if fp16 or bf16 sets another dtype."""
    settings = config.settings
    chosen = settings.data_types.param_dtype
    section = next((name for name in ("fp16", "bf16") if getattr(settings, name).enabled), "")
    if not chosen or not section or param_dtypes(settings) == {chosen}:
        return None
    key = f"{section}.enabled"
    says = ' = "auto"' if settings.bf16.enabled == "auto" and section == "bf16" else ""
    return violation(
        config,
        "data_types.param_dtype",
        f"{at(config, 'data_types.param_dtype')} = {chosen} and {at(config, key)}{says} both set the dtype of "
        "weights",
        "Leave param_dtype out.",
    )


def check_bf16_states(config: Config) -> Problem | None:
    """Require bf16 masters for bf16_optimizer_states."""
    bf16, key = config.settings.bf16, "bf16.bf16_optimizer_states"
    if not bf16.enabled or not bf16.bf16_optimizer_states or bf16.bf16_master_weights_and_grads:
        return None
    return violation(
        config,
        key,
        f"{at(config, key)} needs bf16.bf16_master_weights_and_grads",
        'Set that to true as well; for float32 masters with bf16 states add "state_dtype": "bf16" to '
        "optimizer.params.",
    )


def check_state_dtype(config: Config) -> Problem | None:
    """Reject bf16_optimizer_states beside another dtype in the optimizer's own options."""
    settings, key = config.settings, "bf16.bf16_optimizer_states"
    params = settings.optimizer.params
    state_dtype = params.get("state_dtype")
    option = "state_dtype" if state_dtype is not None else "fp32_optimizer_states"
    agrees = state_dtype in (None, "bf16", "bfloat16") and not params.get("fp32_optimizer_states", False)
    if not settings.bf16.enabled or not settings.bf16.bf16_optimizer_states or agrees:
        return None
    return violation(
        config,
        key,
        f"{at(config, key)} sets bf16 states, but {at(config, f'optimizer.params.{option}')} = "
        f"{shown(params[option])}",
        "Keep one of them.",
    )


def check_fp16_accumulation(config: Config) -> Problem | None:
    """Reject wider accumulators beside float16 masters: a finite float32 sum may overflow in the float16 gradient."""
    settings, key = config.settings, "fp16.fp16_master_weights_and_grads"
    chosen = settings.data_types.grad_accum_dtype
    if not settings.fp16.enabled or not settings.fp16.fp16_master_weights_and_grads or chosen in ("", "float16"):
        return None
    return violation(
        config,
        "data_types.grad_accum_dtype",
        f"{at(config, 'data_types.grad_accum_dtype')} = {chosen} and {at(config, key)} both set the dtype of "
        "gradients: the optimizer gets them in float16, and their overflow would not be detected",
        "Leave grad_accum_dtype out.",
    )


def check_fp16_states(config: Config) -> Problem | None:
    """Reject optimizers that keep states in float16: second moments underflow to 0, and weights become NaN."""
    settings, key = config.settings, "fp16.fp16_master_weights_and_grads"
    name, params = settings.optimizer.type, settings.optimizer.params
    narrow = settings.fp16.enabled and settings.fp16.fp16_master_weights_and_grads
    if not narrow or not name or accepts_option(name, {**params, "state_dtype": None}, "state_dtype", "fp32"):
        return None
    return violation(
        config,
        key,
        f"{at(config, key)} does not work with {name}, which keeps its states in the dtype of the masters: second "
        "moments in float16 underflow to 0",
        "Use Adam, AdamW, Lion, SGD, Adagrad, Lamb or Muon, whose states stay float32, or leave the key out.",
    )


def check_fp8_device(config: Config, facts: Facts) -> list[Problem]:
    """Reject fp8 on devices other than GPUs; `Float8.convert` checks the GPU's capability."""
    if not config.settings.fp8.enabled or facts.device_type == "cuda":
        return []
    return [
        Problem(
            place=config.given.get("fp8.enabled", NOWHERE),
            key="fp8.enabled",
            given=True,
            reason=f"this run computes on the {facts.device_type.upper()}, which has no 8-bit matrix products",
            suggestion="Run on an NVIDIA GPU from Ada on (capability 8.9), or set it to false.",
        )
    ]


PRECISION_RULES = (
    check_one_half_precision,
    check_grad_accum_dtype,
    check_amp,
    check_autocast_weights,
    check_param_dtype,
    check_bf16_states,
    check_state_dtype,
    check_fp16_accumulation,
    check_fp16_states,
)
