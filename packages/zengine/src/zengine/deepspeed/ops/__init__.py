"""`deepspeed.ops`: optimizers.  Nothing is compiled at run time; kernels come with the wheel."""

from __future__ import annotations

from zengine.deepspeed.ops import adagrad, adam, lamb, lion

__all__ = ["adagrad", "adam", "lamb", "lion"]
