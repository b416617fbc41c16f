"""Formats of quantized tensors, as frozen values.

A format cuts the last dim of a tensor into groups and stores small codes with a scale for each group.  The integer
formats decode to `scale * (code - offset) + min`; `Integers` describes them to the kernels.  The others are decoded
by a table (NF4), in two levels (Q4_K, Q6_K) or by torch (Fp8), and have no integer kernels.

`format_name` and `format_named` convert between a format and its text, e.g. "int4-g64-minmax", which configs and
files contain.
"""

from __future__ import annotations

import re
from typing import Any, Literal, TypeAlias, get_args

import attrs
import torch

__all__ = [
    "NF4", "Q4_0", "Q4_K", "Q6_K", "Q8_0", "Format", "Fp8", "Int4", "Int8", "Integers", "ScaleRule",
    "format_name", "format_named", "integers", "unit_of",
]  # fmt: skip

GROUPS = (32, 64, 128)
BLOCK = 32  # the smallest group; rows are padded to whole groups
SUPER_BLOCK = 256  # of Q4_K and Q6_K
ScaleRule: TypeAlias = Literal["search", "amax", "minmax"]


def _check_group(_: object, attribute: attrs.Attribute[Any], value: int | None) -> None:
    if value is not None and value not in GROUPS:
        raise ValueError(f"{attribute.name}={value!r}: pass 32, 64, 128, or None for one group a row")


def _check_scale(_: object, attribute: attrs.Attribute[str], value: str) -> None:
    if value not in get_args(ScaleRule):
        raise ValueError(f"{attribute.name}={value!r}: pass one of {', '.join(get_args(ScaleRule))}")


def _check_bits(_: object, attribute: attrs.Attribute[int], value: int) -> None:
    if value not in (8, 16):
        raise ValueError(f"{attribute.name}={value!r}: pass 8 or 16")


@attrs.frozen
class Int8:
    """8-bit integers: 8.5 bits a weight in groups of 32."""

    group: int | None = attrs.field(default=32, validator=_check_group)  # elements that share a scale; None: a row
    scale: ScaleRule = attrs.field(default="amax", validator=_check_scale)  # symmetric, or "minmax": asymmetric
    activation_bits: int = attrs.field(default=8, validator=_check_bits)  # of products; 16: twice the multiplications


@attrs.frozen
class Int4:
    """4-bit integers: 4.5 bits a weight in groups of 32, 5.0 with "minmax".

    "search" tries 15 symmetric scales and keeps the one with the least squared error; "amax" maps the largest
    magnitude to 7; "minmax" is asymmetric.
    """

    group: int | None = attrs.field(default=32, validator=_check_group)  # elements that share a scale; None: a row
    scale: ScaleRule = attrs.field(default="search", validator=_check_scale)


@attrs.frozen
class Q8_0:  # noqa: N801
    """GGML's Q8_0: 8-bit integers in groups of 32, bit for bit."""


@attrs.frozen
class Q4_0:  # noqa: N801
    """GGML's Q4_0: 4-bit integers in groups of 32, bit for bit."""


@attrs.frozen
class Q4_K:  # noqa: N801
    """GGML's Q4_K: 4-bit integers whose scales and minima have 6 bits; decoded bit for bit."""


@attrs.frozen
class Q6_K:  # noqa: N801
    """GGML's Q6_K: 6-bit integers in groups of 16 whose scales have 8 bits; decoded bit for bit."""


@attrs.frozen
class NF4:
    """Quantiles of the normal distribution (Dettmers et al. 2023), 4 bits: for frozen weights under adapters."""

    group: int | None = attrs.field(default=64, validator=_check_group)  # elements that share a float32 scale


@attrs.frozen
class Fp8:
    """8-bit floats (e4m3) with a float32 scale for each group."""

    group: int | None = attrs.field(default=None, validator=_check_group)  # elements that share a scale; None: a row


Format: TypeAlias = Int8 | Int4 | Q8_0 | Q4_0 | Q4_K | Q6_K | NF4 | Fp8


