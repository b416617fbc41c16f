"""Checks of parameters, groups, gradients and loaded state in the base class."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import zoptim
from zoptim.optimizers.base import CheckedOptimizer
from zoptim.states.spec import Master, StateSpec


class Minimal(CheckedOptimizer):
    """The smallest optimizer: one moment, no step."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        self._set_up()
        super().__init__(params, {"lr": lr, "state_dtype": None, "split_master": False})

    def _check_options(self, options: Any) -> None:
        if options["lr"] < 0:
            raise ValueError(f"lr is {options['lr']}")

    def _state_spec(self, group: Any) -> StateSpec:
        master = Master.SPLIT if group["split_master"] else Master.WEIGHT
        return StateSpec(names=("m",), squares=frozenset(), format=None, master=master, counts=False)


def param(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(*shape, dtype=dtype).requires_grad_()


# Parameters and groups --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"params": [param(3)], "lr": -1}, ValueError),
        ({"params": [torch.ones(2, dtype=torch.complex64)]}, zoptim.UnsupportedTensorError),
    ],
)
def test_a_group_that_raises_is_not_added(bad: dict[str, Any], error: type[Exception]) -> None:
    optimizer = Minimal([param(3)])
    with pytest.raises(error):
        optimizer.add_param_group(bad)
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [param(3)], "lr": 0.5})
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]


def test_an_invalid_group_raises_as_in_torch() -> None:
    with pytest.raises(TypeError, match="must be a dict"):
        Minimal([param(3)]).add_param_group([param(3)])  # type: ignore[arg-type]


def test_a_split_master_needs_bf16_parameters_and_names_those_that_are_not(kind: Any) -> None:
    named = [("first", param(3, dtype=torch.bfloat16)), ("second", param(3))]
    message = r"split_master=True, but parameter 1 of group 0 \('second'\) is torch\.float32; .* model\.bfloat16\(\)"
    with pytest.raises(zoptim.UnsupportedTensorError, match=message):
        kind.make(named, split_master=True)
    kind.make(named[:1], split_master=True)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_duplicate_parameter_raises_before_the_update(kind: Any) -> None:
    only = param(8)
    only.grad = torch.ones(8)
    optimizer = kind.make([only, only])

    def step_twice() -> None:  # the first momentum of SGD is made without a kernel
        optimizer.step()
        optimizer.step()

    with pytest.raises(
        ValueError, match="Give each parameter its own memory, and list each tensor once, in one group"
    ):
        step_twice()


# Gradients --------------------------------------------------------------------------------------------


def test_a_gradient_on_another_device_raises_with_its_name(kind: Any) -> None:
    class Elsewhere(torch.Tensor):
        grad = torch.ones(3, device="meta")  # type: ignore[assignment]

    only = torch.ones(3).as_subclass(Elsewhere).requires_grad_()
    with pytest.raises(ValueError, match="gradient of parameter 0 of group 0 is on meta, the parameter on cpu"):
        kind.make([only]).step()


def test_a_gradient_of_another_shape_raises_with_its_name_before_anything_changes(kind: Any, lab: Any) -> None:
    first, second = param(4), param(4)
    first.grad, second.grad = torch.ones(4), torch.ones(4)
    second.data = torch.ones(2, 2)
    with pytest.raises(
        ValueError, match=r"gradient of parameter 1 of group 0 has shape \(4,\), the parameter has \(2, 2\)"
    ):
        kind.make([first, second]).step()
    assert torch.equal(first.detach(), torch.ones(4))


# Loading ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["state_dtype", "split_master"])
def test_the_format_is_this_optimizers_decision_and_not_the_checkpoints(option: str, lab: Any) -> None:
    values: dict[str, Any] = {"state_dtype": "8bit", "split_master": True}
    plain, special = (
        zoptim.AdamW([param(300, dtype=torch.bfloat16)], **more) for more in ({}, {option: values[option]})
    )
    before = [optimizer.param_groups[0][option] for optimizer in (plain, special)]
    states = [copy.deepcopy(optimizer.state_dict()) for optimizer in (plain, special)]
    plain.load_state_dict(states[1])
    special.load_state_dict(states[0])
    assert [optimizer.param_groups[0][option] for optimizer in (plain, special)] == before


def test_options_that_torch_does_not_have_get_their_defaults() -> None:
    theirs = torch.optim.AdamW([param(3)], lr=0.5)
    ours = zoptim.AdamW([param(3)], bias_correction=False)
    ours.load_state_dict(theirs.state_dict())
    group = ours.param_groups[0]
    assert (group["lr"], group["bias_correction"]) == (0.5, True)
    assert (group["state_dtype"], group["split_master"]) == (None, False)


