"""Sequence parallelism of Transformers' models on two ranks, through DeepSpeed's calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import zcomm
from zcomm.testing import run_ranks

transformers = pytest.importorskip("transformers")

LENGTH, STEPS = 12, 3
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}
PACKED = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]])


def make(kind: str, attention: str = "sdpa", **more: Any) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **more)
    model = getattr(transformers, f"{kind}ForCausalLM")._from_config(config, attn_implementation=attention)
    return model.train()


def batches(rank: int) -> list[dict[str, Tensor]]:
    """Return one rank's batches; the last third of the labels is ignored."""
    generator = torch.Generator().manual_seed(rank)
    found = []
    for index in range(STEPS):
        tokens = torch.randint(0, 64, (2, LENGTH), generator=generator)
        labels = tokens.masked_fill(torch.arange(LENGTH) >= 8 + index, -100)
        found.append({"input_ids": tokens, "labels": labels, **({"position_ids": PACKED} if index == 1 else {})})
    return found


def alone() -> list[float]:
    """Train in one process on the batches of both ranks in turn."""
    model = make("Llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found = []
    for pair in zip(batches(0), batches(1)):
        for batch in pair:
            loss = model(**batch, use_cache=False).loss
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            found += [loss.item(), float(norm)]
    return found


def weighted(loss: Tensor, labels: Tensor, group: Any) -> Tensor:
    """Combine the losses of sequence ranks as Transformers' Trainer does."""
    losses = torch.stack(torch.distributed.nn.functional.all_gather(loss, group=group))
    counts = torch.stack(torch.distributed.nn.functional.all_gather((labels != -100).sum(), group=group))
    losses = torch.where(counts > 0, losses, torch.zeros_like(losses))
    return (losses * counts).sum() / counts.sum().clamp(min=1)


def _trained(stage: int) -> list[float]:
    import zengine.deepspeed as deepspeed
    from zengine.deepspeed.runtime.sequence_parallel.ulysses_sp import (
        UlyssesSPAttentionHF,
        UlyssesSPDataLoaderAdapter,
    )

    model = make("Llama")
    mpu = UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", 2, 2, seq_length=LENGTH)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config, mpu=mpu)
    groups = deepspeed.utils.groups
    group, rank = groups._get_sequence_parallel_group(), groups._get_sequence_parallel_rank()
    found = []
    try:
        for piece in UlyssesSPDataLoaderAdapter(batches(zcomm.group_rank()), rank, group, 2, engine.device):
            own = engine(**piece, labels=piece["shift_labels"], use_cache=False).loss
            loss = weighted(own, piece["shift_labels"], group)
            engine.backward(loss)
            engine.step()
            found += [float(loss.detach()), float(engine.get_global_grad_norm())]
        assert (engine.dp_world_size, groups._get_sequence_parallel_world_size()) == (1, 2)
    finally:
        UlyssesSPAttentionHF.unregister()
        engine.destroy()
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_a_llama_with_shared_keys_trains_as_in_one_process(stage: int) -> None:
    expected = alone()
    for found in run_ranks(_trained, 2, stage):
        assert found == pytest.approx(expected, rel=2e-4)


def _windowed(attention: str) -> float:
    """Return the largest difference of logits and gradients, with sliding windows and left padding."""
    from zengine.deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from zpartition.sequence import SequenceBatches

    model = make("Mistral", attention, sliding_window=4).eval()
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[0, :3] = 0
    batch = {**batches(0)[0], "attention_mask": mask}
    with flexible():
        whole = model(**batch, use_cache=False).logits
        expected = _gradients(model, whole, mask)
        mpu = UlyssesSPAttentionHF.register_with_transformers(model, attention, 2, 2)
        assert mpu is not None
        try:
            piece = SequenceBatches.over([], mpu.sequence()).piece(batch)
            piece.pop("shift_labels")
            logits = model(**piece, use_cache=False).logits
            there = mask.chunk(2, 1)[mpu.get_sequence_parallel_rank()]
            gradients = _gradients(model, logits, there)
        finally:
            UlyssesSPAttentionHF.unregister()
    for gradient in gradients:
        torch.distributed.all_reduce(gradient)
    own = whole.chunk(2, 1)[mpu.get_sequence_parallel_rank()]
    pairs = [(logits[there.bool()], own[there.bool()]), *zip(gradients, expected)]
    return max(float((a - b).abs().max().detach()) for a, b in pairs)


def _gradients(model: nn.Module, logits: Tensor, mask: Tensor) -> list[Tensor]:
    """Return the gradients of the sum of logits over all tokens except padding."""
    weights = list(model.parameters())
    return list(torch.autograd.grad((logits.sin() * mask.unsqueeze(2)).sum(), weights))


@contextmanager
def flexible() -> Iterator[None]:
    """Run Transformers' FlexAttention and masks uncompiled, so that they differentiate on a CPU."""

    def uncompiled(*args: Any, training: bool = False, **kwargs: Any) -> Any:
        return flex_attention(*args, **kwargs)

    def masks(*, _compile: bool, **kwargs: Any) -> Any:
        return create_block_mask(**kwargs)

    with (
        mock.patch("torch.nn.attention.flex_attention._validate_device", return_value=None),
        mock.patch("transformers.integrations.flex_attention.compile_friendly_flex_attention", uncompiled),
        mock.patch("transformers.masking_utils.create_block_mask", masks),
    ):
        yield


@pytest.mark.parametrize("attention", ["sdpa", "flex_attention"])
def test_windows_and_padding_reach_over_the_cut(attention: str) -> None:
    assert max(run_ranks(_windowed, 2, attention)) < 1e-5
