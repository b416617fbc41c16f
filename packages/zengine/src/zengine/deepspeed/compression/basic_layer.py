"""`deepspeed.compression.basic_layer`: names of compressed layers.

`init_compression` keeps the classes of layers, so these classes answer `isinstance` for the layers that it has
prepared, too: `isinstance(model.fc, LinearLayer_Compress)`.  Layers that are made of these classes are compressed by
hand, as DeepSpeed's are:

    layer = LinearLayer_Compress(64, 64)
    layer.enable_weight_quantization(8, 4, 1, True, "symmetric", 1)
    layer.weight_quantization_enabled = True  # from now on
    layer.fix_weight_quantization()           # the weight becomes what forward used

A technique is one of zengine.compression, the one that `init_compression` uses.  An engine does not know such layers:
the caller switches, and the bits are the target's from the start.
"""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from zengine.compression.clean import narrow
from zengine.compression.techniques import (
    ChannelMask,
    HeadMask,
    Mask,
    QuantizerKind,
    RoundInput,
    RoundWeight,
    RowMask,
    SparseMask,
    Technique,
    weight_of,
)
from zengine.config.plan.techniques.compression import TECHNIQUES
from zengine.deepspeed.compression.helper import is_module_compressible
from zpartition import ModelParallelGroup, tensor

__all__ = [
    "BNLayer_Compress",
    "ColumnParallelLinear_Compress",
    "Conv2dLayer_Compress",
    "Embedding_Compress",
    "LinearLayer_Compress",
    "QuantAct",
    "RowParallelLinear_Compress",
    "remember_layers",
]

_PREPARED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def remember_layers(model: nn.Module, mpu: Any = None) -> None:
    """Let the classes of this module recognize the layers of a prepared model."""
    _PREPARED.update(module for module in model.modules() if is_module_compressible(module, mpu))


class _OfPrepared(type):
    """Class of classes whose instances are the prepared layers of a kind."""

    kinds: tuple[type[nn.Module], ...]
    named: str

    def __instancecheck__(cls, instance: Any) -> bool:
        if super().__instancecheck__(instance):
            return True
        if not isinstance(instance, nn.Module) or instance not in _PREPARED:
            return False
        return isinstance(instance, cls.kinds) or bool(cls.named and cls.named in type(instance).__name__)


