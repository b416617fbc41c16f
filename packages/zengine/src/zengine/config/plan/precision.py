"""Dtypes, loss scaling and autocast from the config: the part of `resolve` that is about precision.

Four sections determine it.  fp16 and bf16 cast the weights to 16 bits, with float32 masters unless a key asks for
16-bit ones; torch_autocast (and amp, which is read as it) keeps weights and casts operations; data_types sets the
rest.  If no key sets the dtype of weights, the model keeps its own.  Weights of 16 bits inside an autocast are valid,
as in DeepSpeed: the section of the weights sets masters and loss scale, the autocast casts operations.
`precision_rules` rejects invalid combinations.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import torch

from zengine.config.keys.precision import Amp, Autocast, Bf16, DataTypes, Float8, Fp16
from zengine.config.keys.root import Settings
from zengine.config.plan.dtype_names import autocast_of, keeps_model_dtype, param_dtypes
from zengine.config.plan.facts import Facts
from zengine.config.plan.optimizer import is_narrow, optimizer_plan
from zengine.config.plan.rows import PlanRow, planned, rows
from zengine.config.reading.load import Config
from zprecision import DynamicScaling, KeepInFp32, Precision, StaticScaling, Unscaled

__all__ = [
    "PLAIN",
    "Float8Plan",
    "NumericsPlan",
    "Scaling",
    "default_master_dtype",
    "derived_dtypes",
    "numerics",
    "precision",
    "precision_notices",
    "precision_rows",
    "scaling",
    "wire_dtypes",
]

Scaling = Unscaled | StaticScaling | DynamicScaling
DYNAMIC_KEYS = ("initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale")
_DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}


@attrs.frozen(kw_only=True)
class Float8Plan:
    """Linear layers with 8-bit matrix products; none without a pattern."""

    modules: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class NumericsPlan:
    """Precision of forward and of optimizer states beyond the dtypes of weights."""

    autocast: torch.dtype = torch.float32  # dtype of torch.autocast around forward; float32: none
    float8: Float8Plan = Float8Plan()
    narrow_states: bool = False  # bf16_optimizer_states is on
    amp_level: str = ""  # opt_level of an enabled amp section, else ""


PLAIN = NumericsPlan()


def default_master_dtype(stage: int) -> torch.dtype | None:
    """Return the least dtype of masters if parameters keep the model's dtype; None: there are no masters.

    As in DeepSpeed: none at stage 0, which is plain torch, and at least float32 from stage 1 on.
    """
    return torch.float32 if stage else None


def precision(settings: Settings, facts: Facts) -> Precision:
    """Return the dtypes of weights, accumulators, collectives and masters, and the names that stay float32."""
    types = settings.data_types
    narrowest = sorted(param_dtypes(settings))[0]  # "bfloat16" before "float32"
    is_auto = settings.bf16.enabled == "auto"
    param: torch.dtype | None = None
    master = default_master_dtype(settings.zero_optimization.stage)
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
        keep=KeepInFp32(patterns=patterns, as_listed=types.keep_in_fp32_modules == "auto"),
    )


def _has_narrow_masters(settings: Settings) -> bool:
    fp16, bf16 = settings.fp16, settings.bf16
    return bool(fp16.enabled and fp16.fp16_master_weights_and_grads) or bool(
        bf16.enabled and bf16.bf16_master_weights_and_grads
    )


def _dtype(name: str, default: torch.dtype | None) -> torch.dtype | None:
    return _DTYPES[name] if name else default


def wire_dtypes(settings: Settings) -> dict[str, Any]:
    """Return the fields of a `ZeroPolicy` for the dtype of gradients in collectives.

    By default it is each parameter's dtype.  Gradients of autocast's safe modules are reduced in the lower dtype:
    they are computed in it, and casting them up first would only send zeros.
    """
    if settings.communication_data_type:
        return {"reduce_dtype": _DTYPES[settings.communication_data_type]}
    autocast = autocast_of(settings)
    if not autocast.enabled or not autocast.lower_precision_safe_modules:
        return {}
    return {"narrow_dtype": _DTYPES[autocast.dtype], "narrow_classes": autocast.lower_precision_safe_modules}


def scaling(settings: Settings) -> Scaling:
    """Return the rule of the loss scale; a scale is needed wherever gradients are computed in float16."""
    fp16, autocast = settings.fp16, autocast_of(settings)
    if fp16.enabled:
        if fp16.loss_scale:
            return StaticScaling(fp16.loss_scale)
        return DynamicScaling(**planned(fp16, DynamicScaling, initial=2.0**fp16.initial_scale_power))
    if autocast.enabled and autocast.dtype == "float16":
        return StaticScaling(autocast.loss_scale) if autocast.loss_scale else DynamicScaling()
    return DynamicScaling() if param_dtypes(settings) == {"float16"} else Unscaled()


def derived_dtypes(settings: Settings, dtypes: Precision) -> set[str]:
    """Return the keys whose values follow from other sections unless they are given."""
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
    """Resolve autocast, 8-bit layers and optimizer states."""
    autocast, fp8 = autocast_of(settings), settings.fp8
    return NumericsPlan(
        autocast=_DTYPES[autocast.dtype] if autocast.enabled else torch.float32,
        float8=Float8Plan(**planned(fp8, Float8Plan)) if fp8.enabled else Float8Plan(),
        narrow_states=bool(settings.bf16.enabled and settings.bf16.bf16_optimizer_states),
        amp_level=settings.amp.opt_level if settings.amp.enabled else "",
    )


def precision_rows(
    precision: Precision, scaling: Scaling, numerics: NumericsPlan, narrow_classes: tuple[str, ...], **others: bool
) -> Iterator[PlanRow]:
    """Yield the rows of the precision sections; `others` are `cast_inputs` and `skip_nonfinite` of the plan."""
    factor = scaling.factor if isinstance(scaling, StaticScaling) else "dynamic"
    yield from rows(
        "fp16.",
        scaling,
        Fp16,
        skip=() if isinstance(scaling, DynamicScaling) else DYNAMIC_KEYS,
        enabled=precision.param == torch.float16,
        auto_cast=others["cast_inputs"],
        loss_scale=factor,
        fp16_master_weights_and_grads=precision.master == torch.float16,
    )
    yield from rows(
        "bf16.",
        numerics,
        Bf16,
        enabled=precision.param == torch.bfloat16,
        check_grad_overflow=others["skip_nonfinite"],
        bf16_master_weights_and_grads=precision.master == torch.bfloat16,
    )
    yield from rows("amp.", numerics, Amp, enabled=bool(numerics.amp_level), loss_scale=factor)
    yield from rows(
        "torch_autocast.",
        numerics,
        Autocast,
        skip=() if numerics.autocast == torch.float16 else ("loss_scale",),
        enabled=numerics.autocast != torch.float32,
        lower_precision_safe_modules=narrow_classes,
        loss_scale=factor,
    )
    yield from rows("data_types.", precision, DataTypes, keep_in_fp32_modules=_kept(precision.keep))
    yield from rows("fp8.", numerics.float8, Float8, enabled=bool(numerics.float8.modules))


def _kept(keep: KeepInFp32) -> object:
    return "(what the model lists)" if keep.as_listed else keep.patterns


def precision_notices(config: Config, dtypes: Precision) -> list[str]:
    """Return notices about precision."""
    return [
        *_amp_notices(config),
        *_copy_notices(config, dtypes),
        *_scale_notices(config),
        *_autocast_notices(config),
        *_keep_notices(config, dtypes),
    ]


def _amp_notices(config: Config) -> list[str]:
    amp = config.settings.amp
    if not amp.enabled:
        return []
    where = f'{config.origin("amp.enabled")}: "amp" with opt_level {amp.opt_level}'
    if amp.opt_level == "O0":
        return [f"{where} has no effect here: training in float32"]
    factor = "dynamic loss scaling" if amp.loss_scale == "dynamic" else f"a loss scale of {amp.loss_scale:g}"
    text = f'{where} is read as "torch_autocast": {{"enabled": true, "dtype": "fp16"}} with {factor}'
    if amp.opt_level == "O1":
        return [f"{text}, which is equivalent to O1"]
    apart = "float16 weights with float32 masters" if amp.opt_level == "O2" else "float16 weights and no masters"
    also = ', "fp16_master_weights_and_grads": true' * (amp.opt_level == "O3")
    return [
        f"{text}: weights stay float32, whereas {amp.opt_level} had {apart}. For those write "
        f'"fp16": {{"enabled": true{also}}} in place of "amp"'
    ]


def _copy_notices(config: Config, dtypes: Precision) -> list[str]:
    """Return a notice at stage 3: autograd saves autocast's copies of weights, which cannot be released."""
    settings, autocast = config.settings, autocast_of(config.settings)
    if not autocast.enabled or settings.zero_optimization.stage < 3 or is_narrow(dtypes.param):
        return []
    key = "amp" if settings.amp.enabled else "torch_autocast"
    return [
        f"{config.origin(f'{key}.enabled')}: with {key} at stage 3 every rank holds {autocast.dtype} copies of all "
        "weights from forward to backward (2 bytes per parameter) unless activations are checkpointed. With "
        '"bf16": {"enabled": true} there are no copies'
    ]


