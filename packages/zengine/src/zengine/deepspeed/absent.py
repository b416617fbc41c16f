"""Unavailable parts of DeepSpeed's interface: one table, and placeholder classes.

Importing such a name works, so that scripts which only mention it (an isinstance test, an optional branch) run.
Instantiating, calling or subclassing it raises `NotAvailable`, with the alternative.
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn

__all__ = ["ABSENT", "NotAvailable", "absent", "raise_not_available"]


class NotAvailable(RuntimeError):
    """Part of DeepSpeed's interface that zengine does not provide."""


# Names that will not be provided: qualified name -> reason and alternative.
ABSENT: dict[str, str] = {
    "DeepSpeedTransformerLayer": "a fused BERT layer of 2020 kernels. Use torch.nn.TransformerEncoderLayer.",
    "DeepSpeedTransformerConfig": "a fused BERT layer of 2020 kernels. Use torch.nn.TransformerEncoderLayer.",
    "elasticity.DSElasticAgent": (
        "torch's agent restarts the ranks of an elastic job: zengine run --elastic MIN:MAX train.py, or torchrun "
        "--nnodes=MIN:MAX --max-restarts=N train.py. Checkpoints load at any number of ranks."
    ),
    **dict.fromkeys(
        ("ops.sparse_attention.matmul.MatMul", "ops.sparse_attention.softmax.Softmax"),
        "it is a Triton kernel for blocks of a matrix. Use ops.sparse_attention.SparseSelfAttention, or the mask of "
        "zengine.sparse_attention for FlexAttention and scaled_dot_product_attention.",
    ),
    **dict.fromkeys(
        ("runtime.pipe.dualpipev.DualPipeVEngine", "runtime.pipe.dualpipev.DualPipeVModule"),
        "pipelines run four schedules of their own; DualPipeVSchedule lists DualPipeV's steps. Write "
        '"pipeline": {"schedule": "zero_bubble"}, which also fills the bubble.',
    ),
    **dict.fromkeys(
        ("comm.ccl.CCLBackend", "comm.ccl.CCLHandler"),
        "Intel's oneCCL is not used. Leave the backend out, or write gloo: ranks of one host exchange large tensors "
        "through shared memory.",
    ),
    "utils.pin_memory.NativePinnedMemory": (
        "it locks pages by a library of its own. Use tensor.pin_memory() or get_accelerator().pin_memory(tensor)."
    ),
    "module_inject.GroupQuantizer": (
        "it makes int8 weights for fused inference layers. Use deepspeed.linear.QuantizedLinear for frozen weights."
    ),
    "module_inject.generic_injection": "it replaces the attention of diffusion models by fused kernels. Drop it.",
    "module_inject.replace_transformer_layer": (
        "it replaces blocks by fused inference layers. Use deepspeed.init_inference(model, injection_policy=...) or "
        "tp_model_init, which split the model's own layers."
    ),
    "module_inject.revert_transformer_layer": "blocks are never replaced by fused layers. Leave it out.",
    **dict.fromkeys(
        (
            *("sequence.fpdt_layer.FPDT_Attention", "sequence.fpdt_layer._FPDTGPUAttentionImpl_"),
            "sequence.fpdt_layer._FPDTGPUOffloadingAttentionImpl_",
        ),
        "it moves chunks to the host around flash-attention's kernels. Use zpartition.sequence.ring_attention, or "
        "sequence.layer.DistributedAttention with activation checkpoints on the host.",
    ),
    "sequence.fpdt_layer.FPDT_FFN": (
        "its gradients overwrite its input. Use runtime.sequence_parallel.ulysses_sp.TiledMLP, in chunks of tokens."
    ),
    "sequence.fpdt_layer.FPDT_LogitsLoss": (
        "it is tied to Megatron's layout. Use runtime.sequence_parallel.ulysses_sp.TiledFusedLogitsLoss, or "
        "zpartition.sequence.chunked_cross_entropy."
    ),
    **dict.fromkeys(
        (
            *("runtime.swap_tensor.async_swapper.AsyncTensorSwapper",),
            *("runtime.swap_tensor.optimizer_utils.OptimizerSwapper",),
            *("runtime.swap_tensor.partitioned_optimizer_swapper.PartitionedOptimizerSwapper",),
            *("runtime.swap_tensor.partitioned_param_swapper.AsyncPartitionedParameterSwapper",),
            *("runtime.swap_tensor.pipelined_optimizer_swapper.PipelinedOptimizerSwapper",),
        ),
        "engines move states and weights to files by themselves (zpartition.disk). Write offload_optimizer or "
        'offload_param with "device": "nvme"; for files of your own use AsyncIOBuilder().load().aio_handle.',
    ),
    **dict.fromkeys(
        (
            *("utils.tensor_fragment.tensor_fragment", "utils.tensor_fragment.fragment_address"),
            *("utils.tensor_fragment.get_hp_fragment_mapping", "utils.tensor_fragment.map_to_flat_opt_states"),
            "utils.mixed_precision_linkage.link_hp_params",
            "utils.mixed_precision_linkage.lazy_init_hp_params_optimizer_state",
        ),
        "parameters have no _hp_mapping to their masters and states; a partition addresses those. Use "
        "utils.safe_get_local_fp32_param and safe_get_local_optimizer_state for this rank's elements, "
        "safe_get_full_* for all; load_checkpoint reads universal folders by itself.",
    ),
    "zero.MiCS_Init": "it was removed from DeepSpeed. Use zero.Init, and zero_optimization.shard_group_size.",
}


def raise_not_available(name: str) -> NoReturn:
    """Raise NotAvailable for `name`, an entry of ABSENT."""
    raise NotAvailable(f"deepspeed.{name}: {ABSENT[name]}")


class _Absent(type):
    """Metaclass of placeholder classes: instantiating one, subclassing one or calling its methods raises."""

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise_not_available(cls.qualified)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return functools.partial(_raise_not_available, cls.qualified)

    qualified: str  # the entry in ABSENT


def _raise_not_available(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise_not_available(name)


def absent(name: str) -> Any:
    """Return a placeholder class: it can be imported and tested against, but not instantiated, subclassed or used."""
    text = ABSENT[name]

    def reject(cls: type, *args: Any, **kwargs: Any) -> NoReturn:
        raise_not_available(name)

    members = {
        "__init_subclass__": classmethod(reject),
        "__doc__": f"Not available: {text}",
        "__module__": __name__,
        "qualified": name,
    }
    return _Absent(name.rpartition(".")[2], (), members)
