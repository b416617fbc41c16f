"""`MoE`: a mixture-of-experts layer with DeepSpeed's arguments.

    layer = MoE(512, ExpertMLP(512, 2048), num_experts=8, ep_size=2, k=2)
    output, aux_loss, exp_counts = layer(x)          # loss = loss + 0.01 * aux_loss

Each rank routes its own tokens (so capacity counts a rank's tokens), then tokens are dispatched to the ranks of their
experts.  The output of a layer does not depend on how its experts are sharded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from zpartition.experts.dispatch import TokenDispatch
from zpartition.experts.router import Router, RoutingRule
from zpartition.experts.stacked import Experts, check_divisible

__all__ = ["MoE"]


class MoE(nn.Module):
    """Mixture-of-experts layer: sums the outputs of each token's k best experts of `num_experts`.

    Every rank holds all experts until `distribute` shards them (a zengine engine calls it).
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module | Callable[[], nn.Module],
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        """Accept the arguments of DeepSpeed's layer.

        expert: one expert, (tokens, hidden) -> (tokens, hidden); see Experts for initialization.
        ep_size: ranks to shard the experts over.
        capacity_factor, eval_capacity_factor, min_capacity: see RoutingRule.
        use_residual: add a dense copy of the expert, mixed by a learned coefficient (Rajbhandari et al. 2022, section
            4.1).
        noisy_gate_policy: None, "Jitter" or "RSample".
        use_rts: top-1 drops random tokens instead of the last ones.
        (To balance without an auxiliary loss: `layer.gate.balance_by_bias(0.001)`.)

        Raises ValueError, with the numbers, if the experts do not divide by ep_size or k exceeds their number.
        """
        super().__init__()
        check_divisible(num_experts, ep_size)
        _check_arguments(num_experts, k, use_tutel)
        rule = RoutingRule(
            k=k,
            capacity_factor=capacity_factor,
            eval_capacity_factor=eval_capacity_factor,
            min_capacity=min_capacity,
            noise=noisy_gate_policy or "",
            drops=drop_tokens,
            priority="random" if use_rts else "position",
            second="sampled" if top2_2nd_expert_sampling else "best",
        )
        self.num_experts, self.ep_size = num_experts, ep_size
        self.enable_expert_tensor_parallelism = enable_expert_tensor_parallelism
        self.gate = Router(hidden_size, num_experts, rule)
        self.experts = Experts(expert, num_experts)
        self.mlp: nn.Module | None = None
        self.coefficient: nn.Linear | None = None
        if use_residual:
            self.mlp = copy.deepcopy(expert) if isinstance(expert, nn.Module) else expert()
            self.coefficient = nn.Linear(hidden_size, 2)

    @property
    def num_local_experts(self) -> int:
        """Number of experts on this rank."""
        return len(self.experts.own)

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """(..., hidden) -> the same shape, the auxiliary loss, (experts,) tokens of this rank that chose each expert.

        used_token: one number for each token; tokens with 0 (padding) are not routed.
        """
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        routing = self.gate(x, None if used_token is None else used_token.reshape(-1))
        dispatch = TokenDispatch.plan(routing.experts, routing.kept, self.num_experts, self.experts.expert_group)
        y = self.experts(dispatch.send(x), dispatch.counts)
        output = dispatch.combine(y, routing.weights).to(hidden_states.dtype).view(hidden_states.shape)
        return self._with_residual(hidden_states, output), routing.aux_loss, routing.counts

    def _with_residual(self, x: Tensor, output: Tensor) -> Tensor:
        if self.mlp is None or self.coefficient is None:
            return output
        dense: Any = self.mlp(x)
        mix: Tensor = self.coefficient(x).softmax(dim=-1)
        other: Tensor = dense[0] if isinstance(dense, tuple) else dense
        return output * mix[..., :1] + other * mix[..., 1:]


def _check_arguments(num_experts: int, k: int, use_tutel: bool) -> None:
    if not 1 <= k <= num_experts:
        raise ValueError(f"k is {k}, but must be between 1 and the number of experts, {num_experts}.")
    if use_tutel:
        raise ValueError(
            "use_tutel=True: Tutel's kernels are not supported. Remove it: tokens are sorted by expert and computed "
            "by grouped products, so there are no one-hot products to replace."
        )
