"""torch's contract of an optimizer: groups that are checked when they are given, state that is checked when loaded.

A state dict is numbers (see portable.py).  What is remembered of a parameter, and in which format, is this
optimizer's decision and not the checkpoint's: `load_state_dict` keeps `state_dtype` and `split_master` as they were
constructed and converts what it is given, so state moves between torch.optim, fp32, bf16 and 8-bit optimizers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from zoptim import _compat
from zoptim.errors import UnsupportedTensorError
from zoptim.states import loading, portable
from zoptim.states.spec import ALIKE, STEP, StateSpec

__all__ = ["CheckedOptimizer", "Params"]

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class CheckedOptimizer(torch.optim.Optimizer):
    """A torch optimizer that checks options, parameters, gradients and loaded state, with names in the errors."""

    # Options about the form of the state: loading leaves them alone.
    kept_options: ClassVar[tuple[str, ...]] = ("state_dtype", "split_master")
    # What a state_dict written by torch.optim means by the options that it lacks.
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
        """Add a group as torch does; its options are checked like the constructor's.

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

    def state_dict(self, *, compact: bool = False) -> dict[str, Any]:
        """torch's state dict, in numbers that its optimizers read as they are meant: no codes, no scales.

        compact: the state as it is kept, without a copy, in a form that zoptim reads and torch refuses; see
        [Note: state dicts] in portable.py.
        """
        if compact:
            return portable.compacted(super().state_dict())
        hook = self.register_state_dict_post_hook(
            lambda _, found: self._to_numbers(found), prepend=True
        )  # before others'
        try:
            return super().state_dict()
        finally:
            hook.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state of torch.optim or of zoptim, in any state format, as torch does.

        Raises ValueError, with nothing adopted, for groups or state that do not fit.
        """
        hook = self.register_load_state_dict_pre_hook(_box)
        try:
            super().load_state_dict(portable.expanded(state_dict, type(self).__name__))
        finally:
            hook.remove()

    def check_loaded_options(self, index: int, options: Mapping[str, Any]) -> None:
        """Raise ValueError or TypeError if group `index` could not go on with `options` in place of its own."""
        group = {**self.param_groups[index], **options}
        for option, value in self._absent_options.items():
            group.setdefault(option, value)
        self._check_loaded_group(index, group)

    def portable_state(self, param: Tensor) -> dict[str, Any]:
        """Return what is remembered of `param`, as whoever saves or reshards it should see it; {} before the first
        update.

        Tensors are the optimizer's own.  A moment in 8-bit codes is a `Coded`: `read(start, stop)` gives its elements
        as float32.  The format itself is not state: `kept_options` do not travel.
        """
        index, _ = self._place(param)
        return portable.exported(self.state.get(param, {}), self._state_spec(self.param_groups[index]))

    def load_portable_state(self, param: Tensor, state: Mapping[str, Any]) -> None:
        """Remember `state`, tensors of any float format as `portable_state` names them, in this optimizer's format.

        Raises ValueError, with nothing adopted, for state that lacks a moment or is of another size.
        """
        self.state[param] = self._adopt(*self._place(param), state)

    def check_portable_state(self, param: Tensor, state: Mapping[str, Any]) -> None:
        """Raise the ValueError that `load_portable_state` would, whatever the values are."""
        index, position = self._place(param)
        with self._naming_loads():
            loading.check(state, param, self._state_spec(self.param_groups[index]), self._name(index, position))

    # What a subclass says -------------------------------------------------------------------------

    def _check_options(self, options: Mapping[str, Any]) -> None:
        """Raise ValueError or TypeError naming the option of one merged group that is out of range."""
        raise NotImplementedError

    def _state_spec(self, group: Mapping[str, Any]) -> StateSpec:
        """Return what is remembered of a parameter of this group."""
        raise NotImplementedError

    def _set_up(self) -> None:
        """Make what is neither option nor state: at construction, and after loading or unpickling."""

    def _to_numbers(self, found: dict[str, Any]) -> dict[str, Any]:
        """`found`, a state dict of this optimizer, with state as torch would keep it."""
        for packed, group in zip(found["param_groups"], self.param_groups):
            memory = self._state_spec(group)
            for index, param in zip(packed["params"], group["params"]):
                if index in found["state"]:
                    found["state"][index] = portable.numbers(found["state"][index], param, memory)
        return found

    # Checking -------------------------------------------------------------------------------------

    def _check_params(self, index: int) -> None:
        group = self.param_groups[index]
        for position, param in enumerate(group["params"]):
            name = self._name(index, position)
            if param.is_complex():
                raise UnsupportedTensorError(
                    f"{name} is complex ({param.dtype}); {type(self).__name__} takes real tensors. "
                    "Train torch.view_as_real(parameter)."
                )
            if group["split_master"] and param.dtype is not torch.bfloat16:
                raise UnsupportedTensorError(
                    f"split_master=True, but {name} is {param.dtype}; a split master is the other half of a "
                    "torch.bfloat16 parameter. Convert the model with model.bfloat16(), or leave split_master out."
                )

    def _check_gradients(self, index: int, grads: list[Tensor | None]) -> None:
        params = self.param_groups[index]["params"]
        for position, (param, grad) in enumerate(zip(params, grads)):
            if grad is None:
                continue
            name = self._name(index, position)
            if grad.layout is not torch.strided:
                raise UnsupportedTensorError(
                    f"the gradient of {name} is sparse ({grad.layout}); {type(self).__name__} takes dense gradients. "
                    "Build the embedding with sparse=False, or give its weights to torch.optim.SparseAdam."
                )
            if grad.device != param.device:
                raise ValueError(f"the gradient of {name} is on {grad.device}, the parameter on {param.device}.")
            self._check_shapes(name, param, {"gradient": grad, **self.state.get(param, {})})

    def _check_shapes(self, name: str, param: Tensor, beside: Mapping[str, Any]) -> None:
        """Kernels read raw memory: tensors of another size than the parameter must never reach one."""
        for key, value in beside.items():
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

    def _place(self, param: Tensor) -> tuple[int, int]:
        """(group, position) of a parameter."""
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

        Raises ValueError, with nothing adopted, for options out of range and state that does not fit.
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
                        loaded = loading.unboxed(self.state[param])
                        self.state[param] = self._adopt(index, position, loaded)
        except (TypeError, ValueError):
            self.__dict__.update(previous)
            raise

    def _adopt(self, index: int, position: int, loaded: Mapping[str, Any]) -> dict[str, Any]:
        group = self.param_groups[index]
        who = self._name(index, position)
        with self._naming_loads():
            return loading.adopt(loaded, group["params"][position], self._state_spec(group), who)

    @contextmanager
    def _naming_loads(self) -> Iterator[None]:
        try:
            yield
        except ValueError as failure:
            raise ValueError(f"{type(self).__name__} cannot load this state: {failure}") from None

    def _check_loaded_group(self, index: int, group: Mapping[str, Any]) -> None:
        # torch itself adds "differentiable" to the defaults whenever it loads.
        missing = [option for option in self.defaults if option not in group and option != "differentiable"]
        if missing:
            raise ValueError(
                f"the loaded group {index} lacks the options {', '.join(missing)} of {type(self).__name__}; "
                f"it has {', '.join(sorted(set(group) - {'params'}))}. It was written by another optimizer."
            )
        if group.get("differentiable"):
            raise ValueError(
                f"the loaded group {index} has differentiable=True, and {type(self).__name__}'s steps have no "
                "gradients of their own. Set it to False in the state dict, or keep torch's optimizer."
            )
        self._check_options(group)


def _box(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return {**state_dict, "state": loading.boxed(state_dict["state"])}
