"""`deepspeed.monitor.config`: the sections of the monitors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar, final

from zengine.config import ConfigError
from zengine.config.grammar.source import read
from zengine.config.grammar.table import Section, section_of
from zengine.config.keys.telemetry import Comet, EventFiles, TensorBoard, Wandb
from zengine.deepspeed.section_model import SectionModel

__all__ = [
    "CSVConfig",
    "CometConfig",
    "DeepSpeedMonitorConfig",
    "TensorBoardConfig",
    "WandbConfig",
    "get_monitor_config",
]


class _Files(SectionModel):
    enabled: bool
    output_path: str
    job_name: str


@final
class TensorBoardConfig(_Files):
    """Section `tensorboard`."""

    rows = section_of(TensorBoard)
    title = "tensorboard"


@final
class CSVConfig(_Files):
    """Section `csv_monitor`."""

    rows = section_of(EventFiles)
    title = "csv_monitor"


@final
class WandbConfig(SectionModel):
    """Section `wandb`."""

    rows = section_of(Wandb)
    defaults: ClassVar[Mapping[str, Any]] = {"group": None, "team": None}
    title = "wandb"
    enabled: bool
    project: str


@final
class CometConfig(SectionModel):
    """Section `comet`."""

    rows = section_of(Comet)
    defaults: ClassVar[Mapping[str, Any]] = dict.fromkeys(
        ("project", "workspace", "api_key", "experiment_name", "experiment_key", "online", "mode")
    )
    title = "comet"
    enabled: bool
    samples_log_interval: int


SECTIONS: dict[str, type[SectionModel]] = {
    "tensorboard": TensorBoardConfig,
    "comet": CometConfig,
    "wandb": WandbConfig,
    "csv_monitor": CSVConfig,
}


@final
class DeepSpeedMonitorConfig(SectionModel):
    """The monitors' sections; `enabled` if one of them is."""

    rows = Section(keys={name: kind.rows for name, kind in SECTIONS.items()})
    defaults: ClassVar[Mapping[str, Any]] = SECTIONS
    models: ClassVar[Mapping[str, type[SectionModel]]] = SECTIONS
    title = "monitors"
    tensorboard: TensorBoardConfig
    comet: CometConfig
    wandb: WandbConfig
    csv_monitor: CSVConfig

    @property
    def enabled(self) -> bool:
        """True if a monitor is on."""
        return any(vars(self)[name].enabled for name in SECTIONS)


def get_monitor_config(param_dict: Mapping[str, Any] | str | os.PathLike[str]) -> DeepSpeedMonitorConfig:
    """Return the sections of a config: a dict, a path or JSON text; other keys are not checked.

    Raises as SectionModel does, and ConfigError for a file that cannot be read.
    """
    document: Any = param_dict
    if not isinstance(param_dict, Mapping):
        found = read(param_dict)
        if found.problems:
            raise ConfigError(found.source, found.problems)
        document = found.data
    sections: dict[str, Any] = {name: document.get(name) or {} for name in SECTIONS}
    return DeepSpeedMonitorConfig(**sections)
