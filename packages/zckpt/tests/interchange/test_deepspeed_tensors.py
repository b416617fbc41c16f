import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from zckpt import CheckpointInputError, CheckpointMismatch
from zckpt.containers.torch_file import open_torch_file
from zckpt.interchange.deepspeed_files import TensorParallelRank, open_files
from zckpt.interchange.deepspeed_tensors import MASTER, ShardingRules, StatePart, place_shards, state_parts

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "deepspeed"
CASES = sorted(path.name for path in FIXTURES.glob("zero*"))


def assembled(parts: list[StatePart], key: str) -> dict[str, Tensor]:
    """Every whole tensor; elements that no shard covers are NaN."""
    made: dict[str, Tensor] = {}
    for part in (part for part in parts if part.key == key):
        flat = made.setdefault(part.name, torch.full((math.prod(part.shape),), torch.nan))
        flat[part.span[0] : part.span[1]] = part.tensor.float()
    shapes = {part.name: part.shape for part in parts}
    return {name: flat.view(shapes[name]) for name, flat in made.items()}


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_is_whole_and_its_moments_are_its_own(case: str) -> None:
    """Against DeepSpeed at stage 0, which trained the same model on the same data and keeps everything whole.

    Runs in halves part from it; their masters are compared with the weights that DeepSpeed itself gathered.
    """
    oracle = torch.load(FIXTURES / "zero0_fp32/global_step3/mp_rank_00_model_states.pt", weights_only=True)
    module, states = oracle["module"], oracle["optimizer"]["state"]
    names = ["embed.weight", "body.weight", "body.bias", "norm.weight", "norm.bias", "head.bias"]
    found = open_files(FIXTURES / case / "global_step3")
    parts = state_parts(found.tp_ranks[0])
    masters = assembled(parts, MASTER)
    assert set(masters) == {*names, "frozen.weight", "frozen.bias", "gain"}  # head.weight is embed.weight
    if case.endswith("16"):
        kind = "pytorch_model.bin" if case[4] == "3" else "global_step3/mp_rank_00_model_states.pt"
        with open_torch_file(FIXTURES / case / kind) as gathered:
            module = {name: value.clone() for name, value in gathered.value.get("module", gathered.value).items()}
    for name, value in masters.items():
        assert torch.allclose(value.to(module[name].dtype), module[name], rtol=1e-5, atol=1e-6), name
    if case.endswith("fp32"):
        for key in ("exp_avg", "exp_avg_sq"):
            for index, value in enumerate(assembled(parts, key)[name] for name in names):
                assert torch.allclose(value, states[index][key], rtol=1e-3, atol=1e-7), (key, names[index])
    assert {part.name: part.tensor.item() for part in parts if part.key == "step"} == dict.fromkeys(names, 3.0)
    found.close()


def test_masters_that_do_not_round_to_the_weights_are_refused() -> None:
    """As they would not with the order of DeepSpeed's own param_slice_mappings under round_robin_gradients."""
    found = open_files(FIXTURES / "zero2_bf16/global_step3")
    tp_rank = found.tp_ranks[0]
    first, second = tp_rank.model["param_shapes"]
    swapped = {name: second[name] for name in ("body.bias", "norm.weight", "norm.bias", "head.bias")}
    wrong = TensorParallelRank(({**tp_rank.model, "param_shapes": [first, swapped]},), tp_rank.shards)
    with pytest.raises(CheckpointMismatch, match=r"the masters of 'norm\.(weight|bias)' do not round to its weights"):
        state_parts(wrong)
    state_parts(tp_rank)
    found.close()


# -- tensor parallelism: made here, since a real one needs another framework -----------------------

WHOLE = {"qkv.weight": torch.arange(24.0).view(6, 4), "out.weight": torch.arange(20.0).view(4, 5),
         "norm.weight": torch.arange(4.0)}  # fmt: skip
RULES = {"qkv.*": 0, "*out.weight": 1}


