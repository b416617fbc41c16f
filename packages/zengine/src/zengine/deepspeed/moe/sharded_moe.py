"""`deepspeed.moe.sharded_moe`: DeepSpeed's gates with their dense results, and a layer over them.

`deepspeed.moe.layer.MoE` does not use them: it routes by `zpartition.experts`, without tensors of (tokens, experts,
capacity).  The gates here choose by the same functions and return what DeepSpeed's return, for models that have their
own MoE layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import ProcessGroup, ReduceOp
from torch.nn import functional as F

from zengine.deepspeed.comm import all_reduce, all_to_all_single
from zengine.deepspeed.comm.world import get_world_size
from zengine.deepspeed.moe.mappings import drop_tokens as drop_to_tensor_rank
from zengine.deepspeed.moe.mappings import gather_tokens
from zengine.deepspeed.utils import groups
from zengine.deepspeed.utils.bwc import bwc_tensor_model_parallel_world_size
from zpartition import experts as routing

__all__ = [
    "MOELayer",
    "TopKGate",
    "einsum",
    "gumbel_rsample",
    "multiplicative_jitter",
    "top1gating",
    "top2gating",
    "topkgating",
]


def multiplicative_jitter(x: Tensor, device: Any, epsilon: float = 1e-2) -> Tensor:
    """Multiply by random numbers between 1 - epsilon and 1 + epsilon (Fedus et al. 2022)."""
    return x if epsilon == 0 else x * torch.empty(x.shape, device=device).uniform_(1 - epsilon, 1 + epsilon)


def gumbel_rsample(shape: Any, device: Any) -> Tensor:
    """Samples of Gumbel(0, 1)."""
    zero, one = torch.tensor(0.0, device=device), torch.tensor(1.0, device=device)
    drawn: Tensor = torch.distributions.Gumbel(zero, one).rsample(shape)
    return drawn


def einsum(rule: str, a: Tensor, b: Tensor) -> Tensor:
    """torch.einsum."""
    return torch.einsum(rule, a, b)


def _capacity(gates: Tensor, capacity_factor: Tensor, min_capacity: Tensor) -> Tensor:
    """(): maximum number of tokens of an expert, from (tokens, experts) gates."""
    fair = torch.ceil(gates.shape[0] / gates.shape[1] * capacity_factor).to(torch.int64)
    return torch.maximum(fair, min_capacity.to(torch.int64))


class _AllToAll(Function):
    """All-to-all of equal chunks of dim 0; backward is the same."""

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup | None, input: Tensor) -> Tensor:
        ctx.group = group
        output = torch.empty_like(input, memory_format=torch.contiguous_format)
        all_to_all_single(output, input.contiguous(), group=group)
        return output

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> Any:
        return None, _AllToAll.apply(ctx.group, *grad_output)  # type: ignore[no-untyped-call]


def top1gating(
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    used_token: Tensor | None = None,
    noisy_gate_policy: str | None = None,
    drop_tokens: bool = True,
    use_rts: bool = True,
    ep_group: ProcessGroup | None = None,
    sparse_routes: bool = False,
    use_tutel: bool = False,
) -> tuple[Any, ...]:
    """Choose one expert for each token.

    logits: (tokens, experts) float32.
    ep_group: without `drop_tokens`, its ranks agree on the capacity.
    use_tutel: ignored.

    Returns (auxiliary loss, combine weights, dispatch mask, counts), the second and third (tokens, experts,
    capacity), or with `sparse_routes` (auxiliary loss, capacity, experts, indices, locations, gates, counts), where
    indices (-1: dropped), locations and gates are (1, tokens).

    Raises ValueError for fewer tokens than `min_capacity`.
    """
    if logits.shape[0] < min_capacity:
        raise ValueError(
            f"{logits.shape[0]} tokens are fewer than min_capacity, {min_capacity}: set min_capacity to 0, or use "
            "larger batches"
        )
    noise = gumbel_rsample(logits.shape, logits.device) if noisy_gate_policy == "RSample" else None
    free = routing.top1(logits, noise=noise, used=used_token)
    capacity = _capacity_for(logits, free.counts, capacity_factor, min_capacity, drop_tokens, ep_group)
    if not drop_tokens:
        capacity = capacity.clamp(max=logits.shape[0])
    priority = torch.rand(logits.shape, device=logits.device).gather(1, free.experts)[:, 0] if use_rts else None
    found = routing.top1(logits, capacity=int(capacity), noise=noise, priority=priority, used=used_token)
    return _as_deepspeed(found, capacity, logits.shape[1], sparse=sparse_routes)


def top2gating(
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: ProcessGroup | None = None,
    top2_2nd_expert_sampling: bool = True,
    sparse_routes: bool = False,
) -> tuple[Any, ...]:
    """Choose two experts for each token; see `top1gating`.  `logits` is not changed."""
    noise = gumbel_rsample(logits.shape, logits.device) if top2_2nd_expert_sampling else None
    free = routing.top2(logits, noise=noise)
    capacity = _capacity_for(logits, free.counts, 2 * capacity_factor, min_capacity, drop_tokens, ep_group)
    found = routing.top2(logits, capacity=int(capacity), noise=noise)
    return _as_deepspeed(found, capacity, logits.shape[1], sparse=sparse_routes, by_choice=True)


def topkgating(
    logits: Tensor,
    k: int,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: ProcessGroup | None = None,
    drop_policy: str = "probs",
    sparse_routes: bool = False,
) -> tuple[Any, ...]:
    """Choose k experts for each token; see `top1gating`.

    drop_policy: over capacity an expert takes the tokens with the largest probabilities, or "position": the first.

    Raises ValueError for another policy.
    """
    if drop_policy not in ("probs", "position"):
        raise ValueError(f"drop_policy must be probs or position, got {drop_policy!r}")
    scores = logits.log_softmax(dim=1)  # the order of probabilities; its softmax is that of `logits`
    found = routing.topk(scores, k)
    capacity = _capacity_for(logits, found.counts, k * capacity_factor, min_capacity, drop_tokens, ep_group)
    kept = found.kept
    if drop_tokens and drop_policy == "probs":
        kept = routing.topk(scores, k, capacity=int(capacity)).kept
    elif drop_tokens:
        kept = _places(found.experts, kept, logits.shape[1], by_choice=False) < capacity
    gates = logits.softmax(dim=1).gather(1, found.experts) * kept
    gates = gates / gates.sum(dim=1, keepdim=True).clamp(min=torch.finfo(gates.dtype).eps)
    chosen = routing.Routing(found.experts, gates, kept, found.aux_loss, found.counts)
    return _as_deepspeed(chosen, capacity, logits.shape[1], sparse=sparse_routes)


def _capacity_for(
    logits: Tensor, counts: Tensor, factor: float, minimum: int, drops: bool, ep_group: ProcessGroup | None
) -> Tensor:
    """(): the configured capacity, or without drops what the fullest expert of all ranks needs."""
    if drops:
        return _capacity(logits, torch.tensor(factor), torch.tensor(minimum))
    largest = counts.max()
    if ep_group is not None and get_world_size(ep_group) > 1:
        all_reduce(largest, op=ReduceOp.MAX, group=ep_group)
    if groups._get_expert_model_parallel_world_size() == 1:  # tensor ranks share the tokens of an expert
        size = bwc_tensor_model_parallel_world_size(groups.mpu)
        largest = torch.ceil(largest / size).mul(size).to(largest.dtype)
    return largest


def _places(experts: Tensor, kept: Tensor, num_experts: int, *, by_choice: bool) -> Tensor:
    """(tokens, k) int64: number of each kept choice in its expert, choice by choice or token by token."""
    order = experts.t().reshape(-1) if by_choice else experts.reshape(-1)
    counted = kept.t().reshape(-1) if by_choice else kept.reshape(-1)
    running = (F.one_hot(order, num_experts) * counted[:, None]).cumsum(dim=0)
    place = running.gather(1, order[:, None])[:, 0] - 1
    return place.view(experts.shape[1], -1).t() if by_choice else place.view(experts.shape)


def _as_deepspeed(
    found: routing.Routing, capacity: Tensor, num_experts: int, *, sparse: bool, by_choice: bool = False
) -> tuple[Any, ...]:
    place = _places(found.experts, found.kept, num_experts, by_choice=by_choice).clamp(min=0) * found.kept
    if sparse:
        indices = torch.where(found.kept, found.experts, -1).t().to(torch.int32).contiguous()
        rest = place.t().to(torch.int32).contiguous(), found.weights.t().contiguous()
        return found.aux_loss, capacity, num_experts, indices, *rest, found.counts
    tokens, size = found.experts.shape[0], num_experts * int(capacity)
    where = found.experts * int(capacity) + place
    combine = found.weights.new_zeros(tokens, size).scatter_add(1, where, found.weights * found.kept)
    combine = combine.view(tokens, num_experts, int(capacity))
    return found.aux_loss, combine, combine.bool(), found.counts


class TopKGate(nn.Module):
    """Gate with a linear layer `wg`; see `top1gating`, `top2gating` and, for larger k, `topkgating`."""

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 8,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        ep_group: ProcessGroup | None = None,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        self.wg = nn.Linear(model_dim, num_experts, bias=False)
        self.ep_group, self.k, self.min_capacity = ep_group, k, min_capacity
        self.capacity_factor, self.eval_capacity_factor = capacity_factor, eval_capacity_factor
        self.noisy_gate_policy, self.drop_tokens, self.use_rts = noisy_gate_policy, drop_tokens, use_rts
        self.top2_2nd_expert_sampling = top2_2nd_expert_sampling

    def _set_ep_group(self, ep_group: ProcessGroup | None) -> None:
        if self.ep_group is not None:
            raise ValueError("the gate has an expert-parallel group already")
        self.ep_group = ep_group

    def forward(
        self, input: Tensor, used_token: Tensor | None = None, sparse_routes: bool = False, use_tutel: bool = False
    ) -> tuple[Any, ...]:
        """Route (tokens, hidden) in float32."""
        x = input.float()
        if self.noisy_gate_policy == "Jitter" and self.training:
            x = multiplicative_jitter(x, device=x.device)
        logits = F.linear(x, self.wg.weight.float())
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        shared: dict[str, Any] = {
            "drop_tokens": self.drop_tokens,
            "ep_group": self.ep_group,
            "sparse_routes": sparse_routes,
        }
        if self.k == 1:
            noise = self.noisy_gate_policy if self.training else None
            return top1gating(logits, factor, self.min_capacity, used_token, noise, use_rts=self.use_rts, **shared)
        if self.k == 2:
            sampling = self.top2_2nd_expert_sampling
            return top2gating(logits, factor, self.min_capacity, top2_2nd_expert_sampling=sampling, **shared)
        return topkgating(logits, self.k, factor, self.min_capacity, **shared)


class MOELayer(nn.Module):
    """A gate, and experts of which each rank of the expert-parallel group has `num_local_experts` (GShard).

    After a forward, `l_aux` is the auxiliary loss and `exp_counts` the tokens of each expert.
    """

    l_aux: Tensor
    exp_counts: Tensor

    def __init__(
        self,
        gate: nn.Module,
        experts: nn.Module,
        ep_group_name: str,
        ep_size: int,
        num_local_experts: int,
        use_tutel: bool = False,
    ) -> None:
        """gate: as TopKGate; experts: (ep_size, num_local_experts, tokens, hidden) -> the same.

        use_tutel: ignored.
        """
        super().__init__()
        self.gate, self.experts, self.ep_group_name = gate, experts, ep_group_name
        self.ep_size, self.num_local_experts = ep_size, num_local_experts
        self.ep_group: ProcessGroup | None = None

    def _set_ep_group(self, ep_group: ProcessGroup | None) -> None:
        self.ep_group = ep_group
        gate: Any = self.gate
        gate._set_ep_group(ep_group)

    def forward(self, *input: Any, **kwargs: Any) -> Tensor:
        """(hidden states (..., hidden), one number for each token or None) -> (..., hidden)."""
        x: Tensor = input[0]
        rows = x.reshape(-1, x.shape[-1])
        used = input[1] if len(input) > 1 else None
        routed = self.gate(rows, used, True, False)  # a gate of one's own takes DeepSpeed's four arguments
        self.l_aux, capacity, num_experts, indices, places, gates, self.exp_counts = routed
        size = int(capacity)
        slots = torch.where(indices >= 0, indices.long() * size + places, num_experts * size)  # the last one: dropped
        sent = _to_slots(rows, slots, num_experts * size).view(num_experts, size, -1)
        returned = self._compute(sent).reshape(num_experts * size, -1)
        padded = torch.cat([returned, returned.new_zeros(1, returned.shape[1])])
        combined: Tensor = (padded[slots] * gates[..., None]).sum(dim=0).to(returned.dtype)
        return combined.reshape(x.shape)

    def _compute(self, sent: Tensor) -> Tensor:
        """(experts, capacity, hidden) of this rank's tokens -> the same, computed by the ranks of the experts."""
        is_split = groups._get_expert_model_parallel_world_size() > 1  # experts are split over tensor ranks, too
        shape = (self.ep_size, self.num_local_experts, -1, sent.shape[-1])
        mine = self._exchange(drop_to_tensor_rank(sent, dim=1))
        mine = gather_tokens(mine, dim=1) if is_split else mine
        out: Tensor = self.experts(mine.reshape(shape))
        out = out.reshape(self.ep_size * self.num_local_experts, -1, sent.shape[-1])
        out = drop_to_tensor_rank(out, dim=1) if is_split else out
        return gather_tokens(self._exchange(out), dim=1)

    def _exchange(self, rows: Tensor) -> Tensor:
        if self.ep_size == 1:
            return rows.contiguous()
        exchanged: Tensor = _AllToAll.apply(self.ep_group, rows)  # type: ignore[no-untyped-call]
        return exchanged


def _to_slots(rows: Tensor, slots: Tensor, num_slots: int) -> Tensor:
    """(num_slots, hidden): the token of each slot; zeros where there is none."""
    source = torch.full((num_slots + 1,), rows.shape[0], dtype=torch.int64, device=rows.device)
    source.scatter_(
        0, slots.reshape(-1), torch.arange(rows.shape[0], device=rows.device).expand_as(slots).reshape(-1)
    )
    return torch.cat([rows, rows.new_zeros(1, rows.shape[1])]).index_select(0, source[:-1])
