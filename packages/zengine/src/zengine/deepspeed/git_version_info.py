"""`deepspeed.git_version_info`: versions, and the ops that are built in."""

from __future__ import annotations

import torch

from zengine.as_deepspeed import API_VERSION
from zengine.deepspeed.accelerator.real_accelerator import get_accelerator
from zengine.deepspeed.ops import __compatible_ops__

__all__ = ["accelerator_name", "compatible_ops", "git_branch", "git_hash", "installed_ops", "torch_info", "version"]

version = API_VERSION  # of DeepSpeed, whose names zengine.deepspeed has
git_hash = git_branch = "[none]"  # wheels are built from releases
compatible_ops: dict[str, bool] = __compatible_ops__
installed_ops = dict(compatible_ops)  # nothing is compiled at run time
accelerator_name = get_accelerator().device_name()
_nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else ()  # type: ignore[no-untyped-call]
torch_info = {
    "version": ".".join(torch.__version__.split(".")[:2]),
    "bf16_support": get_accelerator().is_bf16_supported(),
    "cuda_version": torch.version.cuda or "0.0",
    "nccl_version": ".".join(map(str, _nccl)) or "0.0",
    "hip_version": torch.version.hip or "0.0",
}
