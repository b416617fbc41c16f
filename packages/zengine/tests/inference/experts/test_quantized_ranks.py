"""Stacked experts that are quantized over expert ranks: the codes of one rank, and its logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers_models import MODELS, SIZES, model

import zengine.deepspeed as deepspeed
from zcomm.testing import run_ranks
from zengine.deepspeed.inference.memory import estimate
from zengine.deepspeed.inference.splitting import degrees
from zengine.inference.experts.gather import whole_experts
from zengine.inference.experts.separate import SeparateExperts, stacks_in
from zengine.inference.quantized_modules import QuantizedLinear
from zprecision.backends import native

transformers = pytest.importorskip("transformers")
needs_kernels = pytest.mark.skipif(native.library() is None, reason="the kernels are not built")
IDS = torch.tensor([[5, 9, 11, 3], [60, 7, 8, 2]])
GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
MIXTRAL, SHARED = "Mixtral of eight", "Qwen2-MoE, shared expert"
FORMATS = [(MIXTRAL, 8), (MIXTRAL, 4), (SHARED, 4), ("Qwen3-MoE", 8)]
OVER_TWO = {"moe": {"ep_size": 2}}


def quant(bits: int) -> dict[str, Any]:
    return {"quant": {"weight": {"num_bits": bits}}}


def _engine(subject: Any, **given: Any) -> Any:
    return deepspeed.init_inference(subject, {"dtype": "fp32", "max_out_tokens": 32, **given})


def _codes(engine: Any) -> dict[str, list[Tensor]]:
    """The parts of every quantized layer, by its name."""
    layers = {name: each for name, each in engine.module.named_modules() if isinstance(each, QuantizedLinear)}
    return {name: [*each.weight.state_dict().values()] for name, each in layers.items()}


def _experts_of(names: Any) -> set[tuple[str, int]]:
    """(matrix, number) of the first block's experts among names of layers."""
    begin = "model.layers.0.mlp.experts."
    found = (name.removeprefix(begin).split(".") for name in names if name.startswith(begin))
    return {(matrix, int(number)) for matrix, number in found}


def _has_codes_of(split: Any, whole: Any) -> bool:
    """Whether layers of `split` have the codes and scales of `whole`; its experts are a rank's half."""
    mine, all_of = _codes(split), _codes(whole)
    first = 4 * torch.distributed.get_rank()
    wanted = {(matrix, number) for matrix in ("gate_up_proj", "down_proj") for number in range(first, first + 4)}
    assert _experts_of(mine) == wanted
    assert {name for name in all_of if ".experts." not in name} == {name for name in mine if ".experts." not in name}
    assert not [name for name, _ in split.module.named_parameters() if ".experts." in name]
    return all(torch.equal(a, b) for name, parts in mine.items() for a, b in zip(parts, all_of[name], strict=True))


def _error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


def _modules(name: str, given: dict[str, Any], dtype: str) -> tuple[bool, float, float, list[int]]:
    whole, split = (_engine(model(name), **{**given, "dtype": dtype}, **more) for more in ({}, OVER_TWO))
    own = IDS[torch.distributed.get_rank()][None]  # ranks may have different inputs
    plain = _engine(model(name))(IDS).logits
    wanted = whole(IDS).logits
    error = max(_error(split(IDS).logits, wanted), _error(split(own).logits, whole(own).logits))
    return _has_codes_of(split, whole), error, _error(wanted.float(), plain), list(split.ep_group)


@pytest.mark.parametrize(("name", "bits"), FORMATS)
def test_the_modules_forward_has_the_codes_and_the_logits_of_one_rank(name: str, bits: int) -> None:
    for equal, error, rounding, numbers in run_ranks(_modules, 2, name, quant(bits), "fp32"):
        assert equal
        assert error < 1e-5
        assert rounding > 1e-4, "weights are rounded"
        assert numbers == [8]


def test_other_activations_and_dtypes_fit_as_well() -> None:
    wide = {"quant": {"weight": {"num_bits": 8}, "activation": {"num_bits": 16}}}
    for equal, error, *_ in run_ranks(_modules, 2, MIXTRAL, wide, "fp32"):
        assert equal
        assert error < 1e-5
    for equal, error, *_ in run_ranks(_modules, 2, MIXTRAL, quant(8), "bf16"):
        assert equal
        assert error < 0.03


