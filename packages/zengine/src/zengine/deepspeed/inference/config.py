"""Inference config: every key is honoured, ignored with a notice, or rejected with a reason.

Keyword arguments and `config` are merged; a key in both must have the same value in both.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, final

import torch

from zengine.config import ConfigError, Problem
from zengine.config.grammar.kinds import ANYTHING, TEXT, TRUTH, Mismatch, ValueKind, whole
from zengine.config.grammar.source import read
from zengine.config.grammar.table import Key, Row, Section, Support, ignored, renamed
from zengine.deepspeed.inference.files import (
    CHECKPOINT_CONFIG,
    FILE_KEYS,
    InferenceCheckpointConfig,
    WeightFiles,
    file_problems,
    read_files,
)
from zengine.deepspeed.inference.offloading import WeightOffload, read_offload, read_zero
from zengine.deepspeed.inference.parallel import (
    MOE,
    OLD_NAMES,
    TENSOR,
    DeepSpeedMoEConfig,
    DeepSpeedTPConfig,
    Parallelism,
    conflicts,
    honoured,
    read_parallelism,
)
from zengine.deepspeed.inference.quantization import (
    QUANT,
    QuantizationConfig,
    WeightQuantization,
    read_quantization,
)
from zengine.deepspeed.section_model import SectionModel, invalid

__all__ = [
    "DeepSpeedInferenceConfig",
    "DeepSpeedMoEConfig",
    "DeepSpeedTPConfig",
    "DtypeEnum",
    "default_inference_config",
    "merge_config",
]


class DtypeEnum(enum.Enum):
    """Dtypes of weights, with their names."""

    fp16 = (torch.float16, "torch.float16", "fp16", "float16", "half")
    fp32 = (torch.float32, "torch.float32", "fp32", "float32", "float")
    bf16 = (torch.bfloat16, "torch.bfloat16", "bf16", "bfloat16", "bfloat")
    int8 = (torch.int8, "torch.int8", "int8")

    @classmethod
    def from_str(cls, value: str) -> DtypeEnum:
        """Return the member with this name.  Raises ValueError."""
        for dtype in cls:
            if value in dtype.value:
                return dtype
        raise ValueError(f"{value!r} is not a valid DtypeEnum")


def _read_dtype(value: object) -> torch.dtype:
    given = value.lower() if isinstance(value, str) else value
    found: list[torch.dtype] = [each.value[0] for each in DtypeEnum if given in each.value]
    if not found:
        bits = (
            ': for 4 bits, quant={"weight": {"num_bits": 4}}'
            if str(value) in ("4", "int4", "uint4", "torch.int4")
            else ""
        )
        raise Mismatch(f"must be float32, float16, bfloat16 or int8{bits}")
    return found[0]


def _read_policy(value: object) -> object:
    if isinstance(value, Mapping):
        return value
    raise Mismatch("must be a mapping from classes of blocks to names of layers in them")


def _read_off(value: Any) -> object:
    """Return {} for a section that says that it is off: configs that are written out whole have such sections."""
    section = value if isinstance(value, Mapping) else {"enabled": bool(value)}
    is_off = not section or section.get("enabled", True) is False or section.get("stage") == 0
    return {} if is_off else value


_OFF = ValueKind("a section that is off", _read_off)


def _only(default: Any, why: str, hint: str, kind: ValueKind = ANYTHING) -> Key:
    return Key(support=Support.FIXED, kind=kind, matching=(default,), why=why, hint=hint)


_KEYS: dict[str, Row] = {
    "dtype": honoured(kind=ValueKind("a dtype", _read_dtype), default=torch.float16),
    "max_out_tokens": honoured(kind=whole(1), default=1024),
    "max_tokens": renamed(whole(1), "max_out_tokens", what="another name"),
    "keep_module_on_host": honoured(kind=TRUTH, default=False),
    **FILE_KEYS,
    "injection_policy": honoured(kind=ValueKind("a policy", _read_policy)),
    "injection_dict": renamed(ANYTHING, "injection_policy", what="another name"),
    "tensor_parallel": Section(keys=TENSOR),
    "moe": Section(keys=MOE),
    "quant": Section(keys=QUANT),
    **OLD_NAMES,
    "replace_with_kernel_inject": honoured(kind=TRUTH, default=False),
    "enable_cuda_graph": honoured(kind=TRUTH, default=False),
    "min_out_tokens": honoured(kind=whole(1), default=1),
    # DeepSpeed's kernels
    "transposed_mode": ignored(TRUTH, False, why="weights are repacked for the kernels that run"),
    "set_empty_params": ignored(TRUTH, False, why="a model on the meta device gets memory when its weights are read"),
    "triangular_masking": ignored(TRUTH, True, why="a decoder is recognized with the mask that it has"),
    "return_tuple": ignored(TRUTH, True, why="modules return what they returned before"),
    "training_mp_size": ignored(whole(1), 1, why="a checkpoint of any number of ranks is read"),
    "injection_policy_tuple": ignored(ANYTHING, None, why="it is internal to DeepSpeed"),
    "config": ignored(ANYTHING, None, why="the module has its own config"),
    "replace_method": ignored(TEXT, "auto", why="decoders are recognized by what they compute"),
    **dict.fromkeys(
        ("use_triton", "triton_autotune"),
        ignored(TRUTH, False, why="there are no Triton kernels: others run, with the same results"),
    ),
    "kernel_inject": renamed(TRUTH, "replace_with_kernel_inject", what="another name"),
    "tm": renamed(TRUTH, "triangular_masking", what="another name"),
    "min_tokens": renamed(whole(1), "min_out_tokens", what="another name"),
    "args": renamed(ANYTHING, "config", what="another name"),
    # only the default
    "zero": honoured(kind=ValueKind("a ZeRO section", read_zero), default={}),
    "checkpoint_config": Section(keys=CHECKPOINT_CONFIG),
    "ckpt_config": renamed(ANYTHING, "checkpoint_config", what="another name"),
}


@final
class DeepSpeedInferenceConfig(SectionModel):
    """Settings of `init_inference`, with DeepSpeed's names as keyword arguments and attributes.

    tensor_parallel may be a size, moe a truth value; None counts as not given.  Raises ValueError for unknown,
    rejected or out-of-range keys.
    """

    rows = Section(keys=_KEYS)
    models: ClassVar[Mapping[str, type[SectionModel]]] = {
        "tensor_parallel": DeepSpeedTPConfig,
        "moe": DeepSpeedMoEConfig,
        "quant": QuantizationConfig,
        "checkpoint_config": InferenceCheckpointConfig,
    }
    defaults: ClassVar[Mapping[str, Any]] = models
    title = "init_inference"
    dtype: torch.dtype  # of the weights; int8: of the linear layers
    max_out_tokens: (
        int  # of a prompt, and of prompt and answer in a fused decoder's cache; generate() raises above it
    )
    min_out_tokens: int  # init_inference() raises if the memory does not suffice for as many
    keep_module_on_host: bool  # do not move the module
    checkpoint: str | Mapping[str, Any] | None  # weights to load: a path, or DeepSpeed's list of files
    base_dir: str  # of relative paths
    save_mp_checkpoint_path: str | None  # folder to write the quantized model to
    checkpoint_config: InferenceCheckpointConfig
    tensor_parallel: DeepSpeedTPConfig
    moe: DeepSpeedMoEConfig
    quant: QuantizationConfig
    zero: dict[str, Any]  # of a stage-3 config: stream weights, or share them between ranks

    def __init__(self, strict: bool = False, **data: Any) -> None:
        given = {
            key: _plain(key, data[key]) for key in sorted(data, key=lambda key: key != "tp") if data[key] is not None
        }
        super().__init__(strict, **given)  # `tp` is another name of the section into which other old names move
        is_quantized = self.quantization is not None
        written = file_problems(
            self.given(),
            self.checkpoint_config.given(),
            is_quantized=is_quantized,
            expert_ranks=self.parallelism.experts.size,
        )
        problems = [
            *conflicts(self.tensor_parallel, self.injection_policy),
            *self._graph_conflicts(),
            *self._length_conflicts(),
            *written,
        ]
        if problems:
            raise invalid(type(self).__name__, problems)
        if self.replace_with_kernel_inject and self.parallelism.policy:
            raise AssertionError(
                "init_inference() got replace_with_kernel_inject and injection_policy: the first runs a recognized "
                "decoder, the second names the layers that ranks split. Give one of them."
            )

    def _length_conflicts(self) -> Iterator[Problem]:
        if self.min_out_tokens > self.max_out_tokens:
            yield Problem(
                key="init_inference.min_out_tokens",
                reason=f"min_out_tokens = {self.min_out_tokens} is more than max_out_tokens = {self.max_out_tokens}",
                suggestion="Raise max_out_tokens: a cache holds as many.",
            )

    def _graph_conflicts(self) -> Iterator[Problem]:
        if self.enable_cuda_graph and self.tensor_parallel.enabled and self.tensor_parallel.tp_size > 1:
            yield Problem(
                key="init_inference.enable_cuda_graph",
                reason="messages between tensor ranks are not captured in CUDA graphs",
                suggestion="Remove it, or use one tensor rank.",
            )

    def _refuse_both_names(self, given: Mapping[str, Any]) -> None:
        """Accept old names beside a section that lacks the key."""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> DeepSpeedInferenceConfig:
        """Read a config.  Raises as the constructor does."""
        return cls(**given)

    @property
    def parallelism(self) -> Parallelism:
        """Parallelism of the model."""
        return read_parallelism(self.tensor_parallel, self.moe, self.injection_policy)

    @property
    def quantization(self) -> WeightQuantization | None:
        """Formats of the linear layers; None if they are not quantized."""
        return read_quantization(self.dtype, self.quant.given())

    @property
    def files(self) -> WeightFiles:
        """Files that weights are read from, and written to."""
        return read_files(self.given(), self.checkpoint_config.given())

    @property
    def offload(self) -> WeightOffload | None:
        """Where blocks rest between their calls; None: whole, on the device."""
        return read_offload(self.zero)

    def without_offload(self) -> DeepSpeedInferenceConfig:
        """Return the config without `zero`."""
        return type(self)(**{**self.given(), "zero": None})

    def compute_dtype(self, device: torch.device, stored: torch.dtype = torch.float32) -> torch.dtype:
        """Return the dtype of weights that are not quantized, and of activations.

        CPUs multiply float16 slowly: there it becomes bfloat16 if weights are `stored` so, else float32.
        """
        if self.dtype not in (torch.int8, torch.float16):
            return self.dtype
        if device.type == "cpu":
            return torch.bfloat16 if self.dtype == torch.float16 and stored == torch.bfloat16 else torch.float32
        return torch.float16

    @property
    def notices(self) -> tuple[str, ...]:
        """Lines about keys without effect, and about old names."""
        parallelism = self.parallelism
        is_read = bool(parallelism.policy) and not parallelism.is_single_rank
        is_idle = self.injection_policy is not None and not is_read
        idle = []
        if is_idle:
            idle.append("init_inference.injection_policy has no effect here: no layers are split")
        if self.zero and self.offload is None:
            idle.append("init_inference.zero has no effect here: only stage 3 streams weights")
        return (*self.model_notices, *idle)


def _plain(key: str, value: Any) -> Any:
    """Return a shorthand written out, and a section without what is None."""
    if key in ("tensor_parallel", "tp") and isinstance(value, int) and not isinstance(value, bool):
        value = {"tp_size": value}
    elif key == "moe" and isinstance(value, bool):
        value = {"enabled": value}
    is_section = key in ("tensor_parallel", "tp", "moe", "checkpoint_config", "ckpt_config") and isinstance(
        value, Mapping
    )
    return {name: inner for name, inner in value.items() if inner is not None} if is_section else value


def default_inference_config() -> dict[str, Any]:
    """Return the keys with their defaults."""
    return DeepSpeedInferenceConfig().model_dump()


def merge_config(config: Any, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `keywords` into `config`.  Raises ValueError if a key has different values in both."""
    given = _as_dict(config)
    clashes = [key for key in keywords if key in given and not _is_same(key, given[key], keywords[key])]
    if clashes:
        values = ", ".join(
            f"{key} is {given[key]!r} in config and {keywords[key]!r} as an argument" for key in clashes
        )
        raise ValueError(f"init_inference() got conflicting values: {values}. Give each key once.")
    return {**given, **keywords}


def _is_same(key: str, one: Any, other: Any) -> bool:
    """Return whether two values of a key mean the same: "fp16" is torch.float16."""
    if key != "dtype":
        return bool(one == other)
    try:
        return _read_dtype(one) == _read_dtype(other)
    except Mismatch:  # the constructor says which values are allowed
        return bool(one == other)


def _as_dict(config: Any) -> dict[str, Any]:
    if config is None:
        return {}
    if isinstance(config, DeepSpeedInferenceConfig):
        return config.given()
    if isinstance(config, Mapping):
        return dict(config)
    document = read(config)
    if document.problems:
        raise ConfigError(document.source, document.problems)
    found: Any = document.data or {}
    return {str(key): value for key, value in found.items()}
