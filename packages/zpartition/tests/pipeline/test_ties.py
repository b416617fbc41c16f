import torch
from torch import nn

from zcomm.testing import run_ranks
from zpartition.pipeline import LayerSpec, PipelineModule, TiedLayerSpec
from zpartition.pipeline.channels import Channels
from zpartition.pipeline.p2p import TiedWeights, _parameter_slots, _set_parameter


def broadcast_and_reduce() -> list[float]:
    shared = [TiedLayerSpec("w", nn.Linear, 2, 2) for _ in range(3)]
    model = PipelineModule([shared[0], shared[1], LayerSpec(nn.Linear, 2, 2), shared[2]], num_stages=2)
    rank, channels = torch.distributed.get_rank(), Channels(None, torch.device("cpu"))
    tied = TiedWeights(model, channels)
    arrived: list[float] = []
    if rank == 0:
        own = model.tied["w"]
        own.bias.requires_grad_(False)
        with torch.no_grad():
            own.weight.fill_(3.0)
        own.weight.register_post_accumulate_grad_hook(lambda param: arrived.append(param.grad.sum().item()))
        own(torch.ones(1, 2)).sum().backward()
    else:
        assert [name for name, _ in model.named_parameters()] == ["layers.2.weight", "layers.2.bias"]
    tied.broadcast()
    if rank == 1:
        copy = model.tied_copies["w"]
        assert copy.weight.tolist() == [[3, 3], [3, 3]]
        copy(2 * torch.ones(1, 2)).sum().backward()
        arrived.append(copy.weight.grad.sum().item())
    tied.reduce_gradients()
    channels.flush()
    if rank == 1:
        assert model.tied_copies["w"].weight.grad is None
    else:
        assert model.tied["w"].bias.grad is None
    return arrived


def test_a_copy_has_the_owner_s_weights_and_returns_its_gradient() -> None:
    assert run_ranks(broadcast_and_reduce, 2) == [[4.0, 12.0], [8.0]]


def test_a_copy_on_the_meta_device_gets_memory() -> None:
    copy = nn.Linear(2, 2, device="meta")
    copy.bias.requires_grad_(False)
    for holder, name in _parameter_slots(copy):
        _set_parameter(holder, name, torch.ones(getattr(holder, name).shape))
    assert copy(torch.ones(1, 2)).tolist() == [[3, 3]]
    assert [param.requires_grad for param in copy.parameters()] == [True, False]
