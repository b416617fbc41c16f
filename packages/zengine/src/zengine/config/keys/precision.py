"""Keys of precision: dtypes of weights, loss scaling, autocast, Apex AMP, 8-bit layers."""

from __future__ import annotations

import attrs

from zengine.config.grammar.kinds import (
    DTYPE,
    MAPPING,
    NAMES,
    TRUTH,
    Mismatch,
    ValueKind,
    choice,
    dtype_schema,
    literal,
    null_or,
    number,
    whole,
)
from zengine.config.grammar.table import Row, ignored, renamed, section, setting

SAFE_MODULES = ("torch.nn.Linear", "torch.nn.Conv1d", "torch.nn.Conv2d", "torch.nn.Conv3d")

LEVELS = ("O0", "O1", "O2", "O3")

MAX_SCALE = 3.4028234663852886e38  # of float32, in which a loss scale is kept
MIN_SCALE = 2.0**-126  # the least normal float32
_SCALE = number(0, MAX_SCALE)


def _read_min_scale(value: object) -> float:
    scale: float = _SCALE.read(value)
    return scale or MIN_SCALE


FLOOR = ValueKind("a number (0 counts as 2^-126)", _read_min_scale, _SCALE.json_schema)


def _read_half(value: object) -> str:
    dtype: str = DTYPE.read(value)
    if dtype in ("float32", "float64"):
        raise Mismatch('must be "bf16" or "fp16"', f"To train in {dtype}, leave the section out.")
    return dtype


HALF = ValueKind('"bf16" or "fp16"', _read_half, dtype_schema("bfloat16", "float16"))


def _start(scale: float) -> str:
    return f"starts at {scale:g}"


@attrs.frozen(kw_only=True)
class Fp16:
    """fp16: half precision with loss scaling."""

    enabled: bool = setting(TRUTH, False, "train in float16")
    auto_cast: bool = setting(TRUTH, False, "cast floating inputs of forward to float16")
    loss_scale: float = setting(number(0, MAX_SCALE), 0.0, "static loss scale; 0: dynamic")
    initial_scale_power: int = setting(
        whole(0, 126), 16, "initial dynamic scale: 2 to this power", plan="initial", show=_start
    )
    loss_scale_window: int = setting(
        whole(1), 1000, "steps without overflow before a dynamic scale doubles", plan="window"
    )
    hysteresis: int = setting(whole(1), 2, "overflows before a dynamic scale halves")
    consecutive_hysteresis: bool = setting(TRUTH, False, "a step without overflow resets the hysteresis")
    min_loss_scale: float = setting(FLOOR, 1.0, "lower bound of a dynamic scale", plan="floor")
    fp16_master_weights_and_grads: bool = setting(TRUTH, False, "no float32 masters; optimizer states stay float32")


BF16: dict[str, Row] = {
    "immediate_grad_update": ignored(TRUTH, True, why="gradients are always accumulated immediately"),
    "check_overflow": renamed(TRUTH, "check_grad_overflow"),
}

BFLOAT16 = renamed(MAPPING, "bf16")


@attrs.frozen(kw_only=True)
class Bf16:
    """bf16: bfloat16 training."""

    enabled: bool | str = setting(
        literal(TRUTH, "auto"), False, 'train in bfloat16; "auto": if it is faster on this device'
    )
    check_grad_overflow: bool = setting(TRUTH, True, "skip updates with non-finite gradients")
    bf16_master_weights_and_grads: bool = setting(TRUTH, False, "no float32 masters; optimizer states stay float32")
    bf16_optimizer_states: bool = setting(
        TRUTH, False, "with bf16 masters: bf16 optimizer states", plan="narrow_states"
    )


@attrs.frozen(kw_only=True)
class DataTypes:
    """data_types: dtypes that fp16 and bf16 do not determine."""

    grad_accum_dtype: str = setting(
        null_or(DTYPE, ""),
        "",
        "dtype of the gradient accumulators; default: that of the masters",
        plan="accumulate",
        empty="(each parameter's)",
    )
    param_dtype: str = setting(
        null_or(DTYPE, ""),
        "",
        "dtype of the weights; default: that of fp16 or bf16, else the model's",
        plan="param",
        empty="(the model's)",
    )
    buffer_dtype: str = setting(
        null_or(DTYPE, ""),
        "",
        "dtype of floating-point buffers; default: unchanged",
        plan="buffer",
        empty="(each buffer's)",
    )
    # DeepSpeed keeps buffers only; here parameters as well.
    keep_in_fp32_modules: tuple[str, ...] | str = setting(
        literal(NAMES, "auto"),
        "auto",
        "substrings of names that stay float32; auto: the lists of a Transformers model",
        empty="(none)",
    )


