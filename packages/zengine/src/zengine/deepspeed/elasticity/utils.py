"""`deepspeed.elasticity.utils`."""

from __future__ import annotations


def is_torch_elastic_compatible() -> bool:
    """Return True: every supported torch has the elastic agent."""
    return True
