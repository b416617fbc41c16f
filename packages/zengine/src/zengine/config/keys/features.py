"""Keys of optional training techniques: progressive layer drop."""

from __future__ import annotations

import attrs

from zengine.config.grammar.kinds import COUNT, TEXT, TRUTH, null_or, number
from zengine.config.grammar.table import section, setting


@attrs.frozen(kw_only=True)
class ProgressiveLayerDrop:
    """progressive_layer_drop: deep layers are skipped more and more often."""

    enabled: bool = setting(TRUTH, False, "skip layers at random in training")
    theta: float = setting(number(0, 1), 1.0, "probability, in the limit, to keep the layer after the last")
    gamma: float = setting(number(0), 0.001, "rate at which the probability falls from 1 to theta, per step")
    layers: str = setting(  # ours: DeepSpeed leaves the skipping to the model
        null_or(TEXT, ""),
        "",
        "path of the module list whose layers are skipped (of a pipeline: their class); empty: the model skips by "
        "the keyword pld_theta of its forward",
    )
    seed: int = setting(COUNT, 1234, "seed of the skipped layers, equal on all ranks")  # ours


@attrs.frozen(kw_only=True, slots=False)
class FeatureKeys:
    """Sections of the top level about optional techniques: `Plan` has the same fields."""

    progressive_layer_drop: ProgressiveLayerDrop = section(ProgressiveLayerDrop, switch="enabled")
