"""Hollow tensors count what torch's fake tensors do, or say that an operation is unusual."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zengine._compat import fake_tensors, watching
from zengine.planning import activations
from zengine.planning.activations import dry_run
from zengine.planning.hollow import HollowTensor, HollowTensors, Rule, Unusual
from zengine.planning.models import Shape, Transformer


class Recomputed(nn.Module):
    """Blocks with dropout whose activations are made again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 300), nn.Dropout(0.1), nn.Linear(300, 64)) for _ in "ab"
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x.square().mean()


class InPlace(nn.Module):
    """Views, changes in place, several results, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.embed = nn.LayerNorm(6), nn.Embedding(5, 6)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.norm(x + self.embed.weight[:4]).chunk(2, dim=-1)
        first = first.mul(2).relu_().transpose(0, 1).contiguous()
        values, _ = torch.cat([first, second.reshape(3, 4) * torch.tensor(2.0)]).max(dim=0)
        values[1:].mul_(3)
        return values


class Convolution(nn.Module):
    """Its kernel chooses a memory format: fake tensors have a rule for that."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).relu()


def transformer(dtype: torch.dtype) -> nn.Module:
    with torch.device("meta"):
        return Transformer(Shape(layers=2, width=128, vocabulary=300)).to(dtype)


def tokens() -> Tensor:
    return torch.zeros(3, 33, dtype=torch.long)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "float32": (lambda: transformer(torch.float32), tokens),
    "bfloat16": (lambda: transformer(torch.bfloat16), tokens),
    "recomputed": (Recomputed, lambda: torch.ones(70, 64)),
    "in place": (InPlace, lambda: torch.ones(4, 6)),
    "attention mask": (
        lambda: nn.TransformerEncoderLayer(64, 4, 128, batch_first=True),
        lambda: {"src": torch.ones(2, 16, 64), "src_mask": torch.ones(16, 16).tril().log()},
    ),
    "recurrent": (lambda: nn.LSTM(8, 16), lambda: torch.ones(5, 2, 8)),
}


def counted_by(running: Any, watch: Any, make: Callable[[], nn.Module], batch: Callable[[], Any], dtype: Any) -> Any:
    run = activations._Run(module=make(), batch=batch, device="cpu", autocast=dtype)
    return run.tracked(running, watch)


@pytest.mark.parametrize("autocast", [torch.float32, torch.bfloat16], ids=["plain", "autocast"])
@pytest.mark.parametrize("name", MODELS)
def test_usual_models_are_counted_as_by_fake_tensors(name: str, autocast: torch.dtype) -> None:
    hollow = HollowTensors("cpu")
    found = counted_by(hollow.running(), hollow.watching, *MODELS[name], autocast)
    assert found == counted_by(fake_tensors(), watching, *MODELS[name], autocast)
    assert found.peak > 0


def test_equal_layers_ask_meta_kernels_once(monkeypatch: pytest.MonkeyPatch) -> None:
    derive, derived = HollowTensors._derive, []

    def counting(self: HollowTensors, func: Any, *rest: Any) -> Rule:
        derived.append(func)
        return derive(self, func, *rest)

    monkeypatch.setattr(HollowTensors, "_derive", counting)
    counts = []
    for layers in (2, 9):
        derived.clear()
        with torch.device("meta"):
            module = Transformer(Shape(layers=layers, width=64, vocabulary=50))
        dry_run(module, tokens, device="cpu")
        counts.append(len(derived))
    assert counts[0] == counts[1]


def test_a_model_with_an_unusual_operation_takes_fake_tensors() -> None:
    def batch() -> Tensor:
        return torch.ones(2, 3, 9, 9)

    hollow = HollowTensors("cpu")
    with pytest.raises(Unusual, match=r"aten\.convolution\.default has a rule of its own"):
        counted_by(hollow.running(), hollow.watching, Convolution, batch, torch.float32)
    found = dry_run(Convolution(), batch, device="cpu")
    assert found == counted_by(fake_tensors(), watching, Convolution, batch, torch.float32)


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (lambda x: x.sum().item(), "_local_scalar_dense"),
        (lambda x: x.unsqueeze_(0), "changes the layout of an argument"),
        (lambda x: x.to("meta"), "on meta"),
        (lambda x: x + OUTSIDE, "made outside of the dry run"),
        (lambda x: x.to(torch.complex64), "complex64"),
        (lambda x: x[x > 0], "meta"),
    ],
)
def test_what_has_no_rule_is_said(act: Callable[[Tensor], Any], reason: str) -> None:
    with HollowTensors("cpu").running(), pytest.raises((Unusual, RuntimeError), match=reason):
        act(torch.ones(2, 3))


OUTSIDE = torch.ones(3)


def test_a_hollow_tensor_has_a_layout_and_bytes_and_no_memory() -> None:
    with HollowTensors("cpu").running():
        made = torch.ones(2, 3, dtype=torch.bfloat16)
        part = made[1, 1:]
    assert type(made) is HollowTensor
    assert (made.shape, made.stride(), made.device.type) == ((2, 3), (3, 1), "cpu")
    assert (part.shape, part.storage_offset(), part.dtype) == ((2,), 4, torch.bfloat16)
    assert part.untyped_storage() is made.untyped_storage()
    assert made.untyped_storage().nbytes() == 12
    with pytest.raises(Unusual, match="outside of a dry run"):
        made + 1


def test_zengine_plan_imports_no_compiler(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}}')
    script = """
import sys
from zengine.cli import main
assert main(["plan", "c.json", "--params", "1e8", "--world", "8", "--memory", "80GB", "--device", "cuda"]) == 0
assert "torch._dynamo" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
