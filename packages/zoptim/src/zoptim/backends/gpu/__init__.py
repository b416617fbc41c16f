"""The kernels on CUDA devices: the formulas of the C kernels, compiled by NVRTC, launched through CuPy.

Problem: a step over hundreds of tensors must need a few launches, never synchronize with the host, and be capturable
in a CUDA graph; and the code must be testable without a GPU.

Design: `csrc/zk_gpu.cu` includes the headers of the C kernels, so each rule and format is written once.  Rows,
streams and chunks are in device tables (`tables`), so one launch updates any number of tensors.  A combination of
rule and formats is one program (`source`), compiled on first use and cached on disk (`compiler`).  Launching is a
small protocol (`launch`): CuPy on a GPU; in the tests a C compiler and fibers, which run the same text on CPU
tensors, bit for bit like the C kernels.

CuPy is imported only if there is a CUDA device.

Rejected: Triton (its own compiler and rounding, no control of contraction); CuPy's `RawModule` (adds `-ftz=true`,
which flushes subnormal moments, so GPU and CPU would differ); `torch.utils.cpp_extension` (needs the CUDA toolkit);
lists of addresses as kernel arguments, as in apex (a launch for every 110 tensors).
"""

from zoptim.backends.gpu.job import GpuJob
from zoptim.backends.gpu.launch import reason_without
from zoptim.backends.gpu.source import kernels_source
from zoptim.backends.gpu.squares import SquaresJob, grad_stats

__all__ = ["GpuJob", "SquaresJob", "grad_stats", "kernels_source", "reason_without"]
