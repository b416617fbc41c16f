from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from zpartition import on_meta

COUNTED = """
import sys, torch
from torch import nn
import zpartition
from zpartition.pipeline import LayerSpec
from zpartition.pipeline.layers import weights_of

assert zpartition.on_meta(lambda: nn.Embedding(10**9, 512)).weight.is_meta
print(weights_of([LayerSpec(nn.Embedding, 10, 4), LayerSpec(nn.Linear, 4, 4)], "parameters"))
print("torch._dynamo" in sys.modules)
"""


def test_shapes_are_those_of_the_model_and_what_is_real_stays() -> None:
    made = on_meta(lambda: nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10)))
    assert [tuple(param.shape) for param in made.parameters()] == [(10, 4), (10, 4), (10,)]
    assert all(param.is_meta for param in made.parameters())
    filled = on_meta(lambda: torch.zeros(200, device="cpu").normal_())
    assert filled.std() > 0.5


def test_embeddings_are_counted_without_torchs_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", COUNTED], capture_output=True, text=True, timeout=600)
    assert done.stdout.splitlines() == ["[40.0, 20.0]", "False"], done.stdout + done.stderr


def test_a_module_instead_of_its_builder_is_rejected() -> None:
    with pytest.raises(TypeError, match=r"a function that builds the model, got a Linear: on_meta\(lambda: Linear"):
        on_meta(nn.Linear(2, 2))
