"""Fused decoding over tensor-parallel ranks: the logits of one rank, and one token on all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers_models import model

import zengine.deepspeed as deepspeed
from zcomm.testing import run_ranks
from zprecision.backends import native

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(native.library() is None, reason="the kernels are not built")
IDS = torch.tensor([[5, 9, 11, 3], [60, 7, 8, 2]])
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "fp32"},
    "int8": {"dtype": "int8"},
    "int8-a16": {"dtype": "int8", "quant": {"activation": {"num_bits": 16}}},
    "int4": {"dtype": "fp32", "quant": {"weight": {"num_bits": 4}}},
}
NAMES = ["LLaMA-3, scaled rotary", "Qwen3, norms of queries and keys", "Phi, partial rotary, parallel", "Mixtral"]


def _engine(name: str, format: str, **given: Any) -> Any:
    return deepspeed.init_inference(
        model(name), {**FORMATS[format], "max_out_tokens": 32, "replace_with_kernel_inject": True, **given}
    )


def _decoded(engine: Any) -> Tensor:
    """Logits of both rows, token by token from the first on."""
    with engine._fused.empty_steps(2) as steps:
        return torch.stack([steps.forward_each(IDS[:, at], [0, 1]) for at in range(IDS.shape[1])])


def _prefilled(engine: Any) -> Tensor:
    """Logits after both prompts."""
    with engine._fused.empty_steps(2) as steps:
        found: Tensor = engine._fused.prefill(steps, list(IDS))
    return found


def _answers(name: str, format: str) -> dict[str, Any]:
    whole, split = _engine(name, format), _engine(name, format, tensor_parallel={"tp_size": 2})
    wanted, found = _decoded(whole), _decoded(split)
    given = {"max_new_tokens": 8, "do_sample": True, "pad_token_id": 0}
    prompt = _prefilled(split)
    return {
        "error": float((found - wanted).abs().max() / wanted.abs().max()),
        "prompt": float((prompt - _prefilled(whole)).abs().max()),
        "reasons": split._fused.steps.fused.reasons,
        "heads": split._fused.decoder.blocks[0].attention.num_heads,
        "greedy": torch.equal(
            split.generate(IDS, max_new_tokens=8, do_sample=False, pad_token_id=0),
            whole.generate(IDS, max_new_tokens=8, do_sample=False, pad_token_id=0),
        ),
        "drawn": split.generate(IDS, **given).tolist(),
    }


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_give_the_logits_of_one(name: str, format: str) -> None:
    one, other = run_ranks(_answers, 2, name, format)
    for found in (one, other):
        assert found["reasons"] == {}
        assert found["heads"] == 3
        assert found["error"] < 1e-5
        assert found["prompt"] < 1e-4
        assert found["greedy"]
    assert one["drawn"] == other["drawn"]
