"""The FLOPs meter at module boundaries."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from zengine.flops.meter import FlopsMeter, make_counter


class Inner(nn.Linear):
    """Calls itself once, as recursive modules do."""

    def forward(self, x: torch.Tensor, again: bool = True) -> torch.Tensor:
        y = super().forward(x)
        return self(y, again=False) if again else y


def test_a_module_that_calls_itself_counts_once() -> None:
    model = nn.Sequential(Inner(4, 4))
    meter = FlopsMeter(model, clock=itertools.count().__next__)
    meter.start()
    model(torch.ones(2, 4))
    meter.stop()
    one = 2 * 2 * 4 * 4
    assert meter.readings["0"].flops == meter.readings[""].flops == 2 * one
    assert (meter.readings["0"].calls, meter.readings["0"].seconds) == (1, 2)  # entered, entered again, left
    assert meter.operations == {"addmm": 2 * one}


def test_the_device_is_waited_for_at_every_edge() -> None:
    waits: list[int] = []
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    meter = FlopsMeter(model, synchronize=lambda: waits.append(1))
    meter.start()
    model(torch.ones(1, 2))
    meter.stop()
    assert len(waits) == 2 * 3


def test_layers_that_are_called_outside_of_the_model_are_not_counted() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    meter = FlopsMeter(model)
    meter.start()
    model[0](torch.ones(1, 2))
    assert meter.readings["0"].calls == 0


def test_attention_on_a_cpu_is_known_to_the_counter() -> None:
    q = torch.ones(1, 2, 8, 4, requires_grad=True)
    with make_counter() as counter:
        torch.nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()
    forward = 2 * 2 * 2 * 8 * 8 * 4
    assert counter.get_total_flops() == forward + forward * 5 // 2
