"""Keys of optional techniques: progressive layer drop, elastic batch sizes, generation with the trained weights."""

from __future__ import annotations

import attrs

from zengine.config.grammar.kinds import COUNT, TEXT, TRUTH, list_of, null_or, number, whole
from zengine.config.grammar.table import Row, fixed, ignored, section, section_of, setting

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


@attrs.frozen(kw_only=True)
class HybridEngine:
    """hybrid_engine: the engine also generates, with the weights that it trains."""

    enabled: bool = setting(TRUTH, False, "initialize() returns an engine that generates")
    max_out_tokens: int = setting(whole(1), 512, "most tokens of a sequence: prompt and answer")
    release_inference_cache: bool = setting(TRUTH, False, "free keys and values after each generation")


_HYBRID_OTHERS: dict[str, Row] = {
    "inference_tp_size": fixed(whole(1), 1, why="generation with weights that are split over ranks"),
    "pin_parameters": ignored(TRUTH, True, why="stage 3 gathers once for all tokens of a rollout, always"),
    "tp_gather_partition_size": ignored(whole(1), why="it belongs to inference_tp_size"),
    "enable_cuda_graph": ignored(TRUTH, False, why="generation launches its kernels itself"),
}
HYBRID_ENGINE = section_of(HybridEngine, _HYBRID_OTHERS, switch="enabled")


@attrs.frozen(kw_only=True, slots=False)
class FeatureKeys:
    """Sections of the top level about optional techniques: `Plan` has the same fields."""

    progressive_layer_drop: ProgressiveLayerDrop = section(ProgressiveLayerDrop, switch="enabled")
    elasticity: Elasticity = section(
        Elasticity,
        {"min_time": ignored(COUNT, 0, why="schedulers of jobs read it")},
        switch="enabled",
    )
    hybrid_engine: HybridEngine = section(HybridEngine, _HYBRID_OTHERS, switch="enabled")
