"""Who trains in the network bench: each contender is a step over `accumulation` micro-batches."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import attrs
import models
import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["ARITHMETIC", "CONTENDERS", "FORWARD", "PEER", "TRANSPORT", "Setting", "available"]

LR = 1e-4
FORWARD, ARITHMETIC, TRANSPORT, PEER = "forward alone", "arithmetic alone", "transport alone", "DDP"
Step = Callable[[list[Tensor]], None]  # one step over the micro-batches
Made = tuple[Step, Callable[[], object]]  # the step, and what ends the contender


@attrs.frozen(kw_only=True)
class Setting:
    """What all contenders share."""

    shape: models.Shape
    micro_batch: int
    tokens: int
    accumulation: int

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Setting:
        """Inverse of `attrs.asdict` and JSON."""
        return cls(**{**fields, "shape": models.Shape(**fields["shape"])})

    def batches(self, index: int, rank: int) -> list[Tensor]:
        """Return the micro-batches of a step."""
        seeds = ((index * 97 + rank) * self.accumulation + micro for micro in range(self.accumulation))
        return [models.batch(self.shape, self.micro_batch, self.tokens, seed) for seed in seeds]


def _forward(setting: Setting) -> Made:
    """The forward pass of a rank, whose activations are kept."""
    model = models.make(setting.shape)

    def step(batches: list[Tensor]) -> None:
        for tokens in batches:
            model(tokens)

    return step, _nothing


def _alone(setting: Setting) -> Made:
    """All arithmetic of a rank of stage 0, and no communication: a part of the floor."""
    model = models.make(setting.shape)
    update = _update(model)

    def step(batches: list[Tensor]) -> None:
        for tokens in batches:
            (model(tokens) / len(batches)).backward()
        update()

    return step, _nothing


def _transport(setting: Setting) -> Made:
    """Gloo's all_reduce of all gradients, and no arithmetic: the other part."""
    pieces = torch.zeros(sum(p.numel() for p in models.make(setting.shape).parameters())).split(1 << 20)

    def step(batches: list[Tensor]) -> None:
        for work in [dist.all_reduce(piece, async_op=True) for piece in pieces]:
            work.wait()

    return step, _nothing


def _ddp(cap_mb: int) -> Callable[[Setting], Made]:
    def make(setting: Setting) -> Made:
        model = nn.parallel.DistributedDataParallel(
            models.make(setting.shape), gradient_as_bucket_view=True, bucket_cap_mb=cap_mb
        )
        update = _update(model)

        def step(batches: list[Tensor]) -> None:
            for index, tokens in enumerate(batches):
                with nullcontext() if index == len(batches) - 1 else model.no_sync():
                    (model(tokens) / len(batches)).backward()
            update()

        return step, _nothing

    return make


def _ours(stage: int, **zero: object) -> Callable[[Setting], Made]:
    def make(setting: Setting) -> Made:
        import zengine

        engine, *_ = zengine.initialize(
            model=models.make(setting.shape), config=_config(setting, {"stage": stage, **zero})
        )
        return _engine_step(engine), engine.close

    return make


def _deepspeed(stage: int, **zero: object) -> Callable[[Setting], Made]:
    def make(setting: Setting) -> Made:
        import deepspeed

        config = _config(setting, {"stage": stage, **zero})
        engine, *_ = deepspeed.initialize(model=models.make(setting.shape), config=config, dist_init_required=False)
        return _engine_step(engine), engine.destroy

    return make


def _config(setting: Setting, zero: Mapping[str, object]) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": setting.micro_batch,
        "gradient_accumulation_steps": setting.accumulation,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        "zero_optimization": dict(zero),
    }


def _engine_step(engine: Any) -> Step:
    def step(batches: list[Tensor]) -> None:
        for tokens in batches:
            engine.backward(engine(tokens))
            engine.step()

    return step


def _update(model: nn.Module) -> Callable[[], None]:
    """Clip the norm of the gradient, and update."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def update() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return update


def _nothing() -> None:
    """End a contender that holds nothing."""


_ZEROPP: dict[str, object] = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
# DeepSpeed's own bucket sizes hold all gradients of a small model: nothing would overlap.
_SMALL: dict[str, object] = {"reduce_bucket_size": 2_000_000, "allgather_bucket_size": 2_000_000}

CONTENDERS: dict[str, Callable[[Setting], Made]] = {
    FORWARD: _forward,
    ARITHMETIC: _alone,
    TRANSPORT: _transport,
    PEER: _ddp(25),
    "DDP, buckets of 5 MB": _ddp(5),
    "ours stage 0": _ours(0),
    "ours stage 0, measured buckets": _ours(0, reduce_bucket_size="measured"),
    "ours stage 1": _ours(1),
    "ours stage 1, measured buckets": _ours(1, reduce_bucket_size="measured"),
    "ours stage 2": _ours(2),
    "ours stage 2, measured buckets": _ours(2, reduce_bucket_size="measured"),
    "ours stage 3": _ours(3),
    "ours hybrid, stage 2": _ours(2, shard_group_size=2),
    "ours hybrid, stage 3": _ours(3, shard_group_size=2),
    "ours ZeRO++": _ours(3, **_ZEROPP),
    "ours ZeRO++, hpZ 2": _ours(3, zero_hpz_partition_size=2, **_ZEROPP),
    "DeepSpeed stage 0": _deepspeed(0),
    "DeepSpeed stage 1": _deepspeed(1, **_SMALL),
    "DeepSpeed stage 2": _deepspeed(2, **_SMALL),
    "DeepSpeed stage 3": _deepspeed(3, **_SMALL),
}


def available(ranks: int) -> list[str]:
    """Return the contenders that can run here: hybrid shards need more than two ranks."""
    has_deepspeed = importlib.util.find_spec("deepspeed") is not None
    few = [name for name in CONTENDERS if ranks > 2 or not ("hybrid" in name or "hpZ" in name)]
    return [name for name in few if has_deepspeed or not name.startswith("DeepSpeed")]
