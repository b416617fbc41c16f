import pytest
import torch
from torch import nn

from zcomm.testing import run_ranks
from zpartition.pipeline import LayerPartitionError, LayerSpec, PipelineModule, TiedLayerSpec

BLOCKS = [LayerSpec(nn.Linear, 4, 4) for _ in range(6)]


def test_one_stage_is_an_ordinary_module() -> None:
    torch.manual_seed(0)
    model = PipelineModule(BLOCKS, num_stages=1)
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    data = torch.randn(3, 4)
    assert torch.equal(model(data), plain(data))
    assert [name for name, _ in model.named_parameters()][:2] == ["layers.0.weight", "layers.0.bias"]


def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def test_compiled_layers_compute_the_same_each_in_a_graph_of_its_own() -> None:
    def transposed(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return x @ module.weight

    layers = [
        TiedLayerSpec("e", nn.Linear, 4, 4),
        twice,
        nn.Linear(4, 4),
        TiedLayerSpec("e", nn.Linear, 4, 4, forward_fn=transposed),
    ]
    torch.manual_seed(0)
    model = PipelineModule(layers, num_stages=1)
    data, names, graphs = torch.randn(3, 4), list(model.state_dict()), []
    wanted = model(data)

    def backend(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    model.compile(backend=backend)
    assert torch.equal(model(data), wanted)
    assert len(graphs) == 4
    assert list(model.state_dict()) == names


def parts() -> tuple[list[str], list[int], str]:
    tied = [TiedLayerSpec("e", nn.Linear, 4, 4, bias=False), *BLOCKS, TiedLayerSpec("e", nn.Linear, 4, 4, bias=False)]
    model = PipelineModule(tied, num_stages=2, partition_method="uniform", stages_per_rank=2)
    with pytest.raises(RuntimeError, match="forward"):
        model(torch.randn(1, 4))
    with pytest.raises(ValueError, match=r"num_stages=3 does not divide the 2 ranks of this run: choose one of 1, 2"):
        PipelineModule(BLOCKS, num_stages=3)
    return [name for name in model.state_dict() if "weight" in name], list(model.my_stages), sorted(model.tied_copies)


def test_ranks_hold_their_stages_under_the_names_of_the_whole() -> None:
    first, second = run_ranks(parts, 2)
    assert first == (["tied.e.weight", "layers.1.weight", "layers.4.weight", "layers.5.weight"], [0, 2], [])
    assert second == (["layers.2.weight", "layers.3.weight", "layers.6.weight"], [1, 3], ["e"])


def test_fewer_layers_than_stages_raise() -> None:
    with pytest.raises(LayerPartitionError, match="2 layers cannot be partitioned into 3 stages"):
        PipelineModule(BLOCKS[:2], num_stages=1, stages_per_rank=3)


def test_recomputation_saves_activations_and_changes_no_value() -> None:
    torch.manual_seed(0)
    model = PipelineModule([nn.Linear(4, 4), torch.tanh, nn.Linear(4, 4), torch.tanh], num_stages=1)
    data, saved = torch.randn(2, 4), []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(1) or each, lambda each: each):
        plain = model(data)
        count = len(saved)
        model.recompute_interval = 2
        assert torch.equal(model(data), plain)
    assert len(saved) - count < count


def test_a_topology_gives_the_number_of_stages() -> None:
    class Topology:
        def get_dim(self, axis: str) -> int:
            return {"pipe": 1, "data": 1}[axis]

    assert PipelineModule(BLOCKS, topology=Topology()).num_stages == 1
