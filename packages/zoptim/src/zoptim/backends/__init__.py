"""Backends: the compiled CPU kernels and the GPU kernels, their plans and jobs."""
