"""The settings of `pipeline`: how a `PipelineModule` is cut and carried out."""

from __future__ import annotations

import attrs

from zengine.config.kinds import TEXT, TRUTH, Kind, choice, literal, null_or, whole
from zengine.config.table import Entry, no_effect, setting

__all__ = ["OTHERS", "Pipeline"]


def _read_stages(value: object) -> int:
    return 0 if value == "auto" else int(literal(whole(0), "auto").read(value))


STAGES = Kind('a whole number >= 1, or "auto"', _read_stages)


@attrs.frozen(kw_only=True)
class Pipeline:
    """pipeline: of a model that is a PipelineModule, which is cut before there is a config."""

    stages: int = setting(STAGES, 0, 'ranks along the model\'s depth; "auto" (0): as the PipelineModule was made')
    partition: str = setting(null_or(TEXT, ""), "", "what its partition_method has to be; empty: whatever it is")
    seed_layers: bool = setting(TRUTH, False, "whether its layers have seeds of their own; checked where it is given")
    activation_checkpoint_interval: int = setting(
        whole(0), 0, "layers that are computed again together in backward; 0: as the PipelineModule says"
    )
    # Ours: DeepSpeed has 1F1B.
    schedule: str = setting(
        choice("1f1b", "gpipe", "interleaved", "zero_bubble"), "1f1b", "in which order micro-batches are worked on"
    )


OTHERS: dict[str, Entry] = {
    "pipe_partitioned": no_effect(TRUTH, True, why="stages hand whole activations to each other"),
    "grad_partitioned": no_effect(TRUTH, True, why="stages hand whole gradients to each other"),
    "use_reentrant": no_effect(TRUTH, True, why="layers are computed again without re-entering autograd"),
}
