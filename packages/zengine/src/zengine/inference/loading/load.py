"""`load_model`: from a path to a module that runs, quantized while it streams.

Phases: open the source; build the module without memory; fill it layer by layer; recognize its decoder.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn

from zengine.inference.experts.separate import SeparateExperts, chosen_stacks, separate_chosen
from zengine.inference.loading import weights
from zengine.inference.loading.packed import find_packed, load_packed
from zengine.inference.loading.sources import Given, Source, open_source, read_config
from zengine.inference.loading.stored import QuantizedSlice, StackedSlice, Tensors
from zengine.inference.loading.streaming import ChooseFormat, stream
from zengine.inference.quantized import QuantizationReport
from zengine.inference.recognize import NotRecognized, recognize
from zengine.inference.structure import Decoder
from zengine.inference.verify import verify
from zpartition.experts import num_experts_of, own_experts_of
from zprecision.quant import Format, format_named

__all__ = ["LoadedModel", "empty_model", "fill", "load_model"]

log = logging.getLogger("zengine")

# keys of a config that no module is built by: the dtype is given, and code of the folder is not run
_NOT_BUILT = ("quantization_config", "auto_map", "dtype", "torch_dtype")
# names under which the configs of Transformers have the number of layers, which are built one by one
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers")
_DTYPES = {str(each).removeprefix("torch."): each for each in (torch.float32, torch.bfloat16, torch.float16)}


@attrs.frozen(kw_only=True, eq=False)
class LoadedModel:
    """A model that is ready to run."""

    module: nn.Module  # in eval mode; its quantized layers are QuantizedLinear
    decoder: Decoder | None  # recognized in the module, over the same weights; None if it is no known decoder
    reason: str  # that it is not recognized for; "" if it is
    report: QuantizationReport  # its quantized layers; empty if none are
    folder: Path | None  # that may have the tokenizer


def load_model(
    path: Given,
    *,
    format: Format | str | Callable[[str], Format | str | None] | None = None,
    dtype: torch.dtype | None = None,
    module: nn.Module | None = None,
    device: torch.device | str = "cpu",
    base_dir: str = "",
) -> LoadedModel:
    """Load a model for inference, quantizing its linear layers while the files are read.

    The peak of memory is the loaded model and one layer at work.

    path: a Hugging Face folder (plain, GPTQ, AWQ or compressed-tensors), a GGUF file, a `.safetensors` or `.pt` file,
        a zckpt checkpoint or the root of some, a folder of `save_packed`, or DeepSpeed's list of files (a mapping, or
        the path of its JSON).
    format: of the linear layers: a value, its text ("int4", "int8-g64"), or a function from a layer's name to
        one of these or None.  Layers that need more than four bits get eight (see `zengine.inference.quantized`).
        Layers that the files hold as codes of at most as many bits keep their codes, and those of `save_packed`
        always do.  None: nothing is quantized here.
    dtype: of the other parameters, and of activations.  None: that of `module`; else float32 if layers are quantized,
        and that of the model's config if none are.
    module: the model to fill; it may be on the meta device.  None: Transformers' model for the config beside the
        weights, or in the GGUF file.
    device: of the loaded model, if `module` has no memory yet.
    base_dir: folder of `path`, or of the files of DeepSpeed's list.

    Raises ValueError and CheckpointError: no known format, damaged files, weights that do not fit the model, an
    unknown format; TypeError: another kind of argument.
    """
    _check_dtype(dtype)
    choose, place = _chooser(format), torch.device(device)
    packed = None if isinstance(path, Mapping) else find_packed(Path(base_dir, path))
    if packed is not None:
        made = _module(module, read_config(packed.path), str(packed.path), dtype, len(packed.checkpoint(0).names()))
        report = load_packed(made, packed, place)
        return _finished(made, report, packed.path)
    with open_source(path, base_dir) as source:
        wanted = dtype if module is not None else _compute_dtype(dtype, source, format is not None)
        made = _module(module, source.config, source.origin, wanted, len(source.tensors))
        return _finished(made, fill(made, source, choose, place), source.folder)


def empty_model(path: Given, base_dir: str = "") -> nn.Module:
    """Return Transformers' model for the config beside the weights at `path`, on the meta device.

    Its quantization_config is left out: layers are linear, and get the codes of the files when these are read.

    Raises ValueError and CheckpointError as `load_model`.
    """
    packed = None if isinstance(path, Mapping) else find_packed(Path(base_dir, path))
    if packed is not None:
        return _build(read_config(packed.path), str(packed.path), torch.float32, len(packed.checkpoint(0).names()))
    with open_source(path, base_dir) as source:
        stored = _compute_dtype(None, source, is_asked=False)
        return _build(source.config, source.origin, stored, len(source.tensors))


def fill(
    module: nn.Module, source: Source, choose: ChooseFormat, device: torch.device, *, outliers: bool = True
) -> QuantizationReport:
    """Fill `module` from an open source, quantizing its layers; see `stream`."""
    tensors = _by_expert(module, weights.named_by_module(source.tensors, module), choose)
    try:
        report = stream(module, tensors, choose, device, outliers=outliers)
    except ValueError as error:
        raise ValueError(f"{source.origin} does not fit {type(module).__name__}: {error}") from error
    source.adjust(module)
    return report


def _by_expert(module: nn.Module, tensors: Tensors, choose: ChooseFormat) -> Tensors:
    """Separate the stacked experts that are quantized, and return the tensors under the names of their layers."""
    stacks = list(chosen_stacks(module, choose))
    separate_chosen(module, choose)
    found = dict(tensors)
    for name, stack in stacks:
        experts = module.get_submodule(name)
        for each in stack.names if isinstance(experts, SeparateExperts) else ():
            if (stored := found.pop(f"{name}.{each}", None)) is not None:
                number, wanted = stored.get_shape()[0], num_experts_of(experts)
                numbers = own_experts_of(experts) if number == wanted else range(number)  # others raise, by name
                found |= {f"{name}.{each}.{index}.weight": StackedSlice(stored, index) for index in numbers}
    return found


def _module(
    given: nn.Module | None,
    config: Mapping[str, Any],
    origin: str,
    dtype: torch.dtype | None,
    most_layers: int | None = None,
) -> nn.Module:
    """Return the given module, cast, or Transformers' model for a config, on the meta device."""
    if given is None:
        return _build(config, origin, dtype or torch.float32, most_layers)
    return given if dtype is None else _cast(given, dtype)