@attrs.frozen
class Integers:
    """An integer format as the kernels see it: value = scale * (code - offset) [+ min]."""

    bits: int  # 4 or 8
    group: int | None  # elements that share a scale; None: a row
    scale: str  # the rule of the scale: a ScaleRule, or "ggml"
    activation_bits: int = 8  # 8, or 16: two parts of 8

    @property
    def is_symmetric(self) -> bool:
        """True if there are no minima."""
        return self.scale != "minmax"

    @property
    def offset(self) -> int:
        """Return the unsigned code of zero."""
        return 1 << (self.bits - 1) if self.is_symmetric else 0


def integers(format: Format) -> Integers | None:
    """Return the description of an integer format; None for the others."""
    if isinstance(format, Int8):
        return Integers(8, format.group, format.scale, format.activation_bits)
    if isinstance(format, Int4):
        return Integers(4, format.group, format.scale)
    if isinstance(format, Q8_0 | Q4_0):
        return Integers(8 if isinstance(format, Q8_0) else 4, BLOCK, "ggml")
    return None


def unit_of(format: Format) -> int:
    """Return the elements of a row that cannot be parted: rows are padded to a multiple, cuts are at multiples."""
    if isinstance(format, Q4_K | Q6_K):
        return SUPER_BLOCK
    if isinstance(format, Q8_0 | Q4_0):
        return BLOCK
    return format.group or BLOCK


_PLAIN: dict[str, Format] = {"q8_0": Q8_0(), "q4_0": Q4_0(), "q4_k": Q4_K(), "q6_k": Q6_K()}
_GROUPED: dict[str, type[Int8 | Int4 | NF4 | Fp8]] = {"int8": Int8, "int4": Int4, "nf4": NF4, "fp8": Fp8}
_DEFAULTS = {name: kind() for name, kind in _GROUPED.items()}  # made here: torch.compile traces no constructor


def format_name(format: Format) -> str:
    """Return the text of a format, with what differs from the defaults: "int4", "int8-row", "int4-g64-minmax"."""
    for name, plain in _PLAIN.items():
        if format == plain:
            return name
    (name,) = (name for name, kind in _GROUPED.items() if type(format) is kind)
    default = _DEFAULTS[name]
    parts = [name]
    if format.group != default.group:  # type: ignore[union-attr]
        parts.append(f"g{format.group}" if format.group else "row")  # type: ignore[union-attr]
    if isinstance(format, Int8 | Int4) and format.scale != default.scale:  # type: ignore[union-attr]
        parts.append(format.scale)
    if isinstance(format, Int8) and format.activation_bits == 16:
        parts.append("a16")
    return "-".join(parts)


def format_named(name: str) -> Format:
    """Return the format with this text.  Raises `ValueError` for an unknown one."""
    if name.lower() in _PLAIN:
        return _PLAIN[name.lower()]
    found = re.fullmatch(
        r"(int8|int4|nf4|fp8)(?:-(g32|g64|g128|row))?(?:-(search|amax|minmax))?(-a16)?", name.lower()
    )
    if found is None or (found[3] and found[1] not in ("int8", "int4")) or (found[4] and found[1] != "int8"):
        raise ValueError(
            f"{name!r} names no format: use int8, int4, nf4 or fp8, each with an optional -g32, -g64, -g128 or -row, "
            f"integers also with -search, -amax or -minmax, int8 with -a16 (activations of 16 bits); or "
            f"{', '.join(_PLAIN)}"
        )
    chosen: dict[str, object] = {}
    if found[2]:
        chosen["group"] = None if found[2] == "row" else int(found[2][1:])
    if found[3]:
        chosen["scale"] = found[3]
    if found[4]:
        chosen["activation_bits"] = 16
    return _GROUPED[found[1]](**chosen)  # type: ignore[arg-type]


def has_fp8() -> bool:
    """Return whether this torch has the dtype of `Fp8`."""
    return hasattr(torch, "float8_e4m3fn")
