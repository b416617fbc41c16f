"""Precision modes x stages x worlds: as one process in plain torch, equal stages, checkpoints bit for bit.

The oracle of a mode is a plain loop: weights cast, masters beside them, the loss scaled by hand, torch.autocast
around forward.  zoptim updates the masters; its stochastic rounding depends on the value alone, so sharding does not
change it, and its arithmetic has tests of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

import zcomm
import zengine
import zoptim
import zpartition
import zprecision
from zcomm.testing import run_ranks

NUM_STEPS, RATE = 4, 0.02
STAGES = (0, 1, 2, 3)
STRICT = {"stage3_unit_size": 300, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0}
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@attrs.frozen(kw_only=True)
class Mode:
    """One row of the table."""

    config: dict[str, Any]
    weights: torch.dtype = F32
    masters: torch.dtype = F32
    states: str | None = None  # None: like the masters
    autocast: torch.dtype | None = None
    scale: float = 1.0
    keeps_norm: bool = False
    tolerance: float = 1e-3  # of losses, relative, where two ranks sum narrow gradients; one rank has the same bits

    @property
    def bytes_per_param(self) -> int:
        """Bytes of weights, masters and AdamW's two moments at stage 0."""
        apart = 0 if self.masters == self.weights else self.masters.itemsize
        moment = 2 if self.states == "bf16" else 4
        return self.weights.itemsize + apart + 2 * moment


ON = {"enabled": True}
LOW = {**ON, "bf16_master_weights_and_grads": True}
MODES: dict[str, Mode] = {
    "fp32": Mode(config={}, tolerance=1e-6),
    "bf16": Mode(config={"bf16": ON}, weights=BF16),
    "fp16 dynamic": Mode(
        config={"fp16": {**ON, "initial_scale_power": 6, "loss_scale_window": 2}}, weights=F16, scale=64.0
    ),
    "fp16 static": Mode(config={"fp16": {**ON, "loss_scale": 128}}, weights=F16, scale=128.0),
    "fp16 with narrow masters": Mode(
        config={"fp16": {**ON, "loss_scale": 128, "fp16_master_weights_and_grads": True}},
        weights=F16, masters=F16, states="fp32", scale=128.0,
    ),
    "autocast bf16": Mode(config={"torch_autocast": ON}, autocast=BF16),
    "autocast fp16": Mode(
        config={"torch_autocast": {**ON, "dtype": "fp16", "loss_scale": 128}}, autocast=F16, scale=128.0
    ),
    "autocast bf16 on bf16": Mode(
        config={"bf16": ON, "torch_autocast": ON}, weights=BF16, autocast=BF16
    ),
    "autocast fp16 on fp16": Mode(
        config={"fp16": {**ON, "loss_scale": 128}, "torch_autocast": ON}, weights=F16, autocast=F16, scale=128.0
    ),
    "bf16 with narrow masters": Mode(
        config={"bf16": LOW}, weights=BF16, masters=BF16, states="fp32"
    ),
    "bf16 with narrow masters and states": Mode(
        config={"bf16": {**LOW, "bf16_optimizer_states": True}},
        weights=BF16, masters=BF16, states="bf16",
    ),
    "bf16 but for the norm": Mode(
        config={"bf16": ON, "data_types": {"keep_in_fp32_modules": ["norm"]}},
        weights=BF16, keeps_norm=True,
    ),
    "bf16 with narrow masters but for the norm": Mode(
        config={"bf16": LOW, "data_types": {"keep_in_fp32_modules": ["norm"]}},
        weights=BF16, masters=BF16, states="fp32", keeps_norm=True,
    ),
}  # fmt: skip


