"""The table of peaks."""

import pytest
import torch

from zengine.telemetry.work import PEAK_TFLOPS, peak_by_name, peak_of


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.0),
        ("Tesla V100-SXM2-32GB", 125.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("Something New 9000", 0.0),
    ],
)
def test_a_device_is_known_by_the_words_of_its_name(name, peak):
    assert peak_by_name(name) == peak


def test_every_line_of_the_table_is_found_by_its_own_name():
    assert {name: peak_by_name(f"NVIDIA {name}") for name in PEAK_TFLOPS} == PEAK_TFLOPS


def test_a_cpu_has_no_peak():
    assert peak_of(torch.device("cpu")) == 0.0
