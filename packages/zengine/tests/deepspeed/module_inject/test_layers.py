"""Split layers made by hand: equal to the whole layer, gathered and split again."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import layer_norm, linear

import zcomm
import zengine.deepspeed as deepspeed
from zcomm.testing import run_ranks
from zengine.deepspeed.absent import NotAvailable
from zengine.deepspeed.module_inject import AutoTP, ReplaceWithTensorSlicing, layers, replace_transformer_layer
from zengine.deepspeed.module_inject.replace_module import replace_module
from zengine.deepspeed.module_inject.tp_shard import AutoTPMeta, get_shard_size, get_shard_size_list

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/deepspeed_0_19_8.json").read_text())["shard_sizes"]


def test_sizes_are_those_of_deepspeed() -> None:
    """DeepSpeed 0.19.8's, for sizes x ranks x key-value heads x grains x names of layers."""
    found = [
        get_shard_size_list(size, ranks, AutoTPMeta(num_kv_heads=heads, tp_grain_size=grain), name)
        for size in (7, 24, 64, 100)
        for ranks in (1, 2, 3, 4)
        for heads in (None, 4, 6, 7)
        for grain in (1, 8)
        for name in (None, "q_proj", "mlp.up", "lm_head")
        if not (heads and size % heads == 0 and heads < ranks)
    ]
    assert found == GOLDEN
    with pytest.raises(ValueError, match="needs rank= or mp_group=: mp_size is 2"):
        get_shard_size(8, 2, AutoTPMeta())


def test_facts_are_read_off_a_config() -> None:
    config = type("Config", (), {"num_key_value_heads": 2, "num_attention_heads": 4, "hidden_size": 8})()
    outer = type("Outer", (), {"text_config": config, "num_attention_heads": 99})()
    for given in (config, outer):
        meta = AutoTPMeta.from_model_config(given, 8)
        assert (meta.num_kv_heads, meta.num_attention_heads, meta.n_embd, meta.tp_grain_size) == (2, 4, 8, 8)
    assert AutoTPMeta.from_model_config(None) == AutoTPMeta()


def _column(whole: nn.Linear, x: torch.Tensor, group: Any) -> None:
    rank, w = zcomm.group_rank(), torch.randn(4, 6)
    layer = layers.LinearLayer(copy.deepcopy(whole), group, name="up")
    joined = layers.LinearLayer(copy.deepcopy(whole), group, gather_output=True)
    mine, other = (x.detach().clone().requires_grad_() for _ in range(2))
    (layer(mine) * w.chunk(2, 1)[rank]).sum().backward()
    (joined(other) * w).sum().backward()
    (whole(x) * w).sum().backward()
    assert sum(p.numel() for p in layer.parameters()) == (8 * 6 + 6) // 2
    for found in (layer, joined):
        torch.testing.assert_close(found.weight.grad, whole.weight.grad.chunk(2)[rank])
        torch.testing.assert_close(found.bias.grad, whole.bias.grad.chunk(2)[rank])
    torch.testing.assert_close(joined(x), whole(x))
    torch.testing.assert_close(mine.grad, x.grad)
    torch.testing.assert_close(other.grad, x.grad)


def _row(whole: nn.Linear, x: torch.Tensor, group: Any) -> None:
    rank, w = zcomm.group_rank(), torch.randn(4, 6)
    layer = layers.LinearAllreduce(copy.deepcopy(whole), group)
    head = layers.LmHeadLinearAllreduce(copy.deepcopy(whole), group)
    part = x.detach().chunk(2, -1)[rank].clone().requires_grad_()
    x.grad = whole.weight.grad = whole.bias.grad = None
    (layer(part) * w).sum().backward()
    (whole(x) * w).sum().backward()
    torch.testing.assert_close(layer(part), whole(x))
    torch.testing.assert_close(head(x), whole(x))
    torch.testing.assert_close(layer.weight.grad, whole.weight.grad.chunk(2, 1)[rank])
    torch.testing.assert_close(layer.bias.grad, whole.bias.grad)
    torch.testing.assert_close(part.grad, x.grad.chunk(2, -1)[rank])


