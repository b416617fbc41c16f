"""Optimizers by name and option dict, as in a DeepSpeed JSON config.

The names of zoptim's classes (table.py), in any case, build these; the exact name of any other class of torch.optim
builds torch's.

DeepSpeed's semantics:

* "Adam" decouples the weight decay (it is AdamW) unless `adam_w_mode` is false; "AdamW" always does, whatever
  `adam_w_mode` says.
* weight_decay defaults to 0, also for "AdamW" (torch's AdamW: 0.01); "Lion" defaults to lr 1e-3, betas (0.9, 0.999).
* `torch_adam` selects torch's class instead of ours.
* `fp32_optimizer_states` (Adam, AdamW, Lion, Adagrad): true keeps moments in float32 for any parameter dtype, false
  in the parameters' dtype, which may be float32.  `state_dtype` has more choices.
* MuAdam, MuAdamW and MuSGD scale the rates of Adam, AdamW and SGD by the base shapes of the package mup: mup.py.
* `max_grad_norm` raises: optimizers do not clip; gradient_clipping does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from zoptim.checks import check_option_names, flag
from zoptim.errors import UnknownNameError, did_you_mean
from zoptim.optimizers.adam import Adam, AdamW
from zoptim.optimizers.base import Params
from zoptim.optimizers.mup import MUP_NAMES, mup_groups
from zoptim.optimizers.table import ROWS, OptimizerRow
from zoptim.states.formats import StateFormat

__all__ = ["make_optimizer"]

_STATES = "fp32_optimizer_states"
_DEEPSPEED_ADAM_OPTIONS = ("adam_w_mode", "torch_adam", _STATES)
# Arguments of a class that a config cannot set.
_NOT_IN_CONFIGS = frozenset({"params", "decoupled_weight_decay", "use_muon"})

_ROWS = {row.name.lower(): row for row in ROWS}


def make_optimizer(name: str, params: Params, options: Mapping[str, Any] | None = None) -> torch.optim.Optimizer:
    """Build the optimizer of a config's `{"type": name, "params": options}`.

    params: parameters, named parameters or group dicts, as for torch.optim.  Lists in `options`, as in JSON, become
    tuples.

    Raises UnknownNameError for an unknown name or option (with the nearest one), ValueError or TypeError for values
    out of range.

    >>> import torch, zoptim
    >>> model = torch.nn.Linear(2, 2)
    >>> optimizer = zoptim.make_optimizer("AdamW", model.parameters(), {"betas": [0.9, 0.95]})
    >>> optimizer.param_groups[0]["betas"]
    (0.9, 0.95)
    """
    if not isinstance(name, str):
        raise TypeError(f"the optimizer's name is {name!r}; it must be a string such as 'AdamW'.")
    given = {key: tuple(v) if isinstance(v, list) else v for key, v in (options or {}).items()}
    if "max_grad_norm" in given:
        raise ValueError(
            f"{name} was given max_grad_norm={given['max_grad_norm']!r}; optimizers do not clip. "
            "Remove it and set gradient_clipping at the top level of the config."
        )
    row = _ROWS.get(name.lower())
    if name.lower() in MUP_NAMES:
        return _make_mup(name, params, given)
    if row is None:
        return _make_torch(name, params, given)
    return _make_adam(name, params, given) if row.module == "adam" else _make_own(row, name, params, given)


def _make_mup(name: str, params: Params, options: dict[str, Any]) -> torch.optim.Optimizer:
    """Build the optimizer over groups whose rates are scaled by mup's base shapes; see mup.py."""
    cls = _ROWS[MUP_NAMES[name.lower()].lower()].load()
    check_option_names(name, options, _options_of(cls))
    options.setdefault("weight_decay", 0.0)
    members: list[Any] = list(params)
    defaults = cls([torch.nn.Parameter(torch.zeros(1))], **options).defaults  # checks the values
    groups = mup_groups(name, members, lr=defaults["lr"], weight_decay=options["weight_decay"])
    return cls(groups, **options)


