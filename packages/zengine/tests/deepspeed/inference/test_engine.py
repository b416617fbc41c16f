"""init_inference: cast, frozen, limited; everything else is the module's."""

from __future__ import annotations

import logging
from typing import ClassVar

import pytest
import safetensors.torch
import torch
from torch import nn

import zengine.deepspeed as deepspeed
from zcomm.testing import run_ranks
from zpartition.testing.expert_models import MoELanguageModel
from zpartition.testing.tensor_models import PLAN, Language


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 2)
        self.drop = nn.Dropout(0.9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.body(x))

    def generate(self, input_ids: torch.Tensor, max_new_tokens: int = 0) -> int:
        return input_ids.shape[-1] + max_new_tokens


def test_the_module_is_cast_evaluated_and_keeps_no_graph():
    engine = deepspeed.init_inference(Generator(), dtype=torch.bfloat16)
    out = engine(torch.ones(1, 2, dtype=torch.bfloat16))
    assert (out.dtype, out.requires_grad) == (torch.bfloat16, False)
    assert not engine.module.training
    assert engine.body is engine.module.body
    assert isinstance(engine, deepspeed.InferenceEngine)


def test_a_state_dict_has_each_weight_once_as_deepspeed_s():
    engine = deepspeed.init_inference(Generator(), dtype="fp32")
    assert list(engine.state_dict()) == ["module.body.weight", "module.body.bias"]
    assert [name for name, _ in engine.named_modules() if name] == ["module", "module.body", "module.drop"]
    engine.load_state_dict(
        {f"module.{name}": torch.zeros_like(each) for name, each in engine.module.state_dict().items()}
    )
    assert not engine(torch.ones(1, 2)).any()


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("given", [{}, {"dtype": "half"}])
def test_fp16_becomes_a_dtype_that_a_cpu_computes_in(
    stored: torch.dtype, given: dict[str, str], caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.INFO, "zengine"):
        engine = deepspeed.init_inference(Generator().to(stored), given)
    assert engine.body.weight.dtype == stored
    (record,) = caplog.records
    assert (
        record.getMessage() == f"init_inference: torch.float16 is slow on cpu; weights and activations are {stored}"
    )
    assert record.levelno == (logging.WARNING if given else logging.INFO)


def test_generation_beyond_the_limit_is_refused_before_it_begins():
    engine = deepspeed.init_inference(Generator(), dtype="fp32", max_out_tokens=6)
    ids = torch.ones(1, 4, dtype=torch.long)
    assert engine.generate(ids, max_new_tokens=3) == 7  # the prompt alone counts
    with pytest.raises(RuntimeError, match=r"Input with size 7 exceeds maximum length of 6: pass a larger max_out"):
        engine.generate(input_ids=torch.ones(1, 7, dtype=torch.long))
    with pytest.raises(AttributeError, match=r"Linear has no generate"):
        deepspeed.init_inference(nn.Linear(1, 1)).generate(ids)


@pytest.mark.parametrize("use_cuda_events", [True, False])
def test_times_of_forward_passes(use_cuda_events: bool):
    engine = deepspeed.init_inference(Generator(), dtype="fp32")
    with pytest.raises(AssertionError, match="call profile_model_time"):
        engine.model_times()
    for _ in range(2):  # measuring twice measures each pass once
        engine.profile_model_time(use_cuda_events=use_cuda_events)
    for _ in range(3):
        engine(torch.ones(1, 2))
    with pytest.raises(RuntimeError):
        engine(torch.ones(1, 5))  # a pass that fails is over
    times = engine.model_times()
    assert len(times) == 4
    assert min(times) > 0
    assert engine.model_times() == []
    engine.destroy()
    engine(torch.ones(1, 2))
    with pytest.raises(AssertionError):
        engine.model_times()


def test_weights_come_from_a_checkpoint(tmp_path):
    source = Generator()
    safetensors.torch.save_file(source.state_dict(), tmp_path / "model.safetensors")
    engine = deepspeed.init_inference(Generator(), dtype="fp32", checkpoint=str(tmp_path))
    assert torch.equal(engine.body.weight, source.body.weight)
    with pytest.raises(ValueError, match=r"does not fit Linear: .*missing: bias, weight; unexpected: body\.bias"):
        deepspeed.init_inference(nn.Linear(2, 2), dtype="fp32", checkpoint=str(tmp_path))