class Net(nn.Module):
    """A norm between two layers, and a buffer that training changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(8, 32)
        self.norm = nn.LayerNorm(32)
        self.last = nn.Linear(32, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.last(torch.tanh(self.norm(self.first(x.to(self.first.weight.dtype)))))


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * (step % 2) + rank)
    x = torch.randn(6, 8, generator=generator)
    return x, x[:, :4].cumsum(1).tanh()


def loss_of(model: Callable[[Tensor], Tensor], step: int, rank: int) -> Tensor:
    x, y = batch(step, rank)
    return (model(x).float() - y).square().mean()


def oracle(mode: Mode, world_size: int, num_steps: int) -> list[float]:
    """Return losses of plain torch in one process, on all ranks' batches."""
    model = Net().to(mode.weights)
    if mode.keeps_norm:
        model.norm.float()
        model.norm.register_forward_pre_hook(lambda _, args: (args[0].float(),))
        model.norm.register_forward_hook(lambda _, args, output: output.to(mode.weights))
    params = list(model.parameters())
    is_apart = [param.dtype != mode.masters and param.dtype != F32 for param in params]
    masters = [
        nn.Parameter(param.detach().to(mode.masters)) if apart else param for param, apart in zip(params, is_apart)
    ]
    optimizer = zoptim.AdamW(masters, lr=RATE, weight_decay=0.0, state_dtype=mode.states)
    losses = []
    for step in range(num_steps):
        total, sums = 0.0, [torch.zeros_like(master, dtype=F32) for master in masters]
        for rank in range(world_size):
            with torch.autocast("cpu", dtype=mode.autocast, enabled=mode.autocast is not None):
                loss = loss_of(model, step, rank)
            (loss * mode.scale).backward()
            total += loss.item() / world_size
            for added, param in zip(sums, params):
                added += param.grad.float() / world_size
                param.grad = None
        for master, summed in zip(masters, sums):
            master.grad = summed.to(master.dtype)
        optimizer.grad_scale = torch.tensor(mode.scale)
        optimizer.step()
        optimizer.zero_grad()
        for param, master in zip(params, masters):
            param.data.copy_(master.data)
        losses.append(total)
    return losses


def made(mode: Mode, stage: int) -> zengine.Engine:
    config = {
        "train_micro_batch_size_per_gpu": 6,
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.0}},
        "zero_optimization": {"stage": stage, **STRICT},
    }
    return zengine.initialize(model=Net(), config={**config, **mode.config})[0]


def trained(engine: zengine.Engine, steps: range) -> list[float]:
    losses = []
    for step in steps:
        engine.backward(loss_of(engine, step, zcomm.group_rank()))
        report = engine.step()
        assert report
        losses.append(report.loss)
    return losses


def weights_of(engine: zengine.Engine) -> dict[str, Tensor]:
    """Return all trained values, as the optimizer holds them."""
    params = engine.module.named_parameters()
    return {name: zpartition.safe_get_full_fp32_param(param).clone() for name, param in params}


def sizes(engine: zengine.Engine) -> tuple[dict[str, int], dict[str, int]]:
    """Return (live, planned) bytes by owner."""
    plan = engine.plan
    with torch.device("meta"):
        model = Net()
    planned = zpartition.plan(
        plan.precision.cast_module(model),
        policy=plan.zero,
        world_size=zcomm.group_size(),
        optimizer=lambda params: zoptim.make_optimizer(plan.optimizer.type, params, plan.optimizer.params),
    )
    live = engine.parts.partition.ledger()
    owners = ("parameters", "masters", "accumulators", "states")
    return {name: live[name] for name in owners}, {name: planned.ledger()[name] for name in owners}


def all_of_one_world(folder: str) -> dict[str, dict[str, Any]]:
    """Return the results of every mode and stage on this rank."""
    found: dict[str, dict[str, Any]] = {}
    for name, mode in MODES.items():
        row: dict[str, Any] = {"losses": [], "weights": [], "sizes": []}
        row["expected"] = oracle(mode, zcomm.group_size(), NUM_STEPS)  # the same number of threads
        for stage in STAGES:
            engine = made(mode, stage)
            row["losses"].append(trained(engine, range(NUM_STEPS)))
            row["weights"].append(weights_of(engine))
            row["sizes"].append(sizes(engine))
            if stage == 1:
                engine.save_checkpoint(folder, tag=name.replace(" ", "_"))
                row["on"] = trained(engine, range(NUM_STEPS, NUM_STEPS + 2)), weights_of(engine)
                row["dtypes"] = {each.dtype for each in row["on"][1].values()}
            engine.close()
        resumed = made(mode, 3)
        resumed.load_checkpoint(folder, tag=name.replace(" ", "_"))
        row["resumed"] = trained(resumed, range(NUM_STEPS, NUM_STEPS + 2)), weights_of(resumed)
        resumed.close()
        found[name] = row
    return found


@pytest.fixture(scope="module", params=[1, 2])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("saved")
    return request.param, run_ranks(all_of_one_world, request.param, str(folder))[0]


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, theirs[name]) and value.dtype == theirs[name].dtype for name, value in ours.items())


