"""`deepspeed.ops.op_builder`: builders, which report the ops that are built in.

A builder of any other op of DeepSpeed is `NotImplementedBuilder`, as DeepSpeed has it on a CPU.
"""

from __future__ import annotations

from zengine.deepspeed.ops.op_builder.builder import NotImplementedBuilder, OpBuilder, make_builder

_OPS = "zengine.deepspeed.ops"

CPUAdamBuilder = make_builder("CPUAdamBuilder", "cpu_adam", f"{_OPS}.adam.cpu_adam")
CPUAdagradBuilder = make_builder("CPUAdagradBuilder", "cpu_adagrad", f"{_OPS}.adagrad.cpu_adagrad")
CPULionBuilder = make_builder("CPULionBuilder", "cpu_lion", f"{_OPS}.lion.cpu_lion")
FusedAdamBuilder = make_builder("FusedAdamBuilder", "fused_adam", f"{_OPS}.adam.fused_adam")
FusedLambBuilder = make_builder("FusedLambBuilder", "fused_lamb", f"{_OPS}.lamb.fused_lamb")
FusedLionBuilder = make_builder("FusedLionBuilder", "fused_lion", f"{_OPS}.lion.fused_lion")
ShareMemCommBuilder = make_builder("ShareMemCommBuilder", "deepspeed_shm_comm", "zcomm")
AsyncIOBuilder = make_builder("AsyncIOBuilder", "async_io", f"{_OPS}.aio")
UtilsBuilder = make_builder("UtilsBuilder", "utils", f"{_OPS}.flat")

CCLCommBuilder = NotImplementedBuilder
DeepCompileBuilder = NotImplementedBuilder
EvoformerAttnBuilder = NotImplementedBuilder
FPQuantizerBuilder = NotImplementedBuilder
FlashAttentionBuilder = NotImplementedBuilder
GDSBuilder = NotImplementedBuilder
InferenceBuilder = NotImplementedBuilder
InferenceCoreBuilder = NotImplementedBuilder
InferenceCutlassBuilder = NotImplementedBuilder
PinMemoryBuilder = NotImplementedBuilder
QuantizerBuilder = NotImplementedBuilder
RaggedOpsBuilder = NotImplementedBuilder
RaggedUtilsBuilder = NotImplementedBuilder
RandomLTDBuilder = NotImplementedBuilder
SpatialInferenceBuilder = NotImplementedBuilder
StochasticTransformerBuilder = NotImplementedBuilder
TransformerBuilder = NotImplementedBuilder

__all__ = ["NotImplementedBuilder", "OpBuilder", "builder_of"]
__all__ += sorted(name for name in dir() if name.endswith("Builder") and name not in __all__)


def builder_of(class_name: str) -> type[OpBuilder]:
    """Return the builder class of that name; NotImplementedBuilder for another."""
    found = globals().get(class_name)
    return found if isinstance(found, type) and issubclass(found, OpBuilder) else NotImplementedBuilder
