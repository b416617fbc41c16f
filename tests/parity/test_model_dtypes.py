"""Models with a dtype of their own and a config without dtypes train as in plain torch, at every stage.

The oracle is a plain torch loop.  float64 models compute in float64 at every stage.  16-bit models are trained as in
DeepSpeed: at stage 0 without masters, as in torch; from stage 1 on with float32 masters and, for float16, a dynamic
loss scale.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

import zcomm
import zengine
import zpartition
import zprecision
from zcomm.testing import run_ranks
from zengine.deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
STAGES, ACCUMULATIONS, NUM_STEPS = (0, 1, 2, 3), (1, 3), 4
STRICT = {"stage3_unit_size": 300, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0}
SCALE = 2.0**16  # initial dynamic loss scale of DeepSpeed
NARROW = {"bfloat16": BF16, "float16": F16}


class Net(nn.Module):
    """Two layers and a norm that may have another dtype."""

    def __init__(self, dtype: torch.dtype, part: torch.dtype | None = None) -> None:
        super().__init__()
        torch.manual_seed(7)
        # multiples of 64 elements: torch rounds 16-bit tails differently from whole registers
        self.first, self.norm, self.last = nn.Linear(8, 64), nn.LayerNorm(64), nn.Linear(64, 4, bias=False)
        self.to(dtype)
        self.norm.to(part or dtype)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x.to(self.first.weight.dtype)).to(self.norm.weight.dtype))
        return self.last(torch.tanh(hidden).to(self.last.weight.dtype))


def batch(micro_step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * (micro_step % 6) + rank)
    x = torch.randn(6, 8, generator=generator, dtype=F64)
    return x, x[:, :4].cumsum(1).tanh()


def loss_of(model: Callable[[Tensor], Tensor], micro_step: int, rank: int) -> Tensor:
    x, y = batch(micro_step, rank)
    out = model(x)
    return (out - y.to(out.dtype)).square().mean()


@attrs.frozen(kw_only=True)
class Case:
    """One model, optimizer and clipping."""

    dtype: torch.dtype
    part: torch.dtype | None = None  # of the norm
    optimizer: Any = None  # (parameters) -> torch optimizer, for engine and oracle
    section: dict[str, Any] | None = None  # section of the config that replaces `optimizer`, its oracle
    clip: float = 0.0
    tolerance: float = 1e-12  # relative, of losses and weights


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02, weight_decay=0.1)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adagrad(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(params, lr=0.02, eps=1e-10)


CASES = {
    "float64 AdamW": Case(dtype=F64, optimizer=adamw),
    "float64 AdamW clipped": Case(dtype=F64, optimizer=adamw, clip=0.05),
    "float64 SGD": Case(dtype=F64, optimizer=sgd),
    "float64 SGD clipped": Case(dtype=F64, optimizer=sgd, clip=0.05),
    "float64 config AdamW": Case(
        dtype=F64, optimizer=adamw, section={"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1}}, clip=0.05
    ),
    "float64 config SGD": Case(
        dtype=F64, optimizer=sgd, section={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, clip=0.05
    ),
    "float64 config Adagrad": Case(
        dtype=F64, optimizer=adagrad, section={"type": "Adagrad", "params": {"lr": 0.02, "eps": 1e-10}}
    ),
    "float32 with a float64 part": Case(dtype=F32, part=F64, optimizer=sgd, clip=0.05, tolerance=1e-6),
    "float64 with a float32 part": Case(dtype=F64, part=F32, optimizer=adamw, tolerance=1e-6),
}  # fmt: skip


def oracle(case: Case, world_size: int, accumulation: int) -> tuple[list[float], dict[str, Tensor]]:
    """Return losses and weights of plain torch in one process, on the batches of all ranks."""
    model = Net(case.dtype, case.part)
    optimizer, losses = case.optimizer(model.parameters()), []
    for step in range(NUM_STEPS):
        total = 0.0
        for micro, rank in itertools.product(range(accumulation), range(world_size)):
            loss = loss_of(model, step * accumulation + micro, rank) / (accumulation * world_size)
            loss.backward()
            total += float(loss)
        if case.clip:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, dict(model.named_parameters())


def made(case: Case, stage: int, accumulation: int, **more: Any) -> zengine.Engine:
    model = Net(case.dtype, case.part)
    config = {
        "train_micro_batch_size_per_gpu": 6,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": case.clip,
        "zero_optimization": {"stage": stage, "reduce_at": "micro_step", **(STRICT if stage == 3 else {})},
        **({"optimizer": case.section} if case.section else {}),
        **more,
    }
    own = None if case.section else case.optimizer(model.parameters())
    return zengine.initialize(model=model, optimizer=own, config=config)[0]


def trained(engine: zengine.Engine, accumulation: int, steps: range = range(NUM_STEPS)) -> list[float]:
    losses = []
    for step in steps:
        for micro in range(accumulation):
            engine.backward(loss_of(engine, step * accumulation + micro, zcomm.group_rank()))
            report = engine.step()
        assert report
        losses.append(report.loss)
    return losses


def weights_of(engine: zengine.Engine) -> dict[str, Tensor]:
    with zpartition.gathered(list(engine.module.parameters())):
        return {name: param.detach().clone() for name, param in engine.module.named_parameters()}


def all_of_one_world() -> dict[Any, Any]:
    found = {}
    for (name, case), accumulation in itertools.product(CASES.items(), ACCUMULATIONS):
        expected = oracle(case, zcomm.group_size(), accumulation)
        rows = []
        for stage in STAGES:
            engine = made(case, stage, accumulation)
            rows.append((trained(engine, accumulation), weights_of(engine)))
            engine.close()
        found[name, accumulation] = expected, rows
    return found


@pytest.fixture(scope="module", params=[1, 2])
def world(request: pytest.FixtureRequest) -> dict[Any, Any]:
    return run_ranks(all_of_one_world, request.param)[0]


@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
@pytest.mark.parametrize("name", CASES)
def test_a_model_keeps_its_dtype_and_trains_as_in_plain_torch(
    name: str, accumulation: int, world: dict[Any, Any]
) -> None:
    (losses, weights), rows = world[name, accumulation]
    before = dict(Net(CASES[name].dtype).named_parameters())
    assert max(float((weights[key] - value).abs().max()) for key, value in before.items()) > 1e-3
    for ours, values in rows:
        assert ours == pytest.approx(losses, rel=CASES[name].tolerance, abs=0)
        for key, value in values.items():
            assert value.dtype == weights[key].dtype
            torch.testing.assert_close(value, weights[key], rtol=CASES[name].tolerance, atol=CASES[name].tolerance)


@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
@pytest.mark.parametrize("name", CASES)
def test_stages_agree_to_the_bit(name: str, accumulation: int, world: dict[Any, Any]) -> None:
    _, rows = world[name, accumulation]
    for (losses, weights), (others, values) in itertools.pairwise(rows):
        assert losses == others
        assert all(torch.equal(value, values[key]) for key, value in weights.items())


def small_loss_of(model: Callable[[Tensor], Tensor], micro_step: int) -> Tensor:
    """Loss with gradients that are finite in float16 under DeepSpeed's initial loss scale."""
    return loss_of(model, micro_step, 0).float() / 64