def _scale_notices(config: Config) -> list[str]:
    settings = config.settings
    idle = [f"fp16.{key}" for key in DYNAMIC_KEYS if f"fp16.{key}" in config.given]
    if not (settings.fp16.enabled and settings.fp16.loss_scale and idle):
        return []
    verb = "has" if len(idle) == 1 else "have"
    return [f"{config.origin(idle[0])}: {', '.join(idle)} {verb} no effect here: fp16.loss_scale is static"]


def _autocast_notices(config: Config) -> list[str]:
    """Return notices of torch_autocast keys that other keys override."""
    settings, autocast = config.settings, autocast_of(config.settings)
    scaled, narrow = "torch_autocast.loss_scale", "torch_autocast.lower_precision_safe_modules"
    idle = {
        scaled: "fp16.loss_scale decides" * settings.fp16.enabled
        or f"gradients in {autocast.dtype} need no loss scale" * (autocast.dtype != "float16"),
        narrow: "communication_data_type sets the dtype of all gradients" * bool(settings.communication_data_type),
    }
    given = {key: why for key, why in idle.items() if why and autocast.enabled and key in config.given}
    return [f"{config.origin(key)}: {key} has no effect here: {why}" for key, why in given.items()]


def _keep_notices(config: Config, dtypes: Precision) -> list[str]:
    key = "data_types.keep_in_fp32_modules"
    if not dtypes.keep.patterns or is_narrow(dtypes.param):
        return []
    reason = f"weights {'keep the dtype of the model' if dtypes.param is None else 'are float32 or wider'}"
    if autocast_of(config.settings).enabled:
        reason += ", and torch.autocast decides for each operation"
    return [f"{config.origin(key)}: {key} has no effect here: {reason}"]
