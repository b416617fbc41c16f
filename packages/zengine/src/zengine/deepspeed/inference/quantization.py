"""Quantization of an inference config: `dtype="int8"`, and the section `quant`.

    {"quant": {"weight": {"num_bits": 4, "q_type": "symmetric"}}}

Weights have 8 or 4 bits; 32 elements of a row share a scale.  Activations are rounded to 8 bits within products; with
{"activation": {"num_bits": 16}} products of 8-bit weights multiply two parts of 8 bits.
`quantized_initialization` and `post_init_quant`, the dicts of ZeRO-Inference, map parts of layer names to their own
bits and group sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar, final

import attrs
import torch

from zengine.config.grammar.kinds import TRUTH, Mismatch, ValueKind, choice, whole
from zengine.config.grammar.table import Row, Section, fixed, ignored
from zengine.deepspeed.inference.parallel import honoured
from zengine.deepspeed.section_model import SectionModel
from zprecision.quant import Format, Int4, Int8, format_name

__all__ = ["QUANT", "QuantizationConfig", "WeightQuantization", "read_quantization"]

_GROUPS = (32, 64, 128)
Wide = TypeVar("Wide", Format, Format | None)


def _read_bits(value: object) -> int:
    if isinstance(value, (int, float)) and value in (4, 8):
        return int(value)
    raise Mismatch("must be 8 or 4")


def _read_activation_bits(value: object) -> int:
    if isinstance(value, (int, float)) and value in (8, 16):
        return int(value)
    raise Mismatch("must be 8 or 16")


_BITS = ValueKind("8 or 4", _read_bits)
_ACTIVATION_BITS = ValueKind("8 or 16", _read_activation_bits)
_TYPE = choice("symmetric", "asymmetric")


def _read_patterns(value: object) -> dict[str, dict[str, Any]]:
    """Read {part of a name: {num_bits, group_size, group_dim, symmetric}}."""
    if not isinstance(value, Mapping):
        raise Mismatch("must map parts of layer names to {num_bits, group_size, group_dim, symmetric}")
    found = {}
    for name, given in value.items():
        if not isinstance(given, Mapping):
            raise Mismatch(f"has {name!r}: {given!r}, which is no object with num_bits, group_size, ...")
        one = {"num_bits": 8, "group_size": 32, "group_dim": 1, "symmetric": False, **given}
        if one["symmetric"] not in (0, 1):  # true and false are
            raise Mismatch(f"has {name!r} with symmetric: {one['symmetric']!r}, which must be true or false")
        unknown = sorted(set(one) - {"num_bits", "group_size", "group_dim", "symmetric"})
        if unknown or one["num_bits"] not in (4, 8) or one["group_size"] not in _GROUPS or one["group_dim"] != 1:
            raise Mismatch(
                f"has {name!r}: {dict(given)!r}; num_bits is 8 or 4, group_size 32, 64 or 128, group_dim 1 (rows)"
            )
        found[str(name)] = one
    return found


_PATTERNS = ValueKind("parts of layer names with their bits", _read_patterns)
_WEIGHT: dict[str, Row] = {
    "enabled": honoured(kind=TRUTH, default=True),
    "num_bits": honoured(kind=_BITS, default=8),
    "q_type": honoured(kind=_TYPE, default="symmetric"),
    "q_groups": ignored(whole(1), 1, why="32 elements of a row share a scale, which is finer"),
    "quantized_initialization": honoured(kind=_PATTERNS, default={}),
    "post_init_quant": honoured(kind=_PATTERNS, default={}),
}
_EIGHT = "other than symmetric rounding of activations"
_ACTIVATION: dict[str, Row] = {
    "enabled": fixed(TRUTH, True, why=_EIGHT, hint="Remove it."),
    "num_bits": honoured(kind=_ACTIVATION_BITS, default=8),
    "q_type": fixed(_TYPE, "symmetric", why=_EIGHT, hint="Remove it."),
    "q_groups": ignored(whole(1), 1, why="32 elements share a scale, which is finer"),
}
QUANT: dict[str, Row] = {
    "enabled": honoured(kind=TRUTH, default=True),
    "activation": Section(keys=_ACTIVATION),
    "weight": Section(keys=_WEIGHT),
    "qkv": Section(keys={"enabled": ignored(TRUTH, True, why="their layers are quantized like all others")}),
}


@final
class QuantizationConfig(SectionModel):
    """Section `quant`."""

    rows = Section(keys=QUANT)
    title = "init_inference.quant"
    models: ClassVar[Mapping[str, type[SectionModel]]] = {}


@attrs.frozen
class WeightQuantization:
    """Formats of linear layers, by name."""

    format: Format | None  # of layers that no pattern names; None: they are not quantized
    patterns: tuple[tuple[str, Format], ...] = ()  # part of a name -> format; the first that fits

    def format_of(self, name: str) -> Format | None:
        """Return the format of the layer `name`; None if it is not quantized."""
        return next((format for part, format in self.patterns if part in name), self.format)

    def name_of(self, name: str) -> str:
        """Return the name of the format of the layer `name`: "int4"; "" if it is not quantized."""
        format = self.format_of(name)
        return "" if format is None else format_name(format)

    def notices(self, names: Sequence[str]) -> list[str]:
        """Return a line for each pattern that none of these names of linear layers contains."""
        return [
            f"init_inference.quant: no linear layer has {part!r} in its name; there are {', '.join(names[:5])}, ..."
            for part, _ in self.patterns
            if not any(part in name for name in names)
        ]


def read_quantization(dtype: torch.dtype, section: Mapping[str, Any]) -> WeightQuantization | None:
    """Return the quantization of a config; None if there is none.

    dtype: int8 quantizes all linear layers to 8 bits.  section: the members of `quant` that were given.
    Raises ValueError for weights of 4 bits with activations of 16.
    """
    found = _read_weights(dtype, section)
    bits = dict(section.get("activation") or {}).get("num_bits", 8)
    if found is None or bits == 8:
        return found
    return WeightQuantization(_wide(found.format), tuple((part, _wide(format)) for part, format in found.patterns))


def _wide(format: Wide) -> Wide:
    """Return a format with activations of 16 bits."""
    if format is None:
        return format
    if not isinstance(format, Int8):
        raise ValueError(
            f"init_inference.quant.activation.num_bits is 16, and weights are {format_name(format)}: their rounding "
            "outweighs that of activations. Use weights of 8 bits, or remove it."
        )
    return attrs.evolve(format, activation_bits=16)


def _read_weights(dtype: torch.dtype, section: Mapping[str, Any]) -> WeightQuantization | None:
    weight = dict(section.get("weight") or {})
    is_on = bool(section) and section.get("enabled", True) and weight.get("enabled", True)
    patterns = tuple(
        (part, _format(one["num_bits"], bool(one["symmetric"]), one["group_size"]))
        for key in ("quantized_initialization", "post_init_quant")
        for part, one in _read_patterns(weight.get(key) or {}).items()
        if is_on
    )
    if is_on and (not patterns or weight.keys() & {"num_bits", "q_type"}):
        symmetric = weight.get("q_type", "symmetric") == "symmetric"
        return WeightQuantization(_format(weight.get("num_bits", 8), symmetric, 32), patterns)
    general: Format | None = Int8() if dtype == torch.int8 else None
    return WeightQuantization(general, patterns) if patterns or general is not None else None


def _format(bits: int, symmetric: bool, group: int) -> Format:
    kinds: dict[int, Callable[..., Format]] = {4: Int4, 8: Int8}
    return kinds[bits](group=group) if symmetric else kinds[bits](group=group, scale="minmax")
