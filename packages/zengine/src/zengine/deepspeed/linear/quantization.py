"""`deepspeed.linear.quantization`: frozen weights stored as floating-point codes of few bits.

A code has a sign, `mantissa_bits` and the remaining bits as exponent.  Groups of consecutive numbers share a float32
scale, which maps the group's largest magnitude to the largest code.  Codes are computed in torch, on any device, and
stored unpacked: one byte for up to 8 bits, two for 12.
"""

from __future__ import annotations

import copy
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zengine.deepspeed.linear.config import QuantizationConfig

__all__ = ["FloatQuantizer", "QuantizedLinear", "QuantizedParameter"]


@attrs.frozen(eq=False)
class Quantized:
    """Codes of a tensor."""

    codes: Tensor  # (groups, group size) uint8, or int16 for more than 8 bits
    scales: Tensor  # (groups, 1) float32
    shape: torch.Size
    dtype: torch.dtype  # before

    def to(self, device: Any) -> Quantized:
        return attrs.evolve(self, codes=self.codes.to(device), scales=self.scales.to(device))


class FloatQuantizer:
    """Quantizer to the codes of a config."""

    def __init__(self, quantization_config: QuantizationConfig | None = None) -> None:
        """Raises ValueError unless q_bits is 6, 8 or 12, and the mantissa leaves an exponent of two bits or more."""
        config = quantization_config or QuantizationConfig()
        self.q_bits, self.mantissa_bits, self.group_size = config.q_bits, config.mantissa_bits, config.group_size
        self.exponent_bits = self.q_bits - 1 - self.mantissa_bits
        if self.q_bits not in (6, 8, 12) or self.mantissa_bits < 1 or self.exponent_bits < 2:
            raise ValueError(
                f"q_bits={self.q_bits}, mantissa_bits={self.mantissa_bits}: q_bits must be 6, 8 or 12, and the "
                "mantissa must leave a sign and at least two bits of exponent"
            )

    def quantize(self, x: Tensor) -> Quantized:
        """Return the codes of a floating-point tensor of any shape, rounded to nearest."""
        flat = x.detach().reshape(-1).float()
        groups = F.pad(flat, (0, -flat.numel() % self.group_size)).view(-1, self.group_size)
        top = groups.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        scales = top / self._largest()
        scaled = groups / scales
        exponent = scaled.abs().clamp(min=2.0 ** self._least()).log2().floor()
        steps = (scaled.abs() / torch.exp2(exponent - self.mantissa_bits)).round()  # 2^m .. 2^(m+1); less: subnormal
        base = (exponent - self._least()) * 2**self.mantissa_bits
        magnitude = (base + steps).clamp(max=2 ** (self.q_bits - 1) - 1).to(torch.int32)
        codes = torch.where(scaled < 0, magnitude + 2 ** (self.q_bits - 1), magnitude)
        return Quantized(codes.to(torch.uint8 if self.q_bits <= 8 else torch.int16), scales, x.shape, x.dtype)

    def dequantize(self, x: Quantized) -> Tensor:
        """Return the numbers, in the dtype that they had."""
        codes = x.codes.to(torch.int32)
        half = 2 ** (self.q_bits - 1)
        magnitude = codes % half
        number = magnitude.div(2**self.mantissa_bits, rounding_mode="floor")  # of the exponent; 0: subnormal
        steps = magnitude % 2**self.mantissa_bits + 2**self.mantissa_bits * (number > 0)
        values = steps * torch.exp2((number.clamp(min=1) - 1 + self._least() - self.mantissa_bits).float())
        values = torch.where(codes >= half, -values, values) * x.scales
        return values.reshape(-1)[: x.shape.numel()].view(x.shape).to(x.dtype)

    def _least(self) -> int:
        """Exponent of the smallest normal code."""
        return 2 - (1 << (self.exponent_bits - 1))

    def _largest(self) -> float:
        """Largest code, as a number; no code is reserved for infinities."""
        return float((2 - 2.0**-self.mantissa_bits) * 2.0 ** (self._least() + 2**self.exponent_bits - 2))


