"""Kernels on CUDA devices: text in `csrc/zq_gpu.cu`, compiled by NVRTC and launched through CuPy.

`compiler` compiles and caches, `launch` loads and launches; `quant/gpu.py` packs the arguments.  Launching is a
small protocol: CuPy on a GPU; in the tests a C compiler and fibers, which run the same text on CPU tensors, bit for
bit like the C kernels.  CuPy is imported only if there is a CUDA device.

Rejected: Triton (its own compiler and rounding, no control of contraction); `torch.utils.cpp_extension` (needs the
CUDA toolkit); torch's int4 operators (they dequantize, for bfloat16 activations only, in a layout of their own).
"""
