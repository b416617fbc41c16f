"""Rules between the keys of precision; see rules.py."""

from __future__ import annotations

from zengine.config.grammar.errors import NOWHERE, Problem, shown
from zengine.config.plan.facts import Facts
from zengine.config.plan.precision import autocast_of, param_dtypes
from zengine.config.reading.choices import accepts_option
from zengine.config.reading.load import Config, at, violation

__all__ = ["PRECISION_RULES", "check_fp8_device"]


def check_one_half_precision(config: Config) -> Problem | None:
    """fp16 and bf16 exclude each other, whatever "auto" would turn out to be."""
    if not (config.settings.fp16.enabled and config.settings.bf16.enabled):
        return None
    fp16, bf16 = at(config, "fp16.enabled"), at(config, "bf16.enabled")
    return violation(config, "fp16.enabled", f"{fp16} and {bf16} are both on", "Keep one of them.")


def check_grad_accum_dtype(config: Config) -> Problem | None:
    """A sum is kept in the dtype of the gradients themselves, or in a wider one."""
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
    """amp is read as torch_autocast in float16, beside which the other sections have no room."""
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
    """Under autocast, weights are float32, or already of its own dtype and not float16."""
    settings = config.settings
    autocast, model = autocast_of(settings), param_dtypes(settings)
    if not autocast.enabled or model <= {"float32", *({autocast.dtype} - {"float16"})}:
        return None
    halves = [name for name in ("fp16", "bf16") if getattr(settings, name).enabled]
    is_amp = autocast is not settings.torch_autocast
    if is_amp and halves:
        return None  # told by check_amp
    switch = "amp.enabled" if is_amp else "torch_autocast.enabled"
    key = f"{halves[0]}.enabled" if halves else "data_types.param_dtype"
    narrow = sorted(model - {"float32"})[0]
    if narrow == "float16":
        reason = "autocast needs weights whose gradients are float32"
    elif narrow == "float64":
        reason = "autocast leaves operations on float64 as they are"
    else:
        reason = f"its dtype, {autocast.dtype}, is another half precision"
    return violation(
        config,
        switch,
        f"{at(config, switch)} does not go with weights in {narrow} ({at(config, key)}): {reason}",
        "Keep one of the two sections; bf16 may be combined with torch_autocast in bf16.",
    )


def check_param_dtype(config: Config) -> Problem | None:
    """data_types.param_dtype says what fp16 and bf16 say, or stands alone."""
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
        f"{at(config, 'data_types.param_dtype')} = {chosen} and {at(config, key)}{says} both say what weights are",
        "Leave param_dtype out.",
    )


def check_bf16_states(config: Config) -> Problem | None:
    """bf16 optimizer states are those of bf16 masters."""
    bf16, key = config.settings.bf16, "bf16.bf16_optimizer_states"
    if not bf16.enabled or not bf16.bf16_optimizer_states or bf16.bf16_master_weights_and_grads:
        return None
    return violation(
        config,
        key,
        f"{at(config, key)} needs bf16.bf16_master_weights_and_grads",
        'Turn that on too; for float32 masters with bf16 states write "state_dtype": "bf16" into optimizer.params.',
    )


def check_state_dtype(config: Config) -> Problem | None:
    """The optimizer's own option and bf16_optimizer_states say the same, or only one of them is given."""
    settings, key = config.settings, "bf16.bf16_optimizer_states"
    params = settings.optimizer.params
    said = params.get("state_dtype")
    option = "state_dtype" if said is not None else "fp32_optimizer_states"
    agrees = said in (None, "bf16", "bfloat16") and not params.get("fp32_optimizer_states", False)
    if not settings.bf16.enabled or not settings.bf16.bf16_optimizer_states or agrees:
        return None
    return violation(
        config,
        key,
        f"{at(config, key)} keeps states in bf16, and {at(config, f'optimizer.params.{option}')} = "
        f"{shown(params[option])}",
        "Keep one of them.",
    )


def check_fp16_accumulation(config: Config) -> Problem | None:
    """A sum in float32 may be finite where the float16 gradient that the optimizer is given is not."""
    settings, key = config.settings, "fp16.fp16_master_weights_and_grads"
    chosen = settings.data_types.grad_accum_dtype
    if not settings.fp16.enabled or not settings.fp16.fp16_master_weights_and_grads or chosen in ("", "float16"):
        return None
    return violation(
        config,
        "data_types.grad_accum_dtype",
        f"{at(config, 'data_types.grad_accum_dtype')} = {chosen} and {at(config, key)} both say what gradients are: "
        "the optimizer is given them in float16, and what overflows there would not be seen",
        "Leave grad_accum_dtype out.",
    )


def check_fp16_states(config: Config) -> Problem | None:
    """Second moments of float16 gradients become 0 in float16, and the weights NaN."""
    settings, key = config.settings, "fp16.fp16_master_weights_and_grads"
    name, params = settings.optimizer.type, settings.optimizer.params
    narrow = settings.fp16.enabled and settings.fp16.fp16_master_weights_and_grads
    if not narrow or not name or accepts_option(name, {**params, "state_dtype": None}, "state_dtype", "fp32"):
        return None
    return violation(
        config,
        key,
        f"{at(config, key)} leaves {name} no room for its states: it keeps them in the dtype of the masters, and in "
        "float16 second moments become 0",
        "Use Adam, AdamW, Lion, SGD, Adagrad, Lamb or Muon, whose states stay float32, or leave the key out.",
    )


def check_fp8_device(config: Config, facts: Facts) -> list[Problem]:
    """8-bit products are refused where no device has them; which GPU it is, `Float8.convert` looks up."""
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