@pytest.mark.parametrize("name", MODES)
def test_every_mode_trains_as_plain_torch_in_one_process(name: str, world: tuple[int, dict[str, Any]]) -> None:
    world_size, found = world
    expected = found[name]["expected"]
    assert expected[-1] < 0.9 * expected[0]
    for losses in found[name]["losses"]:
        assert losses == pytest.approx(expected, rel=0 if world_size == 1 else MODES[name].tolerance, abs=0)


@pytest.mark.parametrize("name", MODES)
def test_every_stage_has_the_same_bits(name: str, world: tuple[int, dict[str, Any]]) -> None:
    row = world[1][name]
    for (losses, weights), (other_losses, other_weights) in itertools.pairwise(zip(row["losses"], row["weights"])):
        assert losses == other_losses
        assert same(weights, other_weights)


@pytest.mark.parametrize("name", MODES)
def test_a_run_resumed_at_another_stage_continues_bit_for_bit(name: str, world: tuple[int, dict[str, Any]]) -> None:
    row = world[1][name]
    assert row["resumed"][0] == row["on"][0]
    assert same(row["resumed"][1], row["on"][1])
    assert row["dtypes"] == {MODES[name].masters, *([F32] if MODES[name].keeps_norm else [])}


@pytest.mark.parametrize("name", MODES)
def test_memory_is_as_planned_and_narrow_masters_cost_nothing(name: str, world: tuple[int, dict[str, Any]]) -> None:
    found, mode = world[1], MODES[name]
    for live, planned in found[name]["sizes"]:
        assert live == planned
    stage_0, _ = found[name]["sizes"][0]
    per_param = (stage_0["parameters"] + stage_0["masters"] + stage_0["states"]) / stage_0["parameters"]
    if not mode.keeps_norm:
        assert per_param * mode.weights.itemsize == mode.bytes_per_param
    assert (stage_0["masters"] == 0) == (mode.masters == mode.weights)


class Ones(nn.Module):
    """Weights of 1, each with a gradient of 1."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(1.0, 1.99, 4096))

    def forward(self) -> Tensor:
        return self.w.float().sum()


@pytest.mark.parametrize("name", ["SGD", "torch"])
def test_narrow_masters_learn_from_updates_far_below_their_precision(name: str) -> None:
    """40 updates of 1/1000: stochastic rounding moves the mean by 0.04, rounding to nearest by 0."""
    model = Ones()
    own = torch.optim.SGD(model.parameters(), lr=1e-3) if name == "torch" else None
    config = {"train_batch_size": 1, "gradient_clipping": 0, "bf16": LOW}
    if own is None:
        config["optimizer"] = {"type": "SGD", "params": {"lr": 1e-3}}
    engine = zengine.initialize(model=model, optimizer=own, config=config)[0]
    before = model.w.float().mean().item()
    for _ in range(40):
        engine.backward(engine())
        engine.step()
    moved = before - model.w.float().mean().item()
    assert model.w.dtype == BF16
    assert moved == pytest.approx(0.04, rel=0.15) if name == "SGD" else moved == 0.0
    engine.close()


class OnCpu(zprecision.Float8Linear):
    """8-bit float products by torch on a CPU, without matrix units."""


class Square(nn.Module):
    """Layers whose sizes are multiples of 16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.last = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def in_eight_bits() -> list[tuple[list[float], list[Tensor]]]:
    found = []
    for stage in STAGES:
        model = Square()
        config = {
            "train_micro_batch_size_per_gpu": 5,
            "optimizer": {"type": "AdamW", "params": {"lr": RATE}},
            "zero_optimization": {"stage": stage, **STRICT},
        }
        engine = zengine.initialize(model=model, config=config)[0]
        x = torch.randn(5, 32, generator=torch.Generator().manual_seed(zcomm.group_rank()))
        losses = []
        with zprecision.Float8.convert(model, device="cpu", kind=OnCpu):
            for _ in range(NUM_STEPS):
                engine.backward((engine(x) - x).square().mean())
                losses.append(engine.step().loss)
        engine.close()
        found.append((losses, [param.detach().clone() for param in model.parameters()]))
    return found


def test_8_bit_layers_train_equally_at_every_stage() -> None:
    (losses, weights), *others = run_ranks(in_eight_bits, 2)[0]
    assert losses[-1] < 0.9 * losses[0]
    for other_losses, other_weights in others:
        assert other_losses == losses
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(other_weights, weights))
