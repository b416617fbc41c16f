"""Adapters in files, as PEFT writes them: `adapter_config.json` and `adapter_model.safetensors`.

A folder holds the updates only, so it is small, and any program that knows PEFT's format reads it.  Names are those
of the layers in the plain model, whichever class of ours or of PEFT's holds the adapters.

Every rank calls, at every ZeRO stage.  Saving gathers one layer at a time; rank 0 writes.  Loading checks names and
shapes on all ranks before the first tensor changes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor, nn

import zcomm
from zengine.adapters.foreign import adapted
from zengine.adapters.lora import linear_layers, put_lora
from zengine.adapters.merging import without_adapters
from zengine.adapters.update import Adapted, Update
from zengine.checkpoint.consensus import GroupPeers, on_every_rank
from zengine.checkpoint.weight_files import Entry, write_weights
from zpartition import gathered

__all__ = ["load_adapters", "save_adapters"]

T = TypeVar("T")

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."  # of names in the file, and of PEFT's modules
_SIDE = re.compile(re.escape(_PREFIX) + r"(.+)\.lora_([AB])\.weight")
_UNSUPPORTED = ("use_dora", "modules_to_save", "lora_bias", "alora_invocation_tokens", "trainable_token_indices")


@attrs.frozen(eq=False)
class _SavedUpdate:
    """One layer with its update."""

    name: str  # in the plain model
    update: Update  # its tensors are the parameters
    is_transposed: bool
    dropout: float

    @property
    def rank(self) -> int:
        return self.update.down.shape[0]

    @property
    def alpha(self) -> float:
        alpha = self.update.scale * self.rank
        return int(alpha) if alpha == int(alpha) else alpha


def save_adapters(
    module: nn.Module, folder: str | os.PathLike[str], *, base_model: str = "", task_type: str = ""
) -> None:
    """Write the adapters of `module` into `folder`, in PEFT's format; every rank calls, and rank 0 writes.

    base_model: name or path of the plain model, for the config; by default what the model's own config says.
    task_type: as PEFT names it, such as "CAUSAL_LM".

    Raises ValueError for a module without adapters, or with adapters that are disabled or merged into the weights;
    an error of the file system on every rank.
    """
    layers = _layers(module)
    tensors: dict[str, Tensor] = {}
    for layer in layers:
        sides = {"A": layer.update.down, "B": layer.update.up}
        with gathered([each for each in sides.values() if isinstance(each, nn.Parameter)]):
            for side, tensor in sides.items():
                tensors[f"{_PREFIX}{layer.name}.lora_{side}.weight"] = tensor.detach().to("cpu", copy=True)
    name = base_model or getattr(getattr(module, "config", None), "_name_or_path", "") or None
    config = _config_of(layers, _plain_names(module)) | {
        "base_model_name_or_path": name,
        "task_type": task_type or None,
    }

    def write() -> None:
        if zcomm.group_rank(None) == 0:
            entries = [Entry((key,), tuple(each.shape), each.dtype) for key, each in tensors.items()]
            write_weights(Path(folder) / _WEIGHTS, entries, tensors.values())
            temporary = Path(folder) / f".tmp-{_CONFIG}"
            temporary.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
            temporary.replace(Path(folder) / _CONFIG)

    _together(write, "no adapters were saved")


def load_adapters(module: nn.Module, folder: str | os.PathLike[str]) -> list[str]:
    """Load adapters in PEFT's format into `module`; return the names of their layers.  Every rank calls.

    A module without adapters gets them: call it before `initialize` then.

    Raises ValueError, before anything changes, for layers that the module lacks, other ranks or scales, layers of the
    module without an adapter in the file, and kinds of adapters that are no update of a weight; what reading raises,
    on every rank.
    """
    config, tensors = _together(lambda: _read(Path(folder)), "no adapters were loaded")
    names = sorted({found[1] for key in tensors if (found := _SIDE.fullmatch(key)) is not None})
    scales = {name: _scale(config, name, tensors[_key(name, "A")].shape[0]) for name in names}
    if not any(adapted(each) is not None for each in module.modules()):
        _add(module, names, tensors, scales)
    layers = {layer.name: layer for layer in _layers(module)}
    _check_same(layers, names, tensors, scales)
    for name in names:
        update = layers[name].update
        sides = {"A": update.down, "B": update.up}
        with gathered([p for p in sides.values() if isinstance(p, nn.Parameter)], modifier_rank=0), torch.no_grad():
            for side, tensor in sides.items():
                tensor.copy_(tensors[_key(name, side)])
    return names


def _together(work: Callable[[], T], otherwise: str) -> T:
    """Run `work` on every rank of the world; if it fails on one, raise on all."""
    peers = GroupPeers(None, zcomm.group_rank(None), zcomm.group_size(None))
    return on_every_rank(work, peers, otherwise)


def _key(name: str, side: str) -> str:
    return f"{_PREFIX}{name}.lora_{side}.weight"


def _layers(module: nn.Module) -> list[_SavedUpdate]:
    """Return the layers with adapters.  Raises ValueError if there are none, or not one update each."""
    found = []
    for name, layer in module.named_modules():
        view = adapted(layer)
        if view is not None:
            found.append(_layer(name.removeprefix(_PREFIX), layer, view))
    if not found:
        raise ValueError(without_adapters(module))
    return found


def _layer(name: str, layer: Any, view: Adapted) -> _SavedUpdate:
    updates = view.updates()
    if len(updates) != 1:
        why = "several active adapters" if updates else "adapters that are disabled, or merged into its weight"
        raise ValueError(f"{name} has {why}: a file holds one active adapter of each layer")
    if not isinstance(updates[0].down, nn.Parameter):
        raise ValueError(
            f"{name} has an adapter of DeepSpeed-Chat, whose matrices are transposed: PEFT's files hold those of "
            "add_lora() and of PEFT. Merge it into the weight (fuse_lora_weight) and save the model."
        )
    dropouts = [each.p for each in layer.modules() if isinstance(each, nn.Dropout)]
    base = layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer
    is_transposed = bool(getattr(base, "is_transposed", hasattr(base, "nf")))
    return _SavedUpdate(
        name, updates[0], is_transposed, float(getattr(layer, "dropout", dropouts[0] if dropouts else 0.0))
    )


def _plain_names(module: nn.Module) -> list[str]:
    """Return the names of all layers that a target could mean, adapted ones included."""
    names = [name for name, layer in module.named_modules() if adapted(layer) is not None]
    return [name.removeprefix(_PREFIX) for name in (*names, *(name for name, _ in linear_layers(module)))]


def _config_of(layers: list[_SavedUpdate], names: list[str]) -> dict[str, Any]:
    """Return PEFT's settings: targets by the ends of their paths, where these mean the same layers."""
    wanted = {layer.name for layer in layers}
    ends = sorted({layer.name.rpartition(".")[2] for layer in layers})
    meant = {name for name in names if name.rpartition(".")[2] in ends and ".lora_" not in f".{name}"}
    first = layers[0]
    return {
        "peft_type": "LORA",
        "r": first.rank,
        "lora_alpha": first.alpha,
        "lora_dropout": first.dropout,
        "target_modules": ends if meant == wanted else sorted(wanted),
        "rank_pattern": {layer.name: layer.rank for layer in layers if layer.rank != first.rank},
        "alpha_pattern": {layer.name: layer.alpha for layer in layers if layer.alpha != first.alpha},
        "fan_in_fan_out": first.is_transposed,
        "bias": "none",
        "inference_mode": True,
    }


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config and tensors of a folder.  Raises ValueError for what is no plain LoRA."""
    from zckpt.interchange import read_weights

    if not (folder / _CONFIG).is_file():
        raise ValueError(
            f"{folder} has no {_CONFIG}: pass a folder that PEFT's save_pretrained() or save_adapters() wrote"
        )
    config = json.loads((folder / _CONFIG).read_text())
    wrong = [key for key in _UNSUPPORTED if config.get(key)]
    if config.get("peft_type") != "LORA" or wrong:
        what = ", ".join(wrong) or f"peft_type {config.get('peft_type')!r}"
        raise ValueError(f"{folder / _CONFIG} has {what}: only plain LoRA can be loaded here; use PEFT for others")
    with read_weights(folder / _WEIGHTS) as weights:
        tensors = {name: weights[name][:].clone() for name in weights}
    strange = [name for name in tensors if _SIDE.fullmatch(name) is None]
    alone = [name for name in tensors if name.replace("lora_A", "lora_B") not in tensors]
    if strange or alone:
        raise ValueError(f"{folder / _WEIGHTS} has {(strange or alone)[0]!r}, which is no half of an update")
    return config, tensors


def _scale(config: dict[str, Any], name: str, rank: int) -> float:
    """Return the factor of one layer's update, by PEFT's rules: patterns are expressions for the end of a path."""
    patterns: dict[str, float] = config.get("alpha_pattern") or {}
    alphas = [alpha for key, alpha in patterns.items() if re.match(rf"(.*\.)?({key})$", name)]
    alpha = float(alphas[0] if alphas else config.get("lora_alpha", 8))
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)


def _add(module: nn.Module, names: list[str], tensors: dict[str, Tensor], scales: dict[str, float]) -> None:
    layers = dict(linear_layers(module))
    missing = [name for name in names if name not in layers]
    if missing:
        raise ValueError(
            f"the file has an adapter for {missing[0]} ({len(missing)} such layers), and {type(module).__name__} "
            f"has the linear layers {', '.join(list(layers)[:8]) or 'none'}: load it into the model it was made for"
        )
    for name in names:
        _check_shapes(name, tensors, *_sizes(layers[name]))
    module.requires_grad_(False)
    for name in names:
        rank = tensors[_key(name, "A")].shape[0]
        put_lora(module, name, rank, scales[name] * rank)


def _check_same(
    layers: dict[str, _SavedUpdate], names: list[str], tensors: dict[str, Tensor], scales: dict[str, float]
) -> None:
    if sorted(layers) != names:
        extra, missing = sorted(set(names) - set(layers)), sorted(set(layers) - set(names))
        what = (
            f"the file has an adapter for {extra[0]}, the module none"
            if extra
            else (f"the module has an adapter for {missing[0]}, the file none")
        )
        raise ValueError(f"{what} ({len(names)} layers in the file, {len(layers)} in the module)")
    for name, layer in layers.items():
        up, down = layer.update.up, layer.update.down
        _check_shapes(name, tensors, up.shape[0], down.shape[1], layer.rank)
        if abs(scales[name] - layer.update.scale) > 1e-9 * abs(scales[name]):
            raise ValueError(
                f"{name}: the file's update has the factor {scales[name]}, the module's {layer.update.scale}; "
                "give both the same lora_alpha and rank"
            )


def _sizes(layer: Any) -> tuple[int, int]:
    """Return (out, in)."""
    return (layer.out_features, layer.in_features) if hasattr(layer, "out_features") else (layer.nf, layer.nx)


def _check_shapes(name: str, tensors: dict[str, Tensor], out: int, inputs: int, rank: int | None = None) -> None:
    down, up = (tuple(tensors[_key(name, side)].shape) for side in "AB")
    rank = down[0] if rank is None else rank
    if (down, up) != ((rank, inputs), (out, rank)):
        raise ValueError(
            f"{name}: the file has lora_A {down} and lora_B {up}, and the module ({rank}, {inputs}) and "
            f"({out}, {rank})"
        )
