"""Frozen quantized layers under adapters: products, gradients and memory against plain torch, also in engines."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from small_nets import config, filled
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zckpt
import zengine
import zpartition
from zcomm.testing import run_ranks
from zengine.adapters import QuantizedBase, adapters_disabled, add_lora, merge_lora, merged_weights, quantize_base
from zengine.planning.activations import dry_run
from zprecision import quantize

FORMATS = ["nf4", "int4", "int8", "int4-g64-minmax", "int8-row", "fp8", "nf4-g32"]


class Wide(nn.Module):
    """Two layers, large enough for several blocks a row."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(96, 128), nn.Linear(128, 96, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


def wide() -> Wide:
    torch.manual_seed(0)
    return Wide()


def qlora(format: str = "nf4", dtype: torch.dtype = torch.float32) -> Wide:
    model = wide().to(dtype)
    quantize_base(model, format, ["up", "down"])
    torch.manual_seed(1)
    add_lora(model, config("up", "down"))
    filled(model)
    return model


def oracle(format: str = "nf4", dtype: torch.dtype = torch.float32) -> Wide:
    """The same numbers in plain layers: a dequantized base, and adapters over it."""
    model = wide().to(dtype)
    with torch.no_grad():
        for layer in (model.up, model.down):
            layer.weight.copy_(quantize(layer.weight, format).dequantize())
    torch.manual_seed(1)
    add_lora(model, config("up", "down"))
    filled(model)
    return model


