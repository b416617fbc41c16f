"""What leaves the device, from the config and the machine: the part of `resolve` that is about offload.

On a machine without a GPU "cpu" is where everything is, so nothing is moved and nothing copied.  "nvme" means files
everywhere.
"""

from __future__ import annotations

from zengine.config.load import Config
from zengine.config.plan import Facts
from zengine.config.schema import Settings
from zpartition import Offload, Speculation, Tier

__all__ = ["devices", "offload", "offload_notices"]

_TUNING = "zero_optimization.offload_optimizer."


def devices(settings: Settings) -> dict[str, str]:
    """Where the config wants each part, by the name of its section."""
    zero = settings.zero_optimization
    return {"offload_optimizer": zero.offload_optimizer.device, "offload_param": zero.offload_param.device}


def offload(settings: Settings, facts: Facts) -> Offload:
    """The policy; `rules` have seen to it that there is a path where one is needed."""
    states, weights = settings.zero_optimization.offload_optimizer, settings.zero_optimization.offload_param
    tier = _tier(states.device, facts)
    speculates = states.super_offload and tier is Tier.HOST
    return Offload(
        states=tier,
        weights=_tier(weights.device, facts),
        ratio=states.ratio,
        step_numel=settings.zero_optimization.sub_group_size,
        buffer_count=max(2, states.buffer_count),
        pin=states.pin_memory if tier is Tier.HOST else weights.pin_memory,
        directory=next((each.nvme_path for each in (states, weights) if each.device == "nvme"), ""),
        num_threads=settings.aio.intra_op_parallelism,
        speculation=Speculation.LAST_BACKWARD if speculates else Speculation.OFF,
    )


def offload_notices(config: Config, facts: Facts) -> list[str]:
    """What has no effect on this machine, or beside the other keys."""
    zero = config.settings.zero_optimization
    notices = []
    for name, device in devices(config.settings).items():
        if device == "cpu" and facts.device_type == "cpu":
            key = f"zero_optimization.{name}.device"
            notices.append(
                f"{config.origin(key)}: {key} has no effect here: this run computes on the CPU, where everything is "
                "already"
            )
    tuned = {"sub_group_size": "zero_optimization.sub_group_size", "super_offload": f"{_TUNING}super_offload"}
    tuned |= {key: f"{_TUNING}{key}" for key in ("ratio", "pin_memory", "buffer_count")}
    tuned["aio"] = next((key for key in config.given if key.startswith("aio.")), "aio")
    moved = _tier(zero.offload_optimizer.device, facts)
    idle = {Tier.DEVICE: list(tuned), Tier.HOST: ["buffer_count", "aio"], Tier.DISK: ["super_offload", "pin_memory"]}
    for key in (tuned[name] for name in idle[moved] if tuned[name] in config.given):
        if zero.offload_param.device == "nvme" and key == tuned["aio"]:
            continue
        where = "is not offloaded" if moved is Tier.DEVICE else f"is offloaded to {zero.offload_optimizer.device}"
        notices.append(f"{config.origin(key)}: {key} has no effect here: the optimizer {where}")
    for name, device in devices(config.settings).items():
        key = f"zero_optimization.{name}.nvme_path"
        if key in config.given and getattr(zero, name).nvme_path and device != "nvme":
            notices.append(f'{config.origin(key)}: {key} has no effect here: {name}.device is "{device}"')
    key = "zero_optimization.offload_param.pin_memory"
    if key in config.given and (moved is Tier.HOST or _tier(zero.offload_param.device, facts) is not Tier.HOST):
        decides = f"{_TUNING}pin_memory decides" if moved is Tier.HOST else "the weights are not on the host"
        notices.append(f"{config.origin(key)}: {key} has no effect here: {decides}")
    if moved is Tier.DISK and zero.offload_optimizer.buffer_count < 2:
        key = tuned["buffer_count"]
        notices.append(f"{config.origin(key)}: {key} = 1 counts as 2: one is read while another is updated")
    return notices


def _tier(device: str, facts: Facts) -> Tier:
    if device == "nvme":
        return Tier.DISK
    return Tier.HOST if device == "cpu" and facts.device_type != "cpu" else Tier.DEVICE
