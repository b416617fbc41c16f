"""Description of the measured run: the model and the run's record, which telemetry receives once.

Telemetry is created before the engine, from the plan alone; parameters, layers, the loader and the ledger come later.
"""

from __future__ import annotations

import datetime
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import nn

from zengine.imports import own_version
from zengine.telemetry.work import Formula

_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "depth")
_WIDTHS = ("hidden_size", "n_embd", "d_model", "dim", "width")
_SECRETS = ("api_key",)


@attrs.frozen(kw_only=True)
class RunRecord:
    """Facts about a run that are not curves.  All of it is JSON."""

    started: str  # ISO time, with its zone
    config: Mapping[str, Any]  # as given, without secrets
    plan: Sequence[tuple[str, Any, str]]  # key, value, origin
    environment: Mapping[str, Any]
    hparams: Mapping[str, bool | float | str]  # values for comparing runs

    def as_json(self) -> dict[str, Any]:
        fields = attrs.asdict(self, recurse=False)
        return {**fields, "plan": [list(row) for row in self.plan]}


@attrs.frozen(kw_only=True, eq=False)
class Subject:
    """A complete engine, as telemetry sees it."""

    formula: Formula
    recomputes: bool  # backward is known to recompute activations
    epochs: Callable[[], tuple[float, ...]]  # one number, or none if unknown
    ledger: Callable[[], Mapping[str, int]]  # bytes of this rank by owner
    record: RunRecord


def shape_of(module: nn.Module) -> tuple[int, int]:
    """Return (layers, width) of a transformer from its `config` or `shape`; 0 for unknown values."""
    for name in ("config", "shape", "cfg", "args"):
        config = getattr(module, name, None)
        layers, width = _number(config, _LAYERS), _number(config, _WIDTHS)
        if layers and width:
            return layers, width
    return 0, 0


def _number(config: object, names: tuple[str, ...]) -> int:
    values = [config.get(name) if isinstance(config, Mapping) else getattr(config, name, None) for name in names]
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), 0)


def has_gradient_checkpointing(module: nn.Module) -> bool:
    """Return True if a flag of the model, as in Hugging Face, enables activation checkpointing."""
    flags = ("is_gradient_checkpointing", "gradient_checkpointing")
    return any(getattr(each, flag, False) is True for each in module.modules() for flag in flags)


def environment(device: torch.device, world_size: int) -> dict[str, Any]:
    """Return versions and the machine as JSON."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "zengine": own_version(),
        "cuda": torch.version.cuda or "",
        "host": platform.node(),
        "system": platform.platform(),
        "host cpus": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "device": f"{device.type}: {name}",
        "world_size": world_size,
        "program": " ".join(sys.argv),
    }


def now() -> str:
    """Return the time in ISO 8601."""
    return datetime.datetime.now(datetime.timezone.utc).astimezone().isoformat(timespec="seconds")


def without_secrets(value: Any) -> Any:
    """Replace the API keys of a config by "(hidden)"."""
    if isinstance(value, Mapping):
        return {
            name: "(hidden)" if name in _SECRETS and inner else without_secrets(inner)
            for name, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [without_secrets(inner) for inner in value]
    return str(value) if isinstance(value, float) and value in (float("inf"), float("-inf")) else value