def fast_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=4.0)


def narrow_oracle(dtype: torch.dtype, accumulation: int, *, masters: bool) -> tuple[list[float], list[Tensor]]:
    """Train with plain torch in 16 bits, without masters, or with float32 masters and DeepSpeed's loss scale."""
    model = Net(dtype)
    params = list(model.parameters())
    held = [nn.Parameter(param.detach().float()) for param in params] if masters else params
    scale = SCALE if masters and dtype == F16 else 1.0
    optimizer, losses = fast_sgd(held), []
    for step in range(NUM_STEPS):
        sums, total = [torch.zeros_like(master) for master in held], 0.0
        for micro in range(accumulation):
            loss = small_loss_of(model, step * accumulation + micro)
            (loss / accumulation * scale).backward()
            total += loss.item() / accumulation
            for added, param in zip(sums, params):
                added += param.grad
                param.grad = None
        for master, added in zip(held, sums):
            master.grad = added / scale
        optimizer.step()
        optimizer.zero_grad()
        if masters:
            for param, master in zip(params, held):
                param.data.copy_(master)
        losses.append(total)
    return losses, params


def narrow_losses(engine: zengine.Engine, accumulation: int) -> list[float]:
    losses = []
    for step in range(NUM_STEPS):
        for micro in range(accumulation):
            engine.backward(small_loss_of(engine, step * accumulation + micro))
            report = engine.step()
        losses.append(report.loss)
    return losses


@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", NARROW)
def test_16_bit_weights_have_no_masters_at_stage_0_and_masters_from_stage_1_on(
    name: str, stage: int, accumulation: int
) -> None:
    losses, weights = narrow_oracle(NARROW[name], accumulation, masters=stage > 0)
    engine = made(Case(dtype=NARROW[name], optimizer=fast_sgd), stage, accumulation)
    assert narrow_losses(engine, accumulation) == pytest.approx(losses, rel=1e-6)
    assert all(torch.equal(value, weight) for value, weight in zip(weights_of(engine).values(), weights))
    assert engine.plan.scaling == (
        zprecision.DynamicScaling() if stage and name == "float16" else zprecision.Unscaled()
    )
    assert not engine.fp16_enabled()
    assert not engine.bfloat16_enabled()
    assert engine.get_data_types()[0] == NARROW[name]
    engine.close()


