"""A pipeline as DeepSpeed's example trains it: AlexNet, `training_data`, `set_random_seed`, `train_batch`.

The losses are those of DeepSpeed 0.19.8 on two CPU ranks, made by this loop: two stages, and one stage on two
replicas, have equal ones.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zengine.deepspeed as deepspeed
from zcomm.testing import run_ranks

LOSSES = (2.3064088821411133, 2.298920154571533, 2.317831039428711, 2.305466413497925)  # steps of DeepSpeed 0.19.8
SEED = 1138


class AlexNet(nn.Module):
    """The example's network with fewer channels."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(inplace=True)),
        )
        self.avgpool = nn.AdaptiveAvgPool2d((4, 4))
        self.classifier = nn.Sequential(
            *(nn.Dropout(0.0), nn.Linear(256, 64), nn.ReLU(inplace=True)),
            *(nn.Dropout(0.0), nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Linear(64, num_classes)),
        )


def join_layers(net: Any) -> list[Any]:
    return [*net.features, net.avgpool, lambda value: torch.flatten(value, 1), *net.classifier]


def train(num_stages: int) -> list[float]:
    torch.manual_seed(SEED)
    deepspeed.runtime.utils.set_random_seed(SEED)
    net = deepspeed.pipe.PipelineModule(
        layers=join_layers(AlexNet()),
        loss_fn=nn.CrossEntropyLoss(),
        num_stages=num_stages,
        partition_method="parameters",
        activation_checkpoint_interval=0,
    )
    numbers = torch.Generator().manual_seed(0)
    images, labels = torch.randn(256, 3, 32, 32, generator=numbers), torch.randint(0, 10, (256,), generator=numbers)
    config = {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.9, 0.999], "eps": 1e-8}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 0},
        "fp16": {"enabled": False},
    }
    engine = deepspeed.initialize(
        model=net,
        model_parameters=[param for param in net.parameters() if param.requires_grad],
        training_data=torch.utils.data.TensorDataset(images, labels),
        config=config,
    )[0]
    losses = [float(engine.train_batch()) for _ in LOSSES]
    engine.close()
    return losses


@pytest.mark.parametrize("num_stages", [1, 2])
def test_losses_are_those_of_deepspeed(num_stages: int) -> None:
    for losses in run_ranks(train, 2, num_stages):
        assert losses == pytest.approx(LOSSES, abs=2e-6)
