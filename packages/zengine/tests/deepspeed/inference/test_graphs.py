"""Graphs of forward passes, with a capture that runs the pass again in the place of a GPU's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zengine.deepspeed as deepspeed
from zengine.deepspeed.inference import graphs
from zengine.deepspeed.inference.graphs import GraphedModule


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 3), 0

    def forward(self, x: Tensor, *, scale: float = 1.0, mask: Any = None) -> dict[str, Any]:
        self.calls += 1
        y = self.layer(x) * scale
        return {"y": y if mask is None else y * mask["of"], "size": x.shape[0]}


class Graph:
    """Captures like a GPU: outputs keep their memory, and replays write to it."""

    num_captures = 0

    def capture(self, run: Callable[[], Any]) -> Callable[[], Any]:
        self.num_captures += 1
        outputs = run()

        def replay() -> Any:
            outputs["y"].copy_(run()["y"])
            return outputs

        return replay


def graphed(model: Model) -> tuple[GraphedModule, Graph]:
    graph = Graph()
    return GraphedModule(model, can_capture=lambda tensor: True, capture=graph.capture), graph


@torch.no_grad()
def test_each_signature_has_its_graph_and_outputs_stay() -> None:
    model = Model()
    run, graph = graphed(model)
    calls: list[tuple[Tensor, dict[str, Any]]] = [
        (torch.randn(2, 4), {}),
        (torch.randn(5, 4), {}),
        (torch.randn(2, 4), {"scale": 2.0}),
        (torch.randn(2, 4), {"mask": {"of": torch.rand(2, 3)}}),
        (torch.randn(2, 4), {}),
        (torch.randn(2, 4).double().float(), {"mask": {"of": torch.rand(2, 3)}}),
    ]
    found = [run(x, **given) for x, given in calls]
    assert graph.num_captures == 4
    for (x, given), out in zip(calls, found):
        wanted = model(x, **given)
        assert torch.equal(out["y"], wanted["y"])
        assert out["size"] == wanted["size"]


@torch.no_grad()
def test_what_cannot_be_compared_runs_without_a_graph() -> None:
    model = Model()
    run, graph = graphed(model)
    x = torch.randn(2, 4)

    assert torch.equal(run(x, mask={"of": nn.Parameter(torch.ones(3))})["y"], model(x)["y"])
    assert graph.num_captures == 1
    assert torch.equal(run(x, mask={"of": torch.ones(3), "other": object()})["y"], model(x)["y"])
    assert graph.num_captures == 1
    assert torch.equal(GraphedModule(model)(x)["y"], model(x)["y"]), "host tensors are not captured"


@torch.no_grad()
def test_the_least_recently_used_graph_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    run, graph = graphed(Model())
    for rows in (1, 2, 1, 3, 1, 2):
        run(torch.ones(rows, 4))
    assert graph.num_captures == 4, "1, 2, 3, and 2 again"
    assert len(run.graphs) == 2


def test_on_a_cpu_the_reason_is_told_and_the_module_runs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "zengine"):
        engine = deepspeed.init_inference(Model(), dtype="fp32", enable_cuda_graph=True)
    assert "enable_cuda_graph has no effect here: it needs a GPU with CUDA" in caplog.text
    assert engine(torch.ones(1, 4))["y"].shape == (1, 3)
    with pytest.raises(ValueError, match="and enable_cuda_graph exclude each other"):
        engine.compile()


def test_tensor_ranks_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="enable_cuda_graph: messages between tensor ranks are not captured"):
        deepspeed.init_inference(Model(), enable_cuda_graph=True, mp_size=2)
