"""Backends: the kernels on CPUs and GPUs, and the jobs that call them."""