# Losses of DeepSpeed 0.19.8 on a CPU: (dtype, ZeRO from stage 1 on) -> losses of one process without accumulation
OF_DEEPSPEED = {
    ("bfloat16", False): [0.01165771484375, 0.0089111328125, 0.01019287109375, 0.01007080078125],
    ("bfloat16", True): [0.01165771484375, 0.0089111328125, 0.01019287109375, 0.010009765625],
    ("float16", True): [0.01166534423828125, 0.00893402099609375, 0.0102081298828125, 0.01001739501953125],
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", NARROW)
def test_16_bit_weights_have_the_losses_of_deepspeed(name: str, stage: int) -> None:
    if (name, stage > 0) not in OF_DEEPSPEED:
        pytest.skip("DeepSpeed reduces no float16 gradients on a CPU at stage 0")
    engine = made(Case(dtype=NARROW[name], optimizer=fast_sgd), stage, 1)
    assert narrow_losses(engine, 1) == pytest.approx(OF_DEEPSPEED[name, stage > 0], rel=1e-6)
    engine.close()


CONFIGURED = CASES["float64 config AdamW"]


def saved_and_loaded(folder: str) -> dict[str, Any]:
    """Save a float64 run at stage 2, continue it, and resume the checkpoint at stage 3."""
    engine = made(CONFIGURED, 2, 1)
    trained(engine, 1)
    engine.save_checkpoint(folder, tag="wide")
    engine.save_16bit_model(folder, "weights.bin")
    first = next(engine.module.parameters())
    found: dict[str, Any] = {"weights": weights_of(engine), "reached": zpartition.safe_get_full_fp32_param(first)}
    found["moment"] = zpartition.safe_get_full_optimizer_state(first, "exp_avg")
    found["on"] = trained(engine, 1, range(NUM_STEPS, NUM_STEPS + 2))
    engine.close()
    resumed = made(CONFIGURED, 3, 1)
    resumed.load_checkpoint(folder, tag="wide")
    found["resumed"] = weights_of(resumed), trained(resumed, 1, range(NUM_STEPS, NUM_STEPS + 2))
    resumed.close()
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_checkpoints_and_exports_keep_float64_and_resume_at_another_stage_to_the_bit(
    world_size: int, tmp_path: Path
) -> None:
    found = run_ranks(saved_and_loaded, world_size, str(tmp_path))[0]
    weights, (again, losses) = found["weights"], found["resumed"]
    assert found["reached"].dtype == found["moment"].dtype == F64
    assert torch.equal(found["reached"], weights["first.weight"])
    exported = torch.load(tmp_path / "weights.bin")
    plain = get_fp32_state_dict_from_zero_checkpoint(tmp_path, "wide")
    for name, value in weights.items():
        for other in (again, exported, plain):
            assert other[name].dtype == F64
            assert torch.equal(other[name], value)
    assert losses == found["on"]


def test_a_float32_checkpoint_loads_into_a_float64_engine(tmp_path: Path) -> None:
    narrow = made(attrs.evolve(CONFIGURED, dtype=F32), 1, 1)
    trained(narrow, 1)
    narrow.save_checkpoint(tmp_path, tag="narrow")
    saved = weights_of(narrow)
    narrow.close()
    engine = made(CONFIGURED, 2, 1)
    engine.load_checkpoint(tmp_path, tag="narrow")
    for name, value in weights_of(engine).items():
        assert torch.equal(value, saved[name].double())
        assert value.dtype == F64
    trained(engine, 1, range(NUM_STEPS, NUM_STEPS + 1))
    engine.close()


@pytest.mark.parametrize("stage", STAGES)
def test_data_types_make_a_float32_model_float64(stage: int) -> None:
    case = Case(dtype=F32, section=CONFIGURED.section, clip=CONFIGURED.clip)
    engine = made(case, stage, 1, data_types={"param_dtype": "fp64", "grad_accum_dtype": "fp64"})
    assert engine.get_data_types() == (F64, F64)
    model = Net(F32).double()
    optimizer, losses = adamw(model.parameters()), []
    for step in range(NUM_STEPS):
        loss = loss_of(model, step, 0)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert trained(engine, 1) == pytest.approx(losses, rel=1e-12)
    engine.close()


def test_sums_may_be_wider_than_weights() -> None:
    engine = made(attrs.evolve(CONFIGURED, dtype=F32), 2, 3, data_types={"grad_accum_dtype": "fp64"})
    assert engine.get_data_types() == (F32, F64)
    losses, _ = oracle(attrs.evolve(CONFIGURED, dtype=F32), 1, 3)
    assert trained(engine, 3) == pytest.approx(losses, rel=1e-5)
    engine.close()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_float64_model_that_is_built_inside_init_keeps_its_dtype(stage: int) -> None:
    with zpartition.Init():
        model = Net(F64)
    config = {
        "train_micro_batch_size_per_gpu": 6,
        "gradient_clipping": 0.05,
        "optimizer": CONFIGURED.section,
        "zero_optimization": {"stage": stage, **(STRICT if stage == 3 else {})},
    }
    engine = zengine.initialize(model=model, config=config)[0]
    assert trained(engine, 1) == pytest.approx(oracle(CONFIGURED, 1, 1)[0], rel=1e-12)
    engine.close()


def test_fused_torch_optimizers_divide_in_float64() -> None:
    case = Case(dtype=F64, optimizer=lambda params: torch.optim.AdamW(params, lr=0.02, fused=True), clip=0.05)
    engine = made(case, 2, 1)
    assert trained(engine, 1) == pytest.approx(oracle(case, 1, 1)[0], rel=1e-12)
    engine.close()
