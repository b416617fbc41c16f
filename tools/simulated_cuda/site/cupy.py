"""CuPy of the simulated CUDA device: shadows the real one in processes that have this folder on PYTHONPATH."""

from simulated_cuda.fake_cupy import cuda

__all__ = ["cuda"]
__version__ = "14.0.0"
