"""Attributes of the module that the engine's own hide.

The engine answers for its module: what it does not have itself is the module's (`engine.generate`).  What both have
is the engine's.  Scripts rely on that for names of DeepSpeed's engine (`config`, `device`, `loss_scale`).  None does
for names of this engine alone, so it keeps its own parts under private names, and at the start logs which of the
remaining public ones hide something.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from zengine.engine import Engine

_OWN = (
    "activation_checkpointing add_feature amp_enabled applied_steps batch_fn batches bench_done clock close "
    "curriculum_enabled_legacy curriculum_seqlen drop_gradients end_micro_step last_report load_weights observe "
    "parts passes paused pipeline plan prescale_gradients reducing report_tokens restart_step restore_from_memory "
    "set_lr span sparse_gradients_enabled step_without_schedule take_plain_gradients wait_for_checkpoint world"
)
OWN = frozenset(_OWN.split())  # public names of the engine that DeepSpeed's has not


def hidden_names(engine: Engine) -> list[str]:
    """Names of this engine alone that its module has as well, sorted."""
    module = engine.module
    names = {name for name in vars(module) if not name.startswith("_")}
    for registered in (module._modules, module._parameters, module._buffers):
        names.update(registered)
    for kind in type(module).__mro__:
        if kind is nn.Module:
            break
        names.update(vars(kind))
    return sorted(name for name in OWN & names if hasattr(type(engine), name) or name in vars(engine))


def told_of_hidden_names(engine: Engine) -> str:
    """What to tell the user of them; "" where there are none."""
    names = hidden_names(engine)
    if not names:
        return ""
    ways = ", ".join(f"engine.module.{name}" for name in names)
    return (
        f"{type(engine.module).__name__} has attributes that the engine's own of the same name hide: "
        f"{', '.join(names)}. Reach the module's as {ways}"
    )
