"""An optimizer with quantized state, for tests of [Note: portable state]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

BLOCK = 64


@attrs.frozen(eq=False)
class Coded:
    """A moment in codes, as zpartition sees it."""

    codes: Tensor
    scales: Tensor
    dtype = torch.float32

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def read(self, start: int, stop: int) -> Tensor:
        flat = self.codes.reshape(-1).float() * self.scales.repeat_interleave(BLOCK)[: self.codes.numel()]
        return flat[start:stop].clone()


class CodedMomentum(torch.optim.Optimizer):
    """Momentum SGD that keeps 16-bit codes, and a scale for every 64 elements; codes -> float -> codes is exact."""

    elementwise = True
    kept_options = ("format",)
    block_numel = BLOCK

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "format": "int16"})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for param in (p for p in group["params"] if p.grad is not None):
                state = self.portable_state(param)
                old = state["momentum"].read(0, param.numel()).view(param.shape) if state else 0.0
                momentum = 0.5 * old + param.grad
                param -= group["lr"] * momentum
                count = state.get("step", torch.zeros(()))
                self.load_portable_state(param, {"momentum": momentum, "step": count + 1})

    def portable_state(self, param: Tensor) -> dict[str, Any]:
        kept = self.state.get(param)
        if not kept:
            return {}
        numbers = {key: value for key, value in kept.items() if key not in ("codes", "scales")}
        return {"momentum": Coded(kept["codes"], kept["scales"]), **numbers}

    def load_portable_state(self, param: Tensor, state: dict[str, Any]) -> None:
        if "momentum" not in state:
            raise ValueError("momentum is missing")
        flat = state["momentum"].reshape(-1)
        blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
        scales = 2.0 ** torch.frexp(blocks.abs().amax(1))[1].float() / 2**14
        codes = (flat / scales.repeat_interleave(BLOCK)[: flat.numel()]).round().to(torch.int16)
        numbers = {key: value.clone() for key, value in state.items() if key != "momentum"}
        self.state[param] = {"codes": codes.view(param.shape), "scales": scales, **numbers}


@pytest.fixture
def coded_momentum() -> type[CodedMomentum]:
    return CodedMomentum
