"""`deepspeed.runtime.zero.stage3`: generation with gathered weights; DeepSpeed's estimate of memory, in bytes.

DeepSpeed's formulas exclude activations and buffers; zpartition.plan() counts what this library allocates.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter

from zengine.deepspeed.runtime.base_optimizer import ZeROOptimizer
from zengine.deepspeed.runtime.zero.partition_parameters import GatheredParameters
from zpartition import local_weight

__all__ = [
    "DeepSpeedZeroOptimizer_Stage3",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "model_to_params",
    "unwrap_model_for_generation",
]


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """Gather all weights of an engine inside the block, once for many forward passes; all ranks must enter it."""
    offload = getattr(model.optimizer, "parameter_offload", None)
    with GatheredParameters(model.parameters()):
        if offload is None:
            yield model
            return
        offload.forward_hooks, offload.backward_hooks = [], []
        try:
            yield model
        finally:
            offload._register_deepspeed_module(offload.module)


class DeepSpeedZeroOptimizer_Stage3(ZeROOptimizer):  # noqa: N801 - DeepSpeed's name
    """Optimizer of an engine at stage 3.

    DeepSpeed's sub-groups are buckets here: the weights of one module and parameter group.
    """

    __slots__ = ()

    @property
    def fp16_groups(self) -> list[list[Parameter]]:
        """The module's trained parameters, by sub-group."""
        return [list(storage.params) for storage in self.engine_facts.partition.storages]

    @property
    def fp32_partitioned_groups_flat(self) -> list[Tensor]:
        """Masters that this rank updates, flat, by sub-group: the tensors of `param_groups`.

        Optimizers that take whole parameters only (Muon) have those instead.
        """
        return [param for group in self.param_groups for param in group["params"]]

    @property
    def fp16_partitioned_groups(self) -> list[list[Tensor]]:
        """This rank's elements of the module's trained parameters, flat, by sub-group."""
        return [[local_weight(param) for param in group] for group in self.fp16_groups]


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[float, float, int]:
    """Return (host bytes of a node, device bytes of a rank, bytes of the largest layer in half precision)."""
    ranks, factor = num_gpus_per_node * num_nodes, additional_buffer_factor
    layer = 4 * largest_layer_params
    if not cpu_offload:
        device = layer + int(18 * total_params / ranks)
        host = layer * num_gpus_per_node * factor if zero_init else 4 * total_params * num_gpus_per_node * factor
        return host, device, layer
    states = (18 if cpu_offload_params else 16) / num_nodes
    device = layer if cpu_offload_params else layer + int(2 * total_params / ranks)
    per_param = states if zero_init else max(4 * num_gpus_per_node, states)
    return total_params * per_param * factor, device, layer


def model_to_params(model: nn.Module) -> tuple[int, int]:
    """Return (elements of the model, elements of its largest layer)."""
    total = sum(param.numel() for param in model.parameters())
    layers = (sum(param.numel() for param in module.parameters(recurse=False)) for module in model.modules())
    return total, max(layers)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the estimate of a model for every kind of offload."""
    total, largest = model_to_params(model)
    estimate_zero3_model_states_mem_needs_all_cold(
        total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the estimate from numbers of elements."""
    print(
        f"Estimated memory of params, optim states and gradients for {num_nodes} node(s) of {num_gpus_per_node} "
        f"device(s): {total_params / 1e6:.0f}M total, {largest_layer_params / 1e6:.0f}M in the largest layer.\n"
        "  per CPU  |  per GPU |   Options"
    )
    for offload, params in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            host, device, _ = estimate_zero3_model_states_mem_needs(
                total_params,
                largest_layer_params,
                num_gpus_per_node,
                num_nodes,
                offload,
                params,
                zero_init,
                additional_buffer_factor,
            )
            where = f"offload_param={_place(params)}, offload_optimizer={_place(offload)}, zero_init={int(zero_init)}"
            print(f"  {host / 2**30:7.2f}GB | {device / 2**30:6.2f}GB | {where}")


def _place(is_offloaded: bool) -> str:
    return "cpu " if is_offloaded else "none"
