"""`deepspeed.ops.adam.cpu_adam`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from zengine.deepspeed.ops.adam.mode import DeepSpeedAdam

__all__ = ["DeepSpeedCPUAdam"]


class DeepSpeedCPUAdam(DeepSpeedAdam):
    """AdamW, or Adam with `adamw_mode=False`.

    fp32_optimizer_states: moments in float32; False: in the parameter's dtype.  ds_adam_cpu_cores_perc: ignored.
    """

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
        ds_adam_cpu_cores_perc: float = 0.8,
    ) -> None:
        super().__init__(
            model_params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            decoupled_weight_decay=adamw_mode,
            bias_correction=bias_correction,
            state_dtype="fp32" if fp32_optimizer_states else None,
        )
        self.fp32_optimizer_states = fp32_optimizer_states

    @torch.no_grad()
    def step_subgroup(self, subgroup_id: int, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient, with one state for all: `state[subgroup_id]`.

        So there must be one such parameter at a time, DeepSpeed's flat subgroup.  Returns what `closure` returns.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group, param, grad in self._with_gradients():
            state = self.state[subgroup_id]  # type: ignore[index]  # an int, as in DeepSpeed
            if not state:
                dtype = torch.float32 if self.fp32_optimizer_states else param.dtype
                state.update(step=0, exp_avg=torch.zeros_like(param, dtype=dtype))
                state["exp_avg_sq"] = torch.zeros_like(state["exp_avg"])
            state["step"] += 1
            moments = {name: state[name].float() for name in ("exp_avg", "exp_avg_sq")}
            weight, after = self._evaluate(group, param.float(), grad.float(), moments, state["step"])
            param.copy_(weight)
            for name, value in after.items():
                state[name].copy_(value)
        return loss

    @torch.no_grad()
    def rollback_subgroup(self, sub_group_id: int, closure: Callable[[], Any] | None = None) -> Any:
        """Undo the last `step_subgroup` of this subgroup, up to rounding; the gradients must be those of that step.

        Returns what `closure` returns.  Raises RuntimeError if there is no step to undo.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        state = self.state.get(sub_group_id, {})  # type: ignore[call-overload]
        if not state:
            raise RuntimeError(
                f"Cannot rollback optimizer state for sub_group_id {sub_group_id} as it has not been initialized."
            )
        if state["step"] <= 0:
            raise RuntimeError(f"Cannot rollback sub_group_id {sub_group_id}: step count is {state['step']}")
        for group, param, grad in self._with_gradients():
            _undo_update(group, param, grad.float(), state)
            state["step"] -= 1
        return loss

    def _with_gradients(self) -> Iterator[tuple[Mapping[str, Any], Tensor, Tensor]]:
        """Yield (group, parameter, gradient) of the parameters that have one.

        Raises AssertionError (DeepSpeed's) if one of them is not on the CPU.
        """
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    assert param.device.type == "cpu", (
                        f"CPUAdam param is on {param.device} and must be 'cpu', make sure you enabled "
                        "'offload_optimizer': 'cpu' in your ZeRO config."
                    )
                    yield group, param, param.grad


def _undo_update(group: Mapping[str, Any], param: Tensor, grad: Tensor, state: Mapping[str, Any]) -> None:
    """Set a weight and its moments to their values before step number `state["step"]`."""
    (beta1, beta2), lr, decay = group["betas"], float(group["lr"]), group["weight_decay"]
    first, second = state["exp_avg"].float(), state["exp_avg_sq"].float()
    corrections = (1 - beta1 ** state["step"], 1 - beta2 ** state["step"]) if group["bias_correction"] else (1, 1)
    change = lr * (first / corrections[0]) / ((second / corrections[1]).sqrt() + group["eps"])
    before = param.float() + change
    if group["decoupled_weight_decay"]:
        before /= 1 - lr * decay
    else:
        grad = grad + decay * before
    param.copy_(before)
    state["exp_avg"].copy_((first - (1 - beta1) * grad) / beta1)
    state["exp_avg_sq"].copy_(((second - (1 - beta2) * grad.square()) / beta2).clamp_min(0))
