"""Checks of options, parameters, gradients and loaded state, over torch.optim.Optimizer.

Options are checked when a group is added, gradients when a step is planned, state when it is loaded; errors name the
parameter.  The format of the state belongs to the optimizer, not to the checkpoint: `load_state_dict` keeps
`state_dtype` and `split_master` as constructed and converts, so state moves between torch.optim, fp32, bf16 and 8-bit
optimizers.  State dicts hold decoded numbers, see portable.py.

The options that all optimizers share are checked here; each optimizer's file checks its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from zoptim import _compat
from zoptim.checks import flag, number, optional_flag
from zoptim.errors import UnsupportedTensorError
from zoptim.states import loading, portable
from zoptim.states.formats import StateFormat
from zoptim.states.spec import ALIKE, STEP, StateSpec

__all__ = ["CheckedOptimizer", "Params", "check_betas", "check_common", "check_lr"]

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class CheckedOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose options, parameters, gradients and loaded state are checked."""

    # Options that decide the format of the state: loading keeps this optimizer's own.
    kept_options: ClassVar[tuple[str, ...]] = ("state_dtype", "split_master")
    # Values of options that a state dict of torch.optim lacks.
    _absent_options: ClassVar[Mapping[str, Any]] = {
        "fused": None,
        "foreach": None,
        "maximize": False,
        "state_dtype": None,
        "split_master": False,
    }

    def __init__(self, params: Params, defaults: dict[str, Any]) -> None:
        self._check_options(defaults)
        super().__init__(params, {name: tuple(v) if isinstance(v, list) else v for name, v in defaults.items()})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; its options are checked like the constructor's.

        Raises ValueError or TypeError for options out of range, UnsupportedTensorError for complex parameters.
        """
        if isinstance(param_group, dict):
            self._check_options({**self.defaults, **param_group})
        _compat.add_param_group(self, param_group)
        try:
            self._check_params(len(self.param_groups) - 1)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to None, or to zero, as torch's method does."""
        if not set_to_none:
            super().zero_grad(set_to_none=False)
            return
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None

    def state_dict(self, *, compact: bool = False) -> dict[str, Any]:
        """Return a state dict with decoded moments, which torch.optim can load.

        compact: return the state in its own format, without a copy.  zoptim loads it; torch.optim raises.  See
        [Note: state dicts] in portable.py.
        """
        if compact:
            return portable.as_compact_dict(super().state_dict())
        hook = self.register_state_dict_post_hook(
            lambda _, found: self._to_numbers(found), prepend=True
        )  # before the user's hooks, which see decoded tensors
        try:
            return super().state_dict()
        finally:
            hook.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of torch.optim or of zoptim, in any state format.

        Raises ValueError for groups or state that do not fit; the optimizer is unchanged then.
        """
        hook = self.register_load_state_dict_pre_hook(_box_state)
        try:
            super().load_state_dict(portable.as_torch_dict(state_dict, type(self).__name__))
        finally:
            hook.remove()

    def check_loaded_options(self, index: int, options: Mapping[str, Any]) -> None:
        """Raise ValueError or TypeError if group `index` cannot continue with `options` in place of its own."""
        group = {**self.param_groups[index], **options}
        for option, value in self._absent_options.items():
            group.setdefault(option, value)
        self._check_loaded_group(index, group)

    def portable_state(self, param: Tensor) -> dict[str, Any]:
        """Return the state of `param` for saving and resharding; {} before the first update.

        Tensors are the optimizer's own.  A moment in 8-bit codes is a `Coded`: `read(start, stop)` decodes a part to
        float32.  The format is not part of the state: `kept_options` stay with the optimizer.
        """
        index, _ = self._position_of(param)
        return portable.export_state(self.state.get(param, {}), self._state_spec(self.param_groups[index]))

    def load_portable_state(self, param: Tensor, state: Mapping[str, Any]) -> None:
        """Replace the state of `param` by `state`, converted to this optimizer's format.

        `state` has the keys of `portable_state` and tensors of any float dtype.  Raises ValueError for state that
        lacks a moment or has another shape; the optimizer is unchanged then.
        """
        self.state[param] = self._adopt(*self._position_of(param), state)

    def check_portable_state(self, param: Tensor, state: Mapping[str, Any]) -> None:
        """Raise the ValueError that `load_portable_state` would raise; values are not read."""
        index, position = self._position_of(param)
        with self._name_in_errors():
            loading.check(state, param, self._state_spec(self.param_groups[index]), self._name(index, position))

    def _patch_step_function(self) -> None:
        super()._patch_step_function()
        _compat.skip_idle_hooks(type(self))

    # For subclasses -------------------------------------------------------------------------------

    def _check_options(self, options: Mapping[str, Any]) -> None:
        """Raise ValueError or TypeError that names the option of one merged group that is out of range."""
        raise NotImplementedError

    def _state_spec(self, group: Mapping[str, Any]) -> StateSpec:
        """Return the state spec of the parameters of a group."""
        raise NotImplementedError

    def _set_up(self) -> None:
        """Create attributes that are neither options nor state: at construction, after loading and unpickling."""

    def _to_numbers(self, found: dict[str, Any]) -> dict[str, Any]:
        """Decode the state in `found`, a state dict of this optimizer, and return it."""
        for packed, group in zip(found["param_groups"], self.param_groups):
            spec = self._state_spec(group)
            for index, param in zip(packed["params"], group["params"]):
                if index in found["state"]:
                    found["state"][index] = portable.numbers(found["state"][index], param, spec)
        return found

    # Checking -------------------------------------------------------------------------------------

    def _check_params(self, index: int) -> None:
        group = self.param_groups[index]
        for position, param in enumerate(group["params"]):
            name = self._name(index, position)
            if param.is_complex():
                raise UnsupportedTensorError(
                    f"{name} is complex ({param.dtype}); {type(self).__name__} accepts real tensors. "
                    "Train torch.view_as_real(parameter)."
                )
            if group["split_master"] and param.dtype is not torch.bfloat16:
                raise UnsupportedTensorError(
                    f"split_master=True, but {name} is {param.dtype}; a split master keeps the lower 16 bits of a "
                    "torch.bfloat16 parameter. Convert the model with model.bfloat16(), or remove split_master."
                )

    def _check_gradients(self, index: int, grads: list[Tensor | None]) -> None:
        params = self.param_groups[index]["params"]
        for position, (param, grad) in enumerate(zip(params, grads)):
            if grad is None:
                continue
            name = self._name(index, position)
            if grad.layout is not torch.strided:
                raise UnsupportedTensorError(
                    f"the gradient of {name} is sparse ({grad.layout}); {type(self).__name__} accepts dense ones. "
                    "Build the embedding with sparse=False, or give its weights to torch.optim.SparseAdam."
                )
            if grad.device != param.device:
                raise ValueError(f"the gradient of {name} is on {grad.device}, the parameter on {param.device}.")
            self._check_shapes(name, param, {"gradient": grad, **self.state.get(param, {})})

    def _check_shapes(self, name: str, param: Tensor, tensors: Mapping[str, Any]) -> None:
        """Raise ValueError for a shape that differs from the parameter's: kernels read raw memory."""
        for key, value in tensors.items():
            is_shaped = isinstance(value, Tensor) and self._is_shaped(key)
            if is_shaped and value.shape != param.shape:
                raise ValueError(
                    f"{key} of {name} has shape {tuple(value.shape)}, the parameter has {tuple(param.shape)}. "
                    "Load the state of this model; or, if the parameter's data was replaced, clear its gradient "
                    "and drop its entry from optimizer.state."
                )

    def _is_shaped(self, key: str) -> bool:
        """Return whether state `key` has its parameter's shape."""
        return key not in (STEP, ALIKE) and not key.endswith("_scale")

    def _position_of(self, param: Tensor) -> tuple[int, int]:
        """Return (group, position) of a parameter."""
        for index, group in enumerate(self.param_groups):
            for position, other in enumerate(group["params"]):
                if other is param:
                    return index, position
        raise ValueError(f"a tensor of shape {tuple(param.shape)} is not a parameter of this {type(self).__name__}.")

    def _name(self, index: int, position: int) -> str:
        names = self.param_groups[index].get("param_names")
        where = f"parameter {position} of group {index}"
        return f"{where} ({names[position]!r})" if names else where

    # Loading --------------------------------------------------------------------------------------

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Adopt loaded groups and state (torch calls this when loading and unpickling).

        Raises ValueError for options out of range and state that does not fit; the optimizer is unchanged then.
        """
        previous = dict(self.__dict__)
        kept = [
            {key: group[key] for key in self.kept_options if key in group}
            for group in previous.get("param_groups", [])
        ]
        super().__setstate__(state)
        self._set_up()
        try:
            for index, group in enumerate(self.param_groups):
                for option, value in self._absent_options.items():
                    group.setdefault(option, value)
                group.update(kept[index] if kept else {})
                self._check_loaded_group(index, group)
                for position, param in enumerate(group["params"]):
                    if self.state.get(param):
                        loaded = loading.unbox_tensors(self.state[param])
                        self.state[param] = self._adopt(index, position, loaded)
        except (TypeError, ValueError):
            self.__dict__.update(previous)
            raise

    def _adopt(self, index: int, position: int, loaded: Mapping[str, Any]) -> dict[str, Any]:
        group = self.param_groups[index]
        name = self._name(index, position)
        with self._name_in_errors():
            return loading.adopt(loaded, group["params"][position], self._state_spec(group), name)

    @contextmanager
    def _name_in_errors(self) -> Iterator[None]:
        """Prefix ValueErrors about loaded state with the optimizer's class."""
        try:
            yield
        except ValueError as failure:
            raise ValueError(f"{type(self).__name__} cannot load this state: {failure}") from None

    def _check_loaded_group(self, index: int, group: Mapping[str, Any]) -> None:
        # torch adds "differentiable" to the defaults when it loads.
        missing = [option for option in self.defaults if option not in group and option != "differentiable"]
        if missing:
            raise ValueError(
                f"the loaded group {index} lacks the options {', '.join(missing)} of {type(self).__name__}; "
                f"it has {', '.join(sorted(set(group) - {'params'}))}. It was written by another optimizer."
            )
        if group.get("differentiable"):
            raise ValueError(
                f"the loaded group {index} has differentiable=True; {type(self).__name__} has no autograd through "
                "its steps. Set it to False in the state dict, or use torch's optimizer."
            )
        self._check_options(group)


