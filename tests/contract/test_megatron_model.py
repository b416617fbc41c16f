"""Models that Megatron-style code has split itself, given to the engine with their `mpu`.

Stages x accumulation x data ranks are compared with the unsplit model in one process, with the bound of
test_tensor_engine.py.  Checkpoints and exports are compared bit for bit with the unsplit model's tensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_model import MegatronLike, Mpu, NewMpu
from safetensors.torch import load_file
from torch import Tensor, nn

import zcomm
import zengine
from zcomm.testing import end_ranks, run_ranks
from zengine import deepspeed

STEPS, CLIP, BOUND = 3, 0.1, 2e-5


def config(stage: int, accumulation: int = 2, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20},
        **more,
    }


def tokens(step: int, micro: int, replica: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + replica)
    return torch.randint(0, 30, (2, 8), generator=generator)


def made(model: nn.Module, given: dict[str, Any], mpu: Any) -> zengine.Engine:
    return zengine.initialize(model=model, config=given, mpu=mpu)[0]


def train(engine: zengine.Engine, replica: int, first: int = 0, accumulation: int = 2) -> list[float]:
    """Return the loss of each step, over all replicas, and the last gradient norm."""
    losses = []
    for step in range(first, first + STEPS):
        for micro in range(accumulation):
            engine.backward(engine(tokens(step, micro, replica)))
            report = engine.step()
        losses.append(report.loss)
    return [*losses, float(engine.get_global_grad_norm())]


def train_alone(replicas: int, accumulation: int, dtype: torch.dtype = torch.float32, *, steps: int) -> list[float]:
    """Return the same from the unsplit model and plain PyTorch in one process."""
    model = MegatronLike().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    losses, norm = [], 0.0
    for step in range(steps):
        total = 0.0
        for micro in range(accumulation):
            for replica in range(replicas):
                loss = model(tokens(step, micro, replica)) / (replicas * accumulation)
                loss.backward()
                total += loss.item()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), CLIP))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return [*losses, norm]


@pytest.fixture(autouse=True)
def _fresh_ranks() -> Any:
    yield
    end_ranks()  # the groups of each mpu stay


def _curves(
    cases: list[tuple[int, int]], dtype: torch.dtype = torch.float32, strided: bool = False
) -> list[list[float]]:
    found, mpu = [], Mpu(2, strided=strided)
    for stage, accumulation in cases:
        given = mpu if stage % 2 else NewMpu(mpu)
        engine = made(MegatronLike(mpu).to(dtype), config(stage, accumulation), given)
        groups = engine.parts.groups
        assert groups.tensor() is mpu.tensor  # the mpu's own groups, for all messages
        assert engine.parts.partition.group is groups.data() is mpu.data
        found.append(train(engine, mpu.get_data_parallel_rank(), 0, accumulation))
        engine.close()
    return found


CASES = [(stage, accumulation) for accumulation in (1, 3) for stage in range(4)]


@pytest.mark.parametrize("strided", [False, True], ids=["neighbours", "strided"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_curves_and_norms_are_those_of_the_unsplit_model(world_size: int, strided: bool) -> None:
    expected = {each: train_alone(world_size // 2, each, steps=STEPS) for each in (1, 3)}
    assert min(each[-1] for each in expected.values()) > CLIP  # clips
    for rank in run_ranks(_curves, world_size, CASES, torch.float32, strided):
        for (stage, accumulation), curve in zip(CASES, rank, strict=True):
            assert curve == pytest.approx(expected[accumulation], abs=BOUND), (stage, accumulation)


def test_in_float64_they_are_those_of_float64() -> None:
    expected = train_alone(1, 3, torch.float64, steps=STEPS)
    for curve in run_ranks(_curves, 2, [(0, 3), (3, 3)], torch.float64)[0]:
        assert curve == pytest.approx(expected, rel=1e-11)


# -- checkpoints and exports ---------------------------------------------------------------------


def _parts(engine: zengine.Engine) -> dict[str, Tensor]:
    """Return this rank's slices of weights and moments."""
    found = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
    for name, param in engine.module.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            state = deepspeed.utils.safe_get_full_optimizer_state(param, key)
            assert state is not None
            found[f"{key} {name}"] = state.clone()
    return found


