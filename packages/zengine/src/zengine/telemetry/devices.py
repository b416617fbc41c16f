"""Peak FLOPS of devices, the denominator of the model FLOPs utilisation (MFU).

Vendor figures for dense bf16 matrix products (fp16 where a device lacks bf16), without sparsity, in TFLOPS of one
device.  Unlisted devices, including every CPU, report no MFU unless the config sets the peak
("timers": {"throughput": {"peak_tflops": ...}}).
"""

from __future__ import annotations

import attrs
import torch

# Longer names first where one is part of another: the first that the device's name contains counts.
PEAK_TFLOPS = {
    "GB300": 2500.0,
    "B300": 2250.0,
    "GB200": 2500.0,
    "B200": 2250.0,
    "GH200": 989.4,
    "H200 NVL": 835.5,
    "H200": 989.4,
    "H100 NVL": 835.5,
    "H100 PCIe": 756.0,
    "H100": 989.4,
    "H800": 989.4,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "A40": 149.7,
    "A30": 165.0,
    "A10G": 70.0,
    "A10": 125.0,
    "V100": 125.0,
    "T4": 65.0,
    "RTX 6000 Ada": 364.2,
    "RTX A6000": 154.8,
    "RTX 5090": 209.5,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
    "MI325X": 1307.4,
    "MI300X": 1307.4,
    "MI250X": 383.0,
}


@attrs.frozen(kw_only=True)
class Fleet:
    """Devices that train together."""

    num_devices: int = 1  # ranks that train together, one device each
    peak_tflops: float = 0.0  # of one of them; 0: unknown


def peak_of(device: torch.device) -> float:
    """Return the peak TFLOPS of `device`; 0 if it is not in the table."""
    return peak_by_name(torch.cuda.get_device_name(device)) if device.type == "cuda" else 0.0


def peak_by_name(name: str) -> float:
    """Return the peak TFLOPS of a device name such as "NVIDIA H100 80GB HBM3"; 0 if unknown."""
    words = name.replace("-", " ").split()
    return next((peak for known, peak in PEAK_TFLOPS.items() if _holds(words, known.split())), 0.0)


def _holds(words: list[str], known: list[str]) -> bool:
    """Return True if all words of a table entry occur ("A10" does not match "NVIDIA A100", nor "L4" "L40")."""
    return all(word in words for word in known)