def test_conflicts_and_other_things_than_modules_are_refused():
    with pytest.raises(ValueError, match="conflicting values: dtype is 'fp16' in config and 'fp32' as an argument"):
        deepspeed.init_inference(Generator(), {"dtype": "fp16"}, dtype="fp32")
    with pytest.raises(TypeError, match=r"needs a torch\.nn\.Module, or a path, got int"):
        deepspeed.init_inference(3)
    with pytest.raises(FileNotFoundError, match=r"'gpt2' is no file or folder here: .* of a hub, download it first"):
        deepspeed.init_inference("gpt2")


class Runnable(Language):
    """One whose plan can be inferred."""

    dummy_inputs: ClassVar = {"tokens": torch.arange(8).view(2, 4)}


def _from_file(path: str) -> list[float]:
    """Differences of a model without memory, with a plan in the config and with one that is found by running it."""
    tokens, found = torch.arange(8).view(1, 8) % 4, []
    plan = {"tensor_parallel": {"tp_size": 2, "partition_config": PLAN}}
    for kind, parallelism in ((Language, plan), (Runnable, {"mp_size": 2})):
        with torch.device("meta"):
            model = kind()
        with pytest.raises(ValueError, match="on the meta device and has no weights"):
            deepspeed.init_inference(model, dtype=torch.float32, **parallelism)
        engine = deepspeed.init_inference(model, dtype=torch.float32, checkpoint=path, **parallelism)
        assert sum(p.numel() for p in engine.parameters()) < sum(p.numel() for p in Language().parameters())
        found.append(float((engine(tokens) - Language()(tokens)).abs()))
    return found


def test_ranks_read_their_parts_of_a_checkpoint_into_a_model_without_memory(tmp_path):
    state = {name: value for name, value in Language().state_dict().items() if name != "head.weight"}
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    for found in run_ranks(_from_file, 2, str(tmp_path)):
        assert max(found) < 1e-5


def test_an_engine_is_no_model():
    engine = deepspeed.init_inference(Generator(), dtype="fp32")
    with pytest.raises(ValueError, match=r"pass engine\.module"):
        deepspeed.init_inference(engine)


def _answers() -> tuple[torch.Tensor, torch.Tensor]:
    """Of the whole model, and of one that is split over two ranks."""
    models = Language(), deepspeed.tp_model_init(Language(), 2, config=PLAN)
    tokens = torch.arange(8).view(1, 8) % 4
    whole, split = (deepspeed.init_inference(model, dtype=torch.float32)(tokens) for model in models)
    return whole, split


def test_a_model_that_was_split_before_answers_as_the_whole_one():
    for whole, split in run_ranks(_answers, 2):
        torch.testing.assert_close(split, whole, rtol=0, atol=1e-5)


def test_members_of_an_engine_on_one_rank(tmp_path, monkeypatch: pytest.MonkeyPatch):
    source = Generator()
    safetensors.torch.save_file(source.state_dict(), tmp_path / "model.safetensors")
    source.config = {"the model's": "own"}
    engine = deepspeed.init_inference(source, dtype="fp32", checkpoint=str(tmp_path))
    assert engine.config is source.config
    assert (engine.mp_group, engine.ep_group, engine.expert_mp_group, engine.quantization_scales) == (None,) * 4
    other = Generator()
    engine.load_model_with_checkpoint(other)
    assert torch.equal(other.body.weight, source.body.weight)
    with pytest.raises(ValueError, match=r"needs init_inference\(checkpoint=\.\.\.\)"):
        deepspeed.init_inference(Generator(), dtype="fp32").load_model_with_checkpoint(other)
    given = []
    monkeypatch.setattr(source, "compile", lambda **kwargs: given.append(kwargs))
    assert not engine.is_compiled
    engine.compile(backend="eager", compile_kwargs={"dynamic": False})
    assert engine.is_compiled
    assert given == [{"backend": "eager", "dynamic": False}]


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_a_compiled_engine_answers_as_before(dtype):
    engine = deepspeed.init_inference(Generator(), dtype=dtype)
    x = torch.randn(3, 2)
    wanted = engine(x)
    engine.compile(backend="eager")
    assert torch.equal(engine(x), wanted)


def _expert_members() -> None:
    engine = deepspeed.init_inference(MoELanguageModel(), dtype="fp32", moe={"ep_size": 2})
    (group,) = engine.ep_group.values()
    assert list(engine.ep_group) == [4]
    assert torch.distributed.get_process_group_ranks(group) == [0, 1]
    assert engine.expert_mp_group == {4: None}


def test_groups_of_experts_are_told_by_their_number():
    run_ranks(_expert_members, 2)
