"""State moves between torch, zoptim and every format; state that does not fit raises and changes nothing."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import zoptim

SHAPES = [(40, 30), (7,), (), (0,)]
FORMATS: list[dict[str, Any]] = [{}, {"state_dtype": "bf16"}, {"state_dtype": "8bit"}, {"state_dtype": "fp32"}]
ROUNDING = {"bf16": 2**-7, "8bit": 2**-3, "fp32": 0.0, None: 0.0}


def trained(kind: Any, lab: Any, dtype: torch.dtype = torch.float32, **more: Any) -> tuple[Any, list[Tensor]]:
    params = lab.make_params(SHAPES, dtype)
    optimizer = kind.make(params, **more)
    lab.run(optimizer, params, range(3), SHAPES)
    return optimizer, params


def untrained(kind: Any, lab: Any, dtype: torch.dtype = torch.float32, **more: Any) -> tuple[Any, list[Tensor]]:
    params = lab.make_params(SHAPES, dtype)
    return kind.make(params, **more), params


def moments(optimizer: Any, param: Tensor) -> dict[str, Tensor]:
    """The moments of a parameter, as float32."""
    memory = optimizer._state_spec(optimizer.param_groups[0])
    state = optimizer.state[param]
    return {name: memory.read(state, name).clone() for name in memory.names if name in state}


# Between formats --------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", FORMATS, ids=str)
@pytest.mark.parametrize("source", FORMATS, ids=str)
def test_moments_move_between_all_formats(
    kind: Any, source: dict[str, Any], target: dict[str, Any], lab: Any
) -> None:
    (giver, given), (taker, taken) = trained(kind, lab, **source), untrained(kind, lab, **target)
    taker.load_state_dict(copy.deepcopy(giver.state_dict()))
    rtol = ROUNDING[target.get("state_dtype")]
    for a, b in zip(given, taken):
        expected, found = moments(giver, a), moments(taker, b)
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            largest = float(value.abs().max()) if value.numel() else 0.0
            torch.testing.assert_close(found[name], value, rtol=rtol, atol=2**-15 * largest * bool(rtol))
        if giver.state[a].get("step") is not None and "step" in taker.state[b]:
            assert torch.equal(giver.state[a]["step"], taker.state[b]["step"])


@pytest.mark.parametrize("target", FORMATS, ids=str)
@pytest.mark.parametrize("source", FORMATS, ids=str)
def test_converted_state_has_the_keys_and_dtypes_of_the_format(
    kind: Any, source: dict[str, Any], target: dict[str, Any], lab: Any
) -> None:
    (giver, _), (taker, taken), (native, natives) = (
        trained(kind, lab, **source), untrained(kind, lab, **target), trained(kind, lab, **target)
    )  # fmt: skip
    taker.load_state_dict(copy.deepcopy(giver.state_dict()))
    assert taker.param_groups[0]["state_dtype"] == target.get("state_dtype"), (
        "the format is ours, not the checkpoint's"
    )
    for a, b in zip(taken, natives):
        kinds = [
            {key: (v.dtype, v.shape, v.stride()) for key, v in o.state[p].items()}
            for o, p in ((taker, a), (native, b))
        ]
        assert kinds[0] == kinds[1]
    lab.run(taker, taken, range(3, 5), SHAPES)


@pytest.mark.parametrize("more", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    kind: Any, dtype: torch.dtype, more: dict[str, Any], lab: Any
) -> None:
    straight, params = trained(kind, lab, dtype, **more)
    file = io.BytesIO()
    torch.save((straight.state_dict(), [param.detach() for param in params]), file)
    file.seek(0)
    state, weights = torch.load(file)
    resumed = [weight.requires_grad_() for weight in weights]
    optimizer = kind.make(resumed, **more)
    optimizer.load_state_dict(state)
    lab.run(straight, params, range(3, 6), SHAPES)
    lab.run(optimizer, resumed, range(3, 6), SHAPES)
    lab.assert_bitwise(lab.snapshot(optimizer, resumed), lab.snapshot(straight, params))


@pytest.mark.parametrize("more", FORMATS, ids=str)
def test_a_resumed_split_master_run_equals_an_uninterrupted_one_bit_for_bit(
    kind: Any, more: dict[str, Any], lab: Any
) -> None:
    straight, params = trained(kind, lab, torch.bfloat16, split_master=True, **more)
    resumed = [param.detach().clone().requires_grad_() for param in params]
    optimizer = kind.make(resumed, split_master=True, **more)
    optimizer.load_state_dict(copy.deepcopy(straight.state_dict()))
    lab.run(straight, params, range(3, 6), SHAPES)
    lab.run(optimizer, resumed, range(3, 6), SHAPES)
    lab.assert_bitwise(lab.snapshot(optimizer, resumed), lab.snapshot(straight, params))


def test_there_and_back_again_through_float32_loses_nothing(kind: Any, lab: Any) -> None:
    for more in FORMATS:
        (first, params), (middle, _), (last, lasts) = (
            trained(kind, lab, **more), untrained(kind, lab, state_dtype="fp32"), untrained(kind, lab, **more)
        )  # fmt: skip
        middle.load_state_dict(first.state_dict())
        last.load_state_dict(middle.state_dict())
        for a, b in zip(params, lasts):
            for key, value in first.state[a].items():
                if key in last.state[b] and key != "step":
                    assert torch.equal(value, last.state[b][key]), (more, key)


def test_a_split_master_starts_from_the_weight_when_its_remainder_is_unknown(kind: Any, lab: Any) -> None:
    (giver, _), (taker, taken) = (
        trained(kind, lab, torch.bfloat16), untrained(kind, lab, torch.bfloat16, split_master=True)
    )  # fmt: skip
    taker.load_state_dict(copy.deepcopy(giver.state_dict()))
    for param in taken:
        assert "remainder" not in taker.state[param] or not taker.state[param]["remainder"].any()
    lab.run(taker, taken, range(3, 5), SHAPES)
    assert taker.param_groups[0]["split_master"] is True


@pytest.mark.parametrize("state_dtype", ["bf16", "8bit", "fp32"])
def test_state_of_torch_is_taken_in_any_format(kind: Any, state_dtype: str, lab: Any) -> None:
    theirs = lab.make_params(SHAPES)
    source = kind.make_torch(theirs)
    lab.run(source, theirs, range(3), SHAPES)
    taker, params = untrained(kind, lab, state_dtype=state_dtype)
    taker.load_state_dict(copy.deepcopy(source.state_dict()))
    for a, b in zip(theirs, params):
        for name, value in moments(taker, b).items():
            expected = source.state[a][name]
            largest = float(expected.abs().max()) if expected.numel() else 0.0
            torch.testing.assert_close(value, expected, rtol=ROUNDING[state_dtype], atol=2**-15 * largest)


def test_float32_state_of_bf16_weights_is_not_rounded_on_the_way() -> None:
    """torch casts loaded state to the weight's dtype."""
    param, other = (torch.ones(8, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    source, target = (zoptim.AdamW([p], state_dtype="fp32") for p in (param, other))
    param.grad = torch.linspace(0, 1, 8).bfloat16()
    source.step()
    target.load_state_dict(source.state_dict())
    assert torch.equal(target.state[other]["exp_avg"], source.state[param]["exp_avg"])
    assert target.state[other]["exp_avg"].dtype is torch.float32


@pytest.mark.parametrize("more", [*FORMATS, {"state_dtype": "8bit", "foreach": True}], ids=str)
def test_state_in_another_memory_layout_means_the_same(kind: Any, more: dict[str, Any], lab: Any) -> None:
    (giver, (a, *_)), (_, (b, *_)) = trained(kind, lab, **more), untrained(kind, lab)
    turned = b.detach().t().contiguous().t().requires_grad_()
    taker = kind.make([turned], **more)
    state = copy.deepcopy(giver.state_dict())
    state["state"] = {0: state["state"][0]} if 0 in state["state"] else {}
    state["param_groups"][0]["params"] = [0]
    taker.load_state_dict(state)
    for name, value in moments(giver, a).items():
        rtol = 2 * ROUNDING[more.get("state_dtype")] if more.get("state_dtype") == "8bit" else 0
        largest = float(value.abs().max())
        torch.testing.assert_close(moments(taker, turned)[name], value, rtol=rtol, atol=2**-14 * largest * bool(rtol))
        assert taker.state[turned][name].stride() == turned.stride()


# Copies -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", FORMATS, ids=str)
def test_loaded_tensors_are_copies(kind: Any, more: dict[str, Any], lab: Any) -> None:
    (giver, given), (taker, taken) = trained(kind, lab, **more), untrained(kind, lab, **more)
    written = giver.state_dict()
    taker.load_state_dict(written)
    before = lab.snapshot(giver, given)
    lab.run(taker, taken, range(3, 5), SHAPES)
    lab.assert_bitwise(lab.snapshot(giver, given), before)


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["copy", "pickle"]
)
@pytest.mark.parametrize("more", FORMATS, ids=str)
def test_a_duplicate_steps_alike_and_alone(kind: Any, duplicate: Any, more: dict[str, Any], lab: Any) -> None:
    optimizer, params = trained(kind, lab, **more)
    twin = duplicate(optimizer)
    twins = twin.param_groups[0]["params"]
    before = lab.snapshot(twin, twins)
    lab.run(optimizer, params, range(3, 5), SHAPES)
    lab.assert_bitwise(lab.snapshot(twin, twins), before)
    lab.run(twin, twins, range(3, 5), SHAPES)
    lab.assert_bitwise(lab.snapshot(twin, twins), lab.snapshot(optimizer, params))


def test_an_optimizer_that_never_stepped_can_be_duplicated(kind: Any, lab: Any) -> None:
    optimizer, params = untrained(kind, lab)
    twin = pickle.loads(pickle.dumps(optimizer))
    lab.run(optimizer, params, range(2), SHAPES)
    lab.run(twin, twin.param_groups[0]["params"], range(2), SHAPES)
    lab.assert_bitwise(twin.param_groups[0]["params"], params)


def test_loading_keeps_the_weights_that_follow_a_master() -> None:
    master = torch.ones(8, requires_grad=True)
    weight = torch.ones(8, dtype=torch.bfloat16, requires_grad=True)
    optimizer = zoptim.AdamW([master], lr=0.1)
    optimizer.mirror(master, weight)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.step()
    assert optimizer.state[master]["step"].item() == 2.0
    assert torch.equal(weight.detach(), master.detach().bfloat16())


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["copy", "pickle"]
)
def test_a_duplicate_has_weights_of_its_own_that_follow_its_masters(duplicate: Any) -> None:
    master = torch.ones(8, requires_grad=True)
    weight = torch.ones(8, dtype=torch.bfloat16, requires_grad=True)
    optimizer = zoptim.AdamW([master], lr=0.1)
    optimizer.mirror(master, weight)
    twin, own_weight = duplicate((optimizer, weight))
    own_weight.grad = torch.ones_like(weight)
    twin.step()
    (own_master,) = twin.param_groups[0]["params"]
    assert torch.equal(own_weight.detach(), own_master.detach().bfloat16())
    assert not torch.equal(own_master, master)
    assert torch.equal(weight.detach().float(), torch.ones(8))


