"""`deepspeed.elasticity`: batch sizes that many worlds can train."""

from __future__ import annotations

from zengine.deepspeed.elasticity.constants import ELASTICITY, ENABLED, ENABLED_DEFAULT
from zengine.deepspeed.elasticity.elastic_agent import DSElasticAgent
from zengine.deepspeed.elasticity.elasticity import (
    compute_elastic_config,
    elasticity_enabled,
    ensure_immutable_elastic_config,
)
from zengine.deepspeed.elasticity.utils import is_torch_elastic_compatible

__all__ = [
    "ELASTICITY",
    "ENABLED",
    "ENABLED_DEFAULT",
    "DSElasticAgent",
    "compute_elastic_config",
    "elasticity_enabled",
    "ensure_immutable_elastic_config",
    "is_torch_elastic_compatible",
]
