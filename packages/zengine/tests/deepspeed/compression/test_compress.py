"""DeepSpeed's names of compression: verbs, classes, the schedule, quantizers, the section as dicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zengine
from zengine.deepspeed.compression import compression_scheduler, init_compression, redundancy_clean
from zengine.deepspeed.compression.basic_layer import (
    BNLayer_Compress,
    ColumnParallelLinear_Compress,
    Conv2dLayer_Compress,
    Embedding_Compress,
    LinearLayer_Compress,
    QuantAct,
)
from zengine.deepspeed.compression.compress import student_initialization
from zengine.deepspeed.compression.config import get_compression_config
from zengine.deepspeed.compression.helper import convert_conv1d_to_linear
from zengine.deepspeed.compression.utils import (
    AsymQuantizer,
    BinaryQuantizer,
    SymQuantizer,
    TernaryQuantizer,
    TopKBinarizer,
)

GOLDEN_INPUT = [-1.0, -0.3, 0.04, 0.5, 0.99]


class ColumnParallelLinear(nn.Module):
    """As Megatron's: a linear layer of its own class."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight)


class Mpu:
    ColumnParallelLinear = ColumnParallelLinear


def model() -> nn.ModuleDict:
    torch.manual_seed(2)
    return nn.ModuleDict(
        {
            "query": nn.Linear(4, 4),
            "embed": nn.Embedding(5, 4),
            "conv": nn.Conv2d(2, 4, 3),
            "norm": nn.BatchNorm2d(4),
            "split": ColumnParallelLinear(),
        }
    )


def section(offset: int = 0) -> dict[str, Any]:
    shared = {"enabled": True, "schedule_offset": offset, "quantize_weight_in_forward": True}
    params = {"start_bits": 8, "target_bits": 4}
    groups = {"g": {"params": params, "modules": ["query", "split"]}}
    return {"weight_quantization": {"shared_parameters": shared, "different_groups": groups}}


def test_prepared_layers_are_instances_of_deepspeeds_classes(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"compression_training": section()}))
    plain, made = model(), model()
    assert init_compression(made, str(path), mpu=Mpu()) is made
    for name, kind in (
        ("query", LinearLayer_Compress),
        ("embed", Embedding_Compress),
        ("conv", Conv2dLayer_Compress),
        ("norm", BNLayer_Compress),
        ("split", ColumnParallelLinear_Compress),
    ):
        assert isinstance(made[name], kind)
        assert not isinstance(plain[name], kind)
    assert not isinstance(made["conv"], LinearLayer_Compress)
    assert type(made["query"]) is nn.Linear
    redundancy_clean(made, str(path), mpu=Mpu())
    assert torch.equal(made["split"].weight, SymQuantizer.apply(plain["split"].weight, 4))


def test_the_schedule_counts_steps_without_an_engine() -> None:
    made = init_compression(model(), {"compression_training": section(offset=2)})
    schedule = compression_scheduler(made, section(offset=2))
    x, plain = torch.ones(1, 4), model()["query"]
    schedule.step(step_zero_check=True)
    schedule.step()
    assert (schedule.training_steps, schedule.weight_quantization_enabled) == (1, False)
    assert torch.equal(made["query"](x), plain(x))
    schedule.step()
    assert schedule.weight_quantization_enabled
    assert not torch.equal(made["query"](x), plain(x))


def test_the_section_as_dicts_has_defaults_and_can_be_read_again() -> None:
    found = get_compression_config({"compression_training": section(offset=2)})
    assert found["weight_quantization"]["shared_parameters"]["quantization_type"] == "symmetric"
    assert found["activation_quantization"]["shared_parameters"] == {
        "enabled": False,
        "schedule_offset": 1000,
        "quantization_type": "symmetric",
        "range_calibration": "dynamic",
    }
    assert get_compression_config({"compression_training": found}) == found
    assert not get_compression_config({})["row_pruning"]["shared_parameters"]["enabled"]
    with pytest.raises(zengine.ConfigError, match="has no group"):
        get_compression_config({"compression_training": {"row_pruning": {"shared_parameters": {"enabled": True}}}})


@pytest.mark.parametrize(
    ("quantizer", "bits", "wanted"),
    [
        (SymQuantizer, 4, [-1, -0.25, 0, 0.5, 0.875]),
        (AsymQuantizer, 4, [-0.995, -0.24875, 0, 0.4975, 0.870625]),
        (TernaryQuantizer, 2, [-0.83, 0, 0, 0.83, 0.83]),
        (BinaryQuantizer, 1, [-0.566, -0.566, 0.566, 0.566, 0.566]),
    ],
)
def test_quantizers_have_deepspeeds_values_and_pass_gradients(quantizer: Any, bits: int, wanted: list[float]) -> None:
    x = torch.tensor(GOLDEN_INPUT, requires_grad=True)
    found = quantizer.apply(x, bits, None, None, 1)
    torch.testing.assert_close(found, torch.tensor(wanted), rtol=0, atol=1e-6)
    found.sum().backward()
    assert torch.equal(x.grad, torch.ones(5))


def test_a_mask_of_scores() -> None:
    scores = torch.tensor([[0.1, 3.0], [2.0, -1.0]], requires_grad=True)
    assert TopKBinarizer.apply(scores, 0.5, False).tolist() == [[0.0, 1.0], [1.0, 0.0]]
    assert TopKBinarizer.apply(scores, 0.0, True).tolist() == [[0.0, 1.0], [1.0, 0.0]]  # sigmoid(0) = 0.5


def test_a_running_range() -> None:
    act = QuantAct(quant_mode="asymmetric")
    act(torch.tensor([-1.0, 3.0]), 8)
    act(torch.tensor([-3.0, 1.0]), 8)
    torch.testing.assert_close(act.x_min_max, torch.tensor([-1.1, 2.9]))
    with pytest.raises(ValueError, match="quant_mode = 'even': pass one of"):
        QuantAct(quant_mode="even")


def test_a_student_begins_with_layers_of_its_teacher() -> None:
    student, teacher = (nn.ModuleDict({"h": nn.ModuleList(nn.Linear(2, 2) for _ in range(n))}) for n in (1, 3))
    reduction = {"enabled": True, "module_name_prefix": "h", "teacher_layer": [2]}
    student_initialization(student, teacher, {"compression_training": {"layer_reduction": reduction}})
    assert torch.equal(student["h"][0].weight, teacher["h"][2].weight)


def test_conv1d_becomes_linear() -> None:
    transformers = pytest.importorskip("transformers.pytorch_utils")
    torch.manual_seed(1)
    made = nn.ModuleDict({"fc": transformers.Conv1D(6, 4)})
    x = torch.randn(2, 4)
    expected = made["fc"](x)
    assert convert_conv1d_to_linear(made, transformers.Conv1D) is made
    assert type(made["fc"]) is nn.Linear
    torch.testing.assert_close(made["fc"](x), expected)
