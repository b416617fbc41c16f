"""Keys of compression_training: seven techniques of one shape, and a distillation loss.

A technique has shared parameters with a switch, and groups of modules with parameters of their own.
`plan.techniques` checks the keys that an enabled technique requires.  Zero and an empty name stand for "not given".
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import attrs

from zengine.config.grammar.kinds import (
    COUNT,
    NAMES,
    TEXT,
    TRUTH,
    Mismatch,
    ValueKind,
    choice,
    list_of,
    null_or,
    number,
    whole,
)
from zengine.config.grammar.table import ignored, named_members, section, section_of, setting

EVERY_MODULE = ("*",)
LISTS_OF_NAMES = list_of(NAMES, "a list of lists of names")
COUNTS = list_of(COUNT, "a list of whole numbers >= 0")
RATIO = number(0, 1)
_KIND = choice("symmetric", "asymmetric", fold=str.lower)
_METHOD = choice("l1", "topk", fold=str.lower)
_OFFSET = "applied steps after which it is switched on"
_METHOD_DOC = "l1: the largest {} of the initial weights are kept; topk: those with the highest learned scores"


def _read_sparse_method(value: object) -> str:
    if isinstance(value, str) and value.lower() == "snip_momentum":
        raise Mismatch(
            "is not supported: it is an algorithm of Intel's neural_compressor",
            'Write "l1" or "topk", and a dense_ratio for each group.',
        )
    method: str = _METHOD.read(value)
    return method


def _by_name(**members: Any) -> MappingProxyType[str, Any]:
    """Return groups by the names that the user chose."""
    return MappingProxyType(members)


@attrs.frozen(kw_only=True)
class GroupScope:
    """Modules of a group."""

    modules: tuple[str, ...] = setting(
        null_or(NAMES, EVERY_MODULE), EVERY_MODULE, 'regular expressions, searched in names of modules; "*": all'
    )
    related_modules: tuple[tuple[str, ...], ...] = setting(
        null_or(LISTS_OF_NAMES, ()),
        (),
        "pruning: a list for each of modules, of the layers whose inputs (of heads: outputs) go as well; then "
        "redundancy_clean() shrinks dimensions",
    )


# -- quantization --------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class WeightBits:
    """params of a group of weight_quantization."""

    start_bits: int = setting(COUNT, 0, "bits at the beginning; weights that are rounded in forward have target_bits")
    target_bits: int = setting(
        whole(0, 16), 0, "bits: 3 and more, 2 (ternary) or 1 (binary), the latter two symmetric"
    )
    quantization_period: int = setting(COUNT, 1, "steps until the bits fall by one; then it doubles")
    format: str = setting(  # ours
        null_or(TEXT, ""),
        "",
        'ours: in forward, the format of inference instead of bits, e.g. "int4-row": the trained model is the one '
        "that init_inference() serves, bit for bit",
    )


@attrs.frozen(kw_only=True)
class WeightGroup(GroupScope):
    """Group of weight_quantization."""

    params: WeightBits = section(WeightBits)


@attrs.frozen(kw_only=True)
class MixedRounding:
    """fp16_mixed_quantize: weights between full precision and rounded."""

    enabled: bool = setting(TRUTH, False, "of quantization in the optimizer's step: mix weights and rounded weights")
    quantize_change_ratio: float = setting(number(0, 1), 0.001, "fall of the full weights' share, per step")


@attrs.frozen(kw_only=True)
class WeightShared:
    """shared_parameters of weight_quantization."""

    enabled: bool = setting(TRUTH, False, "round weights of the groups")
    schedule_offset: int = setting(COUNT, 0, _OFFSET)
    quantize_weight_in_forward: bool = setting(
        TRUTH,
        False,
        "round in forward, straight through; false: after each update, as quantize_training does",
    )
    quantize_groups: int = setting(whole(1), 1, "parts of a weight with a scale each; an embedding has one per row")
    quantization_type: str = setting(_KIND, "symmetric", "symmetric, or asymmetric: with a zero point")
    rounding: str = setting(
        choice("nearest", "stochastic", fold=str.lower), "nearest", "in the optimizer's step; in forward nearest"
    )
    quantize_verbose: bool = setting(TRUTH, False, "log each change of bits")
    fp16_mixed_quantize: MixedRounding = section(MixedRounding, switch="enabled")


@attrs.frozen(kw_only=True)
class WeightQuantization:
    """compression_training.weight_quantization."""

    shared_parameters: WeightShared = section(
        WeightShared,
        {"quantizer_kernel": ignored(TRUTH, False, why="one implementation serves all devices")},
        switch="enabled",
    )
    different_groups: Mapping[str, WeightGroup] = named_members(section_of(WeightGroup), _by_name)


@attrs.frozen(kw_only=True)
class ActivationBits:
    """params of a group of activation_quantization."""

    bits: int = setting(COUNT, 0, "bits of a layer's input: 4 or 8")


@attrs.frozen(kw_only=True)
class ActivationGroup(GroupScope):
    """Group of activation_quantization."""

    params: ActivationBits = section(ActivationBits)


@attrs.frozen(kw_only=True)
class ActivationShared:
    """shared_parameters of activation_quantization."""

    enabled: bool = setting(TRUTH, False, "round inputs of the groups' linear layers and convolutions")
    schedule_offset: int = setting(COUNT, 1000, _OFFSET)
    quantization_type: str = setting(_KIND, "symmetric", "symmetric, or asymmetric: with a zero point")
    range_calibration: str = setting(
        choice("dynamic", "static", fold=str.lower),
        "dynamic",
        "dynamic: a scale for each token (of images: each sample); static: one range, a running mean of training",
    )


@attrs.frozen(kw_only=True)
class ActivationQuantization:
    """compression_training.activation_quantization."""

    shared_parameters: ActivationShared = section(ActivationShared, switch="enabled")
    different_groups: Mapping[str, ActivationGroup] = named_members(section_of(ActivationGroup), _by_name)


# -- pruning -------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class DenseRatio:
    """params of a group of a pruning technique."""

    dense_ratio: float = setting(RATIO, 0.0, "share that is kept, above 0", empty="(none)")


@attrs.frozen(kw_only=True)
class PruningGroup(GroupScope):
    """Group of a pruning technique."""

    params: DenseRatio = section(DenseRatio)


@attrs.frozen(kw_only=True)
class SparseShared:
    """shared_parameters of sparse_pruning."""

    enabled: bool = setting(TRUTH, False, "set single weights of the groups to 0")
    schedule_offset: int = setting(COUNT, 1000, _OFFSET)
    method: str = setting(
        ValueKind(_METHOD.wants, _read_sparse_method, _METHOD.json_schema), "l1", _METHOD_DOC.format("magnitudes")
    )
    block_pattern: str = setting(
        TEXT, "4x1", 'ours: "2:4" keeps the 2 largest of 4 neighbours in a row instead of a ratio; others: no effect'
    )
    follow_weights: bool = setting(  # ours
        TRUTH,
        False,
        "ours, of l1: choose again from the present weights in each forward, and train the others straight through",
    )


@attrs.frozen(kw_only=True)
class SparsePruning:
    """compression_training.sparse_pruning."""

    shared_parameters: SparseShared = section(
        SparseShared,
        {
            "dense_ratio": ignored(RATIO, why="groups have their own; this one belongs to snip_momentum"),
            "schedule_offset_end": ignored(COUNT, why="it belongs to snip_momentum"),
            "schedule_offset_stride": ignored(COUNT, 1, why="it belongs to snip_momentum"),
            "excluded_modules": ignored(NAMES, (), why="it belongs to snip_momentum"),
        },
        switch="enabled",
    )
    different_groups: Mapping[str, PruningGroup] = named_members(section_of(PruningGroup), _by_name)


@attrs.frozen(kw_only=True)
class RowShared:
    """shared_parameters of row_pruning."""

    enabled: bool = setting(TRUTH, False, "set whole outputs of the groups' linear layers to 0")
    schedule_offset: int = setting(COUNT, 1000, _OFFSET)
    method: str = setting(_METHOD, "l1", _METHOD_DOC.format("rows, by the sum of magnitudes,"))


@attrs.frozen(kw_only=True)
class RowPruning:
    """compression_training.row_pruning."""

    shared_parameters: RowShared = section(RowShared, switch="enabled")
    different_groups: Mapping[str, PruningGroup] = named_members(section_of(PruningGroup), _by_name)


@attrs.frozen(kw_only=True)
class HeadShared:
    """shared_parameters of head_pruning."""

    enabled: bool = setting(TRUTH, False, "set the inputs of whole heads of the groups' output projections to 0")
    schedule_offset: int = setting(COUNT, 1000, _OFFSET)
    method: str = setting(_METHOD, "topk", "topk: heads with the highest learned scores are kept; no other")
    num_heads: int = setting(COUNT, 0, "heads of a layer; required")


@attrs.frozen(kw_only=True)
class HeadPruning:
    """compression_training.head_pruning."""

    shared_parameters: HeadShared = section(HeadShared, switch="enabled")
    different_groups: Mapping[str, PruningGroup] = named_members(section_of(PruningGroup), _by_name)


@attrs.frozen(kw_only=True)
class ChannelShared:
    """shared_parameters of channel_pruning."""

    enabled: bool = setting(TRUTH, False, "set whole output channels of the groups' convolutions to 0")
    schedule_offset: int = setting(COUNT, 1000, _OFFSET)
    method: str = setting(_METHOD, "l1", _METHOD_DOC.format("channels, by the sum of magnitudes,"))


@attrs.frozen(kw_only=True)
class ChannelPruning:
    """compression_training.channel_pruning."""

    shared_parameters: ChannelShared = section(ChannelShared, switch="enabled")
    different_groups: Mapping[str, PruningGroup] = named_members(section_of(PruningGroup), _by_name)


# -- a teacher -----------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class LayerReduction:
    """compression_training.layer_reduction: a student begins with some of a teacher's layers."""

    enabled: bool = setting(TRUTH, False, "init_compression() copies layers of teacher_model")
    module_name_prefix: str = setting(TEXT, "", "path of the list of layers, in both models")
    teacher_layer: tuple[int, ...] = setting(COUNTS, (), "the teacher's layer for each layer of the student")
    other_module_name: tuple[str, ...] = setting(NAMES, (), "paths of other modules that are copied")


