"""`deepspeed.elasticity.elastic_agent`: not available, see `zengine run --elastic`."""

from __future__ import annotations

from zengine.deepspeed.absent import absent

__all__ = ["DSElasticAgent"]

DSElasticAgent = absent("elasticity.DSElasticAgent")
