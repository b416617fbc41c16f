"""zoptim's steps.  State is in the arena, so that the floor moves the same memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from arena import Arena
from contenders import BETAS, DECAY, EPS, LOSS_SCALE, LR, MAX_NORM, MOMENTUM, Contender, Step
from torch import Tensor

import zoptim

__all__ = ["BOTH", "ours_boundary", "ours_fp32", "ours_offload", "ours_split"]

BOTH = ("cpu", "cuda")
BF16, F32, U8 = torch.bfloat16, torch.float32, torch.uint8

_MOMENTS = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "lamb": ("exp_avg", "exp_avg_sq"),
    "lion": ("exp_avg",),
    "adagrad": ("sum",),
    "sgd": ("momentum_buffer",),
}
_COUNTED = ("adamw", "lamb", "adagrad")


def _make(rule: str, params: Sequence[Tensor], **more: Any) -> zoptim.FlatOptimizer:
    classes: Mapping[str, Callable[[], zoptim.FlatOptimizer]] = {
        "adamw": lambda: zoptim.AdamW(params, LR, BETAS, EPS, DECAY, **more),
        "lamb": lambda: zoptim.LAMB(params, LR, BETAS, EPS, DECAY, min_coeff=0.0, max_coeff=10.0, **more),
        "lion": lambda: zoptim.Lion(params, LR, BETAS, DECAY, **more),
        "adagrad": lambda: zoptim.Adagrad(params, LR, 0.0, DECAY, 0.0, EPS, **more),
        "sgd": lambda: zoptim.SGD(params, LR, MOMENTUM, 0.0, DECAY, **more),
    }
    return classes[rule]()


def _set_state(
    optimizer: zoptim.FlatOptimizer, rule: str, params: Sequence[Tensor], arena: Arena, dtype: torch.dtype = F32
) -> None:
    """Set moments from the arena, in the format of `dtype` (uint8: codes with scales), and own step counts."""
    for position, param in enumerate(params):
        state = {name: arena.get(name, dtype)[position] for name in _MOMENTS[rule]}
        if dtype is U8:
            state |= {f"{name}_scale": arena.get(f"{name}_scale")[position] for name in _MOMENTS[rule]}
        if rule in _COUNTED or dtype is not F32:
            state["step"] = torch.zeros((), device=arena.device)
        optimizer.state[param].update(state)


def ours_fp32(rule: str, state_dtype: str = "fp32", name: str = "ours") -> Contender:
    """float32 weights and gradients; moments in `state_dtype`."""

    def prepare(arena: Arena) -> Step:
        params = arena.with_grads("weight", "grad")
        optimizer = _make(rule, params, state_dtype=state_dtype)
        _set_state(optimizer, rule, params, arena, {"fp32": F32, "bf16": BF16, "8bit": U8}[state_dtype])
        return optimizer.step

    return Contender(name, prepare, BOTH)


def _offloaded(arena: Arena) -> zoptim.FlatOptimizer:
    """AdamW on float32 masters, tied to bf16 weights that have bf16 gradients."""
    masters, weights = arena.parameters("master"), arena.with_grads("weight", "grad", BF16, BF16)
    optimizer = _make("adamw", masters)
    for master, weight in zip(masters, weights):
        optimizer.mirror(master, weight)
    _set_state(optimizer, "adamw", masters, arena)
    return optimizer


def ours_offload() -> Contender:
    """bf16 gradient in, float32 master and moments, bf16 weight out."""
    return Contender("ours", lambda arena: _offloaded(arena).step, BOTH)


def ours_split() -> Contender:
    """bf16 weight and 16-bit remainder for the master; float32 moments, bf16 gradient."""

    def prepare(arena: Arena) -> Step:
        params = arena.with_grads("weight", "grad", BF16, BF16)
        optimizer = _make("adamw", params, split_master=True)
        _set_state(optimizer, "adamw", params, arena)
        for param, remainder in zip(params, arena.get("remainder", torch.int16)):
            optimizer.state[param]["remainder"] = remainder
        return optimizer.step

    return Contender("ours", prepare, BOTH)


def ours_boundary() -> Contender:
    """The offload step with norm, finiteness, unscaling and clipping."""

    def prepare(arena: Arena) -> Step:
        optimizer, measure = _offloaded(arena), _stats_of(arena.get("grad", BF16))
        scale = torch.tensor(LOSS_SCALE, device=arena.device)

        def step() -> None:
            stats = measure()
            optimizer.grad_scale = stats.divisor(max_norm=MAX_NORM, loss_scale=scale)
            optimizer.found_inf = stats.found_inf
            optimizer.step()

        return step

    return Contender("ours", prepare, BOTH)


def _stats_of(grads: list[Tensor]) -> Callable[[], zoptim.GradStats]:
    """Gradient statistics; on a GPU their tables are made once, so that a CUDA graph can capture the call."""
    if grads[0].device.type == "cpu":
        return lambda: zoptim.grad_stats(grads)
    from zoptim.backends.gpu import SquaresJob

    job = SquaresJob(grads)
    return lambda: zoptim.GradStats(*job.measure())
