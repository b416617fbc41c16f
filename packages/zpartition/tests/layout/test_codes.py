"""Codes of quantized weights among the frozen parameters of stage 3: no block is cut, and none is read unseen."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import Parameter

import zpartition
from zcomm.testing import run_ranks
from zpartition.layout.layout import CODE_ALIGNMENT, ParamSpec, plan_layout
from zpartition.layout.plan_layouts import plan_layouts
from zpartition.memory.poison import is_poison, poison_of


class Coded(nn.Module):
    """Codes of two layers of odd sizes, with scales as bytes, beside a trained weight."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def codes(rows: int, columns: int) -> Parameter:
            values = torch.randint(0, 256, (rows, columns), generator=generator, dtype=torch.uint8)
            return Parameter(values, requires_grad=False)

        self.first, self.scales = codes(7, 96), codes(7, 12)
        self.second, self.signed = codes(33, 32), Parameter(torch.arange(96, dtype=torch.int8).view(3, 32), False)
        self.adapter = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = sum(each.long().sum() for each in (self.first, self.scales, self.second, self.signed))
        return self.adapter(x) * (total % 7)  # type: ignore[no-any-return]


POLICY = zpartition.ZeroPolicy(stage=3, persist_numel=0)


@pytest.mark.parametrize("world", [2, 3, 4, 6])
def test_no_block_of_codes_is_cut_between_ranks(world: int) -> None:
    _, frozen = plan_layouts(Coded(), {"adapter.weight": 0}, POLICY, world)
    assert {(b.dtype, slot.name) for b, slot in frozen.slots()} == {
        (torch.uint8, "first"), (torch.uint8, "scales"), (torch.uint8, "second"), (torch.int8, "signed")
    }  # fmt: skip
    for bucket in frozen.buckets:
        for rank in range(world):
            for piece in bucket.pieces(rank):
                lo, hi = piece.span
                assert lo % CODE_ALIGNMENT == 0
                assert hi % CODE_ALIGNMENT == 0 or hi == piece.slot.numel


def test_other_slots_are_not_spread() -> None:
    specs = [
        ParamSpec("a", (5,), torch.float32),
        ParamSpec("b", (5,), torch.float32),
        ParamSpec("c", (5,), torch.uint8),
    ]
    layout = plan_layout(specs, world_size=1, num_shards=1)
    assert {slot.name: slot.offset for _, slot in layout.slots()} == {"a": 16, "b": 0, "c": 0}


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int8, torch.float8_e4m3fn], ids=str
)
def test_poison_is_a_nan_also_as_the_bytes_of_a_scale(dtype: torch.dtype) -> None:
    poison = torch.full((), poison_of(dtype), dtype=dtype)
    assert is_poison(poison)
    assert not is_poison(torch.zeros((), dtype=dtype))
    if not dtype.is_floating_point:
        for scale in (torch.float16, torch.bfloat16, torch.float32):
            assert poison.expand(scale.itemsize).contiguous().view(scale).isnan().all()


def _on_rank(offload: bool) -> None:
    torch.manual_seed(0)
    model = Coded()
    plain = copy.deepcopy(model)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = torch.optim.SGD(model.adapter.parameters(), lr=0.5)
    tier = zpartition.Tier.HOST if offload else zpartition.Tier.DEVICE
    policy = zpartition.ZeroPolicy(
        stage=3, persist_numel=0, frozen_weight_bits=8, offload=zpartition.Offload(weights=tier)
    )
    partition = zpartition.shard(model, optimizer, policy=policy)
    assert is_poison(model._parameters["first"].detach().as_strided((), ()))  # type: ignore[union-attr]
    own = sum(s.own_span.nbytes for s in partition.frozen if s.bucket.dtype == torch.uint8)
    assert own == 2048  # half of 768 + 256 + 1280 aligned bytes, padded to whole spans
    x = torch.randn(2, 4)
    for step in range(2):
        with partition.micro_step(is_last=True):
            y = model(x)
            y.sum().backward()
        assert torch.equal(y, plain(x)) or step
        partition.finish_gradients()
        partition.apply(optimizer.step)
        partition.zero_grad()
    with zpartition.gathered(model):
        for name in ("first", "scales", "second", "signed"):  # also where other frozen weights are gathered in 8 bits
            assert torch.equal(model.get_parameter(name), before[name])
    with zpartition.gathered(model, modifier_rank=0):
        model.first.fill_(3)
    with zpartition.gathered(model):
        assert bool((model.first == 3).all())
    with torch.no_grad():
        model._parameters["second"].as_strided((), ()).fill_(1)  # type: ignore[union-attr]
    with partition.micro_step(is_last=True):
        model(x).sum().backward()
    partition.finish_gradients()
    with pytest.raises(ValueError, match="sharded"):
        partition.apply(optimizer.step)
    partition.zero_grad()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    partition.close()
    assert torch.equal(model.second, before["second"])
    assert torch.equal(state["second"], before["second"])


@pytest.mark.parametrize("offload", [False, True])
def test_codes_are_sharded_gathered_and_edited_as_they_are(offload: bool) -> None:
    run_ranks(_on_rank, 2, offload)
