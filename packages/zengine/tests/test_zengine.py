"""Imports of the package and of a first engine."""

from __future__ import annotations

import subprocess
import sys

import pytest

import zengine

PROBE = """
import sys, torch
def loaded(*names):
    return [name for name in names if name in sys.modules]
import zengine
assert not loaded("zpartition", "zoptim", "zckpt", "zengine.engine.engine", "zengine.config"), sys.modules.keys()
config = {"train_batch_size": 2, "gradient_clipping": 0, "optimizer": {"type": "AdamW", "params": {}}}
engine = zengine.initialize(model=torch.nn.Linear(2, 1), config=config)[0]
engine.backward(engine(torch.ones(2, 2)).mean())
assert engine.step()
torch_parts = ("torch._dynamo", "torch._inductor")
never = (*torch_parts, "tensorboard", "transformers", "zckpt.saving.commit", "zoptim.optimizers.muon")
assert not loaded(*never), loaded(*never)
"""


def test_every_public_name_is_there_and_a_typo_is_not():
    for name in zengine.__all__:
        assert getattr(zengine, name) is not None
        assert name in dir(zengine)
    with pytest.raises(AttributeError, match="'zengine' has no attribute 'initialise'"):
        zengine.initialise  # noqa: B018


def test_nothing_is_imported_that_is_not_used():
    subprocess.run([sys.executable, "-c", PROBE], check=True)