class Compressible(nn.Module):
    """Switches of the techniques of a layer that is compressed by hand, and the weight that they give."""

    weight_quantization_enabled_in_forward: bool = False
    weight_quantization_enabled: bool = False
    activation_quantization_enabled: bool = False
    sparse_pruning_enabled: bool = False
    row_pruning_enabled: bool = False
    head_pruning_enabled: bool = False
    channel_pruning_enabled: bool = False

    # by section, in the order in which they act; made by the first `enable_*`
    _techniques: dict[str, Technique]

    def enable_weight_quantization(
        self,
        start_bits: int,
        target_bits: int,
        quantization_period: int,
        weight_quantization_enabled_in_forward: bool,
        quantization_type: str,
        num_groups: int,
    ) -> None:
        """Round the weight to `target_bits` in forward, while `weight_quantization_enabled` is True.

        Without `weight_quantization_enabled_in_forward` the weight only gets the bits and the period that
        `deepspeed.runtime.quantize.Quantizer` reads.  num_groups: parts with a scale each; rows of an embedding have
        one each.  Raises ValueError for other types, and for bits or groups that do not fit.
        """
        groups = 0 if isinstance(self, nn.Embedding) else num_groups
        technique = RoundWeight(offset=0, bits=target_bits, kind=_kind(quantization_type), groups=groups)
        if weight_quantization_enabled_in_forward:
            self._enable(technique)
            technique.weight(self, weight_of(self).detach())  # raises for bits that there are not
        elif "weight_quantization" in vars(self).get("_techniques", {}):
            self._forget("weight_quantization")
        weight: Any = self.weight
        weight.start_bits, weight.target_bits, weight.q_period = start_bits, target_bits, quantization_period
        self.weight_quantization_enabled_in_forward = weight_quantization_enabled_in_forward

    def enable_activation_quantization(self, bits: int, quantization_type: str, range_calibration: str) -> None:
        """Round the input to 4 or 8 bits, while `activation_quantization_enabled` is True.

        range_calibration: "dynamic" (a scale for each token, of images for each sample), "static" (a running range).
        Raises ValueError for other values.
        """
        if bits not in (4, 8) or range_calibration not in ("dynamic", "static"):
            raise ValueError(
                f"bits = {bits!r} must be 4 or 8, and range_calibration = {range_calibration!r} 'dynamic' or 'static'"
            )
        self._enable(
            RoundInput(offset=0, bits=bits, kind=_kind(quantization_type), is_static=range_calibration == "static")
        )

    def enable_sparse_pruning(self, ratio: float, method: str) -> None:
        """Keep a share of the weights, while `sparse_pruning_enabled` is True.

        method: "l1" (the largest ones now) or "topk" (by learned scores).  Raises ValueError for others.
        """
        self._enable(SparseMask(offset=0, ratio=ratio, is_learned=_is_learned(method)))

    def get_mask(self, pruning_type: str = "row") -> Tensor:
        """Return the mask of "sparse", "row", "head" or "channel" pruning, 1 for what is kept.

        Raises ValueError if it has not been enabled.
        """
        found = vars(self).get("_techniques", {}).get(f"{pruning_type}_pruning")
        if not isinstance(found, Mask):
            raise ValueError(
                f"{pruning_type} pruning of this {type(self).__name__} is not enabled; call "
                f"enable_{pruning_type}_pruning() first"
            )
        return found.mask(self)

    @torch.no_grad()
    def fix_weight_quantization(self) -> None:
        """Round the weight itself, and stop rounding in forward.  Raises ValueError if it is not enabled."""
        weight_of(self).copy_(self._found("weight_quantization").weight(self, weight_of(self)))
        self.weight_quantization_enabled_in_forward = False
        self._forget("weight_quantization")

    @torch.no_grad()
    def fix_sparse_pruning_helper(self) -> None:
        """Set the pruned weights to 0, and drop the mask.  Raises ValueError if it is not enabled."""
        weight_of(self).copy_(self._found("sparse_pruning").weight(self, weight_of(self)))
        self._forget("sparse_pruning")

    @torch.no_grad()
    def _fix_mask(self, name: str, dim: int, *, shrinks: bool) -> Tensor:
        """Apply a mask to the weight, or shrink `dim` of it; drop and return the mask."""
        found = self._found(name)
        assert isinstance(found, Mask)
        mask = found.mask(self).detach().bool()
        bias = getattr(self, "bias", None)
        if shrinks:
            heads = found.heads if isinstance(found, HeadMask) else mask.numel()
            narrow(self, dim, mask.view(-1).repeat_interleave(weight_of(self).shape[dim] // heads))
        else:
            new = found.weight(self, weight_of(self))
            if bias is not None:
                bias.copy_(found.bias(self, bias))
            weight_of(self).copy_(new)
        self._forget(name)
        return mask

    def _enable(self, technique: Technique) -> None:
        """Keep a technique, in place of one of its section."""
        techniques = vars(self).setdefault("_techniques", {})
        if technique.name in techniques:
            self._forget(technique.name)
        technique.check(self, type(self).__name__)
        technique.prepare(self)
        techniques[technique.name] = technique
        for name in [name for name in TECHNIQUES if name in techniques]:
            techniques[name] = techniques.pop(name)

    def _found(self, name: str) -> Technique:
        found = vars(self).get("_techniques", {}).get(name)
        if not isinstance(found, Technique):
            raise ValueError(f"{name} of this {type(self).__name__} is not enabled; call enable_{name}() first")
        return found

    def _forget(self, name: str) -> None:
        vars(self)["_techniques"].pop(name).release(self)
        setattr(self, f"{name}_enabled", False)

    def _effective(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the input, the weight and the bias that forward uses."""
        weight, bias = weight_of(self), getattr(self, "bias", None)
        for name, technique in vars(self).get("_techniques", {}).items():
            if getattr(self, f"{name}_enabled"):
                x, weight = technique.input(self, x), technique.weight(self, weight)
                bias = None if bias is None else technique.bias(self, bias)
        return x, weight, bias


class LinearLayer_Compress(Compressible, nn.Linear, metaclass=_OfPrepared):  # noqa: N801
    """nn.Linear that is compressed by hand, or prepared by `init_compression`."""

    kinds: ClassVar[tuple[type[nn.Module], ...]] = (nn.Linear,)
    named: ClassVar[str] = ""

    def enable_row_pruning(self, ratio: float, method: str) -> None:
        """Keep a share of the rows, while `row_pruning_enabled` is True.  method: "l1" or "topk"; see sparse."""
        self._enable(RowMask(offset=0, ratio=ratio, is_learned=_is_learned(method)))

    def enable_head_pruning(self, ratio: float, method: str, num_heads: int) -> None:
        """Keep a share of the heads, columns of this output projection, while `head_pruning_enabled` is True.

        Raises ValueError for a method other than "topk", and for heads that do not divide the columns.
        """
        if method != "topk":
            raise ValueError(f"method = {method!r}: heads are pruned by learned scores; pass 'topk'")
        self._enable(HeadMask(offset=0, ratio=ratio, is_learned=True, heads=num_heads))

    def fix_row_col_pruning_helper(self, mask: Tensor | None = None, dim_reduction: bool = False) -> Tensor | None:
        """Apply the mask of rows, or remove the rows with `dim_reduction`; return the mask.

        mask: that of the layer before; the columns that it does not keep are removed, and None is returned.
        """
        if mask is None:
            return self._fix_mask("row_pruning", 0, shrinks=dim_reduction)
        narrow(self, 1, mask.bool().view(-1))
        return None

    def fix_head_pruning_helper(
        self, mask: Tensor | None = None, num_heads: int | None = None, dim_reduction: bool = False
    ) -> Tensor | None:
        """Apply the mask of heads to the columns, or remove them with `dim_reduction`; return the mask.

        mask: that of the output projection, of `num_heads` heads; rows of those that it does not keep are removed.
        """
        if mask is None:
            return self._fix_mask("head_pruning", 1, shrinks=dim_reduction)
        kept = mask.bool().view(-1)
        narrow(self, 0, kept.repeat_interleave(self.weight.shape[0] // (num_heads or kept.numel())))
        return mask

    def forward(self, input: Tensor, skip_bias_add: bool = False) -> Any:
        """Return the product; with `skip_bias_add` without the bias, and the bias beside it."""
        x, weight, bias = self._effective(input)
        if skip_bias_add:
            return nn.functional.linear(x, weight), bias
        return nn.functional.linear(x, weight, bias)


class Conv2dLayer_Compress(Compressible, nn.Conv2d, metaclass=_OfPrepared):  # noqa: N801
    """nn.Conv2d that is compressed by hand, or prepared by `init_compression`."""

    kinds, named = (nn.Conv2d,), ""

    def enable_channel_pruning(self, ratio: float, method: str) -> None:
        """Keep a share of the output channels, while `channel_pruning_enabled` is True; see sparse pruning."""
        self._enable(ChannelMask(offset=0, ratio=ratio, is_learned=_is_learned(method)))

    def fix_channel_pruning_helper(self, mask: Tensor | None = None, dim_reduction: bool = False) -> Tensor | None:
        """Apply the mask of channels, or remove them with `dim_reduction`; return the mask.

        mask: that of the layer before; the input channels that it does not keep are removed, and None is returned.
        """
        if mask is None:
            return self._fix_mask("channel_pruning", 0, shrinks=dim_reduction)
        narrow(self, 1, mask.bool().view(-1))
        return None

    def forward(self, input: Tensor) -> Tensor:
        x, weight, bias = self._effective(input)
        found: Tensor = self._conv_forward(x, weight, bias)
        return found


class Embedding_Compress(Compressible, nn.Embedding, metaclass=_OfPrepared):  # noqa: N801
    """nn.Embedding that is compressed by hand, or prepared by `init_compression`; each row has a scale."""

    kinds, named = (nn.Embedding,), ""

    def forward(self, input: Tensor) -> Tensor:
        _, weight, _ = self._effective(input)
        return nn.functional.embedding(
            input, weight, self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse
        )


class BNLayer_Compress(nn.BatchNorm2d, metaclass=_OfPrepared):  # noqa: N801
    """nn.BatchNorm2d whose channels may shrink, or one that `init_compression` has prepared."""

    kinds, named = (nn.BatchNorm2d,), ""

    def fix_channel_pruning_helper(self, mask: Tensor, dim_reduction: bool = True) -> None:
        """Remove the channels that the mask of the convolution before does not keep."""
        narrow(self, 0, mask.bool().view(-1))


class ColumnParallelLinear_Compress(LinearLayer_Compress):  # noqa: N801
    """Linear layer split by outputs over an mpu's model-parallel ranks, or a prepared one of that name."""

    kinds, named = (), "ColumnParallelLinear"

    def __init__(
        self,
        mpu: Any,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = True,
        skip_bias_add: bool = False,
    ) -> None:
        """Hold this rank's outputs.  Raises ValueError if the ranks do not divide them."""
        self.mp_group = ModelParallelGroup.of(mpu.get_model_parallel_group())
        super().__init__(input_size, _share("output_size", output_size, self.mp_group), bias=bias)
        self.input_size, self.output_size, self.output_size_per_partition = input_size, output_size, self.out_features
        self.gather_output, self.skip_bias_add = gather_output, skip_bias_add

    def forward(self, input: Tensor, skip_bias_add: bool = False) -> Any:
        """Return (outputs, bias): this rank's, or all with `gather_output`; None unless it is left to the caller."""
        skips = self.skip_bias_add or skip_bias_add
        found = super().forward(tensor.copy(input, self.mp_group), skips)
        output, bias = found if skips else (found, None)
        if self.gather_output:
            output = tensor.join_features(output, self.mp_group, (output.shape[-1],) * self.mp_group.size)
        return output, bias


class RowParallelLinear_Compress(LinearLayer_Compress):  # noqa: N801
    """Linear layer split by inputs over an mpu's model-parallel ranks, or a prepared one of that name."""

    kinds, named = (), "RowParallelLinear"

    def __init__(
        self,
        mpu: Any,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        skip_bias_add: bool = False,
    ) -> None:
        """Hold this rank's inputs.  Raises ValueError if the ranks do not divide them."""
        self.mp_group = ModelParallelGroup.of(mpu.get_model_parallel_group())
        super().__init__(_share("input_size", input_size, self.mp_group), output_size, bias=bias)
        self.input_size, self.output_size, self.input_size_per_partition = input_size, output_size, self.in_features
        self.input_is_parallel, self.skip_bias_add = input_is_parallel, skip_bias_add

    def forward(self, input: Tensor, skip_bias_add: bool = False) -> Any:
        """Return (outputs, bias); None unless it is left to the caller.  input: this rank's, or all of it."""
        if not self.input_is_parallel:
            input = tensor.slice_features(input, self.mp_group, (self.in_features,) * self.mp_group.size)
        product, bias = super().forward(input, True)
        output = tensor.reduce(product, self.mp_group) if self.mp_group.size > 1 else product
        if self.skip_bias_add or skip_bias_add:
            return output, bias
        return (output if bias is None else output + bias), None


def _share(name: str, size: int, ranks: ModelParallelGroup) -> int:
    """Return a rank's part of a size."""
    if size % ranks.size:
        raise ValueError(f"{name} = {size} does not divide over {ranks.size} model-parallel ranks; use a multiple")
    return size // ranks.size


class QuantAct(nn.Module):
    """Rounds activations by a running range, which training updates."""

    x_min_max: Tensor
    kinds: ClassVar[tuple[str, ...]] = ("symmetric", "asymmetric")

    def __init__(self, act_range_momentum: float = 0.95, quant_mode: str = "symmetric") -> None:
        """act_range_momentum: share of the old range.  quant_mode: "symmetric" or "asymmetric"; raises ValueError."""
        super().__init__()
        if quant_mode not in self.kinds:
            raise ValueError(f"quant_mode = {quant_mode!r}: pass one of {', '.join(map(repr, self.kinds))}")
        self.act_range_momentum, self.quant_mode = act_range_momentum, quant_mode
        self.register_buffer("x_min_max", torch.zeros(2))

    def forward(self, x: Tensor, num_bits: int, *args: Any) -> Tensor:
        """Return `x`, of any shape, rounded to `num_bits`; other arguments have no effect."""
        rule = RoundInput(
            offset=0,
            bits=num_bits,
            kind="symmetric" if self.quant_mode == "symmetric" else "asymmetric",
            is_static=True,
            momentum=self.act_range_momentum,
        )
        return rule.by_range(x, self.x_min_max, is_training=self.training)


def _kind(quantization_type: str) -> QuantizerKind:
    if quantization_type == "symmetric":
        return "symmetric"
    if quantization_type == "asymmetric":
        return "asymmetric"
    raise ValueError(f"quantization_type = {quantization_type!r}: pass 'symmetric' or 'asymmetric'")


def _is_learned(method: str) -> bool:
    if method not in ("l1", "topk"):
        raise ValueError(f"method = {method!r}: pass 'l1' or 'topk'")
    return method == "topk"
