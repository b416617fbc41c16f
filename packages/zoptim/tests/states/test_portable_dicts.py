"""State dicts have decoded values for torch's optimizers; compact ones load into zoptim only."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor

import zoptim

SHAPES = [(40, 30), (7,), (), (0,)]
FORMATS: list[dict[str, Any]] = [{}, {"state_dtype": "bf16"}, {"state_dtype": "8bit"}, {"state_dtype": "fp32"}]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def trained(kind: Any, lab: Any, dtype: torch.dtype = torch.float32, **more: Any) -> tuple[Any, list[Tensor]]:
    params = lab.make_params(SHAPES, dtype)
    optimizer = kind.make(params, **more)
    lab.run(optimizer, params, range(3), SHAPES)
    return optimizer, params


def kept(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's own state as a state dict, the form of older versions."""
    return torch.optim.Optimizer.state_dict(optimizer)


def moments(optimizer: Any, param: Tensor) -> dict[str, Tensor]:
    """The moments of a parameter, as float32."""
    memory, state = optimizer._state_spec(optimizer.param_groups[0]), optimizer.state[param]
    return {name: memory.read(state, name).clone() for name in memory.names if name in state}


# Numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", FORMATS, ids=str)
def test_torch_reads_every_format_as_the_numbers_it_stands_for(kind: Any, more: dict[str, Any], lab: Any) -> None:
    ours, params = trained(kind, lab, **more)
    others = [param.detach().clone().requires_grad_() for param in params]
    theirs = kind.make_torch(others)
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    for a, b in zip(params, others):
        for name, value in moments(ours, a).items():
            assert torch.equal(theirs.state[b][name], value), name
    for optimizer, some in ((ours, params), (theirs, others)):
        lab.run(optimizer, some, range(3, 4), SHAPES)
    for a, b in zip(params, others):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # the step itself reads the numbers, not the codes


@pytest.mark.parametrize("more", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_moments_are_float32_or_the_parameters_dtype_and_have_torchs_names(
    kind: Any, dtype: torch.dtype, more: dict[str, Any], lab: Any
) -> None:
    ours, params = trained(kind, lab, dtype, **more)
    state = ours.state_dict()["state"]
    for index, param in enumerate(params):
        names = ours._state_spec(ours.param_groups[0]).names
        assert set(state.get(index, {})) - {"step"} == set(names)
        for name in names:
            assert state[index][name].dtype in (torch.float32, param.dtype)
            assert state[index][name].shape == param.shape


def test_the_values_of_8bit_adam_are_those_of_float32_adam_nearly() -> None:
    found = {}
    for state_dtype in (None, "8bit"):
        param = torch.zeros(300, requires_grad=True)
        optimizer = zoptim.AdamW([param], state_dtype=state_dtype)
        for _ in range(10):
            param.grad = torch.full_like(param, 0.3)
            optimizer.step()
        other = torch.optim.AdamW([torch.zeros(300, requires_grad=True)])
        other.load_state_dict(optimizer.state_dict())
        found[state_dtype] = float(other.state_dict()["state"][0]["exp_avg"].norm())
    assert found["8bit"] == pytest.approx(found[None], rel=0.05)


def test_uncoded_state_is_not_copied() -> None:
    param = torch.zeros(300, dtype=torch.bfloat16, requires_grad=True)
    for state_dtype in (None, "fp32"):
        optimizer = zoptim.AdamW([param], state_dtype=state_dtype)
        param.grad = torch.ones_like(param)
        optimizer.step()
        state = optimizer.state_dict()["state"][0]
        assert all(state[key] is value for key, value in optimizer.state[param].items())


def test_a_state_dict_does_not_change_the_optimizer(kind: Any, lab: Any) -> None:
    ours, params = trained(kind, lab, state_dtype="8bit")
    before = lab.snapshot(ours, params)
    ours.state_dict()
    lab.assert_bitwise(lab.snapshot(ours, params), before)


def test_codes_of_a_moment_that_the_options_no_longer_ask_for_are_numbers_too() -> None:
    param = torch.zeros(300, requires_grad=True)
    optimizer = zoptim.AdamW([param], state_dtype="8bit", amsgrad=True)
    param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.param_groups[0]["amsgrad"] = False
    state = optimizer.state_dict()["state"][0]
    assert set(state) == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
    assert {value.dtype for value in state.values()} == {torch.float32}


def test_muons_matrices_load_into_torchs_muon_from_8_bits() -> None:
    def matrices() -> list[Tensor]:
        generator = torch.Generator().manual_seed(3)
        return [torch.randn(24, 32, generator=generator).requires_grad_() for _ in range(2)]

    params, others = matrices(), matrices()
    ours = zoptim.Muon(params, state_dtype="8bit")
    for param in params:
        param.grad = torch.cos(param.detach())
    ours.step()
    theirs = torch.optim.Muon(others, adjust_lr_fn="original")
    theirs.load_state_dict(ours.state_dict())
    for a, b in zip(params, others):
        assert torch.equal(theirs.state[b]["momentum_buffer"], moments(ours, a)["momentum_buffer"])


# Compact ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_groups", [1, 2, 3])
@pytest.mark.parametrize(
    "theirs", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adafactor]
)
def test_torch_rejects_a_compact_state_dict(theirs: Any, num_groups: int) -> None:
    def groups() -> list[dict[str, Any]]:
        return [{"params": [torch.zeros(300, requires_grad=True)]} for _ in range(num_groups)]

    ours = zoptim.AdamW(groups(), state_dtype="8bit")
    for group in ours.param_groups:
        group["params"][0].grad = torch.ones(300)
    ours.step()
    other, written = theirs(groups(), lr=0.25), ours.state_dict(compact=True)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        other.load_state_dict(written)
    assert not any(value.any() for state in other.state.values() for value in state.values())  # Adagrad begins at 0
    assert [group["lr"] for group in other.param_groups] == [0.25] * num_groups


