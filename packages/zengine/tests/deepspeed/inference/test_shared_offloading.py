"""Stage 3 of inference over ranks: each has a share of the blocks, and the outputs of the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from streamed_blocks import IDS, Model, held

import zengine.deepspeed as deepspeed
from zcomm.testing import RankFailed, run_ranks
from zengine.inference.offload import SharedRest
from zengine.inference.quantized_modules import QuantizedLinear

PLACES: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"offload_param": {"device": "cpu"}},
    "drive": {"offload_param": {"device": "nvme"}},
}
FORMATS: dict[str, dict[str, Any]] = {"plain": {"dtype": "fp32"}, "int8": {"dtype": "int8"}}


def config(place: str, folder: Path, **given: Any) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": 3, **PLACES[place]}
    if place == "drive":
        zero["offload_param"] = {"device": "nvme", "nvme_path": str(folder / "drive")}
    return {"dtype": "fp32", "zero": zero, **given}


def _outputs(place: str, format: str, is_on_meta: bool, folder: Path) -> dict[str, Any]:
    given = dict(FORMATS[format])
    wanted = deepspeed.init_inference(Model(), given)
    with torch.device("meta" if is_on_meta else "cpu"):
        model = Model()
    if is_on_meta:
        given["checkpoint"] = str(folder / "model.safetensors")
    engine = deepspeed.init_inference(model, config(place, folder, **given))
    stream = engine._stream
    found = [torch.equal(engine(IDS, skips), wanted(IDS, skips)) for skips in (False, True, False)]
    other = IDS[:1, : 3 + torch.distributed.get_rank()]  # ranks may have different inputs
    found.append(torch.equal(engine(other), wanted(other)))
    return {
        "equal": found,
        "held": held(model),
        "shared": isinstance(stream.rest, SharedRest),
        "resting": stream.resting_bytes,
        "whole": sum(each.num_bytes for each in stream.packed),
        "quantized": isinstance(model.blocks[1].up, QuantizedLinear),
    }


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("is_on_meta", [False, True], ids=["in memory", "on meta"])
def test_ranks_hold_shares_and_give_the_outputs_of_the_whole_model(
    place: str, format: str, is_on_meta: bool, tmp_path: Path
) -> None:
    safetensors.torch.save_file(Model().state_dict(), tmp_path / "model.safetensors")
    for size in (2, 3) if (place, format, is_on_meta) == ("host", "plain", True) else (2,):
        for found in run_ranks(_outputs, size, place, format, is_on_meta, tmp_path):
            assert found["equal"] == [True] * 4
            assert found["held"] == [False] * 5
            assert found["shared"]
            assert found["whole"] <= size * found["resting"] <= found["whole"] + 5 * size * 64
            assert found["quantized"] == (format == "int8")


def _first_weights(folder: Path) -> bool:
    model, rank = Model(), torch.distributed.get_rank()
    wanted = Model().eval()(IDS)
    with torch.no_grad():
        for param in model.parameters():
            param += rank
    return torch.equal(deepspeed.init_inference(model, config("host", folder))(IDS), wanted)


def test_ranks_have_the_weights_of_the_first(tmp_path: Path) -> None:
    assert run_ranks(_first_weights, 2, tmp_path) == [True, True]


def _other_models(folder: Path) -> str:
    model = Model()
    if torch.distributed.get_rank():
        model.head = torch.nn.Linear(32, 12)
    try:
        deepspeed.init_inference(model, config("host", folder))
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_with_other_models_are_told(tmp_path: Path) -> None:
    for told in run_ranks(_other_models, 2, tmp_path):
        assert "head.weight" in told


def _failing_drive(folder: Path) -> None:
    place = folder / "drive" if torch.distributed.get_rank() else Path("/proc/none")
    zero = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(place)}}
    deepspeed.init_inference(Model(), {"dtype": "fp32", "zero": zero})


def test_a_rank_that_fails_is_named_on_all(tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as told:
        run_ranks(_failing_drive, 2, tmp_path)
    assert "init_inference failed on rank 0" in str(told.value)


def _split_and_streamed(format: str, is_on_meta: bool, folder: Path) -> dict[str, Any]:
    given = dict(FORMATS[format])
    wanted = deepspeed.init_inference(Model(), given)(IDS)
    policy = {"injection_policy": {type(Model().blocks[0]): ("down",)}, "tensor_parallel": {"tp_size": 2}}
    with torch.device("meta" if is_on_meta else "cpu"):
        model = Model()
    if is_on_meta:
        given["checkpoint"] = str(folder / "model.safetensors")
    engine = deepspeed.init_inference(model, config("drive", folder, **given, **policy))
    found = engine(IDS)
    return {
        "error": float((found - wanted).abs().max() / wanted.abs().max()),
        "held": held(model),
        "bytes": engine._stream.resting_bytes,
    }


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("is_on_meta", [False, True], ids=["in memory", "on meta"])
def test_parts_of_tensor_ranks_stream_from_their_own_places(format: str, is_on_meta: bool, tmp_path: Path) -> None:
    safetensors.torch.save_file(Model().state_dict(), tmp_path / "model.safetensors")
    whole = sum(param.nbytes for param in Model().blocks.parameters())
    for found in run_ranks(_split_and_streamed, 2, format, is_on_meta, tmp_path):
        assert found["error"] < 1e-5
        assert found["held"] == [False] * 5
        assert found["bytes"] < 0.7 * whole


def _generated(folder: Path) -> list[list[int]]:
    """Tokens of this rank's prompt by the shared and by the whole weights."""
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 3}
    config_ = transformers.LlamaConfig(vocab_size=64, eos_token_id=None, **sizes)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config_).eval()
    rank = torch.distributed.get_rank()
    prompt, given = torch.tensor([[3, 4, 5 + rank]]), {"max_new_tokens": 3 + 4 * rank, "do_sample": False}
    wanted = model.generate(prompt, **given)
    engine = deepspeed.init_inference(model, config("host", folder))
    return [engine.generate(prompt, **given)[0].tolist(), wanted[0].tolist()]


def test_ranks_generate_answers_of_different_lengths(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    for found, wanted in run_ranks(_generated, 2, tmp_path):
        assert found == wanted
