"""`deepspeed.runtime.zero.stage_1_and_2`: the optimizer's class; DeepSpeed's estimate of memory, in bytes."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from zengine.deepspeed.runtime.base_optimizer import ZeROOptimizer, joined

__all__ = [
    "DeepSpeedZeroOptimizer",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
]


class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """Optimizer of an engine at stage 1 or 2."""

    __slots__ = ()

    @property
    def round_robin_bit16_groups(self) -> list[list[Tensor]]:
        """The module's trained parameters, by parameter group."""
        return [list(group) for group in self.fp16_groups]

    @property
    def bit16_groups_flat(self) -> list[Tensor]:
        """The module's weights, flat, by parameter group: the memory itself if a group has one bucket, padded."""
        return [joined([storage.flat for storage in storages]) for storages in self._storages_of_groups()]

    @property
    def parallel_partitioned_bit16_groups(self) -> list[list[Tensor]]:
        """The elements of `bit16_groups_flat` that each rank updates, by parameter group and rank."""
        return [
            [
                joined([storage.flat[slice(*storage.bucket.span(rank))] for storage in storages])
                for rank in range(self.engine_facts.plan.parallel.gradient_ranks)
            ]
            for storages in self._storages_of_groups()
        ]

    def _storages_of_groups(self) -> list[list[Any]]:
        found: list[list[Any]] = [[] for _ in self.param_groups]
        for storage in self.engine_facts.partition.storages:
            found[storage.bucket.group].append(storage)
        return found


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[float, float]:
    """Return (host bytes of a node, device bytes of a rank)."""
    ranks = num_gpus_per_node * num_nodes
    if cpu_offload:
        return total_params * max(4 * ranks, 16) * additional_buffer_factor, 2 * total_params
    return (
        total_params * 4 * num_gpus_per_node * additional_buffer_factor,
        2 * total_params + int(18 * total_params / ranks),
    )


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the estimate of a model with and without offload."""
    total = sum(param.numel() for param in model.parameters())
    estimate_zero2_model_states_mem_needs_all_cold(total, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the estimate from the number of elements."""
    print(
        f"Estimated memory of params, optim states and gradients for {num_nodes} node(s) of {num_gpus_per_node} "
        f"device(s): {total_params / 1e6:.0f}M total.\n  per CPU  |  per GPU |   Options"
    )
    for offload in (True, False):
        host, device = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor
        )
        print(f"  {host / 2**30:7.2f}GB | {device / 2**30:6.2f}GB | offload_optimizer={'cpu' if offload else 'none'}")
