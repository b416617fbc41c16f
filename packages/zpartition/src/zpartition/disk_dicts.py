"""State dicts of an optimizer whose states are on disk: whole, as if they were in memory.

torch builds and loads them from `optimizer.state`, where nothing is between steps.  So hooks put copies there before
a state dict is built, take them away afterwards, and take to disk what has been loaded.  All states of a rank are in
memory while somebody holds the state dict; `state_shards` needs a bucket at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from zpartition.disk_states import OnDisk

__all__ = ["hook_dicts"]


def hook_dicts(optimizer: torch.optim.Optimizer, places: Sequence[tuple[OnDisk, Parameter]]) -> list[RemovableHandle]:
    """Let `state_dict` and `load_state_dict` of `optimizer` see the masters of `places`; returns the hooks."""

    def fill(_: torch.optim.Optimizer) -> None:
        copies: dict[Parameter, dict[str, Any]] = {}
        for home, master in places:
            with home.shown(optimizer, master):
                entry = optimizer.state.get(master)
                copies[master] = {key: _copied(value) for key, value in (entry or {}).items()}
        optimizer.state.update({master: entry for master, entry in copies.items() if entry})

    def empty(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        for _home, master in places:
            optimizer.state.pop(master, None)

    def take(_: torch.optim.Optimizer) -> None:
        for home, master in places:
            entry = optimizer.state.pop(master, None)
            if entry:
                home.replace(optimizer, master, functools.partial(optimizer.state.update, {master: entry}))
            else:  # what is loaded has none
                home.clear(optimizer, master)

    return [
        optimizer.register_state_dict_pre_hook(fill),
        optimizer.register_state_dict_post_hook(empty),
        optimizer.register_load_state_dict_post_hook(take),
    ]


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
