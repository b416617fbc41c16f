"""`deepspeed.linear.optimized_linear`: linear layers with a frozen weight and a trained low-rank adapter."""

from __future__ import annotations

import math
from dataclasses import is_dataclass
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zengine.adapters.update import Update
from zengine.deepspeed.accelerator import get_accelerator
from zengine.deepspeed.comm import all_gather_into_tensor
from zengine.deepspeed.comm.world import get_rank, get_world_size, is_initialized
from zengine.deepspeed.linear.config import LoRAConfig, QuantizationConfig
from zengine.deepspeed.linear.quantization import QuantizedLinear, QuantizedParameter
from zpartition import Address, ModelParallelGroup, model_parallel_group_of

__all__ = ["LoRAOptimizedLinear", "OptimizedLinear"]

_PLAIN = nn.Linear


class LayerOptions(TypedDict, total=False):
    """Optional arguments of OptimizedLinear."""

    device: Any
    dtype: torch.dtype  # bfloat16 by default
    linear_cls: Any  # class of ordinary layers: torch.nn.Linear


class OptimizedLinear(nn.Module):
    """Constructor: returns a LoRAOptimizedLinear, a QuantizedLinear or, without configs, a `linear_cls`."""

    def __new__(  # type: ignore[misc]
        cls,
        input_dim: int,
        output_dim: int,
        bias: bool = False,
        lora_config: LoRAConfig | None = None,
        quantization_config: QuantizationConfig | None = None,
        **options: Unpack[LayerOptions],
    ) -> nn.Module:
        """Raises ValueError for configs that are no dataclasses."""
        for given in (lora_config, quantization_config):
            if given is not None and not is_dataclass(given):
                raise ValueError(f"expected a LoRAConfig and a QuantizationConfig, got {type(given).__name__}")
        if lora_config is not None:
            return LoRAOptimizedLinear(input_dim, output_dim, bias, lora_config, quantization_config, **options)
        dtype, device = options.get("dtype", torch.bfloat16), options.get("device")
        if quantization_config is not None:
            return QuantizedLinear(input_dim, output_dim, bias, quantization_config, dtype)
        plain: nn.Module = options.get("linear_cls", _PLAIN)(
            input_dim, output_dim, bias=bias, dtype=dtype, device=device
        )
        return plain


