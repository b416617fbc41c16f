"""`deepspeed.runtime.rollout.opsd`: targets of a rollout, and the generalized Jensen-Shannon loss.

On-policy distillation (Agarwal et al. 2024, "On-Policy Distillation of Language Models", section 3): the student
generates, and both models judge its tokens.  With mixture m = beta p + (1 - beta) q of teacher p and student q, the
loss of a token is beta KL(p | m) + (1 - beta) KL(q | m); beta = 0 is KL(p | q), beta = 1 is KL(q | p).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from zengine.rollout.values import RolloutBatch

__all__ = ["JSDLossOutput", "ResponseTokenBatch", "generalized_jsd_loss"]


@dataclass(frozen=True)
class ResponseTokenBatch:
    """Next-token targets of a rollout: the logits at column i predict `target_ids[:, i]`."""

    input_ids: Tensor  # (samples, time) int64
    attention_mask: Tensor  # (samples, time)
    target_ids: Tensor  # (samples, time - 1) int64
    response_mask: Tensor  # (samples, time - 1) bool: targets that are new tokens

    @classmethod
    def from_rollout(cls, rollout: RolloutBatch) -> ResponseTokenBatch:
        """Return the targets of a rollout.  Raises ValueError for starts outside of the sequence, or not whole."""
        starts, length = rollout.response_start_idx, rollout.seq_len
        if starts.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"response_start_idx must have an integer dtype; it has {starts.dtype}")
        if len({rollout.input_ids.device, rollout.attention_mask.device, starts.device}) > 1:
            raise ValueError("input_ids, attention_mask and response_start_idx of a rollout must be on one device")
        if bool(((starts < 1) | (starts > length)).any()):
            raise ValueError(f"response_start_idx must be in [1, {length}]; it is {starts.tolist()}")
        columns = torch.arange(1, length, device=starts.device)
        is_new = columns[None, :] >= starts[:, None]
        return cls(
            rollout.input_ids,
            rollout.attention_mask,
            rollout.input_ids[:, 1:],
            rollout.attention_mask[:, 1:].bool() & is_new,
        )

    def select_causal_logits(self, logits: Tensor) -> Tensor:
        """Return the logits, (samples, time, vocabulary), of the columns that have a target.

        Raises ValueError for another shape.
        """
        if logits.dim() != 3 or logits.shape[:2] != self.input_ids.shape:
            raise ValueError(
                f"logits must be (samples, time, vocabulary) with {tuple(self.input_ids.shape)} in front; their "
                f"shape is {tuple(logits.shape)}"
            )
        return logits[:, :-1]


@dataclass(frozen=True)
class JSDLossOutput:
    """A loss, and its parts for a mean over ranks."""

    loss: Tensor  # mean over the tokens that count
    loss_sum: Tensor
    valid_token_count: Tensor  # () int64


def generalized_jsd_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    response_mask: Tensor,
    beta: float = 0.5,
    temperature: float = 1.0,
    teacher_top_k: int | None = None,
    pointwise_clip: float | None = None,
) -> JSDLossOutput:
    """Return the divergence of student and teacher over the tokens of the mask.

    student_logits, teacher_logits: (samples, time, vocabulary).  response_mask: (samples, time).
    teacher_top_k: compare over the k likeliest tokens of the teacher only, normalized again.
    pointwise_clip: largest contribution of one entry of the vocabulary.

    Raises ValueError for shapes that do not match, and values out of range.
    """
    _check_shapes(student_logits, teacher_logits, response_mask)
    _check_numbers(beta, temperature, teacher_top_k, pointwise_clip, student_logits.shape[-1])
    student, teacher = student_logits / temperature, teacher_logits / temperature
    if teacher_top_k is not None:
        likeliest = teacher.topk(teacher_top_k, dim=-1).indices
        student, teacher = student.gather(-1, likeliest), teacher.gather(-1, likeliest)
    log_q, log_p = F.log_softmax(student, -1), F.log_softmax(teacher, -1)
    if beta in (0.0, 1.0):
        entries = log_p.exp() * (log_p - log_q) if beta == 0.0 else log_q.exp() * (log_q - log_p)
    else:
        log_m = torch.logaddexp(log_q + math.log1p(-beta), log_p + math.log(beta))
        entries = beta * log_p.exp() * (log_p - log_m) + (1 - beta) * log_q.exp() * (log_q - log_m)
    if pointwise_clip is not None:
        entries = entries.clamp(max=pointwise_clip)
    total = (entries.sum(-1) * response_mask.to(entries.dtype)).sum()
    count = response_mask.sum().long()
    return JSDLossOutput(total / count.clamp(min=1), total, count)


def _check_shapes(student: Tensor, teacher: Tensor, mask: Tensor) -> None:
    if student.shape != teacher.shape or student.dim() != 3 or mask.shape != student.shape[:2]:
        raise ValueError(
            f"logits must be (samples, time, vocabulary) twice, and the mask (samples, time); shapes are "
            f"{tuple(student.shape)}, {tuple(teacher.shape)}, {tuple(mask.shape)}"
        )


def _check_numbers(beta: float, temperature: float, top_k: int | None, clip: float | None, vocabulary: int) -> None:
    if not 0.0 <= beta <= 1.0 or temperature <= 0.0 or (clip is not None and clip < 0.0):
        raise ValueError(
            f"beta = {beta} must be in [0, 1], temperature = {temperature} above 0, pointwise_clip = {clip} >= 0"
        )
    if top_k is not None and not 0 < top_k <= vocabulary:
        raise ValueError(f"teacher_top_k = {top_k} must be from 1 to the vocabulary's {vocabulary}")