def check_common(options: Mapping[str, Any]) -> None:
    """Check the options that every FlatOptimizer has (one merged parameter group)."""
    check_lr(options["lr"])
    number("weight_decay", options["weight_decay"], 0)
    for name in ("maximize", "split_master"):
        flag(name, options[name])
    StateFormat.parse(options["state_dtype"])
    fused = optional_flag("fused", options["fused"])
    foreach = optional_flag("foreach", options["foreach"])
    if fused and foreach:
        raise ValueError("fused=True and foreach=True; choose one, or leave both None.")


def check_betas(options: Mapping[str, Any]) -> None:
    """Check `betas`: two numbers in [0, 1)."""
    betas = options["betas"]
    if isinstance(betas, (str, Tensor)) or not hasattr(betas, "__len__") or len(betas) != 2:
        raise TypeError(f"betas is {betas!r}; it must be two numbers in [0, 1), such as (0.9, 0.999).")
    for position, beta in enumerate(betas):
        number(f"betas[{position}]", beta, 0, 1)


def check_lr(lr: Any) -> None:
    """Check `lr`: a number >= 0 (0 freezes the weights but not the moments), or a tensor with one such element."""
    if not isinstance(lr, Tensor):
        number("lr", lr, 0)
    elif lr.numel() != 1:
        raise ValueError(f"lr is a tensor of shape {tuple(lr.shape)}; it must have exactly one element.")
    else:
        number("lr", float(lr), 0)


def _box_state(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return {**state_dict, "state": loading.box_tensors(state_dict["state"])}