def batch(index: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(4, 96, generator=torch.Generator().manual_seed(index)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_outputs_and_gradients_are_those_of_the_dequantized_base(format: str, dtype: torch.dtype) -> None:
    model, plain = qlora(format, dtype), oracle(format, dtype)
    for shape in ((5, 96), (2, 3, 96)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)
        first, second = x.clone().requires_grad_(), x.clone().requires_grad_()
        for subject, given in ((model, first), (plain, second)):
            subject.zero_grad()
            subject(given).square().sum().backward()
        assert torch.equal(model(x), plain(x))
        assert first.grad is not None
        assert second.grad is not None
        assert torch.equal(first.grad, second.grad)
        theirs = dict(plain.named_parameters())
        trained = {name: param.grad for name, param in model.named_parameters() if param.requires_grad}
        assert len(trained) == 4
        for name, gradient in trained.items():
            assert gradient is not None
            assert torch.equal(gradient, theirs[name].grad)  # type: ignore[arg-type]


def test_autograd_keeps_codes_and_no_dequantized_weight() -> None:
    model, kept = qlora(), set[int]()
    base = sum(p.nbytes for n, p in model.named_parameters() if n.startswith(("up.weight", "down.weight")))
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept.add(tensor.untyped_storage().data_ptr())
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = model(batch(0).requires_grad_())
    matrix = 96 * 128 * 4
    assert base < 2 * matrix / 6  # 4.5 of 32 bits
    assert max(found.values()) < matrix / 4
    y.sum().backward()


def test_a_trained_bias_gets_its_gradient() -> None:
    model, plain = wide(), wide()
    quantize_base(model, "int8", ["up"])
    with torch.no_grad():
        plain.up.weight.copy_(quantize(plain.up.weight, "int8").dequantize())
    for subject in (model, plain):
        subject(torch.ones(2, 3, 96)).sum().backward()
    assert isinstance(model.up, QuantizedBase)
    torch.testing.assert_close(model.up.bias.grad, plain.up.bias.grad)  # type: ignore[union-attr]


def test_adapters_switch_and_merge_over_a_quantized_base() -> None:
    model, x = qlora(), batch(0)
    codes = {name: param.clone() for name, param in model.named_parameters()}
    with adapters_disabled(model):
        without = model(x)
    bare = wide()
    quantize_base(bare, "nf4", ["up", "down"])
    assert torch.equal(without, bare(x))
    merged = dict(merged_weights(model))
    plain = oracle()
    for name, weight in merged_weights(plain):
        assert torch.equal(merged[name], weight)
    assert all(torch.equal(param, codes[name]) for name, param in model.named_parameters())
    with pytest.raises(ValueError, match=r"the base of up is quantized: codes of base \+ update.*dequantize=True"):
        merge_lora(model)
    assert merge_lora(model, dequantize=True) == ["up", "down"]
    assert torch.equal(model.up.weight, merged["up"])
    torch.testing.assert_close(model(x), plain(x))


def test_codes_survive_casts_copies_and_moves() -> None:
    model = qlora()
    codes = {name: param.clone() for name, param in model.named_parameters() if "weight_" in name}
    assert {param.dtype for param in codes.values()} == {torch.uint8}
    for other in (
        copy.deepcopy(model).bfloat16(),
        copy.deepcopy(model).half().float(),
        copy.deepcopy(model).to("cpu"),
    ):
        after = dict(other.named_parameters())
        assert all(torch.equal(after[name], param) for name, param in codes.items())
    state = qlora().state_dict()
    assert sorted(name for name in state if name.startswith("up")) == [
        *("up.bias", "up.lora_A", "up.lora_B", "up.weight_codes_nf4", "up.weight_scales_nf4")
    ]
    with pytest.raises(RuntimeError, match=r"Missing key.*up\.weight_codes_int4"):
        qlora("int4").load_state_dict(state)


def test_quantized_weights_cannot_be_trained() -> None:
    model = qlora()
    with pytest.raises(ValueError, match="a quantized weight cannot be trained: its codes have no gradient"):
        model.requires_grad_(True)
    codes = [param for name, param in model_of_bases().named_parameters() if "weight_" in name]
    with pytest.raises(ValueError, match=r"nothing to train.*uint8, the codes of quantized weights.*Add adapters"):
        zengine.initialize(model=model_of_bases(), model_parameters=codes, config=SETTINGS)
    with zpartition.Init():
        deferred = Wide()
    with pytest.raises(
        ValueError, match=r"built inside zero\.Init and has no weights to quantize yet: build and load"
    ):
        quantize_base(deferred, "nf4", ["up"])
    with pytest.raises(ValueError, match="up is quantized already"):
        quantize_base(model_of_bases(), "nf4", ["up"])
    with pytest.raises(ValueError, match="'nf5' names no format"):
        quantize_base(wide(), "nf5", ["up"])
    with pytest.raises(ValueError, match="names 'k', and Wide has no such linear layer"):
        quantize_base(wide(), "nf4", ["k"])


def model_of_bases() -> Wide:
    model = wide()
    quantize_base(model, "nf4", ["up", "down"])
    return model


def test_a_model_without_memory_has_codes_without_values() -> None:
    with torch.device("meta"):
        model = Wide()
    quantize_base(model, "int4-g64-minmax", ["up", "down"])
    add_lora(model, config("up"))
    real = qlora("int4-g64-minmax")
    for name, param in model.named_parameters():
        assert param.is_meta
        assert (param.shape, param.dtype) == (dict(real.named_parameters())[name].shape, param.dtype)


SETTINGS: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.0}},
}


def _engine(stage: int, accumulation: int, format: str) -> Any:
    zero: dict[str, Any] = {"stage": stage, "reduce_at": "micro_step"}
    if stage == 3:
        zero |= {"stage3_param_persistence_threshold": 0}
    settings = SETTINGS | {"gradient_accumulation_steps": accumulation, "zero_optimization": zero}
    model = qlora(format)
    trained = [param for param in model.parameters() if param.requires_grad]
    return zengine.initialize(model=model, model_parameters=trained, config=settings)[0]


