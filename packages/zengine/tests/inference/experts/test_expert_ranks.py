"""Fused decoding over expert-parallel ranks: the logits of one rank, and one token on all."""

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
GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
NAMES = ["Mixtral of eight", "Qwen2-MoE, shared expert", "OLMoE"]


def _engine(name: str, **given: Any) -> Any:
    return deepspeed.init_inference(
        model(name), {"dtype": "fp32", "max_out_tokens": 32, "replace_with_kernel_inject": True, **given}
    )


def _decoded(engine: Any) -> Tensor:
    """Logits of both rows, token by token from the first on."""
    with engine._fused.empty_steps(2) as steps:
        return torch.stack([steps.forward_each(IDS[:, at], [0, 1]) for at in range(IDS.shape[1])])


def _answers(name: str) -> dict[str, Any]:
    whole, split = _engine(name), _engine(name, moe={"ep_size": 2})
    wanted, found = _decoded(whole), _decoded(split)
    with split._fused.empty_steps(2) as steps:
        prompt = split._fused.prefill(steps, list(IDS))
    with whole._fused.empty_steps(2) as steps:
        prompt_wanted = whole._fused.prefill(steps, list(IDS))
    torch.manual_seed(torch.distributed.get_rank())
    return {
        "error": float((found - wanted).abs().max() / wanted.abs().max()),
        "prompt": float((prompt - prompt_wanted).abs().max() / prompt_wanted.abs().max()),
        "reasons": split._fused.steps.fused.reasons,
        "experts": len(split._fused.decoder.blocks[0].mlp.experts),
        "logits": found,
        "greedy": torch.equal(split.generate(IDS, **GREEDY), whole.generate(IDS, **GREEDY)),
        "module": torch.equal(split.module.generate(IDS, **GREEDY), whole.generate(IDS, **GREEDY)),
        "drawn": split.generate(IDS, max_new_tokens=8, do_sample=True, pad_token_id=0).tolist(),
    }


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_give_the_logits_of_one(name: str) -> None:
    one, other = run_ranks(_answers, 2, name)
    for found in (one, other):
        assert found["reasons"] == {}
        assert found["experts"] == 4
        assert found["error"] < 1e-5
        assert found["prompt"] < 1e-5
        assert found["greedy"]
        assert found["module"]
    assert torch.equal(one["logits"], other["logits"]), "ranks decide by the same bits"
    assert one["drawn"] == other["drawn"]


def _other_inputs() -> tuple[list[int], list[int], str]:
    engine, whole = _engine("Mixtral of eight", moe={"ep_size": 2}), _engine("Mixtral of eight")
    own = IDS[torch.distributed.get_rank()][None]
    given = {**GREEDY, "eos_token_id": None}
    found = engine.generate(own, **given)
    return found[0].tolist(), whole.generate(own, **given)[0].tolist(), ", ".join(engine._told)


def test_ranks_with_their_own_inputs_generate_by_the_modules_forward() -> None:
    for found, wanted, told in run_ranks(_other_inputs, 2):
        assert found == wanted
        assert told == "inputs that differ between expert ranks"


def _other_arguments(way: str) -> tuple[list[int], list[int], str]:
    from transformers import GenerationConfig, LogitsProcessorList, SuppressTokensLogitsProcessor

    engine, whole = _engine("Mixtral of eight", moe={"ep_size": 2}), _engine("Mixtral of eight")
    given: dict[str, Any] = {**GREEDY, "eos_token_id": None, "pad_token_id": 0}
    beams = 1 + torch.distributed.get_rank()
    if way == "config":
        given = {"generation_config": GenerationConfig(**given, num_beams=beams)}
    elif way == "argument":
        given["num_beams"] = beams
    elif way == "config of the module":
        for each in (engine, whole):
            each.module.generation_config.repetition_penalty = float(beams)
    else:
        given["logits_processor"] = LogitsProcessorList([SuppressTokensLogitsProcessor([3])])
    found, wanted = engine.generate(IDS, **given), whole.generate(IDS, **given)
    return found.tolist(), wanted.tolist(), ", ".join(engine._told)


@pytest.mark.parametrize("way", ["argument", "config", "config of the module", "processors"])
def test_ranks_that_ask_for_different_searches_agree_on_the_modules_forward(way: str) -> None:
    for found, wanted, told in run_ranks(_other_arguments, 2, way):
        assert found == wanted
        assert told == ("" if way == "processors" else "inputs that differ between expert ranks")


def _quantized() -> tuple[float, dict[str, str], int]:
    """Difference of two ranks' logits from one rank's, with every layer quantized but the experts."""
    formats = {"quant": {"weight": {"post_init_quant": {"self_attn": {"num_bits": 8}, "lm_head": {"num_bits": 4}}}}}
    whole, split = _engine(NAMES[0], **formats), _engine(NAMES[0], moe={"ep_size": 2}, **formats)
    wanted, found = _decoded(whole), _decoded(split)
    error = float((found - wanted).abs().max() / wanted.abs().max())
    return error, split._fused.steps.fused.reasons, len(split.quantization_scales or {})


def test_ranks_quantize_what_is_beside_the_experts() -> None:
    for error, reasons, num_layers in run_ranks(_quantized, 2):
        assert error < 1e-5
        assert reasons == {}
        assert num_layers == 9


class _Lists(torch.nn.Module):
    """A decoder whose experts are a list of modules: it is called as it is between fused attentions."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(48, 4, bias=False)
        self.experts = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.Linear(48, 32, bias=False), torch.nn.SiLU(), torch.nn.Linear(32, 48, bias=False)
            )
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.gate(flat).softmax(-1).topk(2)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            row, column = (chosen == index).nonzero(as_tuple=True)
            out.index_add_(0, row, expert(flat[row]) * weights[row, column, None])
        return out.view(x.shape)


def _with_lists(dtype: str, **given: Any) -> Any:
    made = model("LLaMA-3, scaled rotary")
    torch.manual_seed(5)
    for layer in made.model.layers:
        layer.mlp = _Lists()
    return deepspeed.init_inference(
        made.eval(), {"dtype": dtype, "max_out_tokens": 32, "replace_with_kernel_inject": True, **given}
    )


def _lists(dtype: str) -> Any:
    whole, split = _with_lists(dtype), _with_lists(dtype, moe={"ep_size": 2})
    torch.manual_seed(torch.distributed.get_rank())
    drawn = split.generate(IDS, max_new_tokens=6, do_sample=True, pad_token_id=0).tolist()
    own = IDS[torch.distributed.get_rank()][None]
    alone = {**GREEDY, "eos_token_id": None}
    return (
        split._fused is not None,
        torch.equal(split.generate(IDS, **GREEDY), whole.generate(IDS, **GREEDY)),
        torch.equal(split.generate(own, **alone), whole.generate(own, **alone)),
        drawn,
    )


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_lists_of_experts_are_called_between_fused_attentions(dtype: str) -> None:
    one, other = run_ranks(_lists, 2, dtype)
    for found in (one, other):
        assert found[:3] == (True, True, True)
    assert one[3] == other[3]
