"""Keys of optional training techniques: progressive layer drop, elastic batch sizes."""

from __future__ import annotations

import attrs

from zengine.config.grammar.kinds import COUNT, TEXT, TRUTH, list_of, null_or, number, whole
from zengine.config.grammar.table import ignored, section, setting

MICRO_BATCHES = list_of(whole(1), "a list of whole numbers >= 1")
VERSION = number(0.1, 0.2)


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


@attrs.frozen(kw_only=True)
class Elasticity:
    """elasticity: the batch size that the most world sizes can train, in place of the three keys of the batch."""

    enabled: bool = setting(TRUTH, False, "choose batch and micro-batch size for the world of the run")
    max_train_batch_size: int = setting(COUNT, 0, "upper limit of train_batch_size; required")
    micro_batch_sizes: tuple[int, ...] = setting(
        MICRO_BATCHES, (), "allowed train_micro_batch_size_per_gpu; required"
    )
    min_gpus: int = setting(whole(1), 1, "least ranks of the job")
    max_gpus: int = setting(whole(1), 10000, "most ranks of the job")
    prefer_larger_batch: bool = setting(TRUTH, True, "of equally elastic batch sizes take the larger one")
    ignore_non_elastic_batch_info: bool = setting(
        TRUTH, False, "override the three keys of the batch, which are an error otherwise"
    )
    version: float = setting(VERSION, 0.2, "0.1: counts ranks; 0.2: counts whole hosts, and knows model parallelism")
    model_parallel_size: int = setting(whole(1), 1, "0.2: ranks that hold one copy of the model")
    num_gpus_per_node: int = setting(whole(1), 1, "0.2: ranks of a host")


@attrs.frozen(kw_only=True, slots=False)
class FeatureKeys:
    """Sections of the top level about optional techniques: `Plan` has the same fields."""

    progressive_layer_drop: ProgressiveLayerDrop = section(ProgressiveLayerDrop, switch="enabled")
    elasticity: Elasticity = section(
        Elasticity,
        {"min_time": ignored(COUNT, 0, why="schedulers of jobs read it")},
        switch="enabled",
    )
