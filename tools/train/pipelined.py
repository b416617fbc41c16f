"""The same model in stages, for --pipeline: a list of layers with the names that the whole one has.

Names are what checkpoints go by, so a run goes on with another number of stages, or without any.  The embedding is
used at both ends, as input and as output: the last stage borrows it.

What a layer hands on is (x,), or (x, unevenness) of a model with experts: how unevenly the blocks so far use theirs,
which the last stage adds to the loss.  So gradients of that go back through the stages as those of x do, and the loss
is that of the whole model.  Ranks of a stage that share windows have a part of each, as they have without stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zcomm
import zengine
from zpartition.pipeline import PipelineModule, TiedLayerSpec

from .launch import degree_of
from .model import ALL, GPT, Block, Part, Scorer, Shape, balanced, rotations

Handed = tuple[Tensor, ...]  # (x,) or (x, unevenness): (batch, time, width) and () float32


def in_stages(model: GPT, config: Mapping[str, Any]) -> nn.Module:
    """`model` itself with one stage, else this rank's part of it; its layers are taken over, with their values."""
    num_stages = degree_of(config, "pipeline")
    if num_stages == 1:
        return model
    ways = Ways(model)
    embedding, norm = model.token_embedding, model.final_norm
    layers = [
        _layer("bytes", embedding, ways.read),
        *(_layer(f"block {i}", block, ways.mix) for i, block in enumerate(model.blocks)),
        _layer("norm", norm, ways.norm),
        _layer("bytes", embedding, ways.score),
    ]
    blocks = [f"blocks.{i}" for i in range(len(model.blocks))]
    names = ["token_embedding", *blocks, "final_norm", "token_embedding"]
    made = PipelineModule(layers, num_stages, loss_fn=ways.loss, names=names, dynamic_shape=True)
    made.shape = model.shape  # type: ignore[assignment]  # by which the engine's telemetry counts the attention's work
    return made


@attrs.frozen(eq=False)
class Ways:
    """What each layer does with what it is handed.  In training a rank works on the part of a window that is its."""

    model: GPT

    @property
    def part(self) -> Part:
        return self.model.part if torch.is_grad_enabled() else ALL

    def read(self, embedding: nn.Module, tokens: Tensor) -> Handed:
        """tokens: (batch, time) int64, of the whole window."""
        return (embedding(self.part.of(tokens)),)

    def mix(self, block: nn.Module, handed: Handed) -> Handed:
        """A block with the positions of its input."""
        x, *uneven = handed
        part = self.part
        begin = part.begin(x.shape[1])
        turns = rotations(begin + x.shape[1], cast("Block", block).head_size, like=x)
        x = block(x, *(turn[begin:] for turn in turns), uneven, part)
        return (x, torch.stack(uneven).sum()) if uneven else (x,)

    def norm(self, norm: nn.Module, handed: Handed) -> Handed:
        x, *uneven = handed
        return norm(x), *uneven

    def score(self, embedding: nn.Module, handed: Handed) -> Handed:
        """(batch, time, 256) in place of x."""
        x, *uneven = handed
        return F.linear(x, cast("nn.Embedding", embedding).weight), *uneven

    def loss(self, handed: Handed, targets: Tensor) -> Tensor:
        """Mean loss in nats per byte, () float32; targets (batch, time), of the whole window."""
        scores, *uneven = handed
        found = self.part.loss(scores, self.part.of(targets))
        return balanced(found, uneven, self.model.shape.depth) if torch.is_grad_enabled() else found


def pair_of(windows: Tensor) -> tuple[Tensor, Tensor]:
    """What is read and what is guessed of windows (batch, time + 1)."""
    tokens = windows.long()
    return tokens[:, :-1], tokens[:, 1:]


def whole_batch(engine: zengine.PipelineEngine, batches: Iterator[Tensor]) -> zengine.StepReport:
    """One optimizer step; every rank reads the same windows, so that the loader stands alike everywhere."""
    windows = [next(batches) for _ in range(engine.micro_batches)]
    engine.train_batch(map(pair_of, windows))
    assert engine.last_report is not None
    return engine.last_report


def losses_of(engine: zengine.PipelineEngine, batches: Sequence[Tensor]) -> list[float]:
    """The loss of each batch of windows, on every rank."""
    pairs = map(pair_of, batches)
    found: list[float] = engine.eval_batch(pairs, reduce_output=None, num_micro_batches=len(batches)).tolist()
    return found


def writer_of(engine: zengine.Engine, model: GPT) -> Scorer:
    """Who scores the next byte: the model, or its stages together."""
    return Stages(engine, model.shape, model.numel) if isinstance(engine, zengine.PipelineEngine) else model


@attrs.frozen(eq=False)
class Stages:
    """The stages of an engine, asked as if they were a model.  All ranks ask alike."""

    engine: zengine.PipelineEngine
    shape: Shape
    numel: int

    @property
    def device(self) -> torch.device:
        return self.engine.device

    def logits(self, tokens: Tensor) -> Tensor:
        """Scores of the next byte: tokens (1, time) -> (1, time, 256) float32, on every rank."""
        found = self.engine.eval_batch(iter([(tokens, None)]), compute_loss=False, num_micro_batches=1)
        scores = (
            torch.empty(*tokens.shape, 256, device=self.device) if found is None else found[0][0].float().contiguous()
        )
        zcomm.broadcast(
            scores, self.engine.parts.groups.pipeline(), source=self.engine.num_stages - 1, label="scores"
        )
        return scores


def _layer(key: str, module: nn.Module, way: Callable[[nn.Module, Any], Handed]) -> TiedLayerSpec:
    """`module` as it is, carried out in this way."""
    return TiedLayerSpec(key, cast("type[nn.Module]", lambda: module), forward_fn=way)
