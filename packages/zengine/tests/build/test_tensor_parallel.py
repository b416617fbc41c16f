"""Tensor-parallel split by the config, the model's plan or inference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zcomm
import zengine
import zpartition
from zcomm.testing import run_ranks
from zengine.build.tensor_parallel import first_batch
from zpartition.tensor import ColumnLinear, RowLinear
from zpartition.testing.tensor_models import Gated, Grouped, Language

CONFIG = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
SPECS = [
    {"patterns": [r".*\.(gate|up)\.weight"], "partition_type": "column"},
    {"patterns": [r".*\.down\.weight"], "partition_type": "row"},
]


class Rows(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((3, 24), float(index))


class Words(Rows):
    def __getitem__(self, index: int) -> Tensor:
        return torch.arange(8) + index


def model(inner: int = 8, **attributes: Any) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(Gated(inner), nn.LayerNorm(24), Grouped())
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def nameless() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 24))


def split(module: nn.Module, section: dict[str, Any], data: Any = None) -> tuple[list[str], list[int]]:
    """Layers that are split, and this rank's numbers of outputs of the columns among them."""
    config = {**CONFIG, "tensor_parallel": {"autotp_size": 2, **section}}
    engine, *_ = zengine.initialize(model=module, training_data=data, config=config)
    kinds = {name: layer for name, layer in engine.module.named_modules() if hasattr(layer, "placement")}
    columns = [layer.out_features for layer in kinds.values() if isinstance(layer, ColumnLinear)]
    engine.close()
    return list(kinds), columns


def _ways() -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["inferred"] = split(model(), {}, Rows())
    found["specs alone"] = split(
        model(), {"partition_config": {"layer_specs": SPECS, "use_default_specs": False}}, Rows()
    )
    found["specs and the rest"] = split(model(), {"partition_config": {"layer_specs": SPECS}}, Rows())
    found["specs and names"] = split(model(), {"partition_config": {"layer_specs": SPECS}})
    found["names"] = split(model(), {})
    with zpartition.Init():
        empty = model()
    found["names without memory"] = split(empty, {}, Rows())
    plan = {"0.gate": "colwise", "0.up": "colwise", "0.down": "rowwise"}
    found["the model's own"] = split(model(tp_plan=plan), {})
    with zpartition.Init():
        empty = model(tp_plan=plan)
    found["without memory"] = split(empty, {})
    found["coarse"] = split(model(48, tp_plan=plan), {"tp": {"tp_grain_size": 16}})
    found["vocabulary"] = split(Language().float(), {"vocab_parallel_lm_head": True}, Words())[0]
    return found


def test_every_source_of_a_plan_is_heard() -> None:
    one, other = run_ranks(_ways, 2)
    mlp = ["0.gate", "0.up", "0.down"]
    heads = ["2.q_proj", "2.k_proj", "2.v_proj", "2.o_proj"]
    assert one["inferred"] == (mlp + heads, [4, 4, 16, 8, 8])  # 3 groups of heads: 2 here
    assert other["inferred"] == (mlp + heads, [4, 4, 8, 4, 4])
    assert one["specs alone"] == one["the model's own"] == (mlp, [4, 4])
    assert one["specs and names"] == one["names"] == one["names without memory"] == one["inferred"]
    assert one["without memory"] == one["the model's own"]
    assert one["specs and the rest"] == one["inferred"]
    assert (one["coarse"][1], other["coarse"][1]) == ([32, 32], [16, 16])
    assert {"embed", "head"} < set(one["vocabulary"])


def _mistakes() -> list[str]:
    """Messages, each before any collective, then that ranks with other models are told so."""
    found = []
    for module, section in (
        (nn.Sequential(Grouped(heads=4, kv_heads=1)), {"partition_config": {"layer_specs": [
            {"patterns": [r".*[qkv]_proj.*"]}, {"patterns": [".*o_proj.*"], "partition_type": "row"}]}}),
        (model(), {"partition_config": {"layer_specs": SPECS, "strict_mode": True, "use_default_specs": False}}),
        (model(), {"partition_config": {"layer_specs": [{"patterns": ["nothing"]}]}}),
        (model(), {"partition_config": {"layer_specs": [{"patterns": [".*gate.*"], "shape": [3, -1]}]}}),
        (model(tp_plan={"0.down": "diagonal_row"}), {}),
        (nameless(), {}),
    ):  # fmt: skip
        log: list[Any] = []
        with zcomm.traced(log), pytest.raises(ValueError, match=r".") as caught:
            split(module, section)
        found.append(f"{len(log)} messages: {caught.value}")
    with zpartition.Init():
        empty = nameless()
    with pytest.raises(ValueError, match=r"it was built inside zero.Init .* or name its layers in tensor_parallel"):
        split(empty, {}, Rows())
    with pytest.raises(zengine.RanksDisagree, match=r"0\.gate\.weight \(8, 24\).*0\.gate\.weight \(10, 24\)"):
        split(model(8 + 2 * zcomm.group_rank()), {}, Rows())
    return found


def test_what_cannot_be_split_is_told_with_its_numbers_before_any_message() -> None:
    expected = [
        "0 messages: 0 has 1 key-value heads, which cannot be split over 2 tensor ranks",
        "0 messages: the tensor-parallel plan covers 3 layers and leaves out 4 linear ones: 2.q_proj",
        "0 messages: partition_config.layer_specs[0]: pattern 'nothing' fits no weight of the model",
        "0 messages: partition_config.layer_specs[0]: the 8 rows of 0.gate cannot be split into 3 equal blocks",
        "0 messages: tp_plan: style 'diagonal_row' of '0.down' is not known",
        "0 messages: the tensor-parallel plan of Sequential cannot be inferred: it cannot be run, since there is no "
        "small input; and none of the 2 linear layers of Sequential has the name of a last projection (o_proj, ",
    ]
    for found in run_ranks(_mistakes, 2):
        for text, begins in zip(found, expected, strict=True):
            assert text.startswith(begins)


def _whole() -> tuple[str, int, int]:
    config = {**CONFIG, "tensor_parallel": {"autotp_size": 1}}
    engine, _, loader, _ = zengine.initialize(model=model(), training_data=Rows(), config=config)
    found = type(engine.module[0].down).__name__, len(loader), engine.dp_world_size
    engine.close()
    return found


def test_a_degree_of_one_leaves_the_model_alone() -> None:
    assert run_ranks(_whole, 2) == [("Linear", 1, 2)] * 2
    assert RowLinear.__name__ != "Linear"


def test_a_sample_is_a_batch_of_one() -> None:
    assert first_batch(Rows(), None, torch.device("cpu")).shape == (1, 3, 24)
    assert first_batch(Rows(), lambda items: {"x": items[0]}, torch.device("cpu"))["x"].shape == (3, 24)
    assert first_batch(None, None, torch.device("cpu")) is None
    assert first_batch(iter([1]), None, torch.device("cpu")) is None
