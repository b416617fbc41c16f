"""Pipeline parallelism of the main job (--pipeline): the model as a list of layers, cut into stages.

Parameters keep the names of the whole model, by which checkpoints find them, so a run can resume with another number
of stages.  The embedding is tied: first and last stage use it.

Layers pass on (x,), or (x, aux_loss) in a model with experts.  aux_loss is the load-balancing loss of the blocks so
far; the last stage adds it to the loss, so its gradients flow back through the stages with those of x, and the loss
is that of the whole model.  Under sequence parallelism the ranks of a stage hold parts of each window.
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
from .model import GPT, WHOLE_SEQUENCE, Block, Scorer, SequencePart, Shape, add_balance_loss, rotary_tables

Activations = tuple[Tensor, ...]  # (x,) or (x, aux_loss): (batch, time, width) and () float32


def make_pipeline(model: GPT, config: Mapping[str, Any]) -> nn.Module:
    """Return this rank's stage, made of the layers of `model`; `model` itself if there is one stage."""
    num_stages = degree_of(config, "pipeline")
    if num_stages == 1:
        return model
    functions = StageFunctions(model)
    embedding, norm = model.token_embedding, model.final_norm
    layers = [
        _tied_layer("bytes", embedding, functions.embed),
        *(_tied_layer(f"block {i}", block, functions.run_block) for i, block in enumerate(model.blocks)),
        _tied_layer("norm", norm, functions.norm),
        _tied_layer("bytes", embedding, functions.score),
    ]
    blocks = [f"blocks.{i}" for i in range(len(model.blocks))]
    names = ["token_embedding", *blocks, "final_norm", "token_embedding"]
    made = PipelineModule(layers, num_stages, loss_fn=functions.loss, names=names, dynamic_shape=True)
    made.shape = model.shape  # type: ignore[assignment]  # for the engine's count of attention FLOPs
    return made


@attrs.frozen(eq=False)
class StageFunctions:
    """Forward functions of the layers.  In training each works on this rank's part of the window."""

    model: GPT

    @property
    def part(self) -> SequencePart:
        return self.model.part if torch.is_grad_enabled() else WHOLE_SEQUENCE

    def embed(self, embedding: nn.Module, tokens: Tensor) -> Activations:
        """Embed tokens (batch, time) int64 of the whole window."""
        return (embedding(self.part.select(tokens)),)

    def run_block(self, block: nn.Module, activations: Activations) -> Activations:
        """Run a block at the positions of its input."""
        x, *aux_losses = activations
        part = self.part
        begin = part.offset(x.shape[1])
        tables = rotary_tables(begin + x.shape[1], cast("Block", block).head_size, like=x)
        x = block(x, *(table[begin:] for table in tables), aux_losses, part)
        return (x, torch.stack(aux_losses).sum()) if aux_losses else (x,)

    def norm(self, norm: nn.Module, activations: Activations) -> Activations:
        x, *aux_losses = activations
        return norm(x), *aux_losses

    def score(self, embedding: nn.Module, activations: Activations) -> Activations:
        """Replace x by scores (batch, time, 256)."""
        x, *aux_losses = activations
        return F.linear(x, cast("nn.Embedding", embedding).weight), *aux_losses

    def loss(self, activations: Activations, targets: Tensor) -> Tensor:
        """Return the mean loss in nats per byte, () float32; targets (batch, time), of the whole window."""
        scores, *aux_losses = activations
        found = self.part.loss(scores, self.part.select(targets))
        return add_balance_loss(found, aux_losses, self.model.shape.depth) if torch.is_grad_enabled() else found


def inputs_and_targets(windows: Tensor) -> tuple[Tensor, Tensor]:
    """Split windows (batch, time + 1) into inputs and targets."""
    tokens = windows.long()
    return tokens[:, :-1], tokens[:, 1:]


def pipeline_step(engine: zengine.PipelineEngine, batches: Iterator[Tensor]) -> zengine.StepReport:
    """Run one optimizer step; every rank reads the same windows, so loaders stay at the same position."""
    windows = [next(batches) for _ in range(engine.micro_batches)]
    engine.train_batch(map(inputs_and_targets, windows))
    assert engine.last_report is not None
    return engine.last_report


def batch_losses(engine: zengine.PipelineEngine, batches: Sequence[Tensor]) -> list[float]:
    """Return the loss of each batch of windows, on every rank."""
    pairs = map(inputs_and_targets, batches)
    found: list[float] = engine.eval_batch(pairs, reduce_output=None, num_micro_batches=len(batches)).tolist()
    return found


def make_scorer(engine: zengine.Engine, model: GPT) -> Scorer:
    """Return the scorer of the next byte: the model, or its pipeline stages."""
    return PipelineScorer(engine, model.shape, model.numel) if isinstance(engine, zengine.PipelineEngine) else model


@attrs.frozen(eq=False)
class PipelineScorer:
    """Scores from the stages of an engine.  A collective of all ranks."""

    engine: zengine.PipelineEngine
    shape: Shape
    numel: int

    @property
    def input_device(self) -> torch.device:
        return self.engine.device

    def logits(self, tokens: Tensor) -> Tensor:
        """Return scores of the next byte: tokens (1, time) -> (1, time, 256) float32, on every rank."""
        found = self.engine.eval_batch(iter([(tokens, None)]), compute_loss=False, num_micro_batches=1)
        scores = (
            torch.empty(*tokens.shape, 256, device=self.input_device)
            if found is None
            else found[0][0].float().contiguous()
        )
        zcomm.broadcast(
            scores, self.engine.parts.groups.pipeline(), source=self.engine.num_stages - 1, label="scores"
        )
        return scores


def _tied_layer(key: str, module: nn.Module, forward: Callable[[nn.Module, Any], Activations]) -> TiedLayerSpec:
    """Wrap a module that exists as a layer with this forward function."""
    return TiedLayerSpec(key, cast("type[nn.Module]", lambda: module), forward_fn=forward)
