"""Known sections of features that do not exist here yet: accepted while they are off, refused when on.

Their keys are listed all the same, so that a slip of the pen in a section that is switched off is found before
the day it is switched on.
"""

from __future__ import annotations

from zengine.config.kinds import LIST, MAPPING, TEXT, TRUTH, null_or, number, whole
from zengine.config.table import Section, limited, muted, refused, switched

COUNT = whole(0)

PROGRESSIVE_LAYER_DROP = switched("progressive layer drop", muted(theta=number(0, 1), gamma=number(0)))

EIGENVALUE = switched(
    "the eigenvalue of layers",
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

_DIFFICULTY = muted(min_difficulty=number(), max_difficulty=number(), schedule_type=TEXT, schedule_config=MAPPING)
CURRICULUM_LEARNING = switched("curriculum learning", muted(curriculum_type=TEXT) | _DIFFICULTY)

_METRIC = Section(
    keys=muted(index_to_sample_path=TEXT, index_to_metric_path=TEXT, difficulty_type=TEXT, clustering_type=TEXT)
    | _DIFFICULTY
)
DATA_SAMPLING = switched(
    "data sampling",
    {
        **muted(num_epochs=whole(1), num_workers=COUNT, pin_memory=TRUTH),
        "curriculum_learning": switched(
            "curriculum learning",
            {**muted(data_cluster_path=TEXT), "curriculum_metrics": Section(each=(_METRIC,))},
        ),
        "dynamic_batching": switched(
            "dynamic batching",
            muted(
                metrics_path=TEXT,
                lr_scaling_method=TEXT,
                min_batch_size=COUNT,
                max_batch_size=null_or(COUNT, 0),
                sequence_picking_order=TEXT,
                max_tokens=COUNT,
            ),
        ),
    },
)
_LTD_SCHEDULE = Section(
    keys={
        **muted(min_value=COUNT, max_value=COUNT, schedule_type=TEXT),
        "schedule_config": Section(keys=muted(require_steps=COUNT, seq_per_step=COUNT)),
    }
)
DATA_ROUTING = switched(
    "data routing",
    {
        "random_ltd": switched(
            "random layer-token drop",
            {
                **muted(
                    total_layer_num=COUNT,
                    random_ltd_layer_num=COUNT,
                    random_ltd_layer_id=LIST,
                    model_mask_name=null_or(TEXT, ""),
                    model_type=TEXT,
                    hidden_state_order=TEXT,
                ),
                "random_ltd_schedule": _LTD_SCHEDULE,
            },
        )
    },
)

ELASTICITY = switched(
    "elasticity",
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
)

QUANTIZE_TRAINING = switched("mixture of quantization (MoQ)", {}, is_open=True)
SPARSE_ATTENTION = refused(
    "sparse attention is not supported", "Use torch.nn.attention.flex_attention in the model and remove the section."
)
GRAPH_HARVESTING = limited(TRUTH, False, why="graph harvesting")
WEIGHT_QUANTIZATION = refused("quantized inference weights are not available yet", "Remove the section.")