def cell_of(weights: dict[str, Tensor], ranks: int = 2) -> TensorParallelRank:
    """A tensor-parallel rank at stage 2 as DeepSpeed writes it: flat, cut over `ranks`."""
    flat = torch.cat([value.reshape(-1) for value in weights.values()])
    flat = torch.nn.functional.pad(flat, (0, -flat.numel() % (2 * ranks)))
    masters = flat.chunk(ranks)
    shards: tuple[Any, ...] = tuple(
        {
            "zero_stage": 2,
            "single_partition_of_fp32_groups": [mine],
            "base_optimizer_state": {"state": {0: {"step": 5, "exp_avg": mine + 100}}, "param_groups": [{}]},
        }
        for mine in masters
    )
    shapes = {name: tuple(value.shape) for name, value in weights.items()}
    return TensorParallelRank(({"module": dict(weights), "param_shapes": [shapes]},), shards)


def tp_ranks() -> list[list[StatePart]]:
    halves = [
        {"qkv.weight": WHOLE["qkv.weight"][lo : lo + 3].contiguous(), "norm.weight": WHOLE["norm.weight"],
         "out.weight": WHOLE["out.weight"][:, cut].contiguous()}
        for lo, cut in ((0, slice(0, 2)), (3, slice(2, 5)))
    ]  # fmt: skip
    return [state_parts(cell_of(each)) for each in halves]


def test_tensor_parallel_ranks_are_boxes_of_global_tensors() -> None:
    made: dict[tuple[str, str], Tensor] = {}
    for key, shard in place_shards(tp_ranks(), ShardingRules(RULES)):
        target = made.setdefault((key, shard.name), torch.full(shard.global_shape, torch.nan))
        if not shard.box:
            target.copy_(shard.tensor[0])
            continue
        view = target[tuple(slice(lo, hi) for lo, hi in shard.box)]
        flat = view.reshape(-1).clone()
        flat[shard.span[0] : shard.span[1]] = shard.tensor
        view.copy_(flat.view(view.shape))
    for name, value in WHOLE.items():
        assert torch.equal(made[MASTER, name], value)
        assert torch.equal(made["exp_avg", name], value + 100)
        assert made["step", name].item() == 5


def test_tensor_parallel_ranks_need_rules_that_hold() -> None:
    with pytest.raises(CheckpointInputError, match=r"2 tensor-parallel ranks.*pass tensor_parallel"):
        list(place_shards(tp_ranks(), ShardingRules({})))
    with pytest.raises(CheckpointMismatch, match=r"'qkv\.weight' weight differs between tensor-parallel ranks"):
        list(place_shards(tp_ranks(), ShardingRules({"*out.weight": 1})))
    with pytest.raises(CheckpointMismatch, match=r"'out\.weight' have shapes that cannot be joined along dim 0"):
        list(place_shards(tp_ranks(), ShardingRules({"qkv.*": 0, "out.*": 0})))
    with pytest.raises(CheckpointInputError, match=r"tensor_parallel\['qkv\.\*'\] is 2"):
        list(place_shards(tp_ranks(), ShardingRules({"qkv.*": 2})))


def test_numbers_without_names_are_refused_when_shapes_do_not_tell() -> None:
    model = {
        "module": {"a": torch.zeros(2), "b": torch.ones(2)},
        "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": [0]}]},
    }
    with pytest.raises(CheckpointInputError, match=r"stage 0 saves the optimizer's state by number.*2 ways"):
        state_parts(TensorParallelRank((model,), ()))


def test_parameters_without_a_state_are_passed_over() -> None:
    module = {"used": torch.zeros(2), "idle": torch.zeros(3), "last": torch.zeros(4)}
    states = {0: {"exp_avg": torch.ones(2), "step": 1}, 1: {}, 2: {"exp_avg": torch.ones(4), "step": None}}
    model = {"module": module, "optimizer": {"state": states, "param_groups": [{"params": [0, 1, 2]}]}}
    found = {(part.name, part.key) for part in state_parts(TensorParallelRank((model,), ()))}
    assert {pair for pair in found if pair[1] != MASTER} == {
        ("used", "exp_avg"),
        ("used", "step"),
        ("last", "exp_avg"),
    }
    model["optimizer"]["state"] = {}  # SGD without momentum
    assert {part.key for part in state_parts(TensorParallelRank((model,), ()))} == {MASTER}