class LoRAOptimizedLinear(nn.Module):
    """base(x) + lora_alpha / lora_r * lora_weight_2(lora_weight_1(x)); `weight` is frozen.

    With base_weight_sharding each rank holds an equal part of the flattened weight, and a forward gathers it.
    """

    lora_weight_1: nn.Module
    lora_weight_2: nn.Module
    adapter_enabled = True  # False inside `adapters_disabled`

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        bias: bool = False,
        lora_config: LoRAConfig | None = None,
        quantization_config: QuantizationConfig | None = None,
        device: Any = None,
        dtype: torch.dtype = torch.bfloat16,
        linear_cls: Any = _PLAIN,
    ) -> None:
        """Draw the frozen weight (Xavier uniform), and the adapters unless `delay_lora_init`.

        Raises ValueError without a lora_config, with a bias, or if the weight does not divide by the ranks.
        """
        super().__init__()
        if lora_config is None or bias:
            raise ValueError(
                f"LoRAOptimizedLinear needs a lora_config and has no bias; got {lora_config}, bias={bias}"
            )
        self.input_dim, self.output_dim, self.bias = input_dim, output_dim, bias
        self.lora_config, self.quantization_config = lora_config, quantization_config
        self.device = get_accelerator().current_device_name() if device is None else device
        self.dtype, self.linear_cls = dtype, linear_cls
        self.zero_shards = lora_config.base_weight_sharding
        if self.zero_shards > 1 and (self.zero_shards != get_world_size() or input_dim % self.zero_shards):
            raise ValueError(
                f"base_weight_sharding is {self.zero_shards}: it must be 1 or the number of ranks, "
                f"{get_world_size()}, and divide the input size, {input_dim}"
            )
        whole = torch.empty(output_dim, input_dim, dtype=dtype, device=device)
        nn.init.xavier_uniform_(whole)
        self.weight: Any = self._frozen(self._own_part(whole) if self.zero_shards > 1 else whole)
        self.disabled = False
        self._initialized = False
        if not lora_config.delay_lora_init:
            self.init_lora()

    def _frozen(self, weight: Tensor) -> nn.Parameter:
        if self.quantization_config is not None and not weight.is_meta:
            return QuantizedParameter(weight, quantization_config=self.quantization_config)
        return nn.Parameter(weight, requires_grad=False)

    def _own_part(self, whole: Tensor) -> Tensor:
        share = whole.numel() // self.zero_shards
        return whole.flatten().narrow(0, get_rank() * share, share).clone()

    @property
    def expert_group(self) -> ModelParallelGroup:
        """Ranks that hold the other parts of a sharded base, and see other data, as those of experts do."""
        return ModelParallelGroup.of(None) if self.zero_shards > 1 else ModelParallelGroup(None)

    @property
    def mp_group(self) -> ModelParallelGroup:
        """The group of a layer that tensor parallelism does not split."""
        return model_parallel_group_of(nn.Module())

    def addresses(self) -> dict[str, Address]:
        """Return the address of this rank's part among the parts of all ranks, so that no other's replaces it."""
        if self.zero_shards == 1 or self.disabled:
            return {}
        rows, *others = self.weight.shape
        box = ((get_rank() * rows, (get_rank() + 1) * rows), *((0, size) for size in others))
        return {"weight": Address((self.zero_shards * rows, *others), (box,))}

    def disable(self) -> None:
        """Become an ordinary frozen layer, whose weight is loaded next."""
        self.disabled = True
        self.weight = nn.Parameter(
            torch.empty(self.output_dim, self.input_dim, dtype=self.dtype), requires_grad=False
        )

    def init_lora(self) -> None:
        """Make the adapters: the first as in Hu et al. 2021, the second zero.  Nothing for a disabled layer."""
        if self.disabled:
            return
        if self.quantization_config is not None and not isinstance(self.weight, QuantizedParameter):
            self.weight = self._frozen(self.weight.data)
        self._initialized = True
        self.weight.requires_grad = False
        self.lora_scaling_factor = self.lora_config.lora_alpha / self.lora_config.lora_r
        rank, options = self.lora_config.lora_r, {"bias": False, "device": self.device, "dtype": self.dtype}
        self.lora_weight_1 = self.linear_cls(self.input_dim, rank, **options)
        self.lora_weight_2 = self.linear_cls(rank, self.output_dim, **options)
        down, up = self.lora_weight_1.get_parameter("weight"), self.lora_weight_2.get_parameter("weight")
        nn.init.kaiming_uniform_(down, a=math.sqrt(5))
        nn.init.zeros_(up)
        down.requires_grad = up.requires_grad = True

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save this rank's part of the weight itself, not its codes."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self._own_weight()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Load a whole weight, or this rank's part.  Layers outside of `target_mods` become ordinary ones."""
        name, given = f"{prefix}weight", state_dict.get(f"{prefix}weight")
        if not any(target in prefix for target in self.lora_config.target_mods):
            self.disable()
        elif given is not None:
            if self.zero_shards > 1 and not is_initialized():
                raise RuntimeError(
                    "base_weight_sharding needs deepspeed.init_distributed() before weights are loaded"
                )
            is_whole = self.zero_shards > 1 and given.shape == (self.output_dim, self.input_dim)
            own = self._own_part(given) if is_whole else given
            if isinstance(self.weight, QuantizedParameter) and own.shape == self.weight.weight_shape:
                self.weight = self._frozen(own.to(self.weight.device, self.dtype))
                own = self.weight.data
            state_dict[name] = own
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _own_weight(self) -> Tensor:
        weight: Tensor = (
            self.weight.dequantized() if isinstance(self.weight, QuantizedParameter) else self.weight.detach()
        )
        return weight

    def full_weight(self) -> Tensor:
        """(output_dim, input_dim): the frozen weight.  A collective with base_weight_sharding."""
        own = self._own_weight()
        if self.zero_shards == 1 or self.disabled:
            return own
        whole = own.new_empty(self.output_dim * self.input_dim)
        all_gather_into_tensor(whole, own.contiguous())
        return whole.view(self.output_dim, self.input_dim)

    def forward(self, input_tensor: Tensor) -> Tensor:
        """(..., input_dim) -> (..., output_dim).  Raises RuntimeError before `init_lora`."""
        if self.disabled:
            return F.linear(input_tensor, self.weight)
        if not self._initialized:
            raise RuntimeError("the adapters do not exist yet: call deepspeed.linear.init_lora(model) first")
        y = F.linear(input_tensor, self.full_weight())
        if not self.adapter_enabled:
            return y
        adapted: Tensor = self.lora_weight_2(self.lora_weight_1(input_tensor))
        return y + self.lora_scaling_factor * adapted

    base_weight = full_weight  # the name in `zengine.adapters`

    def updates(self) -> list[Update]:
        """Return the update that the forward adds; none while the adapter is disabled."""
        if not self._initialized or self.disabled or not self.adapter_enabled:
            return []
        down, up = (each.get_parameter("weight") for each in (self.lora_weight_1, self.lora_weight_2))
        return [Update(down, up, self.lora_scaling_factor)]
