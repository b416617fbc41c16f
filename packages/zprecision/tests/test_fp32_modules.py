"""Modules of float32 inside a bf16 model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zprecision import Fp32Modules, KeepInFp32, Precision

NORMS = KeepInFp32(patterns=("norm",), as_listed=False)
MIXED = Precision(param=torch.bfloat16, keep=NORMS)


class Block(nn.Module):
    """A layer of each kind, the norm with keyword arguments and a nested output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.norm = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
        self.last = nn.Linear(4, 4)
        self.seen: list[torch.dtype] = []
        self.norm.register_forward_pre_hook(lambda _, args: self.seen.append(args[0].dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


def test_inputs_are_widened_and_outputs_narrowed_around_the_outermost_module() -> None:
    block = MIXED.cast_module(Block())
    with Fp32Modules.install(block, NORMS, torch.bfloat16) as hooks:
        assert hooks.names == ("norm",)
        x = torch.randn(3, 4, dtype=torch.bfloat16)
        output = block(x)
        output.sum().backward()
        wide = block.norm(block.first(x).float())
    assert (output.dtype, block.norm[0].weight.grad.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(output, block.last(wide.to(torch.bfloat16)))


def test_activation_checkpointing_meets_the_same_casts_in_backward() -> None:
    block = MIXED.cast_module(Block())
    x = torch.randn(3, 4, dtype=torch.bfloat16, requires_grad=True)
    with Fp32Modules.install(block, NORMS, torch.bfloat16):
        for reentrant in (True, False):
            checkpoint(block, x, use_reentrant=reentrant).sum().backward()
    assert len(block.seen) == 4  # twice forward, twice again


def test_closing_leaves_no_hook_behind() -> None:
    block = MIXED.cast_module(Block())
    before = len(block.norm._forward_pre_hooks), len(block.norm._forward_hooks)
    hooks = Fp32Modules.install(block, NORMS, torch.bfloat16)
    hooks.close()
    hooks.close()
    assert (len(block.norm._forward_pre_hooks), len(block.norm._forward_hooks)) == before


def test_no_pattern_makes_no_island_and_all_of_a_model_is_one() -> None:
    assert Fp32Modules.install(Block(), KeepInFp32(), torch.bfloat16).names == ()
    hooks = Fp32Modules.install(Block(), KeepInFp32(patterns=("*",)), torch.bfloat16)
    assert hooks.names == ("",)
    hooks.close()


def test_half_a_layer_is_rejected_and_a_part_of_somebodys_own_module_is_theirs() -> None:
    with pytest.raises(
        ValueError, match=r"\['1.bias'\] keeps norm.1.bias in float32 but not norm.1.weight, which the"
    ):
        Fp32Modules.install(Block(), KeepInFp32(patterns=("1.bias",)), torch.bfloat16)
    block = Block()
    block.gain = nn.Parameter(torch.ones(1))
    assert Fp32Modules.install(block, KeepInFp32(patterns=("gain",)), torch.bfloat16).names == ()


def test_keyword_arguments_and_nested_values_are_cast_and_others_are_not() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, pair: Any, *, mask: Any, table: Any) -> Any:
            assert pair[0].dtype == table["x"].dtype == torch.float32
            assert mask.dtype == torch.bool
            return {"sum": pair[0] * self.weight, "count": torch.tensor(3)}

    model = nn.ModuleDict({"nested": Nested(), "other": nn.Linear(2, 2)})
    x = torch.ones(2, dtype=torch.bfloat16)
    with Fp32Modules.install(model, KeepInFp32(patterns=("nested",)), torch.bfloat16):
        found = model["nested"]((x, x), mask=torch.tensor([True]), table={"x": x})
    assert (found["sum"].dtype, found["count"].dtype) == (torch.bfloat16, torch.int64)