def _build(config: Mapping[str, Any], origin: str, dtype: torch.dtype, most_layers: int | None) -> nn.Module:
    plain = {key: value for key, value in config.items() if key not in _NOT_BUILT}
    kind, layers = plain.pop("model_type", None), [plain.get(key) for key in _LAYER_COUNTS]
    if not isinstance(kind, str):
        raise ValueError(f"{origin} has no config.json with a model_type beside it: pass module=, the model to fill")
    most = max((each for each in layers if isinstance(each, (int, float))), default=0)
    if most_layers is not None and not most <= most_layers:
        raise ValueError(f"{origin}: its config says {most:,} layers, and it has {most_layers:,} tensors")
    try:
        import transformers
    except ImportError as error:
        raise ValueError(f"building the model of {origin} needs Transformers: install it, or pass module=") from error
    try:
        made = transformers.AutoConfig.for_model(kind, **plain)
        with torch.device("meta"):
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                made, dtype=dtype, trust_remote_code=False
            )
    except Exception as error:  # Transformers checks configs in part, and torch the sizes that come of them
        reason = (str(error) or type(error).__name__).partition("\nException raised from")[0]
        raise ValueError(f"{origin}: its config does not describe a causal language model: {reason}") from error
    return model


def _finished(module: nn.Module, report: QuantizationReport, folder: Path | None) -> LoadedModel:
    """Return the filled module with its decoder."""
    decoder, reason = _recognized(module.eval())
    return LoadedModel(module=module, decoder=decoder, reason=reason, report=report, folder=folder)


def _chooser(format: Format | str | Callable[[str], Format | str | None] | None) -> ChooseFormat:
    """Return the function from a layer's name to its format.  Raises TypeError for other things."""
    if not callable(format):
        fixed = _format(format)
        return lambda _name: fixed
    choose = format
    return lambda name: _format(choose(name))


def _format(given: object) -> Format | None:
    if given is None or isinstance(given, Format):
        return given
    if not isinstance(given, str):
        raise TypeError(f"format is {given!r}: pass a text such as 'int4', a Format, None, or a function to these")
    return format_named(given)


def _check_dtype(dtype: object) -> None:
    if dtype is not None and dtype not in (*_DTYPES.values(), torch.float64):
        raise TypeError(
            f"dtype is {dtype!r}: pass {', '.join(map(str, _DTYPES.values()))} or None; format= quantizes layers"
        )


def _compute_dtype(given: torch.dtype | None, source: Source, is_asked: bool) -> torch.dtype:
    is_quantized = is_asked or any(isinstance(each, QuantizedSlice) for each in source.tensors.values())
    stored = _DTYPES.get(str(source.config.get("dtype") or source.config.get("torch_dtype")), torch.float32)
    return given or (torch.float32 if is_quantized else stored)


def _cast(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast the floating parameters; buffers, such as rotary frequencies, keep their dtype."""
    from zprecision import Precision

    return Precision(param=dtype).cast_module(module)


def _recognized(module: nn.Module) -> tuple[Decoder | None, str]:
    """Return the verified decoder, or None with the reason."""
    try:
        decoder = recognize(module)
        verify(decoder, module)
    except NotRecognized as error:
        reason = str(error)
    except Exception as error:  # of the module's own code, whose forward may take no token ids
        reason = f"{type(error).__name__}: {error}"
    else:
        return decoder, ""
    if broken := next((name for name, each in module.named_parameters() if not bool(each.isfinite().all())), ""):
        reason = f"{broken} has infinite or NaN values"
    log.info("load_model: %s runs as it is: %s", type(module).__name__, reason)
    return None, reason