def _train(stage: int, format: str, folder: str) -> dict[str, Any]:
    """Train on two batches a step: one on each of two ranks, or both on one."""
    rank, world = zengine_world()
    engine = _engine(stage, 2 // world, format)
    losses = []
    for step in range(3):
        for index in range(rank, 2, world):
            loss = engine(batch(2 * step + index)).square().mean()
            engine.backward(loss)
            report = engine.step()
        losses.append(report.loss)
    engine.save_checkpoint(folder)
    with zpartition.gathered(engine.module):
        params = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
    engine.close()
    return {"losses": losses, "params": params}


def zengine_world() -> tuple[int, int]:
    if not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


@pytest.mark.parametrize("stage", range(4))
def test_engines_train_the_same_bits_on_one_rank_and_two(tmp_path: Path, stage: int) -> None:
    model, losses = oracle(), []
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.05, weight_decay=0.0)
    for step in range(3):
        optimizer.zero_grad()
        loss = torch.stack([model(batch(2 * step + index)).square().mean() for index in range(2)]).mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    (one,) = run_ranks(_train, 1, stage, "nf4", str(tmp_path / "one"))
    two = run_ranks(_train, 2, stage, "nf4", str(tmp_path / "two"))
    for each in two:
        assert each["losses"] == one["losses"]
        assert all(torch.equal(each["params"][name], param) for name, param in one["params"].items())
    assert one["losses"] == pytest.approx(losses, rel=1e-6)
    for name, param in model.named_parameters():
        if param.requires_grad:
            torch.testing.assert_close(one["params"][name], param.detach(), rtol=1e-4, atol=1e-6)
    start = dict(qlora().named_parameters())
    assert all(torch.equal(one["params"][n], p) for n, p in start.items() if not p.requires_grad)


def _reload(stage: int, folder: str, format: str) -> dict[str, Tensor]:
    """Load another world's checkpoint; return the weights."""
    engine = _engine(stage, 1, format)
    with torch.no_grad():  # nothing of the start may survive
        for param in engine.module.parameters() if stage < 3 else ():
            param.fill_(1)
    engine.load_checkpoint(folder)
    with zpartition.gathered(engine.module):
        params = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
    engine.close()
    return params


def test_checkpoints_hold_codes_once_and_any_world_loads_them(tmp_path: Path) -> None:
    saved = run_ranks(_train, 2, 3, "int4-g64-minmax", str(tmp_path))[0]["params"]
    checkpoint = zckpt.find(tmp_path)
    for name, param in saved.items():
        assert torch.equal(checkpoint.tensor(f"model.{name}"), param)
    files = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    codes = sum(param.nbytes for param in saved.values() if param.dtype == torch.uint8)
    trained = sum(3 * 4 * param.numel() for param in saved.values() if param.dtype != torch.uint8)
    assert codes < files < codes + trained + 6_000  # weights and two states of adapters; headers
    for stage, world in ((0, 1), (3, 2), (2, 2), (3, 4)):
        for params in run_ranks(_reload, world, stage, str(tmp_path), "int4-g64-minmax"):
            assert all(torch.equal(params[name], param) for name, param in saved.items())
    with pytest.raises(Exception, match="weight_codes_nf4"):
        run_ranks(_reload, 1, 0, str(tmp_path), "nf4")


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(256, 256)
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def deep(format: str) -> Deep:
    torch.manual_seed(0)
    model = Deep()
    quantize_base(model, format, [f"layers.{index}" for index in range(6)])
    add_lora(model, config(*(f"layers.{index}" for index in range(6)), rank=4))
    return model


def _measure(stage: int, format: str) -> tuple[dict[str, int], dict[str, int], int]:
    """Train two steps; return the bytes of this rank as counted, as planned, and of its codes alone."""
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        zero |= {"stage3_param_persistence_threshold": 0}
    model = deep(format)
    trained = [param for param in model.parameters() if param.requires_grad]
    engine = zengine.initialize(model=model, model_parameters=trained, config=SETTINGS | {"zero_optimization": zero})[
        0
    ]
    partition = engine.parts.partition
    for step in range(2):
        x = torch.randn(4, 256, generator=torch.Generator().manual_seed(step))
        engine.backward(engine(x).square().mean())
        engine.step()
    shards = {id(s.own_span.untyped_storage()): s.own_span for s in partition.frozen if s.bucket.dtype == torch.uint8}
    codes = sum(span.nbytes for span in shards.values())
    with torch.device("meta"):
        plain = Deep()
    names = [f"layers.{index}" for index in range(6)]
    quantize_base(plain, format, names)
    add_lora(plain, config(*names, rank=4))
    planned = zpartition.plan(
        plain,
        policy=partition.policy,
        world_size=zengine_world()[1],
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.1),
    )
    counted = partition.ledger()
    engine.close()
    return counted, planned.ledger(), codes


