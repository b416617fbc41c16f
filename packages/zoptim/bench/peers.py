"""torch's and DeepSpeed's steps, with the additional passes that give the same result.

Their steps read float32 gradients and update float32 weights.  Offload adds a cast of the gradients before and of the
weights after; the whole boundary adds the norm, and the division if the optimizer has none.  Each is the best
sequence for the peer: casts into persistent buffers, foreach instead of loops, torch's fused optimizers with their
own grad_scale.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import attrs
import torch
from arena import Arena
from contenders import BETAS, DECAY, EPS, LOSS_SCALE, LR, MAX_NORM, MOMENTUM, Contender, Step, Unavailable
from torch import Tensor

__all__ = ["Inner", "boundary_peers", "by_hand", "fp32_peers", "offload_peers"]

BF16 = torch.bfloat16
BOTH = ("cpu", "cuda")


@attrs.frozen(eq=False)
class Inner:
    """A peer's float32 update of a list of weights by a list of gradients."""

    step: Step
    grads: list[Tensor]
    divide: Callable[[Tensor, Tensor], bool]  # (divisor, found_inf); False skips the step


def _torch_inner(rule: str, way: str, arena: Arena, weights: str, grads: str) -> Inner:
    params = arena.with_grads(weights, grads)
    options: dict[str, Any] = {"foreach": way == "foreach", "fused": way == "fused"}
    if rule == "adamw":
        names: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
        optimizer: Any = torch.optim.AdamW(params, LR, BETAS, EPS, DECAY, **options)
    elif rule == "adagrad":
        names = ("sum",)
        optimizer = torch.optim.Adagrad(params, LR, 0.0, DECAY, 0.0, EPS, **options)
    else:
        names = ("momentum_buffer",)
        optimizer = torch.optim.SGD(params, LR, MOMENTUM, 0.0, DECAY, **options)
    for position, param in enumerate(params):
        state: dict[str, Any] = {name: arena.get(name)[position] for name in names}
        if rule != "sgd":
            state["step"] = torch.zeros((), device=arena.device if way == "fused" else "cpu")
        optimizer.state[param] = state
    lists = arena.get(grads)
    return Inner(optimizer.step, lists, _by_attributes(optimizer) if way == "fused" else _by_passes(lists))


def _by_attributes(optimizer: Any) -> Callable[[Tensor, Tensor], bool]:
    def divide(divisor: Tensor, found_inf: Tensor) -> bool:
        optimizer.grad_scale, optimizer.found_inf = divisor, found_inf
        return True

    return divide


def _by_passes(grads: list[Tensor]) -> Callable[[Tensor, Tensor], bool]:
    def divide(divisor: Tensor, found_inf: Tensor) -> bool:
        if bool(found_inf):
            return False
        torch._foreach_div_(grads, divisor)
        return True

    return divide


# DeepSpeed's CPU optimizers: module, class, options beyond the shared ones, moments.  Not its Adagrad, which writes
# updates into the gradients; here all contenders read the same gradients.
_DEEPSPEED: dict[str, tuple[str, str, dict[str, Any], tuple[str, ...]]] = {
    "adamw": ("adam", "DeepSpeedCPUAdam", {"betas": BETAS, "eps": EPS}, ("exp_avg", "exp_avg_sq")),
    "lion": ("lion", "DeepSpeedCPULion", {"betas": BETAS}, ("exp_avg",)),
}


def _deepspeed_inner(rule: str, arena: Arena, weights: str, grads: str) -> Inner:
    module, name, options, moments = _DEEPSPEED[rule]
    try:
        kind = getattr(importlib.import_module(f"deepspeed.ops.{module}"), name)
    except Exception as error:  # a broken installation raises many types
        raise Unavailable(f"deepspeed cannot be imported ({error})") from error
    params = arena.with_grads(weights, grads)
    try:
        optimizer = kind(params, lr=LR, weight_decay=DECAY, **options)  # compiles on first use, for minutes
    except Exception as error:
        raise Unavailable(f"{name} cannot be made ({error})") from error
    for position, param in enumerate(params):
        optimizer.state[param] = {"step": 0, **{name: arena.get(name)[position] for name in moments}}
    lists = arena.get(grads)
    return Inner(optimizer.step, lists, _by_passes(lists))


InnerOf = Callable[[Arena, str, str], Inner]  # arena, names of the weights and of the gradients