def _options_of(cls: type[torch.optim.Optimizer]) -> tuple[str, ...]:
    """Return the options that a config may give: named arguments, and those that the class accepts and ignores."""
    named = inspect.signature(cls).parameters.values()
    names = [each.name for each in named if each.kind is not each.VAR_KEYWORD and each.name not in _NOT_IN_CONFIGS]
    return (*names, *getattr(cls, "ignored_options", ()))


def _make_adam(name: str, params: Params, options: dict[str, Any]) -> torch.optim.Optimizer:
    check_option_names(name, options, (*_options_of(AdamW), *_DEEPSPEED_ADAM_OPTIONS))
    decoupled = flag("adam_w_mode", options.pop("adam_w_mode", True)) or name.lower() == "adamw"
    use_torch = flag("torch_adam", options.pop("torch_adam", False))
    states = _states(name, options)
    options.setdefault("weight_decay", 0.0)
    if use_torch:
        return _make_torch_adam(name, params, options, decoupled)
    return AdamW(params, **options, **states) if decoupled else Adam(params, **options, **states)


def _states(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Translate fp32_optimizer_states, removed from `options`, into a state_dtype; {} if it adds nothing.

    Raises ValueError if both are given and contradict each other.
    """
    if _STATES not in options:
        return {}
    in_fp32, given = flag(_STATES, options.pop(_STATES)), StateFormat.parse(options.get("state_dtype"))
    if given is None:
        options.pop("state_dtype", None)
        return {"state_dtype": "fp32" if in_fp32 else None}
    if given is not (StateFormat.FP32 if in_fp32 else StateFormat.BF16):
        raise ValueError(
            f"{name} was given {_STATES}={in_fp32} and state_dtype={options['state_dtype']!r}, which contradict each "
            "other. Remove one of the two."
        )
    return {}


def _make_torch_adam(name: str, params: Params, options: dict[str, Any], decoupled: bool) -> torch.optim.Optimizer:
    ours = {"bias_correction": True, "state_dtype": None, "split_master": False}
    for option, default in ours.items():
        if (given := options.pop(option, default)) != default:
            raise ValueError(
                f"{name} was given torch_adam=True and {option}={given!r}, an option that torch's Adam lacks. "
                f"Remove one of the two; zoptim's Adam supports {option}."
            )
    return torch.optim.AdamW(params, **options) if decoupled else torch.optim.Adam(params, **options)


def _make_own(row: OptimizerRow, name: str, params: Params, options: dict[str, Any]) -> torch.optim.Optimizer:
    cls = row.load()
    check_option_names(name, options, (*_options_of(cls), *([_STATES] if row.fp32_states else [])))
    states = _states(name, options) if row.fp32_states else {}
    return cls(params, **{**row.defaults, **options, **states})


def _make_torch(name: str, params: Params, options: dict[str, Any]) -> torch.optim.Optimizer:
    """Build a class of torch.optim by exact name; option names are checked, values pass through."""
    classes = _torch_classes()
    if name not in classes:
        own = [*(row.name for row in ROWS), "MuAdam", "MuAdamW", "MuSGD"]
        raise UnknownNameError(
            f"there is no optimizer {name!r}.{did_you_mean(name, [*own, *classes])} "
            f"Allowed: {', '.join(own)} in any case; by exact name torch's {', '.join(classes)}."
        )
    allowed = [option for option in inspect.signature(classes[name]).parameters if option != "params"]
    check_option_names(f"torch.optim.{name}", options, allowed)
    return classes[name](params, **options)


def _torch_classes() -> dict[str, Callable[..., torch.optim.Optimizer]]:
    """Return torch.optim's optimizers by name, without the base class and without names that are ours."""
    return {
        name: value
        for name, value in sorted(vars(torch.optim).items())
        if isinstance(value, type)
        and issubclass(value, torch.optim.Optimizer)
        and value is not torch.optim.Optimizer
        and name.lower() not in _ROWS
        and name.lower() not in MUP_NAMES
    }
