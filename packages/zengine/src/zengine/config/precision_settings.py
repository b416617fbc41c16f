"""Settings of precision beyond the fp16 and bf16 sections: autocast, Apex AMP, 8-bit layers, single dtypes."""

from __future__ import annotations

from typing import Any

import attrs

from zengine.config.kinds import DTYPE, LIST, TEXT, TRUTH, Kind, Mismatch, choice, literal, null_or, number
from zengine.config.table import Entry, no_effect, setting

SAFE_MODULES = ("torch.nn.Linear", "torch.nn.Conv1d", "torch.nn.Conv2d", "torch.nn.Conv3d")
LEVELS = ("O0", "O1", "O2", "O3")


def _read_names(value: object) -> tuple[str, ...]:
    names: Any = LIST.read(value)
    return tuple(TEXT.read(name) for name in names)


def _read_half(value: object) -> str:
    dtype: str = DTYPE.read(value)
    if dtype in ("float32", "float64"):
        raise Mismatch('must be "bf16" or "fp16"', f"To train in {dtype}, leave the section out.")
    return dtype


NAMES = Kind("a list of names", _read_names)
HALF = Kind('"bf16" or "fp16"', _read_half)


@attrs.frozen(kw_only=True)
class Autocast:
    """torch_autocast: float32 weights; torch chooses for each operation whether it runs in the lower dtype."""

    enabled: bool = setting(TRUTH, False, "run forward under torch.autocast")
    # torch's own default is float16 on a GPU, where DeepSpeed then scales no loss.
    dtype: str = setting(null_or(HALF, "bfloat16"), "bfloat16", "the lower dtype")
    lower_precision_safe_modules: tuple[str, ...] = setting(
        null_or(NAMES, SAFE_MODULES), SAFE_MODULES, "classes whose parameters' gradients travel in the lower dtype"
    )
    # Ours: for DeepSpeed it is always dynamic.
    loss_scale: float = setting(number(0), 0.0, "factor on the loss with fp16; 0 = dynamic")


@attrs.frozen(kw_only=True)
class Amp:
    """amp: NVIDIA Apex, which its authors gave up; read as torch_autocast."""

    enabled: bool = setting(TRUTH, False, "Apex's mixed precision, carried out by torch.autocast")
    opt_level: str = setting(choice(*LEVELS, fold=str.upper), "O1", "O0: float32; O1, O2, O3: torch_autocast in fp16")
    loss_scale: float | str = setting(
        null_or(literal(number(0), "dynamic"), "dynamic"), "dynamic", 'factor on the loss, or "dynamic"'
    )


_CHOSEN = "torch.autocast has its own rules for each operation"
AMP_OTHERS: dict[str, Entry] = {
    "patch_torch_functions": no_effect(null_or(TRUTH, None), None, True, why=_CHOSEN),
    "keep_batchnorm_fp32": no_effect(
        null_or(literal(TRUTH, "True", "False"), None), None, True, "True", why="weights are float32 anyway"
    ),
    "master_weights": no_effect(null_or(TRUTH, None), None, True, why="weights are float32 anyway"),
    "cast_model_type": no_effect(null_or(DTYPE, None), None, why="weights stay float32"),
    "cast_model_outputs": no_effect(null_or(DTYPE, None), None, why="outputs are what the model returns"),
    "num_losses": no_effect(null_or(number(0), None), None, why="one loss scale serves all losses"),
    "verbosity": no_effect(null_or(number(0), None), None, why="what was done is said once"),
    "min_loss_scale": no_effect(null_or(number(0), None), None, why="a dynamic scale stays above 1"),
    "max_loss_scale": no_effect(null_or(number(0), None), None, why="a dynamic scale has no ceiling"),
}


@attrs.frozen(kw_only=True)
class Float8:
    """fp8, a section of ours: linear layers whose products run in 8-bit floats, on devices that have them."""

    enabled: bool = setting(TRUTH, False, "multiply in 8-bit floats; needs an NVIDIA GPU from Ada on")
    modules: tuple[str, ...] = setting(NAMES, ("*",), "linear layers, by parts of their names; * is anything")
    exclude: tuple[str, ...] = setting(NAMES, ("lm_head",), "linear layers that stay as they are")
