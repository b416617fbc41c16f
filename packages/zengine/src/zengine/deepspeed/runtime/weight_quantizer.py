"""`deepspeed.runtime.weight_quantizer`: 8-bit weights of inference checkpoints with a scale for each group.

Law: a matrix is cut into groups in memory order; scale = 2^b / (2 max abs x + 1e-5), codes = round(x scale), clamped
to b bits.  Scales are stored as their inverse, by which codes are multiplied.  Matrices of an MLP (ratio 4) have
twice the groups, fused queries, keys and values of BERT (ratio 3) three times.

`deepspeed.init_inference` quantizes in blocks of 32 by itself and needs nothing of this; the class serves code that
reads DeepSpeed's own quantized checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["WeightQuantization"]

_MEGATRON = (
    ("mlp.dense_4h_to_h.weight", "mlp4hh_scales"),
    ("mlp.dense_h_to_4h.weight", "mlph4h_scales"),
    ("attention.query_key_value.weight", "qkv_scales"),
)
_DENSE = "attention.dense.weight"


class WeightQuantization:
    """Quantizes weights and collects their scales, (1, groups) for each matrix, by the role of the matrix."""

    def __init__(self, mlp_extra_grouping: bool = True, mp_size: int = 1) -> None:
        """mlp_extra_grouping: MLP matrices have twice the groups.  mp_size: ranks that a matrix is split over."""
        self.mlp_extra_grouping, self.mp_size = mlp_extra_grouping, mp_size
        self.dense_scales: list[Tensor] = []
        self.qkv_scales: list[Tensor] = []
        self.mlp4hh_scales: list[Tensor] = []
        self.mlph4h_scales: list[Tensor] = []

    def quantize_data(
        self, data: Tensor, quantize_bits: int, groups: int, key: str | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return codes, int8 of the shape of `data`, and scales, (groups, 1) float32, that `data` was multiplied by.

        Raises ValueError unless `groups` divides the elements, and for more than 8 bits.
        """
        if groups < 1 or data.numel() % groups or not 2 <= quantize_bits <= 8:
            raise ValueError(
                f"quantize_data{f' ({key})' if key else ''}: {groups} groups must divide the {data.numel()} "
                f"elements, and quantize_bits = {quantize_bits} must be 2 to 8"
            )
        rows = data.detach().float().reshape(groups, -1)
        scales = float(1 << quantize_bits) / (2 * rows.abs().amax(1, keepdim=True) + 1e-5)
        half = 1 << (quantize_bits - 1)
        return (rows * scales).round().clamp(-half, half - 1).to(torch.int8).reshape(data.shape), scales

    def is_mlp(self, data: Tensor, merge_count: int = 1) -> bool:
        """Return whether one side of the whole matrix is four times the other."""
        return self._has_ratio(data, merge_count, 4)

    def is_qkv(self, data: Tensor) -> bool:
        """Return whether one side of the whole matrix is three times the other."""
        return self._has_ratio(data, 1, 3)

    def _has_ratio(self, data: Tensor, count: int, ratio: int) -> bool:
        rows, columns = (self.mp_size * count * size for size in data.shape)
        return ratio in (rows / data.shape[1], columns / data.shape[0])

    def Quantize(  # noqa: N802
        self,
        value_list: MutableSequence[Tensor],
        quantize_bits: int,
        groups: int,
        key: str,
        merge_dim: int = 0,
    ) -> MutableSequence[Tensor]:
        """Replace the parts of one matrix by their codes, in place, and keep the inverse scales under its role."""
        if self.mlp_extra_grouping and self.is_mlp(value_list[0], merge_count=len(value_list)):
            groups *= 2
        scales = []
        for index, data in enumerate(value_list):
            value_list[index], found = self.quantize_data(data, quantize_bits, groups, key)
            scales.append(found)
        role = next((role for name, role in _MEGATRON if name in key), "dense_scales")
        getattr(self, role).append((1 / torch.cat(scales, dim=merge_dim)).view(1, -1))
        return value_list

    def merge_layer_scales(self, layer_scales: Sequence[Tensor]) -> Tensor:
        """Return the scales of one layer's matrices, (1, matrices, groups), filled up with zeros."""
        widest = max(each.shape[-1] for each in layer_scales)
        padded = [nn.functional.pad(each, (0, widest - each.shape[-1])) for each in layer_scales]
        return torch.cat(padded).unsqueeze(0)

    def _by_layer(self) -> list[list[Tensor]]:
        roles = (self.qkv_scales, self.dense_scales, self.mlph4h_scales, self.mlp4hh_scales)
        return [list(layer) for layer in zip(*roles, strict=False)]

    def merge_scales(self) -> Tensor:
        """Return the scales of all layers, (layers, 4, groups): QKV, dense, MLP up, MLP down."""
        return torch.cat([self.merge_layer_scales(layer) for layer in self._by_layer()])

    def merge_scales_split(self, split_count: int) -> list[list[Tensor]]:
        """Return the scales of all layers for each of `split_count` ranks."""
        found: list[list[Tensor]] = [[] for _ in range(split_count)]
        for layer in self._by_layer():
            parts = [torch.split(each.view(-1), each.numel() // split_count) for each in layer]
            for rank in range(split_count):
                found[rank].append(self.merge_layer_scales([each[rank].view(1, -1) for each in parts]))
        return found

    def sd_quantize_megatron(
        self, sd: MutableMapping[str, Any], quantize_bits: int, groups: int
    ) -> tuple[MutableMapping[str, Any], Tensor]:
        """Replace the matrices of a Megatron state dict by codes, in place; return it and the merged scales."""
        for key in list(sd):
            if _DENSE in key or any(name in key for name, _ in _MEGATRON):
                (sd[key],) = self.Quantize([sd[key]], quantize_bits, groups, key=key)
        return sd, self.merge_scales()

    def model_quantize(
        self,
        model: nn.Module,
        quantize_policy: Mapping[type[nn.Module], Callable[[nn.Module], Any]] | None,
        quantize_bits: int,
        groups: int,
    ) -> tuple[nn.Module, Tensor]:
        """Write codes into the matrices of a model's layers; return it and the inverse scales, (layers, 4, groups).

        quantize_policy: class of a layer -> policy, whose attention() and mlp() return the matrices at DeepSpeed's
        places: the second and fourth of each.

        Raises ValueError without a policy, or if no layer is of a class of it.
        """
        if not quantize_policy:
            raise ValueError(
                "model_quantize(): pass quantize_policy={LayerClass: Policy}. init_inference(model, "
                "dtype=torch.int8) finds the layers by itself"
            )
        scales = []
        for layer in [each for each in model.modules() if type(each) in quantize_policy]:
            policy = quantize_policy[type(layer)](layer)
            attention, mlp = policy.attention(), policy.mlp()
            found = []
            for matrix in (attention[1], attention[3], mlp[1], mlp[3]):
                codes, scale = self.quantize_data(matrix, quantize_bits, groups * self._factor(matrix, policy))
                with torch.no_grad():
                    matrix.copy_(codes)
                found.append((1 / scale).view(1, -1))
            scales.append(self.merge_layer_scales(found))
        if not scales:
            names = ", ".join(kind.__name__ for kind in quantize_policy)
            raise ValueError(
                f"model_quantize(): {type(model).__name__} has no layer of a class of the policy: {names}"
            )
        return model, torch.cat(scales)

    def _factor(self, matrix: Tensor, policy: object) -> int:
        if self.mlp_extra_grouping and self.is_mlp(matrix):
            return 2
        return 3 if "HFBert" in type(policy).__name__ and self.is_qkv(matrix) else 1