class QuantizedParameter(nn.Parameter):
    """Frozen parameter whose data are codes; `dequantized()` returns the weight.

    Its data are the codes, (groups, group size).  `to` and `cuda` move codes and scales.
    """

    quantizer: FloatQuantizer
    quantization_config: QuantizationConfig
    scales: Tensor
    weight_shape: torch.Size
    weight_dtype: torch.dtype

    def __new__(
        cls,
        data: Tensor | None = None,
        requires_grad: bool = False,
        quantization_config: QuantizationConfig | None = None,
        quantizer: FloatQuantizer | None = None,
    ) -> QuantizedParameter:
        """Quantize `data`.  Raises ValueError for requires_grad: codes have no gradient."""
        if requires_grad:
            raise ValueError(
                "requires_grad=True is not supported with QuantizedParameter: quantized weights are frozen"
            )
        config = quantization_config or QuantizationConfig()
        found = quantizer or FloatQuantizer(config)
        return cls._of(found.quantize(torch.empty(0) if data is None else data), found, config)

    @classmethod
    def _of(cls, codes: Quantized, quantizer: FloatQuantizer, config: QuantizationConfig) -> QuantizedParameter:
        self = nn.Parameter.__new__(cls, codes.codes, False)
        self.quantizer, self.quantization_config = quantizer, config
        self.scales, self.weight_shape, self.weight_dtype = codes.scales, codes.shape, codes.dtype
        return self

    def _codes(self) -> Quantized:
        codes = self.data.as_subclass(torch.Tensor)
        return Quantized(codes, self.scales.to(codes.device), self.weight_shape, self.weight_dtype)

    def dequantized(self) -> Tensor:
        """Return the weight in its own shape and dtype."""
        return self.quantizer.dequantize(self._codes())

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Move to a device.  A dtype is ignored: codes stay codes."""
        device = torch.empty(0).to(*args, **kwargs).device if args or kwargs else self.device
        is_given = "device" in kwargs or any(not isinstance(each, (torch.dtype, bool)) for each in args)
        return self._of(
            self._codes().to(device if is_given else self.device), self.quantizer, self.quantization_config
        )

    def cuda(self, device: Any = None, non_blocking: bool = False, memory_format: Any = None) -> Any:
        """Move to a GPU."""
        return self.to("cuda" if device is None else device)

    def __deepcopy__(self, memo: Any) -> QuantizedParameter:
        own = self._codes()
        codes = attrs.evolve(own, codes=own.codes.clone(), scales=own.scales.clone())
        return self._of(codes, copy.deepcopy(self.quantizer, memo), copy.deepcopy(self.quantization_config, memo))

    def __copy__(self) -> QuantizedParameter:
        return self._of(self._codes(), self.quantizer, self.quantization_config)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (type(self), attrs.asdict(self._codes(), recurse=False), self.quantization_config)


def _rebuild(kind: type[QuantizedParameter], codes: dict[str, Any], config: QuantizationConfig) -> QuantizedParameter:
    return kind._of(Quantized(**codes), FloatQuantizer(config), config)


class QuantizedLinear(nn.Linear):
    """Linear layer with a frozen, quantized weight, which each forward dequantizes."""

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        bias: bool = False,
        quantization_config: QuantizationConfig | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """Draw a weight as nn.Linear does, and quantize it."""
        super().__init__(input_dim, output_dim, bias=bias, dtype=dtype)
        self.weight: Any = QuantizedParameter(self.weight.data, quantization_config=quantization_config)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save the weight itself, not its codes."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight.dequantized()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Load a weight, and quantize it."""
        name = f"{prefix}weight"
        if name in state_dict and state_dict[name].shape == self.weight.weight_shape:
            whole = state_dict[name].to(self.weight.device, self.weight.weight_dtype)
            self.weight = QuantizedParameter(whole, quantization_config=self.weight.quantization_config)
            state_dict[name] = self.weight.data
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, input: Tensor) -> Tensor:
        """(..., input_dim) -> (..., output_dim)."""
        return F.linear(input, self.weight.dequantized(), self.bias)