@pytest.mark.parametrize("format", ["nf4", "int8"])
@pytest.mark.parametrize("stage", [2, 3])
def test_memory_is_as_planned(stage: int, format: str) -> None:
    for counted, planned, codes in run_ranks(_measure, 2, stage, format):
        for owner in ("parameters", "masters", "accumulators", "states"):
            assert counted[owner] == planned[owner], owner
        assert counted["gathered units"] <= planned["gathered units"]
        if stage == 3:
            exact = 6 * sum(part.nbytes for part in quantize(torch.randn(256, 256), format).parts().values()) // 2
            assert exact <= codes <= exact + 6 * 2048  # one rank of two; spans are padded
            plain = 256 * 256 * 4  # bytes of one matrix
            assert planned["gathered units"] < 1.5 * plain  # the plain first layer, and the codes of the next


class Checkpointed(Wide):
    """Computes its first layer again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        hidden: Any = checkpoint(lambda given: torch.tanh(self.up(given)), x, use_reentrant=False)
        return self.down(hidden)  # type: ignore[no-any-return]


def _train_narrow(stage: int, variant: str) -> list[float]:
    """Train in bfloat16, perhaps with a recomputed layer."""
    torch.manual_seed(0)
    model = (Checkpointed if variant == "recomputed" else Wide)()
    quantize_base(model, "int4", ["up", "down"])
    add_lora(model, config("up", "down"))
    filled(model)
    zero: dict[str, Any] = {"stage": stage, "reduce_at": "micro_step", "stage3_param_persistence_threshold": 0}
    settings = SETTINGS | {"bf16": {"enabled": True}, "zero_optimization": zero}
    trained = [param for param in model.parameters() if param.requires_grad]
    engine = zengine.initialize(model=model, model_parameters=trained, config=settings)[0]
    losses = []
    for step in range(3):
        x = batch(2 * step + zengine_world()[0], torch.bfloat16).requires_grad_()
        engine.backward(engine(x).square().mean())
        losses.append(engine.step().loss)
    engine.close()
    return losses


@pytest.mark.parametrize("variant", ["plain", "recomputed"])
def test_stage_3_has_the_bits_of_stage_0_in_bfloat16(variant: str) -> None:
    for world in (2, 4):
        wanted = run_ranks(_train_narrow, world, 0, "plain")
        assert run_ranks(_train_narrow, world, 3, variant) == wanted
        assert len(set(wanted[0])) == 3


def test_planning_runs_the_model_without_values() -> None:
    """Forward and backward run on fake tensors, as in `zengine plan`; no dequantized weight is kept."""
    for format in ("nf4", "int4", "int8", "int4-g64-minmax"):
        with torch.device("meta"):
            model = Wide()
        quantize_base(model, format, ["up", "down"])
        add_lora(model, config("up", "down"))
        found = dry_run(model, lambda: torch.zeros(4, 96), device="cpu")
        plain = dry_run(_adapted_plain(), lambda: torch.zeros(4, 96), device="cpu")
        assert 0 < found.saved <= plain.saved


@pytest.mark.parametrize("format", ["nf4", "int8"])
def test_large_weights_are_dequantized_in_parts(format: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2048, 2051, bias=False))
    weight = quantize(model[0].weight, format).dequantize()
    quantize_base(model, format, ["0"])
    assert torch.equal(model[0].base_weight(), weight)  # type: ignore[operator]
    x = torch.randn(2, 2048)
    assert torch.equal(model(x), x @ weight.t())


def _adapted_plain() -> Wide:
    with torch.device("meta"):
        model = Wide()
    add_lora(model, config("up", "down"))
    return model
