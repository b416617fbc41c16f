"""The same model in stages, for --pipeline: a list of layers with the names that the whole one has.

Names are what checkpoints go by, so a run goes on with another number of stages, or without any.  The embedding is
used at both ends, as input and as output: the last stage borrows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zcomm
import zengine
from zpartition.pipeline import PipelineModule, TiedLayerSpec

from .launch import degree_of
from .model import GPT, Block, Scorer, Shape, rotations
from .recipe import RecipeError


def in_stages(model: GPT, config: Mapping[str, Any]) -> nn.Module:
    """`model` itself with one stage, else this rank's part of it; its layers are taken over, with their values.

    Raises RecipeError for a config that shares something else out beside: stages hand on one tensor.
    """
    num_stages = degree_of(config, "pipeline")
    if num_stages == 1:
        return model
    if model.shape.experts or degree_of(config, "sequence") > 1:
        other = "--expert" if model.shape.experts else "--sequence"
        raise RecipeError(f"--pipeline {num_stages} does not go with {other} in this job: leave one of them out")
    blocks = [TiedLayerSpec(f"block {i}", _taken(each), forward_fn=_placed) for i, each in enumerate(model.blocks)]
    embedding = _taken(model.token_embedding)
    layers = [
        TiedLayerSpec("bytes", embedding),
        *blocks,
        model.final_norm,
        TiedLayerSpec("bytes", embedding, forward_fn=_scores),
    ]
    names = ["token_embedding", *(f"blocks.{i}" for i in range(len(blocks))), "final_norm", "token_embedding"]
    made = PipelineModule(layers, num_stages, loss_fn=next_byte_loss, names=names, dynamic_shape=True)
    made.shape = model.shape  # type: ignore[assignment]  # by which the engine's telemetry counts the attention's work
    return made


def next_byte_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """Mean loss in nats per byte: scores (batch, time, 256), targets (batch, time)."""
    return F.cross_entropy(scores.float().flatten(0, 1), targets.flatten())


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
            torch.empty(*tokens.shape, 256, device=self.device) if found is None else found[0].float().contiguous()
        )
        zcomm.broadcast(
            scores, self.engine.parts.groups.pipeline(), source=self.engine.num_stages - 1, label="scores"
        )
        return scores


def _taken(module: nn.Module) -> type[nn.Module]:
    """A maker that gives what there is."""
    return cast("type[nn.Module]", lambda: module)


def _placed(block: nn.Module, x: Tensor) -> Tensor:
    """A block with the positions of its input."""
    return cast("Block", block)(x, *rotations(x.shape[1], cast("Block", block).head_size, like=x), [])  # type: ignore[no-any-return]


def _scores(embedding: nn.Module, x: Tensor) -> Tensor:
    return F.linear(x, cast("nn.Embedding", embedding).weight)
