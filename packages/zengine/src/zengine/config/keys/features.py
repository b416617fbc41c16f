"""Keys of optional techniques: layer drop, eigenvalues, elastic batches, rounds of local steps, generation."""

from __future__ import annotations

import attrs

from zengine.config.grammar.kinds import COUNT, NAMES, TEXT, TRUTH, choice, list_of, null_or, number, whole
from zengine.config.grammar.table import Row, ignored, section, section_of, setting
from zengine.config.keys.autotuning import OTHERS as AUTOTUNING_OTHERS
from zengine.config.keys.autotuning import Autotuning
from zengine.config.keys.compression import CompressionTraining

BITS = null_or(whole(0, 8), 0)
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
        "the keyword pld_theta, which its forward names or takes in **kwargs",
    )
    seed: int = setting(COUNT, 1234, "seed of the skipped layers, equal on all ranks")  # ours


@attrs.frozen(kw_only=True)
class BlockEigenvalues:
    """eigenvalue: curvature of the loss in each block of layers, by power iteration."""

    enabled: bool = setting(TRUTH, False, "compute the largest eigenvalue of each block's Hessian")
    verbose: bool = setting(TRUTH, False, "log each block's eigenvalue and its number of products")
    max_iter: int = setting(whole(1), 100, "most products with the Hessian for a block")
    tol: float = setting(number(0), 1e-2, "relative change of the eigenvalue at which the iteration stops")
    stability: float = setting(number(0), 1e-6, "added to the norm by which vectors are divided")
    gas_boundary_resolution: int = setting(whole(1), 1, "steps from one computation to the next")
    layer_name: str = setting(TEXT, "bert.encoder.layer", "path of the module list whose layers are the blocks")
    layer_num: int = setting(COUNT, 0, "number of blocks, from the first layer; 0: all layers of the list")


EIGENVALUE_OTHERS: dict[str, Row] = {"model_name": ignored(TEXT, why="layer_name names the blocks of any model")}


@attrs.frozen(kw_only=True)
class QuantizeBits:
    """quantize_training.quantize_bits."""

    start_bits: int = setting(whole(1, 16), 16, "bits of the first rounded weights")
    target_bits: int = setting(whole(1, 16), 8, "bits at the end: 3 and more, 2 (ternary) or 1 (binary)")


@attrs.frozen(kw_only=True)
class QuantizeSchedule:
    """quantize_training.quantize_schedule."""

    quantize_period: int = setting(
        whole(1), 1000, "steps, after the offset, until the first bit is lost; then it doubles with every lost bit"
    )
    schedule_offset: int = setting(COUNT, 1000, "applied steps before weights are rounded")


@attrs.frozen(kw_only=True)
class QuantizeAlgorithm:
    """quantize_training.quantize_algo."""

    q_type: str = setting(
        choice("symmetric", "asymmetric", fold=str.lower), "symmetric", "with or without zero point"
    )
    rounding: str = setting(
        choice("nearest", "stochastic", fold=str.lower), "nearest", "rounding to codes; nearest at 1 and 2 bits"
    )


@attrs.frozen(kw_only=True)
class MixedWeights:
    """quantize_training.fp16_mixed_quantize: weights between full precision and rounded."""

    enabled: bool = setting(TRUTH, False, "mix each weight with its rounded value, after every lost bit anew")
    quantize_change_ratio: float = setting(number(0, 1), 0.001, "fall of the full weights' share, per step")


@attrs.frozen(kw_only=True)
class QuantizeTraining:
    """quantize_training: weights are rounded to fewer and fewer bits after each update (MoQ)."""

    enabled: bool = setting(TRUTH, False, "round the weights that modules see; masters keep full precision")
    quantize_bits: QuantizeBits = section(QuantizeBits)
    quantize_schedule: QuantizeSchedule = section(QuantizeSchedule)
    quantize_algo: QuantizeAlgorithm = section(QuantizeAlgorithm)
    quantize_groups: int = setting(whole(1), 1, "parts of a weight, in memory order, with a scale each")
    quantize_verbose: bool = setting(TRUTH, False, "log each lost bit")
    modules: tuple[str, ...] = setting(  # ours
        null_or(NAMES, ()),
        (),
        "regular expressions, searched in names of parameters: those with two or more dimensions are rounded",
        empty="(all)",
    )
    fp16_mixed_quantize: MixedWeights = section(MixedWeights, switch="enabled")
    eigenvalue: BlockEigenvalues = section(BlockEigenvalues, EIGENVALUE_OTHERS, switch="enabled")


MODES = ("dense", "fixed", "variable", "bigbird", "bslongformer")
BLOCKS = list_of(COUNT, "a list of whole numbers >= 0")


