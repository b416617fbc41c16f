"""Losses of on-policy distillation."""

from __future__ import annotations

import pytest
import torch

from zengine.deepspeed.runtime.rollout import generalized_jsd_loss


def test_the_jensen_shannon_loss_is_the_mixture_of_both_divergences() -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(2, 3, 7, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]])
    q, p = student.div(2).softmax(-1), teacher.div(2).softmax(-1)

    def kl(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return (one * (one.log() - other.log())).sum(-1)

    for beta in (0.0, 0.3, 1.0):
        m = beta * p + (1 - beta) * q
        by_token = {0.0: kl(p, q), 1.0: kl(q, p)}.get(beta, beta * kl(p, m) + (1 - beta) * kl(q, m))
        found = generalized_jsd_loss(student, teacher, mask, beta=beta, temperature=2.0)
        assert float(found.loss_sum) == pytest.approx(float((by_token * mask).sum()))
        assert int(found.valid_token_count) == 4
        assert float(found.loss) == pytest.approx(float(found.loss_sum) / 4)
    top = generalized_jsd_loss(student, teacher, mask, beta=0.0, teacher_top_k=7)
    assert float(top.loss) == pytest.approx(float(generalized_jsd_loss(student, teacher, mask, beta=0.0).loss))
    assert float(generalized_jsd_loss(student, teacher, mask, pointwise_clip=0.0).loss) <= 0
    for wrong in ({"beta": 2.0}, {"temperature": 0.0}, {"teacher_top_k": 8}, {"pointwise_clip": -1.0}):
        with pytest.raises(ValueError, match=r"beta = |teacher_top_k = "):
            generalized_jsd_loss(student, teacher, mask, **wrong)
