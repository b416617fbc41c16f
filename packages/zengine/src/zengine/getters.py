"""Getters of single settings, by the names that DeepSpeed's engine has: one line each, made from the plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from zprecision import DynamicScaling

if TYPE_CHECKING:
    from zengine.config import Plan

T = TypeVar("T")


def _getter(doc: str, read: Callable[[Plan], T]) -> Callable[[Any], T]:
    """A method that reads the engine's plan."""

    def get(self: Any) -> T:
        return read(self.plan)

    get.__doc__ = doc
    return get


class EngineGetters:
    """What the config came to, setting by setting; mixed into `Engine`.  `engine.config` has them all."""

    train_batch_size = _getter("Samples per optimizer step, over all replicas.", lambda p: p.batch.train_batch_size)
    train_micro_batch_size_per_gpu = _getter("Samples per forward on one rank.", lambda p: p.batch.micro_batch_size)
    gradient_accumulation_steps = _getter("Micro-steps per optimizer step.", lambda p: p.batch.accumulation)
    autotp_size = _getter("Ranks that share the layers of one model.", lambda p: p.parallel.degrees.tensor)
    gradient_clipping = _getter("Global norm that gradients are clipped to; 0 = off.", lambda p: p.clip_norm)
    gradient_predivide_factor = _getter(
        "What gradients are divided by before they are summed.", lambda p: p.zero.averaging.predivide
    )
    prescale_gradients = _getter(
        "Whether gradients are divided by the replicas before they are summed.", lambda p: p.zero.averaging.prescale
    )
    sparse_gradients_enabled = _getter(
        "Whether sparse embeddings exchange rows.", lambda p: p.zero.sparse_gradients.value == "rows"
    )

    optimizer_name = _getter(
        "The config's optimizer; None: the caller's, or none.", lambda p: p.optimizer.type or None
    )
    optimizer_params = _getter("Options of the config's optimizer.", lambda p: dict(p.optimizer.params))
    scheduler_name = _getter(
        "The config's schedule; None: the caller's, or none.", lambda p: p.scheduler.type or None
    )
    scheduler_params = _getter("Options of the config's schedule.", lambda p: dict(p.scheduler.params))

    dynamic_loss_scale = _getter("Whether the loss scale moves.", lambda p: isinstance(p.scaling, DynamicScaling))

    zero_optimization_stage = _getter("The ZeRO stage.", lambda p: p.zero.stage)
    zero_optimization = _getter("Whether anything is sharded.", lambda p: p.zero.stage > 0)
    zero_offload_optimizer = _getter(
        'Where optimizer states live: "none", "cpu" or "nvme".', lambda p: p.offloads.get("offload_optimizer", "none")
    )
    zero_offload_param = _getter(
        'Where weights rest: "none", "cpu" or "nvme".', lambda p: p.offloads.get("offload_param", "none")
    )
    zero_cpu_offload = _getter(
        "Whether optimizer states live on the host.", lambda p: p.offloads.get("offload_optimizer", "none") == "cpu"
    )
    zero_overlap_comm = _getter("Whether reductions overlap with backward.", lambda p: p.zero.overlap)
    zero_ignore_unused_parameters = _getter(
        "Whether parameters without gradient are taken as they come.", lambda p: p.zero.ignore_unused
    )
    zero_reduce_bucket_size = _getter(
        "Elements of a bucket; 0: from the model's size.", lambda p: p.zero.bucket_numel
    )
    zero_prefetch_bucket_size = _getter("Elements gathered ahead at stage 3.", lambda p: p.zero.prefetch_numel)
    zero_param_persistence_threshold = _getter(
        "Parameters of fewer elements stay whole at stage 3.", lambda p: p.zero.persist_numel
    )
    zero_model_persistence_threshold = _getter("The most of those in all.", lambda p: p.zero.persist_total_numel)
    zero_max_live_parameters = _getter("Elements that may be whole at a time.", lambda p: p.zero.max_live_numel)
    zero_max_reuse_distance = _getter("Elements between two uses that keep one.", lambda p: p.zero.max_reuse_numel)

    steps_per_print = _getter(
        "Optimizer steps between console lines; 0 = never.", lambda p: p.telemetry.steps_per_print
    )
    wall_clock_breakdown = _getter("Whether phases are timed.", lambda p: p.telemetry.wall_clock_breakdown)
    memory_breakdown = _getter("Whether memory is read at each phase.", lambda p: p.telemetry.memory_breakdown)
    dump_state = _getter("Whether the plan was printed at start.", lambda p: p.dump_state)
    dataloader_drop_last = _getter("Whether the last, partial batch is left out.", lambda p: p.data.drop_last)
    checkpoint_tag_validation_enabled = _getter(
        "Whether ranks compare the tags of checkpoints.", lambda p: p.tag_validation != "IGNORE"
    )
    checkpoint_tag_validation_fail = _getter(
        "Whether different tags are an error.", lambda p: p.tag_validation == "FAIL"
    )