def _gathered(whole: nn.Linear, group: Any) -> None:
    for kind in (layers.LinearLayer, layers.LinearAllreduce, layers.VocabParallelLinear):
        layer = kind(copy.deepcopy(whole), group)
        shape = layer.weight.shape
        with layers.GatherReplacedLayerParams([layer.weight, layer.bias], layer):
            assert torch.equal(layer.weight, whole.weight)
            assert torch.equal(layer.bias, whole.bias)
        assert layer.weight.shape == shape
        for param in layer.split_parameters():
            param.gather_params([param])
        assert torch.equal(layer.weight, whole.weight)
        for param in layer.split_parameters():
            param._tp_partition([param])
        assert layer.weight.shape == shape
    assert (layer.vocab_start_index, layer.vocab_end_index, layer.vocab_size) == (
        *((0, 3) if not zcomm.group_rank() else (3, 6)),
        6,
    )


def _layers() -> None:
    torch.manual_seed(0)
    group, whole, x = deepspeed.comm.get_world_group(), nn.Linear(8, 6), torch.randn(4, 8, requires_grad=True)
    frozen = layers.LinearLayer(copy.deepcopy(whole), group)
    assert not frozen.weight.requires_grad
    layers.set_autotp_mode(training=True)
    try:
        _column(whole, x, group)
        _row(whole, x, group)
        _gathered(whole, group)
    finally:
        layers.set_autotp_mode(training=False)
    uneven = layers.LinearLayer(nn.Linear(4, 5), group, gather_output=True)
    assert uneven.weight.shape[0] == (3, 2)[zcomm.group_rank()]
    assert uneven(torch.ones(2, 4)).shape == (2, 5)


def test_split_layers_compute_what_the_whole_one_does() -> None:
    run_ranks(_layers, 2)


def test_unsplit_layers_of_given_weights() -> None:
    weight, bias, x = torch.randn(3, 4), torch.randn(3), torch.randn(2, 4)
    torch.testing.assert_close(layers.LinearLayer.from_weights(weight=weight, bias=bias)(x), linear(x, weight, bias))
    norm = layers.Normalize(weight=nn.Parameter(torch.full((4,), 2.0)), bias=nn.Parameter(torch.ones(4)))
    torch.testing.assert_close(norm(x), layer_norm(x, (4,), norm.weight, norm.bias))
    assert {name for name, _ in norm.named_parameters()} == {"weight", "bias"}
    rms = layers.RMSNormalize(4)
    torch.testing.assert_close(rms(x), torch.rms_norm(x, (4,), eps=1e-5))
    table = nn.Parameter(torch.randn(6, 4))
    assert torch.equal(layers.EmbeddingLayer(weight=table)(torch.tensor([2, 0])), table[[2, 0]])
    mask = torch.tensor([[0, 1, 1]])
    assert torch.equal(layers.OPTEmbedding(weight=table)(mask), table[[1, 2, 3]][None])
    with pytest.raises(ValueError, match="needs weight= or weight_shape="):
        layers.EmbeddingLayer()


def test_slices_of_whole_weights_are_copied() -> None:
    whole = torch.arange(24.0).view(4, 6)
    slicing = ReplaceWithTensorSlicing(mp_size=2, out_dim=0, in_dim=1)
    slicing.gpu_index = 1
    assert torch.equal(slicing.copy(torch.zeros(2, 6), whole, int8=True), whole[2:])
    assert torch.equal(slicing.copy(torch.zeros(4, 3), whole, int8=True), whole[:, 3:])
    assert torch.equal(slicing.copy(torch.zeros(2), torch.arange(4.0)), torch.tensor([2.0, 3.0]))
    fused = slicing.strided_copy(torch.zeros(2, 6), whole, num_splits=2, int8=True)
    assert torch.equal(fused, whole[[1, 3]])
    assert slicing.copy(torch.zeros(2, 6), None) is None
    with pytest.raises(ValueError, match="cannot be sliced into"):
        slicing.copy(torch.zeros(8, 6), whole, int8=True)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(4, 4) for _ in range(4))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(), Mlp()


def test_layers_are_found_and_replaced() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([Block(), Block()])
    assert AutoTP.tp_parser(model) == [(Block, ["mlp.down_proj", "self_attn.o_proj"])]
    assert not AutoTP.kernel_supported([])
    numbers = []

    def replace(child: nn.Module, policy: Any, number: int, **kwargs: Any) -> nn.Module:
        numbers.append((policy, number, kwargs["prefix"]))
        return nn.Identity()

    replace_module(model, Block, replace, "policy")
    assert numbers == [("policy", 0, "layers.0."), ("policy", 1, "layers.1.")]
    assert all(isinstance(layer, nn.Identity) for layer in model.layers)
    with pytest.raises(ValueError, match="contains no module of class Block"):
        replace_module(model, Block, replace, "policy")
    with pytest.raises(NotAvailable, match="init_inference"):
        replace_transformer_layer(None, model, None, None, None)