def _there_and_back(root: Path) -> list[list[float]]:
    """Train steps 0-2 split at stage 2, 3-5 unsplit on two replicas at stage 1, 6-8 split at stage 0."""
    mpu = Mpu(2)
    split = made(MegatronLike(mpu), config(2), mpu)
    found = [train(split, 0)]
    split.save_checkpoint(str(root / "split"))
    parts, whole_state = _parts(split), dict(split.state_dict())
    split.close()

    whole = made(MegatronLike(seed=4), config(1, 1), Mpu(1))
    whole.load_checkpoint(str(root / "split"))
    assert whole.global_steps == STEPS
    for name, value in whole.module.state_dict().items():
        assert torch.equal(value, whole_state[name]), name
    whole.save_checkpoint(str(root / "whole"))

    split = made(MegatronLike(mpu, seed=5), config(0), mpu)
    split.load_checkpoint(str(root / "whole"))
    for name, value in _parts(split).items():
        assert torch.equal(value, parts[name]), name  # bit for bit
    split.close()

    losses = []
    for step in range(STEPS, 2 * STEPS):
        whole.backward(whole(tokens(step, zcomm.group_rank(), 0)))
        losses.append(whole.step().loss)
    found.append([*losses, float(whole.get_global_grad_norm())])
    whole.save_checkpoint(str(root / "later"))
    whole.close()

    split = made(MegatronLike(mpu, seed=6), config(3), mpu)
    split.load_checkpoint(str(root / "later"))
    found.append(train(split, 0, 2 * STEPS))
    split.close()
    return found


def test_a_checkpoint_loads_unsplit_and_split_again(tmp_path: Path) -> None:
    expected = train_alone(1, 2, steps=3 * STEPS)[:-1]
    for found in run_ranks(_there_and_back, 2, tmp_path):
        assert [loss for part in found for loss in part[:-1]] == pytest.approx(expected, abs=10 * BOUND)


def _exported(root: Path) -> dict[int, bool]:
    mpu, found = Mpu(2), {}
    for stage in (0, 1, 2, 3):
        engine = made(MegatronLike(mpu), config(stage), mpu)
        engine.save_16bit_model(str(root), f"{stage}.safetensors")
        unsplit = MegatronLike().state_dict()
        state = engine.state_dict()
        assert list(state) == list(unsplit)
        assert all(torch.equal(state[name], value) for name, value in unsplit.items())
        changed = {name: value + 1 for name, value in unsplit.items()}
        engine.load_state_dict(changed)
        found[stage] = all(torch.equal(value, changed[name]) for name, value in engine.state_dict().items())
        own = {n: p.shape for n, p in MegatronLike(mpu).named_parameters()}
        assert {n: p.shape for n, p in engine.module.named_parameters()} == own  # slices, as the layers need them
        engine.close()
    return found


def test_exported_weights_are_those_of_the_unsplit_model(tmp_path: Path) -> None:
    for found in run_ranks(_exported, 2, tmp_path):
        assert found == dict.fromkeys(range(4), True)
    unsplit = MegatronLike().state_dict()
    for stage in range(4):
        file = load_file(str(tmp_path / f"{stage}.safetensors"))
        assert file.keys() == unsplit.keys()
        assert all(torch.equal(file[name], value) for name, value in unsplit.items())


# -- deferred weights, random numbers, overflow --------------------------------------------------


def _deferred() -> list[list[float]]:
    mpu, found = Mpu(2), []
    for stage in (1, 3):
        with deepspeed.zero.Init(mpu=mpu):
            model = MegatronLike(mpu)
        engine = deepspeed.initialize(model=model, config=config(stage), mpu=mpu)[0]
        assert deepspeed.utils.groups.get_model_parallel_world_size() == 2
        found.append(train(engine, mpu.get_data_parallel_rank()))
        engine.close()
    return found


def test_models_built_without_memory_train_alike() -> None:
    expected = train_alone(2, 2, steps=STEPS)
    for curves in run_ranks(_deferred, 4):
        for curve in curves:
            assert curve == pytest.approx(expected, abs=BOUND)


