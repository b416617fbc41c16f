"""Eigenvalues of blocks in an engine: equal to those of one plain module, at every stage."""

from __future__ import annotations

import copy
import csv
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zengine
import zprecision
from zcomm.testing import run_ranks
from zengine.config import ConfigError, Facts, load, resolve
from zengine.deepspeed.runtime.eigenvalue import Eigenvalue
from zpartition.pipeline import LayerSpec, PipelineModule

SECTION = {"enabled": True, "layer_name": "net.layers", "max_iter": 400, "tol": 1e-6, "stability": 1e-12}


class Net(nn.Module):
    def __init__(self, recompute: bool | None = None, attends: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Module()
        self.net.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 1)
        self.recompute, self.attends = recompute, attends
        self.double()

    def _block(self, layer: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + torch.tanh(layer(hidden))
        if self.attends:
            hidden = hidden + F.scaled_dot_product_attention(*[hidden[:, None, None]] * 3)[:, 0, 0]
        return hidden

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.net.layers:
            if self.recompute is None:
                hidden = self._block(layer, hidden)
            else:
                hidden = checkpoint(self._block, layer, hidden, use_reentrant=self.recompute)
        return self.head(hidden).square().mean()


def config(**changes: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "eigenvalue": SECTION,
        **changes,
    }


def engine_of(model: nn.Module | None = None, **changes: Any) -> zengine.Engine:
    return zengine.initialize(model=model or Net(), config=config(**changes))[0]


def batch(step: int, rank: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    draws = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, 4, generator=draws, dtype=torch.float64).to(dtype)


def train(engine: zengine.Engine, steps: range, dtype: torch.dtype = torch.float64) -> list[float]:
    losses = []
    for step in steps:
        loss = engine(batch(step, engine.global_rank, dtype).to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def relative(model: nn.Module, inputs: torch.Tensor) -> list[float]:
    """Return the values of a plain module by torch's dense Hessians."""
    found = [_largest(model, layer, inputs) for layer in model.net.layers]
    return [each / max(found) for each in found]


def _largest(model: nn.Module, layer: nn.Module, inputs: torch.Tensor) -> float:
    fixed = {name: param.detach() for name, param in model.named_parameters()}
    mine = {id(param) for param in layer.parameters()}
    names = [name for name, param in model.named_parameters() if id(param) in mine]
    sizes = [fixed[name].numel() for name in names]

    def loss_of(flat: torch.Tensor) -> torch.Tensor:
        parts = {name: part.view(fixed[name].shape) for name, part in zip(names, flat.split(sizes))}
        return torch.func.functional_call(model, {**fixed, **parts}, (inputs,))

    point = torch.cat([fixed[name].reshape(-1) for name in names])
    return float(torch.linalg.eigvalsh(torch.autograd.functional.hessian(loss_of, point)).abs().max())


def values(engine: zengine.Engine) -> list[float]:
    by_block = {number: value for value, number in engine.block_eigenvalue.values()}
    return [by_block[number] for number in sorted(by_block)]


def _values_at(stage: int, *, num_micro_steps: int = 1) -> list[float]:
    engine = engine_of(zero_optimization={"stage": stage}, gradient_accumulation_steps=num_micro_steps)
    assert engine.block_eigenvalue == {}
    train(engine, range(num_micro_steps))
    found = values(engine)
    engine.close()
    return found


def test_one_rank_has_the_values_of_dense_hessians() -> None:
    assert _values_at(0) == pytest.approx(relative(Net(), batch(0)), rel=1e-4)


def _values_at_stages() -> list[list[float]]:
    return [_values_at(stage) for stage in range(4)]


def test_at_every_stage_ranks_have_the_values_of_the_whole_batch() -> None:
    expected = relative(Net(), torch.cat([batch(0, 0), batch(0, 1)]))
    for by_stage in run_ranks(_values_at_stages, 2):
        for found in by_stage:
            assert found == pytest.approx(expected, rel=1e-4)


def test_with_accumulation_the_last_micro_step_counts() -> None:
    assert _values_at(0, num_micro_steps=2) == pytest.approx(relative(Net(), batch(1)), rel=1e-4)


@pytest.mark.parametrize("section", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_narrow_weights_give_the_values_up_to_their_rounding(section: str, stage: int) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[section]
    narrow = {"enabled": True, **({"initial_scale_power": 10} if section == "fp16" else {})}
    engine = engine_of(Net().to(dtype), **{section: narrow}, zero_optimization={"stage": stage}, eigenvalue=LOOSE)
    train(engine, range(1), dtype)
    assert values(engine) == pytest.approx(relative(Net(), batch(0)), rel=0.1)
    engine.close()


def test_a_step_whose_gradients_overflow_leaves_the_values_as_they_were() -> None:
    fp16 = {"enabled": True, "initial_scale_power": 30, "hysteresis": 1}
    engine = engine_of(Net().half(), fp16=fp16, eigenvalue=LOOSE)
    train(engine, range(1), torch.float16)
    assert engine.skipped_steps == 1
    assert engine.block_eigenvalue == {}
    engine.close()


LOOSE = {**SECTION, "tol": 1e-2}


def _losses(stage: int, accumulation: int) -> tuple[list[float], list[float]]:
    found = []
    for section in ({"enabled": False}, SECTION):
        engine = engine_of(
            eigenvalue=section, zero_optimization={"stage": stage}, gradient_accumulation_steps=accumulation
        )
        found.append(train(engine, range(6)))
        engine.close()
    return found[0], found[1]


def _all_losses() -> list[tuple[list[float], list[float]]]:
    return [_losses(stage, accumulation) for stage in range(4) for accumulation in (1, 2)]


def test_training_is_the_same_bit_for_bit() -> None:
    for pairs in run_ranks(_all_losses, 2):
        assert all(plain == computing for plain, computing in pairs)


def test_steps_between_resolutions_and_evaluations_compute_nothing(tmp_path: Path) -> None:
    engine = engine_of(
        eigenvalue={**SECTION, "gas_boundary_resolution": 3},
        csv_monitor={"enabled": True, "output_path": str(tmp_path), "job_name": "job"},
    )
    for step in range(7):
        assert bool(engine.block_eigenvalue) == (step >= 3)
        train(engine, range(step, step + 1))
        with torch.no_grad():
            engine(batch(50))
    newest = values(engine)
    engine.close()
    for number, value in enumerate(newest):
        (path,) = tmp_path.rglob(f"*ModelBlockParam_{number}.csv")
        lines = list(csv.reader(path.open()))[1:]
        assert [int(line[0]) for line in lines] == [9, 18]
        assert float(lines[-1][1]) == pytest.approx(value, rel=1e-6)


def test_attention_and_recomputed_blocks_have_second_derivatives() -> None:
    model = Net(recompute=False, attends=True).float()
    found = []
    for recompute in (None, False):
        model.recompute = recompute
        engine = engine_of(copy.deepcopy(model), eigenvalue=LOOSE)
        train(engine, range(2), torch.float32)
        found.append(values(engine))
        engine.close()
    assert found[0] == pytest.approx(found[1], rel=1e-3)
    assert torch.backends.cuda.flash_sdp_enabled()


def test_a_model_that_is_differentiable_once_is_told() -> None:
    engine = engine_of(Net(recompute=True))
    with pytest.raises(RuntimeError) as caught:
        engine.backward(engine(batch(0).requires_grad_()))
    assert "reaches no parameter of the blocks" in str(caught.value)
    assert "every operation of the model needs a second derivative" in caught.value.__notes__[0]
    assert "use_reentrant=True" in caught.value.__notes__[0]
    engine.close()


def test_verbose_logs_each_block_on_rank_0(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of(eigenvalue={**SECTION, "verbose": True, "layer_num": 2})
    with caplog.at_level(logging.INFO, "zengine"):
        train(engine, range(1))
    lines = [record.message for record in caplog.records if record.message.startswith("eigenvalue: step 0")]
    assert len(lines) == 2
    assert "relative 1.0000" in "".join(lines)
    engine.close()


def test_a_resumed_run_has_the_newest_values(tmp_path: Path) -> None:
    engine = engine_of()
    train(engine, range(2))
    engine.save_checkpoint(str(tmp_path))
    expected = values(engine)
    engine.close()
    resumed = engine_of()
    resumed.load_checkpoint(str(tmp_path))
    assert values(resumed) == expected
    resumed.close()


def test_names_and_numbers_of_layers_are_checked() -> None:
    with pytest.raises(ValueError, match=r"eigenvalue.layer_name = 'net.layer' is not a list .* 'net.layers'"):
        engine_of(eigenvalue={**SECTION, "layer_name": "net.layer"})
    with pytest.raises(ValueError, match=r"layer_num = 4, but net.layers has 3 layers: set it to at most 3"):
        engine_of(eigenvalue={**SECTION, "layer_num": 4})
    model = Net()
    model.net.layers[1].requires_grad_(False)
    with pytest.raises(ValueError, match=r"blocks \[1\] have no parameter that requires a gradient"):
        engine_of(model)
    with pytest.raises(ValueError, match="eigenvalue does not work with a PipelineModule"):
        engine_of(PipelineModule([LayerSpec(nn.Linear, 4, 4)], num_stages=1, loss_fn=nn.MSELoss()))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tensor_parallel": {"autotp_size": 2}}, "the sums between 2 tensor-parallel ranks have no second"),
        ({"sequence_parallel_size": 2}, "the exchanges between 2 ranks of a sequence have no second derivative"),
        ({"pipeline": {"stages": 2}}, "each of 2 pipeline stages has a part of the graph"),
        ({"expert_parallel": {"enabled": True, "autoep_size": 2}}, "2 ranks hold different experts"),
    ],
)
def test_splits_of_the_model_are_rejected_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        resolve(load(config(**changes)), Facts(world_size=4, replicas=4, device_type="cpu", ranks_per_host=4))


def test_deepspeeds_class_reads_gradients_with_a_graph(caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    computer = Eigenvalue(
        max_iter=400, tol=1e-6, stability=1e-12, layer_name="net.layers", layer_num=3, gas_boundary_resolution=1
    )
    loss = model(batch(0))
    loss.backward(create_graph=True)
    found = computer.compute_eigenvalue(model, device="cpu", scale=1.0)
    assert set(found) == {id(param) for param in model.net.layers.parameters()}
    by_block = {number: value for value, number in found.values()}
    assert [by_block[n] for n in range(3)] == pytest.approx(relative(Net(), batch(0)), rel=1e-4)
    model.zero_grad()
    model(batch(0)).backward()
    assert computer.compute_eigenvalue(model) == {}
    assert "gradients of block 0 have no graph" in caplog.text
    with pytest.raises(ValueError, match="layer_name"):
        Eigenvalue(layer_num=3)


def test_pure_functions_need_no_engine() -> None:
    model = Net()
    rule = zprecision.PowerIteration(max_iter=400, tol=1e-6, stability=1e-12)
    found = zprecision.block_eigenvalues(model(batch(0)), [list(b.parameters()) for b in model.net.layers], rule)
    assert zprecision.relative_eigenvalues([each.value for each in found]) == pytest.approx(
        relative(Net(), batch(0)), rel=1e-4
    )
