"""A language model in Megatron's style, for tests: its own layers hold slices and communicate over an `mpu`.

With one tensor rank it is the unsplit model, the oracle.  All ranks draw whole weights from one seed, and keep their
slices.  Parameters are marked by layers that slice, with one rank, too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import cross_entropy, dropout, linear, scaled_dot_product_attention, silu

VOCABULARY, WIDTH, HEADS, INNER = 30, 24, 4, 20


class Mpu:
    """Groups by the functions of Megatron; tensor ranks are neighbours, or, with `strided`, far apart."""

    def __init__(self, size: int, *, strided: bool = False) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        rows = torch.arange(world).view(-1, size)
        rows = torch.arange(world).view(size, -1).t() if strided else rows
        self.tensor, self.data = (
            next(group for group, ranks in made if rank in ranks)
            for made in (
                [(dist.new_group(ranks), ranks) for ranks in rows.tolist()],
                [(dist.new_group(ranks), ranks) for ranks in rows.t().tolist()],
            )
        )

    def get_model_parallel_group(self) -> ProcessGroup:
        return self.tensor

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank(self.tensor)

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self.tensor)

    def get_data_parallel_group(self) -> ProcessGroup:
        return self.data

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self.data)

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self.data)


class NewMpu:
    """The same by the names of newer versions; the model-parallel group has pipeline ranks, too."""

    def __init__(self, old: Mpu) -> None:
        self.get_tensor_model_parallel_group = old.get_model_parallel_group
        self.get_tensor_model_parallel_rank = old.get_model_parallel_rank
        self.get_tensor_model_parallel_world_size = old.get_model_parallel_world_size
        self.get_data_parallel_group = old.get_data_parallel_group
        self.get_pipeline_model_parallel_world_size = lambda: 1


class Slices:
    """Position among the tensor ranks, with the messages of the layers."""

    def __init__(self, mpu: Any = None) -> None:
        self.group = None if mpu is None else mpu.get_model_parallel_group()
        self.size = 1 if mpu is None else mpu.get_model_parallel_world_size()
        self.rank = 0 if mpu is None else mpu.get_model_parallel_rank()

    def sum(self, x: Tensor) -> Tensor:
        if self.size > 1:
            x = x.contiguous().clone()
            dist.all_reduce(x, group=self.group)
        return x

    def join(self, x: Tensor) -> Tensor:
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, -1)

    def own(self, whole: Tensor, dim: int, stride: int = 1) -> Tensor:
        """Return every `size`-th of size * stride chunks, one after another."""
        return torch.cat(whole.chunk(self.size * stride, dim)[self.rank :: self.size], dim).clone()

    def parameter(self, whole: Tensor, dim: int, stride: int = 1) -> nn.Parameter:
        param = nn.Parameter(self.own(whole, dim, stride))
        marks: Any = param
        marks.tensor_model_parallel, marks.partition_dim, marks.partition_stride = True, dim, stride
        return param


class Enter(torch.autograd.Function):
    """Whole activations into split layers: gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slices: Slices) -> Tensor:
        ctx.slices = slices
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.slices.sum(grad), None


class Leave(torch.autograd.Function):
    """Partial sums become whole activations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slices: Slices) -> Tensor:
        return slices.sum(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Join(torch.autograd.Function):
    """Slices of the last dimension become whole activations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slices: Slices) -> Tensor:
        ctx.slices = slices
        return slices.join(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.slices.own(grad, -1), None


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape) * 0.2


class ColumnParallelLinear(nn.Module):
    def __init__(self, inputs: int, outputs: int, slices: Slices, stride: int = 1) -> None:
        super().__init__()
        self.slices = slices
        self.weight = slices.parameter(drawn(outputs, inputs), 0, stride)
        self.bias = slices.parameter(drawn(outputs), 0, stride)

    def forward(self, x: Tensor) -> Tensor:
        return linear(Enter.apply(x, self.slices), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    def __init__(self, inputs: int, outputs: int, slices: Slices) -> None:
        super().__init__()
        self.slices = slices
        self.weight = slices.parameter(drawn(outputs, inputs), 1)
        self.bias = nn.Parameter(drawn(outputs))  # whole on every rank

    def forward(self, x: Tensor) -> Tensor:
        whole: Tensor = Leave.apply(linear(x, self.weight), self.slices)
        return whole + self.bias


class VocabParallelEmbedding(nn.Module):
    def __init__(self, slices: Slices) -> None:
        super().__init__()
        self.slices = slices
        self.weight = slices.parameter(drawn(VOCABULARY, WIDTH), 0)

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.weight.shape[0]
        own = tokens - self.slices.rank * rows
        is_own = (own >= 0) & (own < rows)
        found = self.weight[own.clamp(0, rows - 1)] * is_own.unsqueeze(-1)
        whole: Tensor = Leave.apply(found, self.slices)
        return whole


class Attention(nn.Module):
    def __init__(self, slices: Slices) -> None:
        super().__init__()
        self.heads = HEADS // slices.size
        self.query_key_value = ColumnParallelLinear(WIDTH, 3 * WIDTH, slices)  # [q; k; v] of each head
        self.dense = RowParallelLinear(WIDTH, WIDTH, slices)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.query_key_value(x).view(batch, length, self.heads, -1)
        q, k, v = (part.transpose(1, 2) for part in heads.chunk(3, dim=-1))
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.dense(y.transpose(1, 2).reshape(batch, length, -1))
        return out


class MLP(nn.Module):
    """Gated; the fused weight is [gate; up], each of which is sliced."""

    def __init__(self, slices: Slices, drop: float) -> None:
        super().__init__()
        self.drop = drop
        self.gate_up = ColumnParallelLinear(WIDTH, 2 * INNER, slices, stride=2)
        self.down = RowParallelLinear(INNER, WIDTH, slices)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        out: Tensor = self.down(dropout(silu(gate) * up, self.drop, self.training))
        return out


class Layer(nn.Module):
    def __init__(self, slices: Slices, drop: float) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention(slices)
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), MLP(slices, drop)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class MegatronLike(nn.Module):
    """(batch, length) tokens -> a scalar loss.  drop: of split activations, by each rank's own random numbers."""

    def __init__(self, mpu: Any = None, *, seed: int = 3, drop: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.slices = slices = Slices(mpu)
        self.embed = VocabParallelEmbedding(slices)
        self.position = nn.Parameter(drawn(8, WIDTH))
        self.layers = nn.ModuleList(Layer(slices, drop) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        parts = linear(Enter.apply(self.norm(x), self.slices), self.embed.weight)  # tied
        logits: Tensor = Join.apply(parts, self.slices)
        return cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())