def _dropped(root: Path) -> tuple[list[float], list[float]]:
    mpu = Mpu(2)
    engine = made(MegatronLike(mpu, drop=0.3), config(2), mpu)
    torch.manual_seed(zcomm.group_rank())  # the masks of split activations differ
    train(engine, 0)
    engine.save_checkpoint(str(root))
    after = train(engine, 0, STEPS)
    engine.close()
    again = made(MegatronLike(mpu, drop=0.3), config(2), mpu)
    torch.manual_seed(17)
    again.load_checkpoint(str(root))
    resumed = train(again, 0, STEPS)
    again.close()
    return after, resumed


def test_each_rank_resumes_its_own_random_numbers(tmp_path: Path) -> None:
    for after, resumed in run_ranks(_dropped, 2, tmp_path):
        assert after == resumed  # bit for bit


def _overflown(strided: bool) -> list[Any]:
    mpu, found = Mpu(2, strided=strided), []
    engine = made(
        MegatronLike(mpu), config(1, 1, fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1}), mpu
    )
    for explodes in (True, False):
        engine.backward(engine(tokens(0, 0, mpu.get_data_parallel_rank())))
        if explodes and dist.get_rank() == 3:
            for gradient in engine.parts.partition.reducer.gradients:
                gradient.kept[0] = torch.inf
        report = engine.step()
        found += [report.applied, report.loss_scale]
    engine.close()
    return found


def test_an_overflow_on_one_rank_skips_the_update_on_all() -> None:
    assert run_ranks(_overflown, 4, False) == [[False, 16.0, True, 8.0]] * 4


# -- errors --------------------------------------------------------------------------------------


def _refused() -> dict[str, str]:
    mpu, found = Mpu(2), {}
    rank = mpu.get_model_parallel_rank()

    def expect(name: str, model: nn.Module, stage: int = 1) -> None:
        with pytest.raises(ValueError) as caught:
            made(model, config(stage), mpu)
        found[name] = str(caught.value)

    for stage in (0, 3):
        model: Any = MegatronLike(mpu)
        with torch.no_grad():
            model.layers[1].norm1.weight[5] += rank  # one element
        expect(f"values, stage {stage}", model, stage)
    model = MegatronLike(mpu)
    model.register_buffer("first_row", torch.tensor(rank * 15))
    expect("buffer", model)
    model = MegatronLike(mpu)
    model.layers[0].mlp.down.weight.tensor_model_parallel = False
    expect("forgotten mark", model)
    model = MegatronLike(mpu)
    model.embed.weight.partition_dim = rank
    expect("other dimensions", model)
    model = MegatronLike(mpu)
    for param in model.parameters():
        vars(param).clear()
    expect("no marks", model)
    return found


def test_what_tensor_ranks_hold_differently_is_named() -> None:
    one, other = run_ranks(_refused, 2)
    assert one == other
    for stage in (0, 3):
        assert "have different values of layers.1.norm1.weight, which is whole" in one[f"values, stage {stage}"]
    assert "persistent=False" in one["buffer"]
    assert "first_row" in one["buffer"]
    # a slice without a mark has other values on each rank
    assert "have different values of layers.0.mlp.down.weight, which is whole" in one["forgotten mark"]
    assert "param.tensor_model_parallel = True" in one["forgotten mark"]
    assert "embed.weight is [15, 24], split along dimension 0" in one["other dimensions"]
    assert "param.partition_dim" in one["no marks"]
    assert '"autotp_size": 2' in one["no marks"]


def _other_batches() -> str:
    mpu = Mpu(2)
    engine = made(MegatronLike(mpu), config(1, 1), mpu)
    engine.backward(engine(tokens(0, 0, mpu.get_model_parallel_rank())))
    with pytest.raises(ValueError) as caught:
        engine.step()
    engine.close()
    return str(caught.value)


def test_other_batches_on_tensor_ranks_are_named() -> None:
    for message in run_ranks(_other_batches, 2):
        assert "tokens of forward pass 1" in message