@attrs.frozen(kw_only=True)
class Autocast:
    """torch_autocast: torch.autocast chooses the dtype of each operation; weights are float32, fp16's or bf16's."""

    enabled: bool = setting(TRUTH, False, "run forward under torch.autocast")
    # torch's own default is float16 on a GPU, for which DeepSpeed does not scale the loss.
    dtype: str = setting(
        null_or(HALF, ""), "", "the lower dtype; default: bf16, and fp16 where weights are fp16", plan="autocast"
    )
    lower_precision_safe_modules: tuple[str, ...] = setting(
        null_or(NAMES, SAFE_MODULES),
        SAFE_MODULES,
        "module classes whose gradients are reduced in the lower dtype",
        empty="(none)",
    )
    # Ours: DeepSpeed's is always dynamic.
    loss_scale: float = setting(number(0, MAX_SCALE), 0.0, "static loss scale with fp16; 0: dynamic")


_CHOSEN = "torch.autocast has its own rules per operation"

AMP_OTHERS: dict[str, Row] = {
    "patch_torch_functions": ignored(null_or(TRUTH, None), None, True, why=_CHOSEN),
    "keep_batchnorm_fp32": ignored(
        null_or(literal(TRUTH, "True", "False"), None), None, True, "True", why="weights are always float32"
    ),
    "master_weights": ignored(null_or(TRUTH, None), None, True, why="weights are always float32"),
    "cast_model_type": ignored(null_or(DTYPE, None), None, why="weights stay float32"),
    "cast_model_outputs": ignored(null_or(DTYPE, None), None, why="outputs are not cast"),
    "num_losses": ignored(null_or(number(0), None), None, why="one loss scale serves all losses"),
    "verbosity": ignored(null_or(number(0), None), None, why="the conversion is logged once"),
    "min_loss_scale": ignored(null_or(number(0), None), None, why="a dynamic scale stays above 1"),
    "max_loss_scale": ignored(null_or(number(0), None), None, why="a dynamic scale has no upper bound"),
}


@attrs.frozen(kw_only=True)
class Amp:
    """amp: NVIDIA Apex, which is deprecated; read as torch_autocast."""

    enabled: bool = setting(TRUTH, False, "Apex's mixed precision, run by torch.autocast")
    opt_level: str = setting(
        choice(*LEVELS, fold=str.upper), "O1", "O0: float32; O1, O2, O3: torch_autocast in fp16", plan="amp_level"
    )
    loss_scale: float | str = setting(
        null_or(literal(number(0, MAX_SCALE), "dynamic"), "dynamic"), "dynamic", 'static loss scale, or "dynamic"'
    )


@attrs.frozen(kw_only=True)
class Float8:
    """fp8, ours: linear layers with 8-bit floating-point matrix products."""

    enabled: bool = setting(TRUTH, False, "8-bit matrix products; needs an NVIDIA GPU from Ada on")
    modules: tuple[str, ...] = setting(NAMES, ("*",), "substrings of the linear layers' names; * matches anything")
    exclude: tuple[str, ...] = setting(
        NAMES, ("lm_head",), "substrings of the names of layers that are not converted", empty="(none)"
    )


@attrs.frozen(kw_only=True, slots=False)
class PrecisionKeys:
    """Sections of the top level about precision."""

    fp16: Fp16 = section(Fp16, switch="enabled")
    bf16: Bf16 = section(Bf16, BF16, switch="enabled")
    amp: Amp = section(Amp, AMP_OTHERS, switch="enabled")
    torch_autocast: Autocast = section(Autocast, switch="enabled")
    fp8: Float8 = section(Float8, switch="enabled")
    data_types: DataTypes = section(DataTypes)


OTHERS: dict[str, Row] = {"bfloat16": BFLOAT16}
