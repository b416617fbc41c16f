"""Sizes, plans and groups of models that several ranks answer with; what does not go together, before any message."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zcomm
import zengine.deepspeed as deepspeed
import zpartition
from zcomm.testing import run_ranks
from zengine.build.agreement import RanksDisagree
from zengine.deepspeed.inference import splitting
from zengine.deepspeed.inference.config import DeepSpeedInferenceConfig
from zengine.deepspeed.inference.parallel import NO_GROUP, ParallelGroup
from zpartition.tensor import Column, Replicated, Row, Rule, TensorPlan
from zpartition.testing.expert_models import MoELanguageModel as Experts
from zpartition.testing.tensor_models import PLAN, Block, Gated, Grouped, Language

TOKENS = torch.arange(14).view(2, 7) % 20


class Runnable(Language):
    """One whose plan can be inferred."""

    @property
    def dummy_inputs(self) -> dict[str, Tensor]:
        return {"tokens": TOKENS}


class Pair(nn.Module):
    """What a wrong plan mixes: the norm between the layers is over all columns."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 4)
        self.dummy_inputs = {"x": torch.rand(2, 4)}

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.norm(self.up(x)))
        return out


class Mpu:
    def get_model_parallel_group(self) -> Any:
        return dist.group.WORLD


def _answers() -> dict[str, tuple[float, int]]:
    """The largest difference from one process, and the elements held, for each way to say how layers are split."""
    expected = Language()(TOKENS)
    policy = {Block: ("attention.o_proj", "proj", "attention.dense", "mlp.down")}
    specs = {"layer_specs": [{"patterns": [r".*mlp\.(gate|up)\.weight"]}, {"patterns": [r".*down\.weight"]}]}
    specs["layer_specs"][1]["partition_type"] = "row"
    ways: dict[str, tuple[Language, dict[str, Any]]] = {
        "plan": (Language(), {"tensor_parallel": {"tp_size": 2, "partition_config": PLAN}}),
        "specs": (Language(), {"tp": {"tp_size": 2, "tp_grain_size": 4, "partition_config": specs}}),
        "policy": (Runnable(), {"mp_size": 2, "injection_policy": policy}),
        "inferred": (Runnable(), {"tensor_parallel": 2}),
        "mpu": (Runnable(), {"mpu": Mpu()}),
        "groups": (Runnable(), {"mpu": zcomm.Groups.of(zcomm.Degrees(tensor=2)), "mp_size": 2}),
        "group": (Runnable(), {"tensor_parallel": {"tp_group": dist.group.WORLD}}),
    }
    found = {}
    for way, (model, given) in ways.items():
        engine = deepspeed.init_inference(model, dtype=torch.float32, **given)
        numel = sum(param.numel() for param in model.parameters())
        found[way] = (float((engine(TOKENS) - expected).abs()), numel)
    return found


def test_a_plan_comes_from_the_config_the_model_or_a_run():
    whole = sum(param.numel() for param in Language().parameters())
    found = run_ranks(_answers, 2)
    for way in found[0]:
        assert max(rank[way][0] for rank in found) < 1e-5, way
        numel = sum(rank[way][1] for rank in found)
        assert whole < numel < 2 * whole, way
    mlp = 3 * sum(param.numel() for name, param in Gated().named_parameters() if name != "down.bias")
    assert sum(rank["specs"][1] for rank in found) == 2 * whole - mlp


def _refusals() -> None:
    log: list[zcomm.Record] = []
    model, alone = Runnable(), dist.new_group([zcomm.group_rank()], use_local_synchronization=True)

    def refused(told: str, given: dict[str, Any], model: nn.Module = model) -> None:
        with pytest.raises(ValueError, match=told):
            deepspeed.init_inference(model, dtype=torch.float32, **given)

    with zcomm.traced(log):
        refused("tp_size = 3 does not divide the 2 ranks of this run: choose one of 1, 2, or start", {"mp_size": 3})
        refused("ep_size = 4 does not divide the 2 ranks", {"moe": {"ep_size": 4}})
        refused(r"tp_size = 2, but the given tensor group has 1 ranks", {"tp": {"tp_size": 2, "tp_group": alone}})
        refused(r"mpu= is a object without get_model_parallel_group", {"mpu": object()})
        refused("1 key-value heads, which cannot be split over 2", {"mp_size": 2}, _Few())
        refused("no experts found in Runnable", {"ep_size": 2})
        refused(r"moe_experts = \[8\], but .* has 4 experts", {"ep_size": 2, "moe_experts": 8}, Experts())
        refused(r"but it has no dummy_inputs.*injection_policy=\{Block", {"mp_size": 2}, Language())
        refused("pattern 'nothing' fits no weight", {"tp": {"tp_size": 2, "partition_config": _spec("nothing")}})
        refused("in a Block is called 'wo'; there are q_proj", {"mp_size": 2, "injection_policy": {Block: "wo"}})
    assert not log
    refused("does not fit Pair", {"tp": {"tp_size": 2, "partition_config": _PAIR}}, Pair())
    with pytest.raises(RanksDisagree, match=r"rank 1 has \[2\.weight"):
        deepspeed.init_inference(
            nn.Sequential(*_layers(2 + zcomm.group_rank())), mp_size=2, tp={"partition_config": _EMPTY}
        )
    assert zpartition.model_parallel_group_of(model).size == 1