def test_no_number_of_groups_makes_torch_take_a_compact_state_dict() -> None:
    written = zoptim.AdamW([torch.zeros(3)]).state_dict(compact=True)
    other = torch.optim.AdamW([{"params": [torch.zeros(1)]} for _ in range(len(written["param_groups"]))])
    with pytest.raises(TypeError):
        other.load_state_dict(written)


@pytest.mark.parametrize("more", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_compact_state_dict_has_the_optimizers_tensors_and_survives_a_file(
    kind: Any, dtype: torch.dtype, more: dict[str, Any], lab: Any
) -> None:
    ours, params = trained(kind, lab, dtype, **more)
    written = ours.state_dict(compact=True)
    file = io.BytesIO()
    torch.save(written, file)
    file.seek(0)
    read = torch.load(file, weights_only=True)
    others = [param.detach().clone().requires_grad_() for param in params]
    twin = kind.make(others, **more)
    twin.load_state_dict(read)
    lab.assert_bitwise(lab.snapshot(twin, others), lab.snapshot(ours, params))
    for optimizer, some in ((ours, params), (twin, others)):
        lab.run(optimizer, some, range(3, 5), SHAPES)
    lab.assert_bitwise(lab.snapshot(twin, others), lab.snapshot(ours, params))


def test_a_compact_state_dict_costs_no_memory_and_loads_into_any_format(lab: Any) -> None:
    params, others = lab.make_params(SHAPES), lab.make_params(SHAPES)
    source, target = zoptim.AdamW(params, state_dtype="8bit"), zoptim.AdamW(others)
    lab.run(source, params, range(2), SHAPES)
    written = source.state_dict(compact=True)
    assert written["compact"]["state"][0]["exp_avg"] is source.state[params[0]]["exp_avg"]
    target.load_state_dict(written)
    for a, b in zip(params, others):
        assert torch.equal(target.state[b]["exp_avg"], moments(source, a)["exp_avg"])


def test_adafactor_speaks_the_same_two_forms() -> None:
    params = [torch.ones(6, 4, requires_grad=True), torch.ones(6, 4, requires_grad=True)]
    source, target = (zoptim.Adafactor([param]) for param in params)
    params[0].grad = torch.ones(6, 4)
    source.step()
    with pytest.raises(ValueError, match="different number of parameter groups"):
        torch.optim.Adafactor([params[1]]).load_state_dict(source.state_dict(compact=True))
    target.load_state_dict(source.state_dict(compact=True))
    assert torch.equal(target.state[params[1]]["row_var"], source.state[params[0]]["row_var"])


def test_a_compact_state_dict_of_a_later_version_raises() -> None:
    written = zoptim.AdamW([torch.zeros(3)]).state_dict(compact=True)
    written["compact"]["version"] = 2
    with pytest.raises(ValueError, match=r"compact state dict of version 2; this zoptim reads version 1"):
        zoptim.AdamW([torch.zeros(3)]).load_state_dict(written)


# State that another optimizer has cast ------------------------------------------------------------------


def test_codes_that_torch_has_cast_raise_when_loaded(lab: Any) -> None:
    params, others, thirds = (lab.make_params(SHAPES) for _ in range(3))
    source = zoptim.AdamW(params, state_dtype="8bit")
    lab.run(source, params, range(2), SHAPES)
    theirs = torch.optim.AdamW(others)
    theirs.load_state_dict(kept(source))  # what state_dict() used to be
    with pytest.raises(ValueError, match=r"exp_avg of parameter 0 of group 0 has a scale, but is torch.fl"):
        zoptim.AdamW(thirds, state_dtype="8bit").load_state_dict(theirs.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_remainder_that_torch_has_cast_is_none(dtype: torch.dtype, lab: Any) -> None:
    """The weights were updated since, and the cast destroyed its bits."""
    params = lab.make_params(SHAPES, torch.bfloat16)
    source = zoptim.AdamW(params, split_master=True)
    lab.run(source, params, range(2), SHAPES)
    theirs = torch.optim.AdamW([param.detach().to(dtype).requires_grad_() for param in params])
    theirs.load_state_dict(source.state_dict())
    others = [param.detach().clone().requires_grad_() for param in params]
    target = zoptim.AdamW(others, split_master=True)
    target.load_state_dict(theirs.state_dict())
    assert not any(target.state[param]["remainder"].any() for param in others)


@pytest.mark.parametrize("keys", ["names", "strings"])
def test_state_under_keys_that_no_group_lists_raises(keys: str, lab: Any) -> None:
    params = lab.make_params(SHAPES)
    source = zoptim.AdamW(params)
    lab.run(source, params, range(2), SHAPES)
    written = source.state_dict()
    written["state"] = {f"layer.{k}" if keys == "names" else str(k): v for k, v in written["state"].items()}
    target = zoptim.AdamW(lab.make_params(SHAPES))
    with pytest.raises(ValueError, match=r"state of '(layer\.)?0' and 3 more, which no parameter group lists"):
        target.load_state_dict(written)
    assert not target.state


NO_STATE_DICTS: list[Any] = [
    {},
    {"state": {}},
    {"param_groups": []},
    {"state": [], "param_groups": []},
    {"state": {}, "param_groups": [0]},
    {"state": {}, "param_groups": [{"lr": 1.0}]},
    {"state": {0: [1.0]}, "param_groups": [{"params": [0]}]},
    {"compact": 3},
    None,
]


@pytest.mark.parametrize("spoiled", NO_STATE_DICTS)
def test_anything_but_a_state_dict_raises_with_the_class(spoiled: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=r"AdamW.load_state_dict"):
        zoptim.AdamW([torch.zeros(3)]).load_state_dict(spoiled)


# Hooks ------------------------------------------------------------------------------------------------


def test_hooks_of_others_see_numbers_and_plain_tensors(lab: Any) -> None:
    params = lab.make_params(SHAPES)
    optimizer = zoptim.AdamW(params, state_dtype="8bit")
    lab.run(optimizer, params, range(2), SHAPES)
    seen: list[Any] = []

    def look(_: Any, state_dict: dict[str, Any]) -> None:
        seen.extend((type(value), value.dtype) for value in state_dict["state"][0].values())

    hooks = [optimizer.register_state_dict_post_hook(look), optimizer.register_load_state_dict_pre_hook(look)]
    written = optimizer.state_dict()
    assert set(seen) == {(Tensor, torch.float32)}
    seen.clear()
    optimizer.load_state_dict(written)
    assert set(seen) == {(Tensor, torch.float32)}
    for hook in hooks:
        hook.remove()
    assert not optimizer._optimizer_state_dict_post_hooks
    assert not optimizer._optimizer_load_state_dict_pre_hooks
