"""PPO with DeepSpeed-Chat's habits: a hybrid engine for the actor, and engines for critic, reference and reward."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from ppo_ranks import SIZES, run

from zcomm.testing import run_ranks


@pytest.mark.parametrize(("stage", "dtype", "tp"), [(3, "fp32", 1), (3, "bf16", 2), (2, "fp16", 1)])
def test_four_engines_train_an_actor_that_generates(stage: int, dtype: str, tp: int, tmp_path: Path) -> None:
    import transformers

    found = run_ranks(run, 2, stage, dtype, tp, 4, str(tmp_path))
    for rank in found:
        assert all(math.isfinite(each) for losses in rank["losses"] for each in losses)
    far = found[0]["far"]
    assert 0 < far["ema"] < far["actor"]  # the average follows
    saved = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    saved.load_state_dict(torch.load(tmp_path / "pytorch_model.bin"))
    with torch.no_grad():
        logits = saved.eval()(torch.arange(3, 13)[None]).logits
    limit = 1e-5 if dtype == "fp32" else 2e-2
    for rank in found:
        assert float((logits - rank["logits"]).abs().max()) < limit
