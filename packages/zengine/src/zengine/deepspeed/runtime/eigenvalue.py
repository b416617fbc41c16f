"""`deepspeed.runtime.eigenvalue`."""

from zengine.features.eigenvalues import Eigenvalue

__all__ = ["Eigenvalue"]
