"""Data flow between layers, traced in one run."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zpartition.tensor.tracing import trace
from zpartition.testing.tensor_models import Block, Blocked, Grouped, Language


def test_sources_are_the_nearest_linear_layers() -> None:
    flow = trace(Block(Grouped()).double(), (torch.zeros(1, 2, 24, dtype=torch.float64),))
    assert flow.sources["attention.o_proj"] == {"attention.q_proj", "attention.k_proj", "attention.v_proj"}
    assert flow.sources["mlp.down"] == {"mlp.gate", "mlp.up"}
    assert flow.sources["mlp.up"] == {"attention.o_proj"}
    assert flow.consumers("mlp.up") == {"mlp.down"}
    assert flow.leaking == {"attention.o_proj", "mlp.down"}  # both through the residual stream
    assert flow.norms == {"norm1": frozenset(), "norm2": {"attention.o_proj"}}


def test_heads_and_blocks_are_read_from_views() -> None:
    flow = trace(Language(), (torch.zeros(1, 4, dtype=torch.long),))
    heads = {name.removeprefix("blocks."): numbers for name, numbers in flow.heads.items()}
    assert heads == {
        "0.attention.q_proj": {6}, "0.attention.k_proj": {3}, "0.attention.v_proj": {3}, "1.attention.qkv": {4},
        "2.attention.query_key_value": {4},
    }  # fmt: skip
    assert flow.blocks == {"blocks.1.attention.qkv": (24, 24, 24)}


class Stacked(Blocked):
    """Outputs viewed as (3, heads, size) at once, as in vision transformers."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, self.n_head, -1).permute(2, 0, 3, 1, 4).unbind(0)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).flatten(2))


def test_stacked_blocks_are_traced_on_the_meta_device() -> None:
    flow = trace(Stacked().to("meta"), (torch.zeros(1, 2, 24, device="meta"),))
    assert (flow.blocks, flow.heads) == ({"qkv": (24, 24, 24)}, {"qkv": {4}})
    assert flow.sources["proj"] == {"qkv"}


def test_all_hooks_are_removed() -> None:
    model = Block(Blocked())
    trace(model, (torch.zeros(1, 2, 24),))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
