"""`deepspeed.runtime.zero.offload_config`: the sections `offload_param` and `offload_optimizer`, and their names."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, final

from zengine.config.grammar.table import section_of
from zengine.config.keys.zero import OFFLOAD_OPTIMIZER, OffloadOptimizer, OffloadParam
from zengine.deepspeed.section_model import SectionModel

__all__ = [
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
    "OffloadDeviceEnum",
    "OffloadStateTypeEnum",
]


class OffloadDeviceEnum(str, enum.Enum):
    """Offload targets."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, enum.Enum):
    """States that `engine.offload_states(include=...)` moves."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class _Offload(SectionModel):
    """Section of an offload: its folder is a Path."""

    device: str
    nvme_path: Path | None
    pin_memory: bool

    def __init__(self, strict: bool = False, **data: Any) -> None:
        super().__init__(strict, **{name: _plain(value) for name, value in data.items()})
        folder = vars(self)["nvme_path"]
        vars(self)["nvme_path"] = Path(folder) if folder else None

    def given(self) -> dict[str, Any]:
        """Return the fields that were given, as plain values."""
        return {name: _plain(value) for name, value in super().given().items()}


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, enum.Enum) else str(value) if isinstance(value, Path) else value


@final
class DeepSpeedZeroOffloadParamConfig(_Offload):
    """Section `zero_optimization.offload_param`."""

    rows = section_of(OffloadParam)
    defaults: ClassVar[Mapping[str, Any]] = {"max_in_cpu": 1_000_000_000, "nvme_path": None}
    title = "offload_param"
    buffer_count: int
    buffer_size: int
    max_in_cpu: int


@final
class DeepSpeedZeroOffloadOptimizerConfig(_Offload):
    """Section `zero_optimization.offload_optimizer`; `pipeline` is true if reads or writes are pipelined."""

    rows = section_of(OffloadOptimizer, OFFLOAD_OPTIMIZER)
    defaults: ClassVar[Mapping[str, Any]] = {
        "buffer_count": 4,
        "nvme_path": None,
        "pipeline_read": False,
        "pipeline_write": False,
        "fast_init": False,
        "cpuadam_cores_perc": 0.8,
    }
    title = "offload_optimizer"
    buffer_count: int
    ratio: float

    @property
    def pipeline(self) -> bool:
        """True if reads or writes are pipelined."""
        return bool(self.pipeline_read or self.pipeline_write)