@attrs.frozen(kw_only=True)
class Distillation:
    """compression_training.distillation, ours: the loss also compares logits with those of a teacher."""

    enabled: bool = setting(TRUTH, False, "add the divergence from the logits of init_compression()'s teacher_model")
    temperature: float = setting(number(above=0), 1.0, "divisor of both logits; the divergence is times its square")
    weight: float = setting(number(0, 1), 0.5, "share of the divergence in the loss; the caller's loss has the rest")
    output: str = setting(TEXT, "logits", "name of the logits in the models' output, unless that is a tensor")


@attrs.frozen(kw_only=True)
class CompressionTraining:
    """compression_training: a model that is smaller after training."""

    layer_reduction: LayerReduction = section(
        LayerReduction,
        {"keep_number_layer": ignored(COUNT, why="teacher_layer has an entry for each layer of the student")},
        switch="enabled",
    )
    weight_quantization: WeightQuantization = section(WeightQuantization)
    activation_quantization: ActivationQuantization = section(ActivationQuantization)
    sparse_pruning: SparsePruning = section(SparsePruning)
    row_pruning: RowPruning = section(RowPruning)
    head_pruning: HeadPruning = section(HeadPruning)
    channel_pruning: ChannelPruning = section(ChannelPruning)
    distillation: Distillation = section(Distillation, switch="enabled")
