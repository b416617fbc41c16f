"""A plain script: save, load, and continue identically."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import zckpt
from zckpt import CheckpointInputError, CheckpointMismatch, load, save, views
from zckpt.testing import run_threads

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.8, 0.9)),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "lr tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2)),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "rprop": lambda p: torch.optim.Rprop(p),
    "lbfgs-like numbers": lambda p: WithNumbers(p, {"lr": 0.1}),
}


class WithNumbers(torch.optim.Optimizer):
    """Keeps a plain number beside a tensor."""

    @torch.no_grad()
    def step(self, closure=None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["count"] = state.get("count", 0) + 1
                    state["sum"] = state.get("sum", torch.zeros_like(p)) + p.grad
                    p -= group["lr"] / state["count"] * state["sum"]


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False), nn.Linear(4, 3))
    made[2].weight = nn.Parameter(torch.rand(4, 4).t())  # not contiguous
    made.register_parameter("tied", made[0].weight)
    made.register_parameter("frozen", nn.Parameter(torch.rand(2), requires_grad=False))
    return made


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 1) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        loss = net(torch.rand(8, 3, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("stepped", [False, True])
def test_a_script_goes_on_bit_for_bit(tmp_path: Path, name: str, stepped: bool) -> None:
    net = model()
    optimizer = OPTIMIZERS[name](net.parameters())
    train(net, optimizer, 3)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.125
    save(tmp_path, tensors=views(net, optimizer), objects={"epoch": 4}, step=3)
    expected = train(net, optimizer, 3, seed=2)

    other = model(seed=7)
    fresh = OPTIMIZERS[name](other.parameters())
    if stepped:
        train(other, fresh, 1)
    loaded = load(tmp_path, tensors=views(other, fresh))
    assert (loaded.step, loaded.objects, loaded.report.missing, loaded.report.extra) == (3, {"epoch": 4}, (), ())
    assert fresh.param_groups[0]["weight_decay"] == 0.125
    assert train(other, fresh, 3, seed=2) == expected
    for key, value in net.state_dict().items():
        assert value.equal(other.state_dict()[key]), key


def test_names_are_those_of_the_model_and_tied_weights_are_one(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer, 1)
    save(tmp_path, "a", tensors=views(net, optimizer))
    names = zckpt.find(tmp_path).names()
    assert "model.tied" in names  # the name that state_dict() gives first
    assert "model.0.weight" not in names
    assert {"model.1.running_mean", "model.1.num_batches_tracked", "optimizer.exp_avg.2.weight"} <= set(names)
    assert not any(name.endswith("frozen") and name.startswith("optimizer") for name in names)


def test_a_missing_optimizer_state_is_an_error_unless_it_is_asked_for(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    save(tmp_path, "a", tensors=views(net))
    before = copy.deepcopy(net.state_dict())
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    with pytest.raises(CheckpointMismatch, match=r'holds no optimizer state\. Load with optimizer="skip"'):
        load(tmp_path, tensors=views(net, optimizer))
    assert not net[0].weight.any()
    load(tmp_path, tensors=views(net, optimizer), optimizer="skip")
    assert all(value.equal(before[key]) for key, value in net.state_dict().items())
    assert not optimizer.state


def test_a_model_alone_is_taken_from_a_checkpoint_of_both(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer, 1)
    save(tmp_path, "a", tensors=views(net, optimizer))
    other = model(seed=9)
    report = load(tmp_path, tensors=views(other)).report
    assert report.extra == ()
    assert other[3].weight.equal(net[3].weight)


def test_what_does_not_fit_is_listed_and_nothing_is_touched(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer, 1)
    save(tmp_path, "a", tensors=views(net, optimizer))
    other = nn.ModuleDict({"0": nn.Linear(3, 4), "new": nn.Linear(1, 1)})
    with pytest.raises(CheckpointMismatch, match=r"(?s)3 missing.*model.new.bias: float32 \(1,\).* extra "):
        load(tmp_path, tensors=views(other))
    report = load(tmp_path, tensors=views(other), strict=False).report
    assert report.missing == ("model.0.weight", "model.new.bias", "model.new.weight")  # the first was saved as tied
    assert "model.3.weight" in report.extra
    with pytest.raises(CheckpointMismatch, match="the state of AdamW, the optimizer is SGD"):
        load(tmp_path, tensors=views(net, torch.optim.SGD(net.parameters(), lr=1)))
    halves = [{"params": list(net.parameters())[:2]}, {"params": list(net.parameters())[2:]}]
    with pytest.raises(CheckpointMismatch, match="than the saved ones: 2 groups here, 1 saved"):
        load(tmp_path, tensors=views(net, torch.optim.AdamW(halves)))
    fewer = torch.optim.AdamW(list(net.parameters())[1:])
    with pytest.raises(CheckpointMismatch, match=r"group 0 has \[\] only here, \['.*'\] only in the checkpoint"):
        load(tmp_path, tensors=views(net, fewer))


def test_what_cannot_be_viewed_is_named(tmp_path: Path) -> None:
    net = model()
    with pytest.raises(CheckpointInputError, match="is not a parameter of the model"):
        save(tmp_path, "a", tensors=views(net, torch.optim.SGD([torch.zeros(2)], lr=1)))
    with pytest.raises(CheckpointInputError, match="use another key"):
        save(tmp_path, "a", tensors=views(net), objects={"zckpt.views": 1})
    optimizer = torch.optim.SGD(net.parameters(), lr=1)
    optimizer.state[net[0].bias] = {"a.b": torch.zeros(1)}
    with pytest.raises(CheckpointInputError, match="a key must be a str without dots"):
        save(tmp_path, "a", tensors=views(net, optimizer))
    optimizer.state[net[0].bias] = {"a": object()}
    with pytest.raises(CheckpointInputError, match=r"zckpt.views\['optimizer'\]\['numbers'\].*builtins.object"):
        save(tmp_path, "a", tensors=views(net, optimizer))


def test_a_rank_that_cannot_be_viewed_is_every_ranks_error(tmp_path: Path) -> None:
    def script(peers: zckpt.Peers) -> None:
        net = model()
        optimizer = torch.optim.SGD(net.parameters() if peers.rank == 0 else [torch.zeros(2)], lr=1)
        save(tmp_path, "a", tensors=views(net, optimizer), peers=peers)

    for outcome in run_threads(script, 2):
        assert isinstance(outcome.error, CheckpointInputError)
        assert "rank 1: the optimizer's parameter 0" in str(outcome.error)


def test_tensors_by_name_are_filled_whatever_their_strides(tmp_path: Path) -> None:
    values = torch.rand(3, 4)
    save(tmp_path, "a", tensors={"w": values.t()})
    live = torch.zeros(3, 4)
    load(tmp_path, tensors={"w": live.t()})
    assert live.equal(values)


def test_replicas_save_and_load_together(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer, 1)
    made = [model(seed=rank + 1) for rank in range(3)]
    optimizers = [torch.optim.AdamW(each.parameters()) for each in made]

    def script(peers: zckpt.Peers) -> int:
        save(tmp_path, tensors=views(net, optimizer), step=5, peers=peers)
        loaded = load(tmp_path, tensors=views(made[peers.rank], optimizers[peers.rank]), peers=peers)
        return loaded.step

    outcomes = run_threads(script, 3)
    assert [(each.value, each.error) for each in outcomes] == [(5, None)] * 3
    expected = train(net, optimizer, 2)
    assert all(train(*each, 2) == expected for each in zip(made, optimizers))


class WithExtra(nn.Linear):
    """Keeps extra state that its state_dict generates."""

    scale = 1.0

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor([self.scale])

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.scale = state.item()


def test_what_the_state_dict_makes_up_is_given_back_to_the_module(tmp_path: Path) -> None:
    net, other = nn.Sequential(WithExtra(2, 2)), nn.Sequential(WithExtra(2, 2))
    net[0].scale = 3.0
    save(tmp_path, "a", tensors=views(net))
    load(tmp_path, tensors=views(other))
    assert other[0].scale == 3.0
    assert other[0].weight.equal(net[0].weight)


def test_state_of_what_is_no_parameter_is_refused_and_not_lost(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.state["global"]["clip"] = 3.0
    with pytest.raises(CheckpointInputError, match="keeps state under 1 keys that are not parameters"):
        save(tmp_path, "a", tensors=views(net, optimizer))
