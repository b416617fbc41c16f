"""The kernels on CUDA devices: the formulas of the C kernels, compiled by NVRTC, launched through CuPy.

Problem: a step over hundreds of tensors must take a handful of launches, never wait for the host, and go into a
CUDA graph; and what runs on a GPU must be tested where there is none.

Design: `csrc/zk_gpu.cu` includes the very headers that the C kernels are made of, so a rule and a format are written
once.  Rows, streams and chunks lie in device tables (`tables`), so one launch updates any number of tensors.  A
combination of rule and formats is one program (`source`), compiled when it is first asked for and kept on disk
(`compiler`).  Whatever launches is behind a small protocol (`launch`): CuPy on a GPU; in the tests a C compiler and
fibres, which run the same text on CPU tensors, bit for bit like the C kernels.

Nothing here imports CuPy before a CUDA device is known to exist.

Rejected: Triton (brings its own compiler and rounding, no control of contraction); CuPy's `RawModule` (adds
`-ftz=true`, which flushes subnormal moments, so GPU and CPU would differ); `torch.utils.cpp_extension` (needs the
CUDA toolkit); arguments by the list, as apex passes them (a launch for every 110 tensors).
"""

from zoptim.backends.gpu.job import GpuJob
from zoptim.backends.gpu.launch import reason_without
from zoptim.backends.gpu.source import kernels_source
from zoptim.backends.gpu.squares import SquaresJob, grad_stats

__all__ = ["GpuJob", "SquaresJob", "grad_stats", "kernels_source", "reason_without"]
