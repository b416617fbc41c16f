"""`deepspeed.utils.mixed_precision_linkage`: not available; parameters have no links to their masters."""

from __future__ import annotations

from zengine.deepspeed.absent import absent

__all__ = ["lazy_init_hp_params_optimizer_state", "link_hp_params"]

lazy_init_hp_params_optimizer_state = absent("utils.mixed_precision_linkage.lazy_init_hp_params_optimizer_state")
link_hp_params = absent("utils.mixed_precision_linkage.link_hp_params")