def _inners(rule: str) -> list[tuple[str, InnerOf, tuple[str, ...]]]:
    """Yield (name, maker, devices) of all peers that have this rule."""

    def torch_way(way: str) -> InnerOf:
        return lambda arena, weights, grads: _torch_inner(rule, way, arena, weights, grads)

    found: list[tuple[str, InnerOf, tuple[str, ...]]] = []
    if rule in ("adamw", "adagrad", "sgd"):
        on_gpu = ("cpu",) if rule == "adagrad" else BOTH  # torch's fused Adagrad is for CPUs
        found.append(("torch fused", torch_way("fused"), on_gpu))
        found.append(("torch foreach", torch_way("foreach"), BOTH))
        found.append(("torch for", torch_way("for"), ("cpu",)))
    if rule in _DEEPSPEED:
        name = _DEEPSPEED[rule][1]
        found.append((name, lambda arena, w, g: _deepspeed_inner(rule, arena, w, g), ("cpu",)))
    return found


def fp32_peers(rule: str) -> list[Contender]:
    """float32 in, float32 out."""

    def plain(inner: InnerOf) -> Callable[[Arena], Step]:
        return lambda arena: inner(arena, "weight", "grad").step

    return [Contender(name, plain(inner), devices) for name, inner, devices in _inners(rule)]


def offload_peers() -> list[Contender]:
    """AdamW between a cast of bf16 gradients and one to bf16 weights."""

    def wrapped(make: InnerOf) -> Callable[[Arena], Step]:
        def prepare(arena: Arena) -> Step:
            inner = make(arena, "master", "grad_float32")
            given, out, masters = arena.get("grad", BF16), arena.get("weight", BF16), arena.get("master")

            def step() -> None:
                torch._foreach_copy_(inner.grads, given)
                inner.step()
                torch._foreach_copy_(out, masters)

            return step

        return prepare

    return [Contender(name, wrapped(make), devices) for name, make, devices in _inners("adamw")]


def boundary_peers() -> list[Contender]:
    """Offload with norm, finiteness, unscaling and clipping in between."""

    def wrapped(make: InnerOf) -> Callable[[Arena], Step]:
        def prepare(arena: Arena) -> Step:
            inner = make(arena, "master", "grad_float32")
            given, out, masters = arena.get("grad", BF16), arena.get("weight", BF16), arena.get("master")
            scale = torch.tensor(LOSS_SCALE, device=arena.device)

            def step() -> None:
                torch._foreach_copy_(inner.grads, given)
                norm = torch.nn.utils.get_total_norm(inner.grads)
                divisor = scale * ((norm / scale + 1e-6) / MAX_NORM).clamp(min=1.0)
                if inner.divide(divisor, (~torch.isfinite(norm)).float()):
                    inner.step()
                torch._foreach_copy_(out, masters)

            return step

        return prepare

    return [Contender(name, wrapped(make), devices) for name, make, devices in _inners("adamw")]


def by_hand(rule: str) -> Contender:
    """Lion and LAMB, which torch lacks, as foreach calls."""
    return Contender("torch foreach, by hand", lambda arena: {"lion": _lion, "lamb": _lamb}[rule](arena), BOTH)


def _lion(arena: Arena) -> Step:
    weights, grads, means = arena.get("weight"), arena.get("grad"), arena.get("exp_avg")

    def step() -> None:
        directions = torch._foreach_mul(means, BETAS[0])
        torch._foreach_add_(directions, grads, alpha=1 - BETAS[0])
        torch._foreach_sign_(directions)
        torch._foreach_mul_(weights, 1 - LR * DECAY)
        torch._foreach_add_(weights, directions, alpha=-LR)
        torch._foreach_lerp_(means, grads, 1 - BETAS[1])

    return step


def _lamb(arena: Arena) -> Step:
    weights, grads = arena.get("weight"), arena.get("grad")
    means, squares = arena.get("exp_avg"), arena.get("exp_avg_sq")
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        torch._foreach_lerp_(means, grads, 1 - BETAS[0])
        torch._foreach_mul_(squares, BETAS[1])
        torch._foreach_addcmul_(squares, grads, grads, 1 - BETAS[1])
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, (1 - BETAS[1] ** count) ** 0.5)
        torch._foreach_add_(roots, EPS)
        directions = torch._foreach_div(means, roots)
        torch._foreach_div_(directions, 1 - BETAS[0] ** count)
        torch._foreach_add_(directions, weights, alpha=DECAY)
        ratios = torch._foreach_div(torch._foreach_norm(weights), torch._foreach_norm(directions))
        torch._foreach_clamp_max_(ratios, 10.0)
        torch._foreach_mul_(ratios, -LR)
        torch._foreach_mul_(directions, ratios)
        torch._foreach_add_(weights, directions)

    return step
