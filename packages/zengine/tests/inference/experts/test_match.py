"""Mixtures of experts in the forms that people write, and forms that are not recognized."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers_models import model

from zengine.inference.cache import KVCache
from zengine.inference.decoder import DecoderPass
from zengine.inference.recognize import recognize
from zengine.inference.structure import Decoder
from zengine.inference.verify import verify
from zprecision.backends import native

pytest.importorskip("transformers")
needs_kernels = pytest.mark.skipif(native.library() is None, reason="the kernels are not built")


def steps_of(decoder: Decoder) -> DecoderPass:
    return DecoderPass(decoder, KVCache.create(decoder, 4, 16))


class Listed(nn.Module):
    """Experts as modules of their own, with a linear router, as models had them before they were stacked."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router, self.top_k = nn.Linear(width, 4, bias=False), 2
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 40), nn.GELU(), nn.Linear(40, width)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = torch.softmax(self.router(flat), -1).topk(self.top_k, -1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            row, column = (chosen == number).nonzero(as_tuple=True)
            out.index_add_(0, row, expert(flat[row]) * weights[row, column, None])
        return out.view_as(x)


@needs_kernels
def test_lists_of_experts_are_fused() -> None:
    subject: Any = model("LLaMA-3, scaled rotary")
    for layer in subject.model.layers:
        layer.mlp = Listed(48)
    decoder = recognize(subject.eval())
    assert steps_of(decoder).fused.reasons == {}
    verify(decoder, subject)


class Noisy(Listed):
    """A router that no form has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.router(x).sigmoid().amax(-1, keepdim=True)


def test_other_mixtures_are_called_as_they_are() -> None:
    subject: Any = model("LLaMA-3, scaled rotary")
    subject.model.layers[1].mlp = Noisy(48)
    decoder = recognize(subject.eval())
    assert decoder.opaque == ("model.layers.1.mlp",)
    verify(decoder, subject)


@needs_kernels
def test_new_memory_of_stacked_experts_shows() -> None:
    subject: Any = model("Mixtral")
    decoder = recognize(subject)
    steps, ids = steps_of(decoder), torch.tensor([5, 9])
    before = steps.forward_each(ids, [0, 1])
    stack = subject.model.layers[0].mlp.experts.down_proj
    with torch.no_grad():
        stack.mul_(0)
    assert not torch.equal(steps.forward_each(ids, [2, 3]), before)
    fusion = steps._fusion
    stack.data = stack.data.clone()
    steps.cache.clear(0)
    assert fusion is not None
    assert not fusion.is_current


@needs_kernels
def test_an_engine_generates_with_stacked_experts() -> None:
    import zengine.deepspeed as deepspeed

    subject: Any = model("Mixtral")
    ids = torch.tensor([[5, 9, 11, 3]])
    plain = deepspeed.init_inference(subject, dtype="fp32", max_out_tokens=24)
    wanted = plain.generate(ids, max_new_tokens=8, do_sample=False)
    engine = deepspeed.init_inference(subject, dtype="fp32", max_out_tokens=24, replace_with_kernel_inject=True)
    assert torch.equal(engine.generate(ids, max_new_tokens=8, do_sample=False), wanted)
    assert engine._fused is not None
    assert engine._fused.steps is not None
    assert engine._fused.steps.fused.reasons == {}