def _decoded(engine: Any) -> Tensor:
    """Logits of both rows, token by token from the first on."""
    with engine._fused.empty_steps(2) as steps:
        return torch.stack([steps.forward_each(IDS[:, at], [0, 1]) for at in range(IDS.shape[1])])


def _fused(name: str, given: dict[str, Any]) -> Any:
    fused = {**given, "replace_with_kernel_inject": True}
    whole, split = _engine(model(name), **fused), _engine(model(name), **fused, **OVER_TWO)
    wanted, found = _decoded(whole), _decoded(split)
    with split._fused.empty_steps(2) as steps, whole._fused.empty_steps(2) as all_steps:
        prompt, all_prompt = split._fused.prefill(steps, list(IDS)), whole._fused.prefill(all_steps, list(IDS))
    torch.manual_seed(torch.distributed.get_rank())
    return {
        "reasons": split._fused.steps.fused.reasons,
        "error": max(_error(found, wanted), _error(prompt, all_prompt)),
        "logits": found,
        "greedy": torch.equal(split.generate(IDS, **GREEDY), whole.generate(IDS, **GREEDY)),
        "module": torch.equal(split.module.generate(IDS, **GREEDY), whole.generate(IDS, **GREEDY)),
        "drawn": split.generate(IDS, max_new_tokens=8, do_sample=True, pad_token_id=0).tolist(),
    }


@needs_kernels
@pytest.mark.parametrize(("name", "bits"), FORMATS)
def test_fused_decoding_has_the_logits_of_one_rank(name: str, bits: int) -> None:
    one, other = run_ranks(_fused, 2, name, quant(bits))
    for found in (one, other):
        assert found["reasons"] == {}
        assert found["error"] < 1e-5
        assert found["greedy"]
        assert found["module"]
    assert torch.equal(one["logits"], other["logits"]), "ranks decide by the same bits"
    assert one["drawn"] == other["drawn"]


def _some() -> tuple[set[tuple[str, int]], float, float]:
    """Experts with a format of their own: the third and the sixth, of which each rank has one."""
    patterns = {"layers.0.mlp.experts.down_proj.2": {"num_bits": 4}, "layers.0.mlp.experts.down_proj.5": {}}
    given = {"quant": {"weight": {"post_init_quant": patterns}}, "replace_with_kernel_inject": True}
    whole, split = _engine(model(MIXTRAL), **given), _engine(model(MIXTRAL), **given, **OVER_TWO)
    assert isinstance(split.module.model.layers[0].mlp.experts, SeparateExperts)
    assert [name for name, *_ in stacks_in(split.module)] == ["model.layers.1.mlp.experts"]
    error = _error(split.module(IDS).logits, whole.module(IDS).logits)
    return _experts_of(_codes(split)), error, _error(_decoded(split), _decoded(whole))


@needs_kernels
def test_formats_by_name_count_experts_of_all_ranks() -> None:
    for rank, (quantized, error, fused_error) in enumerate(run_ranks(_some, 2)):
        assert quantized == {("down_proj", (2, 5)[rank])}
        assert error < 1e-5
        assert fused_error < 1e-5


def _empty(name: str) -> Any:
    kind, given = MODELS[name]
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(
            getattr(transformers, f"{kind}Config")(**{**SIZES, **given}), dtype=torch.float32
        )


def _loaded(folder: str, name: str, bits: int) -> Any:
    """From files, with the bytes of the largest tensor that a rank had while it loaded."""
    given = {**quant(bits), "replace_with_kernel_inject": True}
    whole = _engine(model(name), **given)
    largest = _Largest()
    with largest:
        split = _engine(_empty(name), **given, **OVER_TWO, checkpoint=folder)
    return _has_codes_of(split, whole), _error(_decoded(split), _decoded(whole)), largest.numel


class _Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Elements of the largest tensor of three dims that is made."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.dim() == 3 and made.device.type == "cpu" and len(made) == 4:
            self.numel = max(self.numel, made.numel())
        return made