# Refusals ---------------------------------------------------------------------------------------------


def spoil_a_shape(state: dict[str, Any]) -> None:
    state["state"][1]["exp_avg_sq"] = torch.ones(3, dtype=torch.uint8)


def spoil_a_scale(state: dict[str, Any]) -> None:
    state["state"][0]["exp_avg_scale"] = torch.ones(3)


def forget_a_moment(state: dict[str, Any]) -> None:
    del state["state"][1]["exp_avg"]


def forget_the_step(state: dict[str, Any]) -> None:
    del state["state"][1]["step"]


def forget_an_option(state: dict[str, Any]) -> None:
    del state["param_groups"][0]["betas"]


def spoil_an_option(state: dict[str, Any]) -> None:
    state["param_groups"][0]["eps"] = -1.0


def ask_for_a_graph(state: dict[str, Any]) -> None:
    state["param_groups"][0]["differentiable"] = True


def forget_a_parameter(state: dict[str, Any]) -> None:
    del state["state"][state["param_groups"][0]["params"].pop()]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_a_shape, r"exp_avg_sq of parameter 1 of group 0 has shape \(3,\), the parameter has \(7,\)\."),
        (spoil_a_scale, r"exp_avg_scale of parameter 0 of group 0 has shape \(3,\), it must have \(5,\)"),
        (forget_a_moment, r"AdamW cannot load this state: .* parameter 1 of group 0 lacks exp_avg; it has step, "),
        (forget_the_step, r"parameter 1 of group 0 lacks step; it has exp_avg"),
        (forget_an_option, r"loaded group 0 lacks the options betas of AdamW; it has .*eps.*another optimizer"),
        (spoil_an_option, r"eps is -1\.0; it must be a number in \[0, inf\)"),
        (ask_for_a_graph, r"the loaded group 0 has differentiable=True; AdamW has no autograd through its steps"),
        (forget_a_parameter, r"parameter group that doesn't match the size"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_state_that_does_not_fit_raises_with_the_name_and_changes_nothing(spoil: Any, message: str, lab: Any) -> None:
    params, others = lab.make_params(SHAPES), lab.make_params(SHAPES)
    source, target = (zoptim.AdamW(p, state_dtype="8bit", lr=lr) for p, lr in ((params, 0.1), (others, 0.2)))
    lab.run(source, params, range(2), SHAPES)
    lab.run(target, others, range(1), SHAPES)
    before, options = lab.snapshot(target, others), copy.deepcopy({**target.param_groups[0], "params": None})
    state = copy.deepcopy(source.state_dict(compact=True))
    spoil(state["compact"])
    with pytest.raises(ValueError, match=message):
        target.load_state_dict(state)
    lab.assert_bitwise(lab.snapshot(target, others), before)
    assert {**target.param_groups[0], "params": None} == options
    lab.run(target, others, range(1, 3), SHAPES)


def test_8bit_codes_without_their_scales_raise(lab: Any) -> None:
    params, others = lab.make_params(SHAPES), lab.make_params(SHAPES)
    source, target = zoptim.AdamW(params, state_dtype="8bit"), zoptim.AdamW(others)
    lab.run(source, params, range(2), SHAPES)
    state = copy.deepcopy(source.state_dict(compact=True))
    del state["compact"]["state"][0]["exp_avg_scale"]
    with pytest.raises(ValueError, match=r"parameter 0 of group 0 lacks exp_avg_scale"):
        target.load_state_dict(state)


def test_state_that_was_never_made_loads_as_none(kind: Any, lab: Any) -> None:
    (source, _), (target, params) = untrained(kind, lab), trained(kind, lab)
    target.load_state_dict(copy.deepcopy(source.state_dict()))
    assert not any(target.state.values())
    fresh, others = untrained(kind, lab)
    for param, other in zip(params, others):
        other.data.copy_(param.data)
    lab.run(target, params, range(2), SHAPES)
    lab.run(fresh, others, range(2), SHAPES)
    lab.assert_bitwise(params, others)
