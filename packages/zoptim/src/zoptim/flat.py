"""The base of zoptim's optimizers: torch's contract, plus two attributes that travel with a step.

A training step has to unscale gradients, clip them and skip non-finite ones.  As passes of their own
these read all gradients three more times.  Here they are two scalars that the update reads while it
updates: `grad_scale` (divide by it: the loss scale over the clip coefficient) and `found_inf`
(non-zero: change nothing).  torch's fused optimizers speak the same protocol, and
torch.amp.GradScaler uses it when `_step_supports_amp_scaling` is set.

The rules are elementwise: what happens to an element depends on that element alone, so an optimizer
is correct on whole tensors and on flat shards that cut across tensors alike.  `elementwise` says so
to whoever cuts.

A subclass says three things: which options are legal (`_check_options`), what an untrained tensor's
state is (`_init_state`), and how one batch of tensors is updated (`_update`).

[Note: p.grad after a step] With a grad_scale, the divided gradient is left in `p.grad` (torch's fused
kernels store it there, and the foreach path does the same).  A second step without `zero_grad` would
divide twice.  Without a grad_scale, and on a skipped step, `p.grad` is not written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ._compat import FusedOn, has_fused_kernel
from .batch import NO_SCALE, Batch, Entry, plan_batches, read_signals
from .errors import UnsupportedTensorError

__all__ = ["FlatOptimizer", "Params"]

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class FlatOptimizer(torch.optim.Optimizer):
    """A torch optimizer with an elementwise rule and the grad_scale / found_inf protocol.

    Invariant: every state tensor but `step` has its parameter's shape, dtype and device; `step` is a ()
    float32 tensor beside the parameter.
    """

    # Gradients are divided by it inside the update.  One element, any device; None or 1 divides nothing.
    grad_scale: Tensor | None = NO_SCALE
    # One element, any device.  Non-zero: weights, state and step counts stay bit for bit as they are.
    found_inf: Tensor | None = None
    # torch.amp.GradScaler hands the two scalars over instead of unscaling by itself.
    _step_supports_amp_scaling = True
    # The update of an element reads that element only: shards may cut anywhere.
    elementwise = True
    counts_on_device: ClassVar[bool] = True  # `step` lives beside the parameter
    # Devices and dtypes on which the rule has a fused kernel.
    _fused_on: ClassVar[FusedOn] = {}
    # What a state_dict written by torch.optim means by the options that it lacks.
    _absent_options: ClassVar[Mapping[str, Any]] = {"fused": None, "foreach": None, "maximize": False}

    def __init__(self, params: Params, defaults: dict[str, Any]) -> None:
        self._check_options(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does; its options are checked like the constructor's.

        Raises ValueError or TypeError for options out of range, UnsupportedTensorError for complex parameters.
        """
        if isinstance(param_group, dict):
            self._check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)
        try:
            self._check_params(len(self.param_groups) - 1)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return the closure's loss, or None.

        Phases: evaluate the closure, read the signals, refuse what cannot be updated (before the first
        write), update batch by batch.  See [Note: p.grad after a step].

        Raises UnsupportedTensorError for sparse gradients, ValueError for state of another shape.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            signals = read_signals(self.grad_scale, self.found_inf)
            for index in range(len(self.param_groups)):
                self._check_gradients(index)
            for group in self.param_groups:
                for batch in plan_batches(group, self._entries(group), signals, self._fused_on):
                    self._update(group, batch)
        return loss

    # What a subclass says -------------------------------------------------------------------------

    def _check_options(self, options: Mapping[str, Any]) -> None:
        """Raise ValueError or TypeError naming the option of one merged group that is out of range."""
        raise NotImplementedError

    def _state_keys(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """The keys of a parameter's state, once it has been updated."""
        raise NotImplementedError

    def _init_state(self, group: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
        """The state of `param` before its first update; {} if the first update makes it."""
        raise NotImplementedError

    def _update(self, group: Mapping[str, Any], batch: Batch) -> None:
        """Apply the rule in place to a batch: one device, one dtype, one path, any number of tensors."""
        raise NotImplementedError

    # Gathering and refusing -----------------------------------------------------------------------

    def _entries(self, group: Mapping[str, Any]) -> Iterator[Entry]:
        """The parameters of `group` that have gradients, with their state, made where missing."""
        for param in group["params"]:
            if param.grad is None:
                continue
            state = self.state[param]
            if not state:
                state.update(self._init_state(group, param))
            # A parameter with `grad_dtype` set may carry gradients of another dtype than its own.
            same = param.grad.dtype is param.dtype
            yield Entry(param, param.grad if same else param.grad.to(param.dtype), state)

    def _check_params(self, index: int) -> None:
        group = self.param_groups[index]
        for position, param in enumerate(group["params"]):
            if param.is_complex():
                raise UnsupportedTensorError(
                    f"{self._name(index, position)} is complex ({param.dtype}); "
                    f"{type(self).__name__} takes real tensors. Train torch.view_as_real(parameter)."
                )
            if group["fused"] and not has_fused_kernel(param, self._fused_on):
                raise ValueError(
                    f"fused=True, but torch has no fused kernel for {self._name(index, position)} "
                    f"({param.dtype} on {param.device}). Leave fused=None to choose by tensor."
                )

    def _check_gradients(self, index: int) -> None:
        for position, param in enumerate(self.param_groups[index]["params"]):
            if param.grad is None:
                continue
            if param.grad.layout is not torch.strided:
                raise UnsupportedTensorError(
                    f"the gradient of {self._name(index, position)} is sparse ({param.grad.layout}); "
                    f"{type(self).__name__} takes dense gradients. Build the embedding with sparse=False, "
                    "or give its weights to torch.optim.SparseAdam."
                )
            self._check_shapes(index, position, {"gradient": param.grad, **self.state.get(param, {})})

    def _check_shapes(self, index: int, position: int, beside: Mapping[str, Any]) -> None:
        """Kernels read raw memory: tensors of another size than the parameter must never reach one."""
        shape = self.param_groups[index]["params"][position].shape
        for key, value in beside.items():
            if key != "step" and isinstance(value, Tensor) and value.shape != shape:
                raise ValueError(
                    f"{key} of {self._name(index, position)} has shape {tuple(value.shape)}, the parameter has "
                    f"{tuple(shape)}. Load the state of this model; or, if the parameter's data was replaced, "
                    "clear its gradient and drop its entry from optimizer.state."
                )

    def _name(self, index: int, position: int) -> str:
        names = self.param_groups[index].get("param_names")
        where = f"parameter {position} of group {index}"
        return f"{where} ({names[position]!r})" if names else where

    # Loading --------------------------------------------------------------------------------------

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Adopt loaded groups and state, from torch.optim or from here (torch calls this when loading).

        Raises ValueError, with nothing adopted, for options out of range and state that does not fit.
        """
        previous = dict(self.__dict__)
        super().__setstate__(state)
        try:
            for index, group in enumerate(self.param_groups):
                for option, value in self._absent_options.items():
                    group.setdefault(option, value)
                self._check_loaded_group(index)
                for position, param in enumerate(group["params"]):
                    if self.state.get(param):
                        self.state[param] = self._adopted(index, position)
        except (TypeError, ValueError):
            self.__dict__.update(previous)
            raise

    def _check_loaded_group(self, index: int) -> None:
        group = self.param_groups[index]
        # torch itself adds "differentiable" to the defaults whenever it loads.
        missing = [option for option in self.defaults if option not in group and option != "differentiable"]
        if missing:
            raise ValueError(
                f"the loaded group {index} lacks the options {', '.join(missing)} of {type(self).__name__}; "
                f"it has {', '.join(sorted(set(group) - {'params'}))}. It was written by another optimizer."
            )
        self._check_options(group)

    def _adopted(self, index: int, position: int) -> dict[str, Any]:
        """The state of one parameter in the form that the kernels rely on."""
        group = self.param_groups[index]
        param = group["params"][position]
        state = {key: value for key, value in self.state[param].items() if value is not None}
        missing = [key for key in self._state_keys(group) if key not in state]
        if state and missing:
            raise ValueError(
                f"the loaded state of {self._name(index, position)} lacks {', '.join(missing)}; "
                f"it has {', '.join(state)}. It was written by another optimizer than "
                f"{type(self).__name__}, or by one with other options."
            )
        self._check_shapes(index, position, state)
        for key, value in state.items():
            if key == "step":
                state[key] = torch.as_tensor(value, dtype=torch.float32).to(param.device).reshape(())
            elif isinstance(value, Tensor) and value.stride() != param.stride():
                state[key] = torch.empty_like(param, requires_grad=False).copy_(value)
        return state
