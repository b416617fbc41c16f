"""Oracle: a plain PyTorch loop in one process, on the data of all ranks.

In fp32 and fp64 it joins the batches of the ranks into one.  For bf16 and fp16 it keeps fp32 masters and the engine's
precision choices: each rank's gradient has the model's dtype; their sum is computed in fp32 and communicated in the
model's dtype; micro-steps, mean and update are fp32.

Gradients are clipped to a norm that most steps exceed.  The order of a norm's sum depends on the layout, but the sum
is float64 (zoptim.sum_of_squares), so all stages divide by the same float32, or the same 40 bits of a float64.
"""

from __future__ import annotations

import functools
import itertools

import torch
from torch import nn

from contract_table.scenarios import SCENARIOS, Scenario, batches, last_batch

CLIP_NORM = 0.25
LOSS_SCALE = {torch.bfloat16: 1.0, torch.float16: 256.0}


@functools.cache
def curve(scenario: str, dtype: torch.dtype, world_size: int, accumulation: int) -> tuple[float, ...]:
    """Return the mean loss of each step, and the loss of the last batch afterwards."""
    chosen = SCENARIOS[scenario]
    model = chosen.cast(chosen.model(), dtype)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as on the ranks
    try:
        losses = (with_masters if dtype in LOSS_SCALE else plain)(chosen, model, world_size, accumulation)
        with torch.no_grad():
            return (*losses, model(last_batch()).item())
    finally:
        torch.set_num_threads(threads)


def make_optimizer(scenario: Scenario, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    kind = getattr(torch.optim, scenario.optimizer["type"])
    optimizer: torch.optim.Optimizer = kind(params, **scenario.optimizer["params"])
    return optimizer


def plain(scenario: Scenario, model: nn.Module, world_size: int, accumulation: int) -> list[float]:
    """Train in fp32 or fp64, every rank's batch joined into one."""
    params = list(model.parameters())
    optimizer = make_optimizer(scenario, params)
    curve = []
    for step, data in enumerate(batches(world_size, accumulation)):
        scenario.prepare(model, step)
        total = 0.0
        for tokens in data.flatten(1, 2):
            for loss, again in scenario.losses(model, tokens, step):
                (loss / accumulation).backward(retain_graph=again)
                total += loss.item() / accumulation
        nn.utils.clip_grad_norm_(params, CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        curve.append(total)
    return curve


def with_masters(scenario: Scenario, model: nn.Module, world_size: int, accumulation: int) -> list[float]:
    """Train in bf16 or fp16, with masters, accumulators and updates in fp32."""
    params = list(model.parameters())
    masters = [nn.Parameter(param.detach().float()) for param in params]
    optimizer = make_optimizer(scenario, masters)
    scale = LOSS_SCALE[params[0].dtype]
    curve = []
    for step, data in enumerate(batches(world_size, accumulation)):
        scenario.prepare(model, step)
        total = 0.0
        for micro, index in itertools.product(data, range(scenario.num_losses)):  # each backward is a message
            summed: list[torch.Tensor | None] = [None] * len(params)
            for tokens in micro:
                loss = list(scenario.losses(model, tokens, step))[index][0]
                (scale * loss / accumulation).backward()
                total += loss.item() / accumulation / world_size
                _collect(params, summed)
            _accumulate(params, masters, summed, 1 / world_size / scale)
        nn.utils.clip_grad_norm_(masters, CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        _publish(params, masters)
        curve.append(total)
    return curve


def _collect(params: list[nn.Parameter], summed: list[torch.Tensor | None]) -> None:
    """Add one rank's gradients, in fp32."""
    for index, param in enumerate(params):
        if param.grad is not None:
            before = summed[index]
            summed[index] = param.grad.float() if before is None else before + param.grad.float()
            param.grad = None


def _accumulate(
    params: list[nn.Parameter], masters: list[nn.Parameter], summed: list[torch.Tensor | None], factor: float
) -> None:
    """Add a received message to the masters' gradients."""
    for param, master, total in zip(params, masters, summed):
        if total is not None:
            arrived = total.to(param.dtype).float() * factor
            master.grad = arrived if master.grad is None else master.grad + arrived


@torch.no_grad()
def _publish(params: list[nn.Parameter], masters: list[nn.Parameter]) -> None:
    for param, master in zip(params, masters):
        param.copy_(master)
