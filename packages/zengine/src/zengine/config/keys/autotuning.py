"""Keys of the search for a config by `deepspeed --autotuning`."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from zengine.config.grammar.kinds import ANYTHING, COUNT, MAPPING, TEXT, TRUTH, choice, null_or, whole
from zengine.config.grammar.table import Row, ignored, renamed, section_of, setting


@attrs.frozen(kw_only=True)
class Autotuning:
    """autotuning: `deepspeed --autotuning` runs the script with several configs and writes the best one.

    The launcher reads the section and starts the runs.  An engine measures only if a path asks it to.
    """

    enabled: bool = setting(TRUTH, False, "obey metric_path and model_info_path, which the launcher sets")
    metric_path: str = setting(
        null_or(TEXT, ""), "", "file for the figures of the profiled steps; the script ends after them"
    )
    model_info_path: str = setting(
        null_or(TEXT, ""), "", "file for the sizes of the model; the script ends in its first forward"
    )
    start_profile_step: int = setting(COUNT, 3, "steps before the profiled ones; 0 counts as 1")
    end_profile_step: int = setting(whole(1), 5, "last profiled step")
    fast: bool = setting(TRUTH, True, "try few of the candidates that fit, by predicted traffic; false: all of them")
    metric: str = setting(
        choice("throughput", "latency", "flops", "forward", "backward", "step"),
        "throughput",
        "what the best config has most of (throughput, flops) or least of (milliseconds of a step or of a phase)",
    )
    results_dir: str = setting(null_or(TEXT, ""), "autotuning_results", "folder of the runs and of the best config")
    exps_dir: str = setting(null_or(TEXT, ""), "autotuning_exps", "folder of the configs to try")
    overwrite: bool = setting(TRUTH, True, "remove earlier runs; false: keep those that have a result")
    tuner_type: str = setting(
        choice("gridsearch", "random", "model_based"),
        "gridsearch",
        "order of the candidates if fast is false: as listed, at random, or by predicted traffic",
    )
    tuner_early_stopping: int = setting(COUNT, 5, "runs without a better one after which the search ends; 0: none")
    tuner_num_trials: int = setting(whole(1), 50, "most runs")
    arg_mappings: Mapping[str, str] = setting(
        null_or(MAPPING, {}), {}, "key of the config -> option of the script that gets its value"
    )
    max_train_batch_size: int = setting(
        null_or(COUNT, 0), 0, "samples of a step, made up by accumulation; 0: train_batch_size, or what each run has"
    )
    max_train_micro_batch_size_per_gpu: int = setting(whole(1), 1024, "largest micro-batch to try")
    min_train_micro_batch_size_per_gpu: int = setting(whole(1), 1, "smallest micro-batch to try")
    num_tuning_micro_batch_sizes: int = setting(
        whole(1), 3, "sizes to try at each stage, the largest that fits first"
    )


_MODEL_INFO = ignored(null_or(MAPPING, None), why="the first run reads sizes from the model itself")
OTHERS: dict[str, Row] = {
    "model_info": _MODEL_INFO,
    "min_train_batch_size": ignored(COUNT, 1, why="the smallest micro-batch decides"),
    "mp_size": ignored(COUNT, 1, why="the config's own degrees of parallelism are used"),
    "num_nodes": ignored(null_or(ANYTHING, None), why="the launcher's --num_nodes decides"),
    "num_gpus": ignored(null_or(ANYTHING, None), why="the launcher's --num_gpus decides"),
    "early_stopping": renamed(COUNT, "tuner_early_stopping"),
    "num_trials": renamed(whole(1), "tuner_num_trials"),
}
AUTOTUNING = section_of(Autotuning, OTHERS, switch="enabled")
