"""Dtypes, loss scaling and autocast from the config: the part of `resolve` that is about precision.

Four sections speak of it.  fp16 and bf16 make the weights narrow, with float32 masters unless a key asks for narrow
ones; torch_autocast (and amp, which is read as it) leaves them as they are and narrows operations; data_types says
the rest.  Where none says what weights are, the model's own dtype stays.  bf16 weights inside a bf16 autocast are
legal, as in DeepSpeed; `precision_rules` knows what is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zengine.config.choices import takes
from zengine.config.load import Config
from zengine.config.numerics import Float8Plan, NumericsPlan
from zengine.config.plan import Facts, OptimizerPlan
from zengine.config.precision_settings import Autocast
from zengine.config.schema import Settings
from zprecision import DynamicScaling, Keep, Precision, StaticScaling, Unscaled

__all__ = [
    "autocast_of",
    "derived_dtypes",
    "keeps_model_dtype",
    "numerics",
    "optimizer_plan",
    "own_masters",
    "param_dtypes",
    "precision",
    "precision_notices",
    "scaling",
    "wire_dtypes",
]

DYNAMIC_KEYS = ("initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale")
_DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}


def keeps_model_dtype(settings: Settings) -> bool:
    """Whether no key says what the weights are."""
    return not (settings.fp16.enabled or settings.bf16.enabled or settings.data_types.param_dtype)


def own_masters(stage: int) -> torch.dtype | None:
    """What the optimizer updates where parameters keep the model's dtype: as in DeepSpeed, the parameters themselves
    at stage 0, which is plain torch, and at least float32 from stage 1 on.
    """
    return torch.float32 if stage else None


def param_dtypes(settings: Settings) -> frozenset[str]:
    """What the config says the weights are: one dtype, or two where bf16 is "auto"; float32 where it says nothing."""
    if settings.fp16.enabled:
        return frozenset({"float16"})
    if settings.bf16.enabled == "auto":
        return frozenset({"bfloat16", "float32"})
    return frozenset({"bfloat16" if settings.bf16.enabled else settings.data_types.param_dtype or "float32"})


def autocast_of(settings: Settings) -> Autocast:
    """The torch_autocast section, or what the amp section is read as."""
    amp = settings.amp
    if not amp.enabled or amp.opt_level == "O0":
        return settings.torch_autocast
    factor = 0.0 if amp.loss_scale == "dynamic" else float(amp.loss_scale)
    return Autocast(enabled=True, dtype="float16", loss_scale=factor)


def precision(settings: Settings, facts: Facts) -> Precision:
    """The dtypes of weights, sums, wire and masters, and what stays in float32."""
    types = settings.data_types
    narrowest = sorted(param_dtypes(settings))[0]  # "bfloat16" before "float32"
    is_auto = settings.bf16.enabled == "auto"
    param: torch.dtype | None = None
    master = own_masters(settings.zero_optimization.stage)
    if not keeps_model_dtype(settings):
        param = torch.float32 if is_auto and not facts.bf16_is_faster else _DTYPES[narrowest]
        master = param if _has_narrow_masters(settings) else torch.promote_types(param, torch.float32)
    patterns = () if types.keep_in_fp32_modules == "auto" else types.keep_in_fp32_modules
    return Precision(
        param=param,
        accumulate=_dtype(types.grad_accum_dtype, master),
        reduce=_dtype(settings.communication_data_type, param),
        master=master,
        buffer=_DTYPES.get(types.buffer_dtype),
        keep=Keep(patterns=patterns, as_listed=types.keep_in_fp32_modules == "auto"),
    )


def _has_narrow_masters(settings: Settings) -> bool:
    fp16, bf16 = settings.fp16, settings.bf16
    return bool(fp16.enabled and fp16.fp16_master_weights_and_grads) or bool(
        bf16.enabled and bf16.bf16_master_weights_and_grads
    )


def _dtype(name: str, default: torch.dtype | None) -> torch.dtype | None:
    return _DTYPES[name] if name else default


def wire_dtypes(settings: Settings) -> dict[str, Any]:
    """Fields of a `ZeroPolicy`: what gradients travel in.

    Not said, each parameter's own dtype, but for those of autocast's safe modules: they are computed in the lower
    one, and widening them first would only send zeros.
    """
    if settings.communication_data_type:
        return {"reduce_dtype": _DTYPES[settings.communication_data_type]}
    autocast = autocast_of(settings)
    if not autocast.enabled or not autocast.lower_precision_safe_modules:
        return {}
    return {"narrow_dtype": _DTYPES[autocast.dtype], "narrow_classes": autocast.lower_precision_safe_modules}


def scaling(settings: Settings) -> Unscaled | StaticScaling | DynamicScaling:
    """The rule of the loss scale: wherever gradients pass through float16."""
    fp16, autocast = settings.fp16, autocast_of(settings)
    if fp16.enabled:
        if fp16.loss_scale:
            return StaticScaling(fp16.loss_scale)
        return DynamicScaling(
            initial=2.0**fp16.initial_scale_power,
            window=fp16.loss_scale_window,
            hysteresis=fp16.hysteresis,
            consecutive_hysteresis=fp16.consecutive_hysteresis,
            floor=fp16.min_loss_scale,
        )
    if autocast.enabled and autocast.dtype == "float16":
        return StaticScaling(autocast.loss_scale) if autocast.loss_scale else DynamicScaling()
    return DynamicScaling() if param_dtypes(settings) == {"float16"} else Unscaled()


def derived_dtypes(settings: Settings, dtypes: Precision) -> set[str]:
    """Keys whose values follow from other sections, where they are not given themselves."""
    added = optimizer_plan(settings, dtypes).params.keys() - settings.optimizer.params.keys()
    found = {f"optimizer.params.{key}" for key in added}
    if settings.fp16.enabled or settings.bf16.enabled:
        found.add("data_types.param_dtype")
    if _has_narrow_masters(settings):
        found.add("data_types.grad_accum_dtype")
    if settings.amp.enabled:
        found |= {f"torch_autocast.{key}" for key in ("enabled", "dtype", "loss_scale")}
    return found


def numerics(settings: Settings) -> NumericsPlan:
    """How forward runs."""
    autocast, fp8 = autocast_of(settings), settings.fp8
    return NumericsPlan(
        autocast=_DTYPES[autocast.dtype] if autocast.enabled else torch.float32,
        float8=Float8Plan(modules=fp8.modules, exclude=fp8.exclude) if fp8.enabled else Float8Plan(),
        narrow_states=bool(settings.bf16.enabled and settings.bf16.bf16_optimizer_states),
        amp_level=settings.amp.opt_level if settings.amp.enabled else "",
    )


def optimizer_plan(settings: Settings, dtypes: Precision) -> OptimizerPlan:
    """The optimizer, told in what to keep its states where the masters are narrow.

    Left alone it would keep them in the masters' dtype, as torch does; DeepSpeed's keys mean float32 unless
    bf16_optimizer_states is on.
    """
    name, params = settings.optimizer.type, dict(settings.optimizer.params)
    if name and not _says_states(params) and _is_narrow(dtypes.master):
        wanted = "bf16" if settings.bf16.bf16_optimizer_states else "fp32"
        if takes(name, params, "state_dtype", wanted):
            params["state_dtype"] = wanted
    return OptimizerPlan(type=name, params=params)


def _is_narrow(dtype: torch.dtype | None) -> bool:
    return dtype is not None and dtype.itemsize < torch.float32.itemsize


def _says_states(params: Mapping[str, Any]) -> bool:
    return params.get("state_dtype") is not None or "fp32_optimizer_states" in params


def precision_notices(config: Config, dtypes: Precision) -> list[str]:
    """What a person should hear about once."""
    return [
        *_amp_notices(config),
        *_copy_notices(config, dtypes),
        *_scale_notices(config),
        *_autocast_notices(config),
        *_master_notices(config, dtypes),
        *_keep_notices(config, dtypes),
    ]


def _amp_notices(config: Config) -> list[str]:
    amp = config.settings.amp
    if not amp.enabled:
        return []
    where = f'{config.origin("amp.enabled")}: "amp" with opt_level {amp.opt_level}'
    if amp.opt_level == "O0":
        return [f"{where} is read as nothing at all: training in float32"]
    factor = "dynamic loss scaling" if amp.loss_scale == "dynamic" else f"a loss scale of {amp.loss_scale:g}"
    said = f'{where} is read as "torch_autocast": {{"enabled": true, "dtype": "fp16"}} with {factor}'
    if amp.opt_level == "O1":
        return [f"{said}, which is what O1 does"]
    apart = "float16 weights with float32 masters" if amp.opt_level == "O2" else "float16 weights and no masters"
    also = ', "fp16_master_weights_and_grads": true' * (amp.opt_level == "O3")
    return [
        f"{said}: weights stay float32, where {amp.opt_level} had {apart}. For those write "
        f'"fp16": {{"enabled": true{also}}} in place of "amp"'
    ]


def _copy_notices(config: Config, dtypes: Precision) -> list[str]:
    """Autograd saves what autocast made of a weight, and no partition can take that back."""
    settings, autocast = config.settings, autocast_of(config.settings)
    if not autocast.enabled or settings.zero_optimization.stage < 3 or _is_narrow(dtypes.param):
        return []
    key = "amp" if settings.amp.enabled else "torch_autocast"
    return [
        f"{config.origin(f'{key}.enabled')}: with {key} at stage 3 every rank holds {autocast.dtype} copies of all "
        "weights from forward to backward (2 bytes a parameter), where activations are not checkpointed. With "
        '"bf16": {"enabled": true} there are none'
    ]


def _scale_notices(config: Config) -> list[str]:
    settings = config.settings
    idle = [f"fp16.{key}" for key in DYNAMIC_KEYS if f"fp16.{key}" in config.given]
    if not (settings.fp16.enabled and settings.fp16.loss_scale and idle):
        return []
    verb = "has" if len(idle) == 1 else "have"
    return [f"{config.origin(idle[0])}: {', '.join(idle)} {verb} no effect here: fp16.loss_scale is static"]


def _autocast_notices(config: Config) -> list[str]:
    """Keys of torch_autocast that others decide."""
    settings, autocast = config.settings, config.settings.torch_autocast
    scaled, narrow = "torch_autocast.loss_scale", "torch_autocast.lower_precision_safe_modules"
    idle = {
        scaled: f"gradients in {autocast.dtype} need no loss scale" * (autocast.dtype != "float16"),
        narrow: "communication_data_type says what all gradients travel in" * bool(settings.communication_data_type),
    }
    given = {key: why for key, why in idle.items() if why and autocast.enabled and key in config.given}
    return [f"{config.origin(key)}: {key} has no effect here: {why}" for key, why in given.items()]


def _master_notices(config: Config, dtypes: Precision) -> list[str]:
    """What narrow masters cost, and what could not be done about it."""
    settings, name = config.settings, config.settings.optimizer.type
    asked = "bf16.bf16_master_weights_and_grads"
    if (
        settings.bf16.enabled == "auto"
        and settings.bf16.bf16_master_weights_and_grads
        and not _is_narrow(dtypes.master)
    ):
        return [f"{config.origin(asked)}: {asked} has no effect here: training in float32"]
    if not _is_narrow(dtypes.master):
        return _states_notices(config)
    if not name:
        return []
    notices = []
    chosen = optimizer_plan(settings, dtypes).params
    dtype = str(dtypes.master).removeprefix("torch.")
    if not _says_states(chosen):
        notices.append(f"{name} keeps its states in the dtype of the masters, {dtype}: it has no state_dtype")
    if dtypes.master == torch.float16 or not takes(name, settings.optimizer.params, "state_dtype", "bf16"):
        share = 2**8 if dtype == "bfloat16" else 2**11
        notices.append(
            f"masters in {dtype} are rounded to nearest by {name}: an update below 1/{share} of its weight is lost. "
            "AdamW and its kin of this package round bf16 masters stochastically"
        )
    return notices


def _states_notices(config: Config) -> list[str]:
    """The switch that DeepSpeed reads as "in the dtype of what is optimized", beside float32 masters."""
    key = "optimizer.params.fp32_optimizer_states"
    params = config.settings.optimizer.params
    if params.get("fp32_optimizer_states") is not False or params.get("state_dtype") is not None:
        return []
    return [
        f"{config.origin(key)}: {key} = false has no effect here: states then have the dtype of the masters, which "
        'is float32. For smaller ones write "state_dtype": "bf16"'
    ]


def _keep_notices(config: Config, dtypes: Precision) -> list[str]:
    key = "data_types.keep_in_fp32_modules"
    if not dtypes.keep.patterns or _is_narrow(dtypes.param):
        return []
    reason = f"weights {'keep the dtype of the model' if dtypes.param is None else 'are float32 or wider'}"
    if autocast_of(config.settings).enabled:
        reason += ", and torch.autocast decides for each operation"
    return [f"{config.origin(key)}: {key} has no effect here: {reason}"]