@needs_kernels
@pytest.mark.parametrize(("name", "bits"), [(MIXTRAL, 4), (SHARED, 8)])
def test_files_are_quantized_expert_by_expert_on_each_rank(name: str, bits: int, tmp_path: Path) -> None:
    model(name).save_pretrained(tmp_path)
    for equal, error, largest in run_ranks(_loaded, 2, str(tmp_path), name, bits):
        assert equal
        assert error < 1e-5
        assert largest < 4 * 48 * 40, "no rank holds the stack of its four experts"


def _gathered() -> tuple[bool, bool, int]:
    whole, split = _engine(model(MIXTRAL), **quant(4)), _engine(model(MIXTRAL), **quant(4), **OVER_TWO)
    names = [f"model.layers.{index}.mlp.experts" for index in range(2)]
    for name in names:
        parent, _, last = name.rpartition(".")
        split.module.get_submodule(parent).register_module(last, whole_experts(split.module.get_submodule(name)))
    mine, all_of = _codes(split), _codes(whole)
    equal = mine.keys() == all_of.keys() and all(
        torch.equal(a, b) for name in mine for a, b in zip(mine[name], all_of[name], strict=True)
    )
    return equal, torch.equal(split(IDS).logits, whole(IDS).logits), len(mine)


def test_the_layers_of_all_ranks_are_gathered_with_their_codes() -> None:
    for equal, same, number in run_ranks(_gathered, 2):
        assert equal
        assert same
        assert number == 2 * (4 + 2 * 8) + 1


def _renewed() -> tuple[bool, float]:
    """A path is recognized again, in quantized layers, when weights have moved."""
    given = {**quant(8), "replace_with_kernel_inject": True}
    whole, split = _engine(model(MIXTRAL), **given), _engine(model(MIXTRAL), **given, **OVER_TWO)
    first = split._fused
    norm = split.module.model.norm
    norm.weight = torch.nn.Parameter(norm.weight.detach().clone())
    found, wanted = split.generate(IDS, **GREEDY), whole.generate(IDS, **GREEDY)
    return torch.equal(found, wanted) and split._fused is not first, _error(_decoded(split), _decoded(whole))


@needs_kernels
def test_a_path_over_quantized_experts_is_renewed() -> None:
    for renewed, error in run_ranks(_renewed, 2):
        assert renewed
        assert error < 1e-5


def _streamed(folder: str, path: str) -> tuple[bool, float, bool]:
    """Blocks that rest on a drive, each quantized when it is filled."""
    place = f"{path}/{torch.distributed.get_rank()}"
    zero = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": place}}
    whole = _engine(model(MIXTRAL), **quant(8))
    split = _engine(_empty(MIXTRAL), **quant(8), **OVER_TWO, checkpoint=folder, zero=zero)
    return split._stream is not None, _error(split(IDS).logits, whole(IDS).logits), bool(split.ep_group)


def test_blocks_that_rest_on_a_drive_are_quantized_too(tmp_path: Path) -> None:
    model(MIXTRAL).save_pretrained(tmp_path / "model")
    for is_streamed, error, has_ranks in run_ranks(_streamed, 2, str(tmp_path / "model"), str(tmp_path / "rest")):
        assert is_streamed
        assert error < 1e-5
        assert has_ranks


def _bytes(given: dict[str, Any]) -> tuple[int, int, int]:
    """Bytes of a rank's weights: estimated before, held, and estimated of the model that is split."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}  # of whole groups
    engine = _engine(model(MIXTRAL, **sizes), **given, **OVER_TWO)
    config = engine._config.quantization
    parts = [*engine.module.parameters(), *engine.module.buffers()]
    parts += [part for layer in _codes(engine).values() for part in layer]
    needed = estimate(model(MIXTRAL, **sizes), torch.float32, config, *degrees(engine._config.parallelism))
    again = estimate(engine.module, torch.float32, None, 1, 2)
    return needed.weights_bytes, sum(part.nbytes for part in parts), again.weights_bytes


def test_the_estimate_of_memory_has_a_ranks_experts() -> None:
    for needed, held, again in run_ranks(_bytes, 2, {}):
        assert needed == held == again
    for needed, held, again in run_ranks(_bytes, 2, quant(8)):
        assert needed == pytest.approx(held, rel=0.02)
        assert again == pytest.approx(held, rel=0.01)