@attrs.frozen(kw_only=True)
class SparseAttention:
    """sparse_attention: a block pattern for the attention layers of models that ask for it.

    The engine changes no layer: `zengine.sparse_attention.make_sparsity_config(engine.plan.sparse_attention, heads)`.
    """

    mode: str = setting(choice(*MODES, fold=str.lower), "fixed", "pattern of blocks that attend to each other")
    block: int = setting(whole(1), 16, "tokens of a block")
    different_layout_per_head: bool = setting(TRUTH, False, "heads have patterns of their own")
    num_local_blocks: int = setting(whole(1), 4, "fixed: blocks of a window")
    num_global_blocks: int = setting(
        whole(1), 1, "fixed: blocks of each window that all attend to; bigbird: first blocks that do and are"
    )
    attention: str = setting(
        choice("bidirectional", "unidirectional", fold=str.lower), "bidirectional", "whether later blocks are seen"
    )
    horizontal_global_attention: bool = setting(
        TRUTH, False, "fixed, variable: global blocks attend to everything as well"
    )
    num_different_global_patterns: int = setting(
        whole(1), 1, "fixed: number of choices of a window's global blocks, which heads take in turn"
    )
    num_random_blocks: int = setting(COUNT, 0, "variable, bigbird: random blocks of a row")
    local_window_blocks: tuple[int, ...] = setting(
        BLOCKS, (4,), "variable: blocks of the first windows; the last number repeats"
    )
    global_block_indices: tuple[int, ...] = setting(
        BLOCKS, (0,), "variable, bslongformer: global blocks, or the first ones of ranges"
    )
    global_block_end_indices: tuple[int, ...] = setting(
        null_or(BLOCKS, ()), (), "variable, bslongformer: ends of those ranges", empty="(single blocks)"
    )
    num_sliding_window_blocks: int = setting(whole(1), 3, "bigbird, bslongformer: blocks of the sliding window")


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
class OuterOptimizer:
    """diloco.outer, ours: the SGD that makes the groups' mean movement the weights of the next round."""

    lr: float = setting(number(above=0), 0.7, "learning rate of the outer SGD")
    momentum: float = setting(number(0, 1), 0.9, "momentum of the outer SGD")
    nesterov: bool = setting(TRUTH, True, "Nesterov momentum; false: classical momentum")


@attrs.frozen(kw_only=True)
class DiLoCo:
    """diloco, ours: groups of ranks train by themselves and exchange weights once a round."""

    sync_every: int = setting(COUNT, 0, "steps of a round; turns the section on", empty="off")
    start_step: int = setting(
        COUNT, 0, "first steps, in which the groups average their gradients (data parallelism); then rounds begin"
    )
    groups: int = setting(
        COUNT,
        0,
        "replica groups; 0: the axis `replicate` of a mesh, else one for each zero_optimization.shard_group_size "
        "ranks, else one for each replica",
        empty="(the replicas)",
    )
    fragments: int = setting(
        whole(1), 1, "parts of the weights, layers in strides, that are exchanged in turn, each once in a round"
    )
    sync_delay: int = setting(COUNT, 0, "steps in which a message arrives while training goes on")
    merge_alpha: float = setting(
        number(0, 1), 0.0, "weight of the local weights where the exchanged ones are mixed in; 0: they are replaced"
    )
    quantize_bits: int = setting(BITS, 0, "4 or 8: bits of an outer gradient on the wire", empty="(float32)")
    outer: OuterOptimizer = section(OuterOptimizer)


@attrs.frozen(kw_only=True)
class HybridEngine:
    """hybrid_engine: the engine also generates, with the weights that it trains."""

    enabled: bool = setting(TRUTH, False, "initialize() returns an engine that generates")
    max_out_tokens: int = setting(whole(1), 512, "most tokens of a sequence: prompt and answer")
    release_inference_cache: bool = setting(TRUTH, False, "free keys and values after each generation")
    inference_tp_size: int = setting(
        whole(1), 1, "consecutive ranks that split a copy of the weights, and the prompts, of a rollout"
    )


_HYBRID_OTHERS: dict[str, Row] = {
    "pin_parameters": ignored(TRUTH, True, why="stage 3 gathers once for all tokens of a rollout, always"),
    "tp_gather_partition_size": ignored(whole(1), why="a split copy is made unit by unit, always"),
    "enable_cuda_graph": ignored(TRUTH, False, why="generation launches its kernels itself"),
}
HYBRID_ENGINE = section_of(HybridEngine, _HYBRID_OTHERS, switch="enabled")


@attrs.frozen(kw_only=True, slots=False)
class FeatureKeys:
    """Sections of the top level about optional techniques: `Plan` has the same fields."""

    progressive_layer_drop: ProgressiveLayerDrop = section(ProgressiveLayerDrop, switch="enabled")
    sparse_attention: SparseAttention = section(SparseAttention)
    eigenvalue: BlockEigenvalues = section(BlockEigenvalues, EIGENVALUE_OTHERS, switch="enabled")
    quantize_training: QuantizeTraining = section(
        QuantizeTraining,
        {"quantizer_kernel": ignored(TRUTH, False, why="one implementation serves all devices")},
        switch="enabled",
    )
    elasticity: Elasticity = section(
        Elasticity,
        {"min_time": ignored(COUNT, 0, why="schedulers of jobs read it")},
        switch="enabled",
    )
    diloco: DiLoCo = section(DiLoCo, switch="sync_every", off=(0,))
    autotuning: Autotuning = section(Autotuning, AUTOTUNING_OTHERS, switch="enabled")
    hybrid_engine: HybridEngine = section(HybridEngine, _HYBRID_OTHERS, switch="enabled")
    compression_training: CompressionTraining = section(CompressionTraining)
