"""Universal checkpoints of DeepSpeed, written: the way back to a run of DeepSpeed.

    export_universal(zckpt.find("runs/ours"), "runs/back/global_step30_universal")
    # DeepSpeed: "checkpoint": {"load_universal": true}, engine.load_checkpoint("runs/back")

Every weight and moment is written whole, so DeepSpeed loads it at any stage and world size, and with pipeline stages.
DeepSpeed does not load frozen parameters and buffers from such a folder: the model must have them.  Tensors pass
through memory one at a time.  The folder is renamed to its name when it is complete.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, final

import attrs
import torch
from torch import Tensor

from zckpt.containers.torch_write import write_torch_file
from zckpt.containers.unpickler import Record
from zckpt.errors import CheckpointExists, CheckpointInputError, CheckpointWriteError, os_error_text
from zckpt.format.canonical import JSON
from zckpt.interchange import deepspeed_experts, deepspeed_pipeline
from zckpt.interchange.deepspeed_run import ENGINE_KEYS, OPTIONS
from zckpt.interchange.engine_state import MODEL, OPTIMIZER, TIED, from_json

LAYOUT = "0.19.8"  # the release of DeepSpeed whose layout is written
_LATEST = "latest_universal"
_SCALER = "deepspeed.runtime.fp16.loss_scaler."


class Exported(Protocol):
    """A checkpoint to export: a Checkpoint, or a ForeignCheckpoint."""

    @property
    def step(self) -> int: ...
    @property
    def objects(self) -> dict[str, JSON]: ...
    def names(self) -> tuple[str, ...]: ...
    def tensor(self, name: str) -> Tensor: ...


def export_universal(
    checkpoint: Exported,
    folder: str | os.PathLike[str],
    *,
    pipeline: bool | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a universal checkpoint of DeepSpeed into `folder`, and `latest_universal` beside it; return the folder.

    pipeline: True renames layers.3.weight to 3.weight, as a PipelineModule of DeepSpeed has it; None: if the run had
        pipeline stages.
    config: DeepSpeed's configuration, stored in the checkpoint; its fp16 section has the options of a dynamic loss
        scale (None: that of an imported checkpoint, or DeepSpeed's defaults).

    Raises CheckpointInputError (it is no checkpoint of an engine, or holds no optimizer state), CheckpointExists,
    CheckpointWriteError.
    """
    target = Path(folder)
    if target.exists():
        raise CheckpointExists(f"{target} exists: remove it, or choose another name", path=str(target))
    export = _Export.of(checkpoint, pipeline, config)
    temporary = target.with_name(f".tmp-{target.name}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for name, value in export.files():
            _check_path(name)
            path = temporary / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_torch_file(path, value)
        os.replace(temporary, target)
        (target.parent / _LATEST).write_text(target.name)
    except OSError as error:
        raise CheckpointWriteError(f"export to {target}: {os_error_text(error)}", path=str(target)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _check_path(name: str) -> None:
    """Raise CheckpointInputError for a file outside the folder: names of tensors come from the checkpoint."""
    if "\\" in name or name.count("/") > 2 or {"", ".", ".."} & set(name.split("/")):
        raise CheckpointInputError(f"a tensor's name makes {name[:80]!r}, which is no file of a universal checkpoint")


@final
@attrs.frozen(eq=False)
class _Export:
    checkpoint: Exported
    config: Mapping[str, Any]
    is_pipeline: bool
    stacks: frozenset[str]  # prefixes of layers with stacked experts
    states: dict[str, list[str]]  # trained parameter -> keys of its optimizer state

    @classmethod
    def of(cls, checkpoint: Exported, pipeline: bool | None, config: Mapping[str, Any] | None) -> _Export:
        objects, names = checkpoint.objects, checkpoint.names()
        states: dict[str, list[str]] = {}
        for name in names:
            if name.startswith(OPTIMIZER):
                key, _, param = name.removeprefix(OPTIMIZER).partition(".")
                states.setdefault(param, []).append(key)
        if "clock" not in objects or not states:
            raise CheckpointInputError(
                "a universal checkpoint holds the state of an optimizer, and this checkpoint has none: export its "
                "weights instead (export_huggingface)"
            )
        imported = objects.get("imported")
        source = imported if isinstance(imported, dict) else {}
        degrees = objects.get("degrees")
        stages = degrees.get("pipeline", 1) if isinstance(degrees, dict) else 1
        if pipeline is None:
            pipeline = "pipeline" in source or (isinstance(stages, int) and stages > 1)
        if config is None:
            saved = from_json(source.get("config"))
            config = saved if isinstance(saved, dict) else {}
        weights = [name.removeprefix(MODEL) for name in names if name.startswith(MODEL)]
        stacks = frozenset(deepspeed_experts.layers_with_stacks(weights))
        return cls(checkpoint, config, pipeline, stacks, states)

    def files(self) -> Iterator[tuple[str, Any]]:
        """(path in the folder, content) of each file; the model states come last."""
        shapes: dict[str, tuple[int, ...]] = {}
        rest: dict[str, Tensor] = {}
        for name in self.checkpoint.names():
            if not name.startswith(MODEL):
                continue
            param = name.removeprefix(MODEL)
            if param not in self.states:
                rest.update(self.split(param, self.checkpoint.tensor(name)))
                continue
            for own, value in self.split(param, self.checkpoint.tensor(name)):
                shapes[own] = tuple(value.shape)
                yield f"zero/{own}/fp32.pt", {"cat_dim": 0, "param": value.float()}
            for key in self.states[param]:
                if key != "step":
                    value = self.checkpoint.tensor(f"{OPTIMIZER}{key}.{param}")
                    for own, part in self.split(param, value):
                        yield f"zero/{own}/{key}.pt", {"cat_dim": 0, "param": part.float()}
        for own in shapes if self.has_steps else ():
            yield f"zero/{own}/step.pt", self.num_updates()
        groups = self.groups()
        yield "zero/optimizer_state.pt", self.optimizer(groups)
        if self.is_pipeline:
            for own, value in rest.items():
                if value.is_floating_point():
                    yield f"zero/{own}/fp32.pt", {"cat_dim": 0, "param": value.float()}
        model = self.model(shapes, None if self.is_pipeline else rest)
        yield "mp_rank_00_model_states.pt", model
        yield "zero_pp_rank_0_mp_rank_00_model_states.pt", model  # the name at stage 3

    def split(self, param: str, value: Tensor) -> list[tuple[str, Tensor]]:
        """DeepSpeed's name of a parameter, with the value; of each expert of a stack."""
        names = deepspeed_experts.deepspeed_names(param, value.shape, self.stacks)
        if self.is_pipeline:
            names = [deepspeed_pipeline.deepspeed_name(name) for name in names]
        is_stack = deepspeed_experts.is_stack(param)
        return list(zip(names, value.unbind())) if is_stack else [(names[0], value)]

    @property
    def has_steps(self) -> bool:
        """True if the optimizer counts its updates."""
        return any("step" in keys for keys in self.states.values())

    def num_updates(self) -> Tensor:
        """Count of the updates, () float32.  DeepSpeed has one for all parameters: the largest of ours."""
        names = [f"{OPTIMIZER}step.{param}" for param, keys in self.states.items() if "step" in keys]
        return torch.stack([self.checkpoint.tensor(name).float().reshape(()) for name in names]).max()

    def groups(self) -> list[dict[str, Any]]:
        """Options of each parameter group."""
        saved = from_json(self.checkpoint.objects.get("optimizer"))
        groups = saved.get("groups") if isinstance(saved, dict) else None
        return [
            {**{key: group[key] for key in OPTIONS if key in group}, "params": [index]}
            for index, group in enumerate(groups if isinstance(groups, list) else [])
        ]

    def optimizer(self, groups: list[dict[str, Any]]) -> dict[str, Any]:
        """Content of optimizer_state.pt: what stages 1 and 2 read, and stage 3's inner dict."""
        step = self.num_updates() if self.has_steps else float(self.clock("applied_steps"))
        clipping = self.config.get("gradient_clipping")
        state: dict[str, Any] = {
            "dynamic_loss_scale": False,
            "overflow": False,
            **({} if clipping is None else {"clip_grad": float(clipping)}),  # without: that of the run that loads it
            "zero_stage": 1,
            "partition_count": 1,
            "ds_version": LAYOUT,
            "param_groups": groups,
            "optimizer_state_dict": {"state": {0: {"step": step}}, "param_groups": groups},
        }
        kind, saved = self.part("scaler")
        if kind == "DynamicScaler":
            state |= {"loss_scaler": self.dynamic_scaler(saved), "dynamic_loss_scale": True}
        elif kind == "StaticScaler":
            factor = float(saved["static_factor"])
            state["loss_scaler"] = Record(f"{_SCALER}LossScaler", (), {"cur_scale": factor, "dynamic": False})
        return state

    def dynamic_scaler(self, saved: Mapping[str, Any]) -> Record:
        """DeepSpeed's DynamicLossScaler in the same state."""
        section = self.config.get("fp16")
        options = section if isinstance(section, dict) else {}
        steps = self.clock("steps")
        hysteresis = int(options.get("hysteresis", 2))
        state = {
            "cur_scale": float(saved["factor"]),
            "dynamic": True,
            "cur_iter": steps,
            "last_overflow_iter": steps - 1 - int(saved["clean_steps"]),
            "scale_factor": 2.0,
            "scale_window": int(options.get("loss_scale_window", 1000)),
            "min_scale": options.get("min_loss_scale", 1),
            "delayed_shift": hysteresis,
            "cur_hysteresis": int(saved.get("hysteresis_left", hysteresis)),
            "consecutive_hysteresis": bool(options.get("consecutive_hysteresis", False)),
            "raise_error_at_min_scale": True,
            "dtype": torch.float16,
        }
        return Record(f"{_SCALER}DynamicLossScaler", (), state)

    def clock(self, key: str) -> int:
        clock = self.checkpoint.objects["clock"]
        value = clock.get(key, 0) if isinstance(clock, dict) else 0
        return value if isinstance(value, int) else 0

    def model(self, shapes: Mapping[str, tuple[int, ...]], module: Mapping[str, Tensor] | None) -> dict[str, Any]:
        """Content of the model states: counters, schedule, client state, frozen parameters and buffers."""
        objects = self.checkpoint.objects
        client = from_json(objects.get("client_state"), self.checkpoint.tensor)
        taken = sorted(ENGINE_KEYS & set(client if isinstance(client, dict) else ()))
        if taken:
            raise CheckpointInputError(
                f"the client state has {', '.join(taken)}, which are keys of DeepSpeed's engine in a universal "
                "checkpoint: save the client state under other keys"
            )
        kind, state = self.part("scheduler")
        tied = objects.get(TIED)
        return {
            "module": None if module is None else dict(module),
            "buffer_names": self.left_out(),
            "optimizer": None,
            "param_shapes": [dict(shapes)],
            "frozen_param_shapes": None,
            "shared_params": self.renamed(tied) if isinstance(tied, dict) else {},
            "frozen_param_fragments": None,
            "lr_scheduler": None if kind == "ConstantRate" else state,
            "data_sampler": None,
            "random_ltd": None,
            "skipped_steps": self.clock("skipped_steps"),
            "global_steps": self.clock("steps"),
            "global_samples": self.clock("samples"),
            "dp_world_size": 1,
            "mp_world_size": 1,
            "ds_config": self.named_config(),
            "ds_version": LAYOUT,
            "universal_checkpoint_info": {"universal_checkpoint_version": 0.4},
            **(client if isinstance(client, dict) else {}),
        }

    def part(self, key: str) -> tuple[str, dict[str, Any]]:
        """Class and state of the scaler or the schedule."""
        saved = from_json(self.checkpoint.objects.get(key))
        kind, state = (saved.get("kind"), saved.get("state")) if isinstance(saved, dict) else ("", {})
        return str(kind), state if isinstance(state, dict) else {}

    def named_config(self) -> dict[str, Any]:
        """The configuration, with the classes of optimizer and schedule if it does not name them."""
        optimizer = from_json(self.checkpoint.objects.get("optimizer"))
        name = optimizer.get("kind") if isinstance(optimizer, dict) else ""
        named: dict[str, Any] = (
            {"optimizer": {"type": name, "params": {"adam_w_mode": name != "Adam"}}} if name else {}
        )
        schedule, _ = self.part("scheduler")
        if schedule != "ConstantRate":
            named["scheduler"] = {"type": schedule}
        return {**named, **self.config}

    def left_out(self) -> list[str]:
        """Names that the model has and the checkpoint does not."""
        names = self.checkpoint.objects.get("left_out")
        found = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
        return list(map(deepspeed_pipeline.deepspeed_name, found)) if self.is_pipeline else found

    def renamed(self, tied: Mapping[str, JSON]) -> dict[str, str]:
        pairs = {alias: name for alias, name in tied.items() if isinstance(name, str)}
        if self.is_pipeline:
            rename = deepspeed_pipeline.deepspeed_name
            pairs = {rename(alias): rename(name) for alias, name in pairs.items()}
        return pairs
