"""`deepspeed.comm.ccl`: not available; processors communicate by gloo and shared memory."""

from __future__ import annotations

from zengine.deepspeed.absent import absent

__all__ = ["CCLBackend", "CCLHandler"]

CCLBackend = absent("comm.ccl.CCLBackend")
CCLHandler = absent("comm.ccl.CCLHandler")
