"""`deepspeed.module_inject.auto_ep_config`: the section `expert_parallel` of a config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, final

from zengine.config.grammar.table import section_of
from zengine.config.keys.parallel import EXPERT_PARALLEL, ExpertParallel
from zengine.deepspeed.section_model import SectionModel

__all__ = ["AutoEPConfig", "parse_autoep_config"]


@final
class AutoEPConfig(SectionModel):
    """Section `expert_parallel`; the fields of the router and its kernels have no effect."""

    rows = section_of(ExpertParallel, EXPERT_PARALLEL)
    defaults: ClassVar[Mapping[str, Any]] = {
        **dict.fromkeys(("score_func", "score_apply", "top_k", "routed_scaling_factor"), "auto"),
        **dict.fromkeys(("combine_impl", "row_weighting_impl"), "auto"),
        **dict.fromkeys(("moe_layer_pattern", "router_pattern", "expert_pattern", "preset_model"), None),
        **dict.fromkeys(("disable_triton_grouped_mm", "validate_folding_routing", "async_split_plan"), False),
        "use_grouped_mm": True,
        "route_scale": 1.0,
        "gate_up_impl": "separate",
        "comm_num_sm": 12,
        "comm_qp_margin": 4,
        "comm_max_tokens_per_rank": 0,
    }
    title = "expert_parallel"
    enabled: bool
    autoep_size: int


def parse_autoep_config(param_dict: Mapping[str, Any]) -> AutoEPConfig:
    """Return the object of the section `param_dict`.  Raises as AutoEPConfig does."""
    return AutoEPConfig(**param_dict)
