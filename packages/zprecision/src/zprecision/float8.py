"""Linear layers that multiply in 8-bit floats (Micikevicius et al. 2022, "FP8 formats for deep learning").

Input and weight are rounded to e4m3 (3 bits of mantissa), the gradient of the output to e5m2 (2 bits, more range).
Each tensor has one scale, which maps its current largest magnitude to the largest code.  The three products of a
layer (output, gradient of the input, gradient of the weight) multiply codes and sum in float32.  The weight, its
gradient and its master keep their dtypes; only products are narrow.

    with Float8.convert(model, device="cuda"):
        train(model)

Conversion assigns the class `Float8Linear` to a layer, so the object and its parameter names stay the same; closing
restores the class.  For backward a layer saves codes of its input, but the weight itself and not its codes, so that
ZeRO stage 3 can reshard the weight in between.

Hardware restricts shapes: both sizes of a layer are multiples of 16, and the rows of a batch are padded with zeros to
such a multiple where the gradient of the weight needs it.

Rejected: delayed scaling by a history of maxima (saves a quarter of the reads, and one spike clips the next step);
block scales (better, but only on devices newer than those that can be relied on).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import attrs
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from zprecision import _compat
from zprecision.keep_in_fp32 import KeepInFp32

__all__ = ["Float8", "Float8Linear", "has_float8", "quantized"]

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
_MULTIPLE = 16  # divides the sizes of a product
_EVERYTHING = KeepInFp32(patterns=("*",), as_listed=False)
_NOTHING = KeepInFp32(as_listed=False)


def has_float8(device: torch.device | str) -> bool:
    """True if `device` multiplies 8-bit floats in hardware."""
    return _compat.has_scaled_matmul(torch.device(device))


def quantized(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize: return (codes, scale) with tensor ~ codes * scale.

    codes: `dtype`, same shape, contiguous rows; scale: () float32.

    The largest magnitude becomes the largest code.  A tensor that is not finite becomes NaN, at least where it was
    not finite, so that an overflow remains visible behind the product.
    """
    largest = torch.finfo(dtype).max
    magnitude = tensor.detach().abs().amax().float() if tensor.numel() else tensor.new_zeros((), dtype=torch.float32)
    scale = (magnitude / largest).clamp(min=torch.finfo(torch.float32).tiny)
    codes = (tensor.detach().float() / scale).clamp(-largest, largest).to(dtype).contiguous()
    return codes, scale


class _Product(torch.autograd.Function):
    """Product of input (M, K) and weight (N, K) -> (M, N) in `dtype`, by the matmul of `layer`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: type[Float8Linear], dtype: torch.dtype) -> Tensor:
        x8, x_scale = quantized(x, FORWARD)
        w8, w_scale = quantized(weight, FORWARD)
        ctx.save_for_backward(x8, x_scale, weight)
        ctx.layer, ctx.dtype = layer, x.dtype
        return layer.matmul(x8, w8.t(), (x_scale, w_scale), dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x8, x_scale, weight = ctx.saved_tensors
        matmul = ctx.layer.matmul
        g8, g_scale = quantized(grads[0], BACKWARD)
        to_x = to_weight = None
        if ctx.needs_input_grad[0]:
            w8, w_scale = quantized(weight, FORWARD)
            to_x = matmul(g8, _column_major(w8), (g_scale, w_scale), ctx.dtype)
        if ctx.needs_input_grad[1]:
            g8, x8 = _pad(g8), _pad(x8)
            to_weight = matmul(g8.t().contiguous(), _column_major(x8), (g_scale, x_scale), weight.dtype)
        return to_x, to_weight, None, None


class Float8Linear(nn.Linear):
    """`nn.Linear` in 8-bit floats, made by `Float8.convert`.

    Shapes, parameters and state dict are those of `nn.Linear`.
    """

    matmul = staticmethod(_compat.scaled_matmul)

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features), in the input's dtype, or in autocast's inside torch.autocast."""
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        flat = input.reshape(-1, self.in_features)
        output: Tensor = _Product.apply(flat, self.weight, type(self), dtype)  # type: ignore[no-untyped-call]
        if self.bias is not None:
            output = output + self.bias.to(dtype)
        return output.view(*input.shape[:-1], self.out_features)


@final
@attrs.define(eq=False)
class Float8:
    """Converted layers of one model.  A context manager; `close` makes them `nn.Linear` again."""

    layers: dict[str, nn.Linear]  # by path

    @classmethod
    def convert(
        cls,
        module: nn.Module,
        *,
        device: torch.device | str,
        only: KeepInFp32 = _EVERYTHING,
        but: KeepInFp32 = _NOTHING,
        kind: type[Float8Linear] = Float8Linear,
    ) -> Float8:
        """Convert the `nn.Linear` layers whose weight names match `only` and do not match `but`.

        Skips layers with a size that is no multiple of 16, and subclasses of Linear.  `kind` implements the products.

        Raises:
            ValueError: `device` has no matrix units for 8-bit floats, or no layer can be converted.
        """
        if kind is Float8Linear and not has_float8(device):
            raise ValueError(
                "8-bit products need an NVIDIA GPU of compute capability 8.9 or later (Ada, Hopper, Blackwell), but "
                f"this is {_device_name(torch.device(device))}: keep the layers in bf16"
            )
        included, excluded = only.matching(module), but.matching(module)
        fitting = dict(_convertible(module))
        chosen = {p: m for p, m in fitting.items() if _weight_name(p) in included and _weight_name(p) not in excluded}
        if not chosen:
            raise ValueError(
                f"no layer can be converted to 8-bit floats: {len(fitting)} nn.Linear layers have sizes that are "
                f"multiples of {_MULTIPLE} ({', '.join(list(fitting)[:5]) or 'none'}), and of these the patterns "
                f"{list(only.patterns)} without {list(but.patterns)} select none"
            )
        for layer in chosen.values():
            layer.__class__ = kind
        return cls(chosen)

    def close(self) -> None:
        """Restore the class of the layers; the weights stay as they are."""
        for layer in self.layers.values():
            layer.__class__ = nn.Linear
        self.layers = {}

    def __enter__(self) -> Float8:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _convertible(module: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for path, child in module.named_modules():
        if type(child) is nn.Linear and child.in_features % _MULTIPLE == 0 and child.out_features % _MULTIPLE == 0:
            yield path, child


def _weight_name(path: str) -> str:
    return f"{path}.weight" if path else "weight"


def _column_major(matrix: Tensor) -> Tensor:
    """Return the same matrix with contiguous columns."""
    return matrix.t().contiguous().t()


def _pad(codes: Tensor) -> Tensor:
    """Pad (M, N) with rows of zeros to a multiple of 16."""
    missing = -codes.size(0) % _MULTIPLE
    if not missing:
        return codes
    return torch.cat((codes, codes.new_zeros(missing, codes.size(1))))


def _device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return f"a {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} of capability {major}.{minor}"