class _Few(Runnable):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = Block(Grouped(4, 1)).double()


_PAIR = TensorPlan([Rule("up", Column()), Rule("down", Row())])
_EMPTY = TensorPlan([Rule("0", Column(gathers=True)), Rule("*", Replicated())])


def _layers(count: int) -> list[nn.Module]:
    return [nn.Linear(4, 4) for _ in range(count)]


def _spec(pattern: str) -> dict[str, Any]:
    return {"layer_specs": [{"patterns": [pattern]}]}


def test_what_does_not_go_together_is_refused_with_the_numbers_and_before_any_message():
    run_ranks(_refusals, 2)


def _already(caplog_level: int) -> list[str]:
    """What is said of models that are split already."""
    told: list[str] = []
    handler = logging.Handler(caplog_level)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    model = deepspeed.tp_model_init(Language(), 2, config=PLAN)
    logging.getLogger("zengine").addHandler(handler)
    try:
        again = [deepspeed.init_inference(model, dtype=torch.float32, tensor_parallel=2)(TOKENS) for _ in range(2)]
    finally:
        logging.getLogger("zengine").removeHandler(handler)
    assert torch.equal(*again)
    torch.testing.assert_close(again[0].double(), Language()(TOKENS), rtol=0, atol=1e-5)
    with pytest.raises(
        ValueError,
        match=r"layers are already split over ranks \[0, 1\], and the config asks for ranks \[0, 1, 2, 3\]",
    ):
        splitting._pending(ParallelGroup(4, key="mp_size"), [zpartition.model_parallel_group_of(model)], "layers")
    assert splitting._pending(NO_GROUP, [zpartition.model_parallel_group_of(model)], "layers") == NO_GROUP
    return told


def test_a_model_that_is_split_already_is_told_and_kept():
    for told in run_ranks(_already, 2, logging.WARNING):
        assert told == ["init_inference: the model's layers are already split over ranks [0, 1] and stay so"] * 2


def _experts() -> tuple[float, int]:
    """Of four ranks: two engines at a time, experts over all, and layers over pairs of them."""
    expected = [Experts()(TOKENS), Language()(TOKENS)]
    rank = zcomm.group_rank()
    model = Experts()
    first = deepspeed.init_inference(model, dtype=torch.float32, moe={"ep_size": 4})
    both = deepspeed.init_inference(Language(), dtype=torch.float32, tp={"tp_size": 2, "partition_config": PLAN})
    mixed = Experts()
    plan = TensorPlan([Rule("head", Column(gathers=True)), Rule("**", Replicated())])
    given = {"tensor_parallel": {"tp_size": 2, "partition_config": plan}, "ep_size": 2}
    last = deepspeed.init_inference(mixed, dtype=torch.float32, **given)
    assert zcomm.group_size(zpartition.model_parallel_group_of(both.module).group) == 2
    own = [engine(TOKENS + (rank // 2 if engine is first else 0)) for engine in (first, both, last)]
    wanted = [Experts()(TOKENS + rank // 2), expected[1], expected[0]]
    again = zpartition.whole_state_dict(mixed)
    assert all(torch.equal(again[name], value.float()) for name, value in Experts().state_dict().items())
    with pytest.raises(ValueError, match=r"experts are already split over ranks"):
        deepspeed.init_inference(mixed, dtype=torch.float32, ep_size=4)
    return max(float((a - b).abs()) for a, b in zip(own, wanted)), len(next(model.blocks[0].moe.experts.parameters()))


def test_experts_are_shared_out_beside_other_engines_and_split_layers():
    for worst, local in run_ranks(_experts, 4):
        assert worst < 1e-5
        assert local == 1


def test_one_process_is_told_how_many_are_needed(monkeypatch: pytest.MonkeyPatch):
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    parallelism = DeepSpeedInferenceConfig(mp_size=2).parallelism
    with pytest.raises(ValueError, match=r"does not divide the 1 rank of this run.*torchrun --nproc-per-node 2"):
        splitting.plan_split(Language(), parallelism)
    whole = DeepSpeedInferenceConfig(mp_size=1).parallelism
    assert splitting.plan_split(Language(), whole).plan is None
