"""FLOPs by module, against formulas."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from zengine.flops.meter import make_counter
from zengine.flops.profile import FlopsProfile
from zengine.flops.profiler import FlopsProfiler, get_model_profile

BATCH, LENGTH, WIDTH, HEADS, VOCABULARY = 2, 8, 16, 4, 32
TOKENS = BATCH * LENGTH
# 2 operations a multiply-add: qkv and projection (4 h^2), MLP (8 h^2), scores and mixing (2 s h).
BLOCK = 2 * TOKENS * 12 * WIDTH**2 + 2 * TOKENS * 2 * LENGTH * WIDTH
HEAD = 2 * TOKENS * WIDTH * VOCABULARY


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.view(*x.shape[:2], HEADS, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class GPT(nn.Module):
    def __init__(self, *, recomputes: bool = False) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return self.head(x)


def tokens() -> Tensor:
    return torch.arange(TOKENS).view(BATCH, LENGTH) % VOCABULARY


def profiled(model: nn.Module, *calls: Tensor) -> FlopsProfile:
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    for call in calls:
        model(call)
    profiler.stop_profile()
    return profiler.profile()


def test_the_flops_of_a_gpt_are_those_of_the_formula() -> None:
    profile = profiled(GPT(), tokens())
    flops = {cost.path: cost.flops for cost in profile.modules}
    assert flops["blocks.0"] == flops["blocks.1"] == BLOCK
    assert flops["head"] == HEAD
    assert flops[""] == 2 * BLOCK + HEAD == profile.total.flops
    assert flops["blocks.0.attention.qkv"] == 2 * TOKENS * 3 * WIDTH**2
    own = flops["blocks.0.attention"] - flops["blocks.0.attention.qkv"] - flops["blocks.0.attention.out"]
    assert own == 4 * TOKENS * LENGTH * WIDTH  # the attention kernel
    assert flops["embedding"] == flops["blocks.0.norm"] == 0
    assert sum(profile.operations.values()) == profile.total.flops


def test_parameters_are_inclusive_and_shared_ones_count_once() -> None:
    params = {cost.path: cost.params for cost in profiled(GPT(), tokens()).modules}
    block = 12 * WIDTH**2 + (3 + 1 + 4 + 1) * WIDTH + 2 * WIDTH
    assert params["blocks.0"] == block
    assert params["embedding"] == params["head"] == VOCABULARY * WIDTH
    assert params[""] == 2 * block + VOCABULARY * WIDTH


def test_every_module_has_its_class_its_calls_and_its_time() -> None:
    profile = profiled(GPT(), tokens(), tokens())
    costs = {cost.path: cost for cost in profile.modules}
    assert costs["blocks.0.mlp.1"].kind == "GELU"
    assert all(cost.calls == 2 for path, cost in costs.items() if path != "blocks")  # a list is never called
    assert costs["blocks"].calls == 0
    assert costs["blocks"].flops == 2 * 2 * BLOCK  # the sum of what it holds
    assert 0 < costs["blocks.0"].ms < costs[""].ms
    assert costs["blocks.0.mlp.1"].depth == 4
    assert profile.total.flops == 2 * (2 * BLOCK + HEAD)


def test_recomputed_activations_belong_to_the_backward() -> None:
    model = GPT(recomputes=True)
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    loss = model(tokens()).sum()
    with make_counter() as counter:
        loss.backward()
    profiler.stop_profile()
    assert profiler.get_total_flops() == 2 * BLOCK + HEAD
    # Two forwards (two and a half of the attention kernel), and the blocks again but for their last layer, whose
    # output nobody needs.
    kernels, last_layers = 2 * 4 * TOKENS * LENGTH * WIDTH, 2 * 2 * TOKENS * 4 * WIDTH**2
    assert counter.get_total_flops() == 2 * (2 * BLOCK + HEAD) + kernels // 2 + 2 * BLOCK - last_layers


def test_a_forward_that_raises_leaves_no_counter_and_no_hook() -> None:
    model = GPT()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    with pytest.raises(IndexError):
        model(torch.full((1, 1), VOCABULARY))
    model(tokens())
    profiler.stop_profile()
    assert profiler.get_total_flops() == 2 * BLOCK + HEAD
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    profiler.end_profile()
    assert profiler.get_total_flops() == 0


def test_ignored_classes_are_left_out_with_what_they_hold() -> None:
    profiler = FlopsProfiler(GPT())
    profiler.start_profile(ignore_list=[Attention])
    profiler._model(tokens())
    profiler.stop_profile()
    assert profiler.get_total_flops() == 2 * (2 * TOKENS * 8 * WIDTH**2) + HEAD


def test_a_profile_survives_json() -> None:
    profile = profiled(GPT(), tokens())
    assert FlopsProfile.from_json({**profile.as_json(), "step": 1}) == profile


@pytest.mark.parametrize("meta", [False, True])
def test_get_model_profile_counts_with_and_without_computing(meta: bool, capsys: pytest.CaptureFixture[str]) -> None:
    model = GPT()
    before = copy.deepcopy(model.state_dict())
    totals = get_model_profile(model, args=(tokens(),), as_string=False, meta=meta)
    assert totals[0] == 2 * totals[1] == 2 * BLOCK + HEAD
    assert totals[2] == sum(param.numel() for param in model.parameters())
    assert model.training
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    assert ("forward latency" in capsys.readouterr().out) is not meta


def test_get_model_profile_takes_a_shape_and_writes_to_a_file(tmp_path) -> None:
    path = tmp_path / "made" / "table.txt"
    text = get_model_profile(nn.Linear(4, 8), input_shape=(3, 4), output_file=str(path))
    assert text == ("192 FLOPs", "96 MACs", "40")
    assert "Linear" in path.read_text()


def test_get_model_profile_counts_a_generation() -> None:
    class Writer(nn.Linear):
        def generate(self, x: Tensor, rounds: int) -> Tensor:
            for _ in range(rounds):
                x = self(x)
            return x

    flops, *_ = get_model_profile(
        Writer(4, 4), args=(torch.ones(1, 4),), kwargs={"rounds": 3}, mode="generate", as_string=False
    )
    assert flops == 3 * 2 * 4 * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "nothing to call the model with"),
        ({"args": (1,), "mode": "train"}, '"forward" or "generate"'),
        ({"args": (1,), "mode": "generate", "meta": True}, "cannot run generate"),
    ],
)
def test_mistakes_are_told(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        get_model_profile(nn.Linear(2, 2), **options)