def test_groups_keep_their_own_formats_when_loaded() -> None:
    def make() -> zoptim.AdamW:
        return zoptim.AdamW(
            [{"params": [param(3)], "state_dtype": "bf16"}, {"params": [param(3)], "state_dtype": "8bit"}]
        )

    source, target = make(), make()
    target.load_state_dict(source.state_dict())
    assert [group["state_dtype"] for group in target.param_groups] == ["bf16", "8bit"]


def test_a_state_that_is_unpickled_keeps_the_format_that_it_was_written_in() -> None:
    optimizer = copy.deepcopy(zoptim.AdamW([param(3)], state_dtype="8bit"))
    assert optimizer.param_groups[0]["state_dtype"] == "8bit"


def test_load_hooks_see_plain_tensors(kind: Any, lab: Any) -> None:
    params = lab.make_params([(4,)])
    optimizer = kind.make(params)
    lab.run(optimizer, params, range(2), [(4,)])
    seen: list[Any] = []
    optimizer.register_load_state_dict_post_hook(lambda o: seen.extend(o.state[params[0]].values()))
    optimizer.load_state_dict(optimizer.state_dict())
    assert all(type(value) is Tensor for value in seen)


# Portable state ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("state_dtype", [None, "bf16", "8bit"])
def test_portable_state_moves_by_parameter_and_in_float32(kind: Any, state_dtype: str | None, lab: Any) -> None:
    shapes = [(700,), (5,)]
    params, others = lab.make_params(shapes), lab.make_params(shapes)
    source, target = kind.make(params, state_dtype=state_dtype), kind.make(others)
    lab.run(source, params, range(3), shapes)
    memory = source._state_spec(source.param_groups[0])
    for a, b in zip(params, others):
        given = source.portable_state(a)
        whole = {
            key: value.read(0, a.numel()).view(a.shape) if hasattr(value, "read") else value
            for key, value in given.items()
        }
        assert not [key for key in whole if key.endswith("_scale")]
        target.load_portable_state(b, whole)
        for name in memory.names:
            assert torch.equal(memory.read(target.state[b], name), memory.read(source.state[a], name).float())
    lab.run(target, others, range(3, 4), shapes)


def test_state_for_an_unknown_tensor_raises(lab: Any) -> None:
    optimizer = zoptim.AdamW([param(3)])
    with pytest.raises(ValueError, match=r"a tensor of shape \(4,\) is not a parameter of this AdamW"):
        optimizer.portable_state(param(4))
    with pytest.raises(ValueError, match="parameter 0 of group 0 lacks exp_avg_sq, step; it has exp_avg"):
        optimizer.load_portable_state(optimizer.param_groups[0]["params"][0], {"exp_avg": torch.ones(3)})
    assert not optimizer.state


# The closure, mirrors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("master", "weight", "error", "message"),
    [
        (
            torch.ones(3),
            torch.ones(3),
            TypeError,
            r"torch\.float32 master and a torch\.float32 weight; it needs .*bfloat16",
        ),
        (torch.ones(3).bfloat16(), torch.ones(3).bfloat16(), TypeError, r"a torch\.bfloat16 master"),
        (
            torch.ones(3),
            torch.ones(4).bfloat16(),
            ValueError,
            r"the master has shape, device and strides .*must be equal",
        ),
        (torch.ones(2, 3), torch.ones(3, 2).t().bfloat16(), ValueError, r"must be equal"),
        (torch.ones(3), torch.ones(3, device="meta").half(), ValueError, r"must be equal"),
    ],
)
def test_a_weight_that_cannot_mirror_its_master_raises(
    master: Tensor, weight: Tensor, error: type[Exception], message: str
) -> None:
    optimizer = zoptim.AdamW([master.requires_grad_()])
    with pytest.raises(error, match=message):
        optimizer.mirror(master, weight)


@pytest.mark.parametrize("kind", [zoptim.AdamW, zoptim.Adafactor, zoptim.SGD])
def test_options_and_state_can_be_checked_without_loading(kind: Any) -> None:
    param = torch.ones(3, requires_grad=True)
    optimizer = kind([param], lr=0.1)
    param.grad = torch.ones(3)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    optimizer.check_loaded_options(0, {"lr": 0.5})
    for options in ({"lr": []}, {"weight_decay": -1.0}, {"lr": float("nan")}):
        with pytest.raises((TypeError, ValueError), match=next(iter(options))):
            optimizer.check_loaded_options(0, options)
    optimizer.check_portable_state(param, optimizer.portable_state(param))
    if optimizer.portable_state(param):
        with pytest.raises(ValueError, match="lacks"):
            optimizer.check_portable_state(param, {"step": torch.tensor(1.0)})
    assert str(optimizer.state_dict()) == str(before)
