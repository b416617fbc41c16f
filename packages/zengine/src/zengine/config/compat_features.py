"""Known sections of features that do not exist here yet: accepted while they are off, refused when on.

Their keys are listed all the same, so that a slip of the pen in a section that is switched off is found before
the day it is switched on.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from zengine.config import data_settings as data
from zengine.config.kinds import LIST, MAPPING, TEXT, TRUTH, null_or, number, whole
from zengine.config.table import Section, honoured, limited, muted, no_effect, refused, switched

GONE = ", which DeepSpeed removed in 0.19.8,"  # from the words "is not available yet"
COUNT = whole(0)

PROGRESSIVE_LAYER_DROP = switched(f"progressive layer drop{GONE}", muted(theta=number(0, 1), gamma=number(0)))

EIGENVALUE = switched(
    f"the eigenvalue of layers{GONE}",
    muted(
        verbose=TRUTH,
        max_iter=whole(1),
        tol=number(0),
        stability=number(0),
        gas_boundary_resolution=whole(1),
        layer_name=TEXT,
        layer_num=COUNT,
    ),
)


def _by_name(**members: Any) -> MappingProxyType[str, Any]:
    """Settings by the names that the user chose."""
    return MappingProxyType(members)


CURRICULUM_LEARNING = honoured(
    data.CurriculumLearning, {"schedule_config": honoured(data.ScheduleConfig)}, switch="enabled"
)

_METRIC = honoured(data.CurriculumMetric, {"schedule_config": honoured(data.ScheduleConfig)})
_DATA_SAMPLING = honoured(
    data.DataSampling,
    {
        "curriculum_learning": honoured(
            data.DataCurriculum,
            {
                "data_cluster_path": no_effect(TEXT, why="the order is worked out as it is needed, without files"),
                "curriculum_metrics": Section(each=(_METRIC,), builds=_by_name),
            },
            switch="enabled",
        ),
        "dynamic_batching": honoured(
            data.DynamicBatching,
            {"verbose": no_effect(TRUTH, False, why="what matters is logged in any case")},
            switch="enabled",
        ),
    },
    switch="enabled",
)
_DATA_ROUTING = honoured(
    data.DataRouting,
    {
        "random_ltd": honoured(
            data.RandomLtd,
            {
                "random_ltd_schedule": honoured(
                    data.LtdSchedule, {"schedule_config": honoured(data.LtdScheduleConfig)}
                ),
                "layer_token_lr_schedule": switched("a learning rate by layer tokens", {}, is_open=True),
            },
            switch="enabled",
        )
    },
    switch="enabled",
)
DATA_EFFICIENCY = honoured(data.DataEfficiency, {"data_sampling": _DATA_SAMPLING, "data_routing": _DATA_ROUTING})

ELASTICITY = switched(
    f"elasticity{GONE}",
    muted(
        max_train_batch_size=whole(1),
        micro_batch_sizes=LIST,
        min_gpus=whole(1),
        max_gpus=whole(1),
        min_time=COUNT,
        prefer_larger_batch=TRUTH,
        ignore_non_elastic_batch_info=TRUTH,
        version=number(0),
        model_parallel_size=whole(1),
        num_gpus_per_node=whole(1),
    ),
)

AUTOTUNING = switched(
    "the autotuner",
    muted(
        fast=TRUTH,
        results_dir=null_or(TEXT, ""),
        exps_dir=null_or(TEXT, ""),
        overwrite=TRUTH,
        start_profile_step=COUNT,
        end_profile_step=COUNT,
        metric=TEXT,
        tuner_type=TEXT,
        early_stopping=COUNT,
        num_trials=COUNT,
        tuner_early_stopping=COUNT,
        tuner_num_trials=COUNT,
        arg_mappings=null_or(MAPPING, None),
        max_train_batch_size=null_or(COUNT, 0),
        min_train_batch_size=COUNT,
        max_train_micro_batch_size_per_gpu=COUNT,
        min_train_micro_batch_size_per_gpu=COUNT,
        num_tuning_micro_batch_sizes=COUNT,
        mp_size=COUNT,
        model_info=null_or(MAPPING, None),
    ),
    instead="Set it to false: zengine plan finds the largest micro-batch and the best stage, without sub-jobs.",
)

QUANTIZE_TRAINING = switched(f"mixture of quantization (MoQ){GONE}", {}, is_open=True)
SPARSE_ATTENTION = refused(
    "sparse attention is not supported", "Use torch.nn.attention.flex_attention in the model and remove the section."
)
GRAPH_HARVESTING = limited(TRUTH, False, why=f"graph harvesting{GONE}")
WEIGHT_QUANTIZATION = refused("quantized inference weights are not available yet", "Remove the section.")
