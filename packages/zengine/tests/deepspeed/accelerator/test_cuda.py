"""A GPU under DeepSpeed's names; what needs no GPU."""

from __future__ import annotations

import pytest
import torch

from zengine.deepspeed.accelerator import CudaAccelerator


def test_questions_go_to_torch_cuda_and_others_are_refused():
    gpu = CudaAccelerator()
    assert gpu.memory_allocated is torch.cuda.memory_allocated
    assert gpu.device_name(2) == "cuda:2"
    assert gpu.communication_backend_name() == "nccl"
    assert not gpu.on_accelerator(torch.ones(1))
    with pytest.raises(AttributeError, match=r"get_accelerator\(\) has no 'fly'; use torch\.cuda"):
        gpu.fly  # noqa: B018
