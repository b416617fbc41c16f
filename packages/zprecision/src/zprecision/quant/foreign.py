"""Quantized matrices of other libraries: GPTQ, AWQ and compressed-tensors, decoded without loss.

All three store unsigned codes in words of 32 bits, with a scale and a zero for each group of inputs:

    weight[n, k] = scales[n, g] * (codes[n, k] - zeros[n, g])        g: the group of input k

`GroupedCodes` is that, with one byte a code.  A scale of 16 bits times such a difference has at most 20 bits, so the
float32 value is exact, and a cast to the scales' dtype gives what the libraries compute in it.

    GPTQ                 (Frantar et al. 2023) words along the inputs; zeros along the outputs, stored minus one by
                         version 1, modulo 2^bits; `g_idx` names the group of each input ("act-order")
    AWQ                  (Lin et al. 2024; the "gemm" layout) words along the outputs, whose 4-bit codes are in the
                         order 0, 2, 4, 6, 1, 3, 5, 7
    compressed-tensors   ("pack-quantized") words along the inputs; zeros, if any, in words along the outputs, both
                         shifted by half the range

`GroupedCodes.to_quantized` keeps the codes if one of our formats represents them exactly: 4 bits around the middle
code, 4 bits with minima that float16 holds, or else the differences as 8 bits.  Groups longer than ours are cut, with
their scale repeated.  Groups that are not neighbours and scales that float16 does not hold leave None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from zprecision.quant.formats import GROUPS, Format, Int4, Int8
from zprecision.quant.layout import join_nibbles, padded, unflatten
from zprecision.quant.tensor import QuantizedTensor, checked

__all__ = ["GroupedCodes", "read_awq", "read_compressed", "read_compressed_bytes", "read_gptq"]

_WORD_BITS = 32
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of nibble i
_SCALES = (torch.float16, torch.bfloat16, torch.float32)


@attrs.frozen(eq=False, kw_only=True)
class GroupedCodes:
    """Codes with a scale and a zero for each row and group of inputs."""

    bits: int  # 4 or 8
    codes: Tensor  # (N, K) uint8
    scales: Tensor  # (N, G) float16, bfloat16 or float32
    zeros: Tensor  # (N, G) int16
    groups: Tensor | None = None  # (K,) int64: the group of each input; None: K / G neighbours share one

    @property
    def shape(self) -> tuple[int, int]:
        """Return (out_features, in_features)."""
        return self.codes.shape[0], self.codes.shape[1]

    def parts(self) -> dict[str, Tensor]:
        """Return the tensors that have a row for each output, by name."""
        return {"codes": self.codes, "scales": self.scales, "zeros": self.zeros}

    def map(self, function: Callable[[Tensor], Tensor]) -> GroupedCodes:
        """Return it with `function(part)` for every part, which may choose rows."""
        parts = {name: function(part) for name, part in self.parts().items()}
        return GroupedCodes(bits=self.bits, groups=self.groups, **parts)

    def narrow(self, dim: int, start: int, length: int) -> GroupedCodes:
        """Return the rows [start, start + length).  Raises ValueError for dim 1, whose groups may be anywhere."""
        if dim != 0:
            raise ValueError(f"narrow({dim}, ...): only rows (dim 0) of these codes can be cut")
        return self.map(lambda part: part.narrow(0, start, length))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values, (N, K): exact in float32, then cast to `dtype`."""
        scales, zeros = self.scales.float(), self.zeros.float()
        if self.groups is not None:
            return ((self.codes.float() - zeros[:, self.groups]) * scales[:, self.groups]).to(dtype)
        runs = unflatten(self.codes.float(), scales.shape[1], -1)
        return ((runs - zeros.unsqueeze(-1)) * scales.unsqueeze(-1)).flatten(1).to(dtype)

    def to_quantized(self) -> QuantizedTensor | None:
        """Return the same values in a format of ours; None if none represents them exactly."""
        group, repeats = self._group()
        if repeats == 0:
            return None
        top = 1 << (self.bits - 1)
        scales = self.scales.float() if group is None else self.scales.half()
        if not torch.equal(scales.float(), self.scales.float()):
            return None
        scales = scales.repeat_interleave(repeats, dim=1)
        if bool((self.zeros == top).all()):
            return self._assemble(Int4(group) if self.bits == 4 else Int8(group), self.codes, {"scales": scales})
        wide = self.scales.float() * -self.zeros.float()
        mins = wide if group is None else wide.half()
        if self.bits == 4 and group is not None and torch.equal(mins.float(), wide):
            parts = {"scales": scales, "mins": mins.repeat_interleave(repeats, dim=1)}
            return self._assemble(Int4(group, scale="minmax"), self.codes, parts)
        centred = (unflatten(self.codes.short(), self.zeros.shape[1], -1) - self.zeros.unsqueeze(-1)).flatten(1)
        if centred.numel() and (int(centred.min()) < -128 or int(centred.max()) > 127):
            return None
        return self._assemble(Int8(group), (centred + 128).to(torch.uint8), {"scales": scales})

    def _group(self) -> tuple[int | None, int]:
        """Return the group of our formats, and how often a scale is repeated; 0: none fits."""
        count, length = self.scales.shape[1], self.codes.shape[1]
        if self.groups is not None or not count or length % count:
            return None, 0
        if count == 1:
            return None, 1
        return next(
            ((each, length // count // each) for each in GROUPS[::-1] if length // count % each == 0), (None, 0)
        )

    def _assemble(self, format: Format, unsigned: Tensor, parts: dict[str, Tensor]) -> QuantizedTensor:
        """Return a tensor of codes whose zero is the middle, or that have minima."""
        bits = 4 if isinstance(format, Int4) else 8
        padding = padded(format, unsigned.shape[1]) - unsigned.shape[1]
        codes = torch.nn.functional.pad(unsigned, (0, padding), value=0 if "mins" in parts else 1 << (bits - 1))
        stored = join_nibbles(codes) if bits == 4 else (codes ^ 128).view(torch.int8)
        dtype = self.scales.dtype
        return checked(format, self.shape, dtype, {"codes": stored, **parts})


def read_gptq(parts: Mapping[str, Tensor], *, bits: int, group: int | None, zero_offset: int = 1) -> GroupedCodes:
    """Return the codes of a GPTQ layer, a matrix of (N, K).

    parts: "qweight" (K * bits / 32, N) int32, "qzeros" (G, N * bits / 32) int32, "scales" (G, N), and perhaps "g_idx"
    (K,) int32.  group: inputs that share a scale; None: all.  zero_offset: 1 in version 1 of the layout, 0 in 2.

    Raises ValueError for parts that are missing, of another dtype or shape, or whose groups do not exist.
    """
    per_word = _per_word(bits)
    words, outputs = _matrix(parts, "qweight")
    inputs = words * per_word
    groups = -(-inputs // (group or inputs or 1))
    _check(parts, "qweight", (words, outputs), (torch.int32,))
    _check(parts, "scales", (groups, outputs), _SCALES)
    _check(parts, "qzeros", (groups, -(-outputs // per_word)), (torch.int32,))
    codes = _unpacked(parts["qweight"], bits).permute(1, 0, 2).reshape(outputs, inputs)
    zeros = _unpacked(parts["qzeros"], bits).flatten(1)[:, :outputs].short()
    return GroupedCodes(
        bits=bits,
        codes=codes,
        scales=parts["scales"].t().contiguous(),
        zeros=((zeros + zero_offset) & ((1 << bits) - 1)).t().contiguous(),
        groups=_groups(parts.get("g_idx"), "g_idx", inputs, groups, group),
    )


def read_awq(parts: Mapping[str, Tensor], *, group: int | None) -> GroupedCodes:
    """Return the codes of an AWQ layer of 4 bits in the "gemm" layout, a matrix of (N, K).

    parts: "qweight" (K, N / 8) int32, "scales" (G, N), and "qzeros" (G, N / 8) int32, without which the zero is 8.
    group: inputs that share a scale; None: all.

    Raises ValueError for parts that are missing or of another dtype or shape.
    """
    inputs, words = _matrix(parts, "qweight")
    outputs = words * 8
    groups = -(-inputs // (group or inputs or 1))
    _check(parts, "qweight", (inputs, words), (torch.int32,))
    _check(parts, "scales", (groups, outputs), _SCALES)
    if "qzeros" in parts:
        _check(parts, "qzeros", (groups, words), (torch.int32,))
        zeros = _in_awq_order(parts["qzeros"]).short()
    else:
        zeros = torch.full((groups, outputs), 8, dtype=torch.int16)
    return GroupedCodes(
        bits=4,
        codes=_in_awq_order(parts["qweight"]).t().contiguous(),
        scales=parts["scales"].t().contiguous(),
        zeros=zeros.t().contiguous(),
        groups=_groups(None, "", inputs, groups, group),
    )


def read_compressed(parts: Mapping[str, Tensor], *, bits: int, shape: Sequence[int]) -> GroupedCodes:
    """Return the codes of a compressed-tensors layer ("pack-quantized"), a matrix of `shape`, (N, K).

    parts: "weight_packed" (N, K * bits / 32) int32; "weight_scale" (N, G), or one number for all; perhaps
    "weight_zero_point", (N * bits / 32, G) int32 or (N, G) int8, and "weight_g_idx", (K,).

    Raises ValueError for parts that are missing, of another dtype or shape, or whose groups do not exist.
    """
    per_word, (outputs, inputs) = _per_word(bits), (int(shape[0]), int(shape[1]))
    _check(parts, "weight_packed", (outputs, -(-inputs // per_word)), (torch.int32,))
    return _compressed(
        parts, bits, _unpacked(parts["weight_packed"], bits).flatten(1)[:, :inputs].contiguous(), "weight_packed"
    )


def read_compressed_bytes(parts: Mapping[str, Tensor]) -> GroupedCodes:
    """Return the codes of a compressed-tensors layer that has one in each byte ("int-quantized").

    parts: "weight" (N, K) int8; the others as for `read_compressed`.  Raises ValueError as that does.
    """
    weight = parts.get("weight")
    shape = tuple(weight.shape) if weight is not None and weight.dim() == 2 else (-1, -1)
    _check(parts, "weight", shape, (torch.int8,))
    return _compressed(parts, 8, parts["weight"].view(torch.uint8) ^ 128, "weight")


def _compressed(parts: Mapping[str, Tensor], bits: int, codes: Tensor, name: str) -> GroupedCodes:
    """Return unsigned codes, (N, K) uint8, with their scales and zeros; name: of the codes, for errors."""
    outputs, inputs = codes.shape
    scales = parts.get("weight_scale")
    if scales is not None and scales.numel() == 1:
        scales = scales.reshape(1, 1).expand(outputs, 1)
    groups = scales.shape[1] if scales is not None and scales.dim() == 2 else 1
    _check({"weight_scale": scales} if scales is not None else {}, "weight_scale", (outputs, groups), _SCALES)
    assert scales is not None
    index = parts.get("weight_g_idx")
    if index is not None and bool((index == -1).all()):  # of layers without an order of their own
        index = None
    if groups > max(1, inputs) or (index is None and groups and inputs % groups):
        raise ValueError(f"'weight_scale' has {groups} groups for {inputs} inputs of {name!r}, which do not divide")
    return GroupedCodes(
        bits=bits,
        codes=codes,
        scales=scales.contiguous(),
        zeros=_compressed_zeros(parts.get("weight_zero_point"), bits, outputs, groups),
        groups=_groups(index, "weight_g_idx", inputs, groups, inputs // max(1, groups)),
    )


def _compressed_zeros(zeros: Tensor | None, bits: int, outputs: int, groups: int) -> Tensor:
    """Return the unsigned zeros, (N, G) int16."""
    top = 1 << (bits - 1)
    if zeros is None:
        return torch.full((outputs, groups), top, dtype=torch.int16)
    if zeros.dtype == torch.int32:
        _check({"weight_zero_point": zeros}, "weight_zero_point", (-(-outputs * bits // _WORD_BITS), groups), ())
        return _unpacked(zeros.t().contiguous(), bits).flatten(1)[:, :outputs].t().contiguous().short()
    if zeros.numel() == 1:
        zeros = zeros.reshape(1, 1).expand(outputs, groups)
    _check({"weight_zero_point": zeros}, "weight_zero_point", (outputs, groups), (torch.int8,))
    found = zeros.short() + top
    if bool(((found < 0) | (found >= 2 * top)).any()):
        raise ValueError(f"'weight_zero_point' has values outside of {bits} bits")
    return found


# -- words -----------------------------------------------------------------------------------------


def _per_word(bits: int) -> int:
    if bits not in (4, 8):
        raise ValueError(f"{bits} bits: 4 and 8 are read")
    return _WORD_BITS // bits


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Return (..., 32 / bits) uint8 codes of int32 words, the lowest bits first."""
    data = words.contiguous().unsqueeze(-1).view(torch.uint8)
    return data if bits == 8 else torch.stack([data & 15, data >> 4], dim=-1).flatten(-2)


def _in_awq_order(words: Tensor) -> Tensor:
    """Return the (rows, 8 * columns) uint8 codes of int32 words in AWQ's order."""
    places = sorted(range(8), key=_AWQ_ORDER.__getitem__)
    return _unpacked(words, 4)[..., places].flatten(1)


# -- checks ----------------------------------------------------------------------------------------


def _matrix(parts: Mapping[str, Tensor], name: str) -> tuple[int, int]:
    part = parts.get(name)
    if part is None or part.dim() != 2 or not part.numel():
        raise ValueError(f"'{name}' must be a matrix, and is {'missing' if part is None else tuple(part.shape)}")
    return part.shape[0], part.shape[1]


def _check(parts: Mapping[str, Tensor], name: str, shape: tuple[int, ...], dtypes: Sequence[torch.dtype]) -> None:
    part = parts.get(name)
    if part is None:
        raise ValueError(f"'{name}' is missing")
    if tuple(part.shape) != shape or (dtypes and part.dtype not in dtypes):
        allowed = " or ".join(map(str, dtypes)) or str(part.dtype)
        raise ValueError(f"'{name}' must be {allowed} of {shape}, and is {part.dtype} of {tuple(part.shape)}")


def _groups(index: Tensor | None, name: str, inputs: int, groups: int, group: int | None) -> Tensor | None:
    """Return the group of each input; None if K / G neighbours share one."""
    regular = torch.arange(inputs) // (group or inputs or 1)
    if index is None:
        return None if groups and inputs % groups == 0 else regular
    _check({name: index}, name, (inputs,), (torch.int32, torch.int64))
    found = index.long()
    if bool(((found < 0) | (found >= groups)).any()):
        raise ValueError(f"'{name}' names groups from {int(found.min())} to {int(found.max())}; there are {groups}")
    is_regular = torch.equal(found, regular) and groups and inputs % groups == 0
    return None if is_regular else found
