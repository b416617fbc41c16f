"""`deepspeed.moe.layer`: zpartition's layer of experts, with the attributes of DeepSpeed's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, final

from torch import Tensor, nn
from torch.func import functional_call

from zengine.deepspeed.utils import groups
from zpartition import experts

__all__ = ["MoE"]


class MoE(experts.MoE):
    """`zpartition.experts.MoE`; `deepspeed_moe` shows its gate and experts by DeepSpeed's names.

    The weights keep their own names: `gate.weight`, and `experts.stacked.<name>` with all local experts stacked.
    """

    _last: tuple[Tensor, Tensor] | None = None  # auxiliary loss and counts of the last forward

    @property
    def expert_group_name(self) -> str:
        """Name of the expert-parallel groups."""
        return f"ep_size_{self.ep_size}"

    @property
    def use_residual(self) -> bool:
        """True if a dense expert is added."""
        return self.mlp is not None

    @property
    def num_local_experts(self) -> int:
        """Number of experts on this rank, once an engine has distributed them."""
        return self.num_experts // self.ep_size

    @property
    def deepspeed_moe(self) -> LayerView:
        """Gate, experts and last results."""
        return LayerView(self)

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Check that ep_size divides the world size; an engine distributes the experts over consecutive ranks.

        Raises ValueError for `use_data_before_expert_parallel_`, which places them otherwise.
        """
        if use_data_before_expert_parallel_:
            raise ValueError(
                "use_data_before_expert_parallel_=True is not available: experts go to consecutive ranks. Drop it."
            )
        groups.initialize(ep_size=self.ep_size, mpu=groups.mpu)

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """(..., hidden) -> the same shape, the auxiliary loss, (experts,) tokens that chose each expert."""
        output, aux_loss, counts = super().forward(hidden_states, used_token)
        self._last = aux_loss, counts
        return output, aux_loss, counts


@final
class LayerView:
    """`MoE.deepspeed_moe`: what DeepSpeed's MOELayer shows."""

    def __init__(self, layer: MoE) -> None:
        self._layer = layer
        self.gate = GateView(layer)
        self.experts = ExpertsView(layer)
        self.ep_size, self.ep_group_name = layer.ep_size, layer.expert_group_name
        self.num_local_experts = self.experts.num_local_experts

    @property
    def ep_group(self) -> Any:
        """Group of the ranks that share the experts; None before they are distributed."""
        return self._layer.experts.expert_group.group

    @property
    def l_aux(self) -> Tensor:
        """Auxiliary loss of the last forward.  Raises AttributeError before the first one."""
        return self._results()[0]

    @property
    def exp_counts(self) -> Tensor:
        """(experts,) tokens that chose each expert in the last forward; before the first, raises AttributeError."""
        return self._results()[1]

    def _results(self) -> tuple[Tensor, Tensor]:
        if self._layer._last is None:
            raise AttributeError("l_aux and exp_counts exist after the first forward of the layer")
        return self._layer._last


@final
class GateView:
    """`MoE.deepspeed_moe.gate`: settings of the gate, and its weight as `wg.weight`."""

    def __init__(self, layer: MoE) -> None:
        rule = layer.gate.rule
        self.wg = layer.gate  # has `weight`: (experts, hidden)
        self.k, self.min_capacity, self.drop_tokens = rule.k, rule.min_capacity, rule.drops
        self.capacity_factor, self.eval_capacity_factor = rule.capacity_factor, rule.eval_capacity_factor
        self.noisy_gate_policy, self.use_rts = rule.noise or None, rule.priority == "random"
        self.top2_2nd_expert_sampling = rule.second == "sampled"


@final
class ExpertsView:
    """`MoE.deepspeed_moe.experts`: the local experts, one by one."""

    def __init__(self, layer: MoE) -> None:
        self.num_local_experts = len(layer.experts.own)
        places = range(self.num_local_experts)
        self.deepspeed_experts = [ExpertView(*layer.experts.local_expert(place)) for place in places]


@final
class ExpertView:
    """One expert: can be called, and its weights can be read and written; they are slices of the stacks."""

    def __init__(self, template: nn.Module, weights: Mapping[str, Tensor]) -> None:
        self._template, self._weights = template, dict(weights)

    def __call__(self, *args: Any) -> Any:
        return functional_call(self._template, self._weights, args)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name in the expert, slice)."""
        yield from self._weights.items()

    def parameters(self) -> Iterator[Tensor]:
        """Yield the slices."""
        yield from self._weights.values()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the slices, detached, by name."""
        return {name: weight.detach() for name, weight in self._weights.items()}
