"""Heads read from attributes and config."""

from __future__ import annotations

from types import SimpleNamespace

from torch import nn

from zpartition.tensor.heads import NO_HEADS, Heads, heads_of, set_local_counts
from zpartition.testing.tensor_models import Blocked, Gated, Grouped


def module(**attributes: object) -> nn.Module:
    made = nn.Module()
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def test_heads_are_read_from_the_module_or_the_config_of_an_attention() -> None:
    config = SimpleNamespace(num_attention_heads=8, num_key_value_heads=2)
    assert heads_of(Grouped()) == Heads(6, 3)
    assert heads_of(Blocked()) == Heads(4, 4)
    assert heads_of(module(config=config, head_dim=16)) == Heads(8, 2)
    assert heads_of(module(config=config)) == NO_HEADS  # an MLP carries it as well
    assert heads_of(Gated()) == NO_HEADS
    assert Heads(8, 2).units == 2


def test_counts_and_widths_become_local() -> None:
    made = module(num_heads=6, num_key_value_heads=3, num_key_value_groups=2, embed_dim=24, dim=10, head_dim=4)
    set_local_counts(made, 3, 2, [24, 12])
    found = {name: value for name, value in vars(made).items() if type(value) is int}
    assert found == {
        "num_heads": 4,
        "num_key_value_heads": 2,
        "embed_dim": 16,
        "num_key_value_groups": 2,
        "dim": 10,
        "head_dim": 4,
    }
