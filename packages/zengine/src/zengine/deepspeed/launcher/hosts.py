"""Hosts and devices of the command `deepspeed`: hostfiles, filters, and the text that carries them to each host."""

from __future__ import annotations

import base64
import json
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path

from zengine.deepspeed.utils.logging import logger

__all__ = [
    "apply_num_nodes_and_gpus",
    "decode_world_info",
    "encode_world_info",
    "fetch_hostfile",
    "parse_hostfile",
    "parse_inclusion_exclusion",
    "parse_node_config",
    "parse_node_config_list",
    "parse_resource_filter",
]

Devices = Mapping[str, list[int]]  # of each host, in the order of ranks
_LINE = re.compile(r"(\S+)\s+slots=(\d+)")


def fetch_hostfile(hostfile_path: str) -> OrderedDict[str, int] | None:
    """Return the devices of each host of a file; None, with a warning, if there is no such file."""
    path = Path(hostfile_path)
    if not path.is_file():
        logger.warning("Unable to find hostfile, will proceed with training with local resources only.")
        return None
    return parse_hostfile(path.read_text(encoding="utf-8").splitlines())


def parse_hostfile(hostfile_lines: Iterable[str]) -> OrderedDict[str, int]:
    """Return the devices of each host of lines "name slots=4".  Raises ValueError for other lines, or none."""
    found: OrderedDict[str, int] = OrderedDict()
    for line in map(str.strip, hostfile_lines):
        if not line or line.startswith("#"):
            continue
        match = _LINE.match(line)
        if match is None:
            raise ValueError(
                f"Hostfile contains a bad entry: {line}, unable to proceed with launching. Write lines like "
                '"worker-0 slots=4".'
            )
        if match[1] in found:
            raise ValueError(f"Hostfile contains multiple entries for {match[1]}, unable to proceed with launching")
        found[match[1]] = int(match[2])
    if not found:
        raise ValueError(
            "Hostfile is empty or not formatted correctly, unable to proceed with launching. Write lines like "
            '"worker-0 slots=4".'
        )
    return found


def parse_node_config(node_config: str) -> tuple[str, list[int]]:
    """Return ("host", [0, 2]) for "host:0,2", and ("host", []) for "host".  Raises ValueError for other text."""
    if not re.fullmatch(r"[^:@]+(:\d+(,\d+)*)?", node_config):
        raise ValueError(f'"{node_config}" is not a host or "host:0,2"')
    host, _, slots = node_config.partition(":")
    return host, [int(slot) for slot in slots.split(",")] if slots else []


def parse_node_config_list(node_config_list: str) -> dict[str, list[int]]:
    """Return host -> devices in ascending order of a filter: hosts joined with "@"."""
    found: dict[str, set[int]] = {}
    for host, slots in map(parse_node_config, node_config_list.split("@")):
        found.setdefault(host, set()).update(slots)
    return {host: sorted(slots) for host, slots in found.items()}


def parse_resource_filter(host_info: Devices, include_str: str = "", exclude_str: str = "") -> Devices:
    """Return the devices that pass a filter, in the order of `host_info`.

    Raises ValueError for two filters, and for a host or a device that there is not.
    """
    if include_str and exclude_str:
        raise ValueError("include_str and exclude_str are mutually exclusive.")
    if not include_str and not exclude_str:
        return host_info
    named = parse_node_config_list(include_str or exclude_str)
    for host, slots in named.items():
        if host not in host_info:
            raise ValueError(f"Hostname '{host}' not found in hostfile; its hosts are {', '.join(host_info)}")
        for slot in slots:
            if slot not in host_info[host]:
                raise ValueError(f"No slot '{slot}' specified on host '{host}', which has {host_info[host]}")
    found: OrderedDict[str, list[int]] = OrderedDict()
    for host, slots in host_info.items():
        picked = (named[host] or slots) if host in named else []
        kept = picked if include_str else [slot for slot in slots if slot not in picked]
        if kept:
            found[host] = kept
    return found


def parse_inclusion_exclusion(resource_pool: Mapping[str, int], inclusion: str, exclusion: str) -> Devices:
    """Return the devices of hosts with so many each, filtered."""
    everything = OrderedDict((host, list(range(slots))) for host, slots in resource_pool.items())
    return parse_resource_filter(everything, include_str=inclusion, exclude_str=exclusion)


def apply_num_nodes_and_gpus(active_resources: Devices, num_nodes: int, num_gpus: int) -> Devices:
    """Return the first `num_nodes` hosts with devices 0 to num_gpus - 1; a number below 1 changes nothing."""
    hosts = list(active_resources)[: num_nodes if num_nodes > 0 else None]
    return OrderedDict((host, list(range(num_gpus)) if num_gpus > 0 else active_resources[host]) for host in hosts)


def encode_world_info(world_info: Mapping[str, object]) -> str:
    """Return the devices of each host as JSON in base64."""
    return base64.urlsafe_b64encode(json.dumps(world_info).encode()).decode()


def decode_world_info(text: str) -> dict[str, list[int]]:
    """Undo `encode_world_info`.  Raises ValueError for the text "None", the default of the option."""
    if text == "None":
        raise ValueError("world_info can not be None: pass --world_info, the result of encode_world_info()")
    found: dict[str, list[int]] = json.loads(base64.urlsafe_b64decode(text))
    return found
