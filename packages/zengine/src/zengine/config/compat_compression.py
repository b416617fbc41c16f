"""The compression section: seven techniques with one shape, none available yet.

Each technique has `shared_parameters`, whose `enabled` is its switch, and `different_groups`, whose members the
user names.
"""

from __future__ import annotations

from zengine.config.compat_features import GONE
from zengine.config.kinds import ANYTHING, LIST, TEXT, TRUTH, Kind, null_or, number, whole
from zengine.config.table import Section, limited, muted, switched

COUNT = whole(0)


def _technique(what: str, shared: dict[str, Kind], params: dict[str, Kind]) -> Section:
    group = Section(
        keys={
            "params": Section(keys=muted(**params)),
            **muted(modules=LIST, related_modules=null_or(LIST, ())),
        }
    )
    return Section(
        keys={
            "shared_parameters": Section(
                keys={
                    "enabled": limited(TRUTH, False, why=what + GONE),
                    **muted(schedule_offset=COUNT, schedule_offset_end=COUNT, **shared),
                },
                switch="enabled",
            ),
            "different_groups": Section(each=(group,)),
        }
    )


LAYER_REDUCTION = switched(
    f"layer reduction{GONE}",
    muted(
        keep_number_layer=COUNT,
        module_name_prefix=TEXT,
        teacher_layer=LIST,
        other_module_name=LIST,
    ),
)
WEIGHT_QUANTIZATION = _technique(
    "weight quantization",
    {
        "quantizer_kernel": TRUTH,
        "quantize_groups": COUNT,
        "quantize_verbose": TRUTH,
        "quantization_type": TEXT,
        "rounding": TEXT,
        "quantize_weight_in_forward": TRUTH,
        "fp16_mixed_quantize": ANYTHING,
    },
    {"start_bits": COUNT, "target_bits": COUNT, "quantization_period": COUNT},
)
ACTIVATION_QUANTIZATION = _technique(
    "activation quantization", {"quantization_type": TEXT, "range_calibration": TEXT}, {"bits": COUNT}
)
_RATIO: dict[str, Kind] = {"dense_ratio": number(0, 1)}
SPARSE_PRUNING = _technique(
    "sparse pruning",
    {
        "method": TEXT,
        "block_pattern": TEXT,
        "dense_ratio": number(0, 1),
        "excluded_modules": LIST,
    },
    _RATIO,
)
ROW_PRUNING = _technique("row pruning", {"method": TEXT}, _RATIO)
HEAD_PRUNING = _technique("head pruning", {"method": TEXT, "num_heads": COUNT}, _RATIO)
CHANNEL_PRUNING = _technique("channel pruning", {"method": TEXT}, _RATIO)

COMPRESSION_TRAINING = Section(
    keys={
        "layer_reduction": LAYER_REDUCTION,
        "weight_quantization": WEIGHT_QUANTIZATION,
        "activation_quantization": ACTIVATION_QUANTIZATION,
        "sparse_pruning": SPARSE_PRUNING,
        "row_pruning": ROW_PRUNING,
        "head_pruning": HEAD_PRUNING,
        "channel_pruning": CHANNEL_PRUNING,
    }
)
