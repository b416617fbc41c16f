"""Muon: split into halves, steps against the rules and torch, signals, state, errors."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import zoptim
from zoptim import muon_rule
from zoptim.optimizers.muon import is_matrix
from zoptim.rules.elementwise import AdamMoments, adamw_rule

SHAPES = [(8, 5), (5,), (8, 5), (5, 8), (), (4, 3, 2, 2), (16, 16)]
NAMES = ["a.weight", "a.bias", "b.weight", "c.weight", "scale", "conv.weight", "lm_head.weight"]
MATRICES = {0, 2, 3, 5}  # of SHAPES under NAMES
OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "betas": (0.8, 0.99), "eps": 1e-6}


def make_named(lab: Any, dtype: torch.dtype = torch.float32) -> list[tuple[str, Tensor]]:
    return list(zip(NAMES, lab.make_params(SHAPES, dtype)))


def tensors(named: list[tuple[str, Tensor]]) -> list[Tensor]:
    return [param for _, param in named]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# Who takes what ---------------------------------------------------------------------------------------


def test_matrices_take_muon_and_everything_else_adamw_by_name_and_shape(lab: Any) -> None:
    named = make_named(lab)
    optimizer = zoptim.Muon(named, **OPTIONS)
    lab.run(optimizer, tensors(named), range(1), SHAPES)
    for index, param in enumerate(tensors(named)):
        expected = {"momentum_buffer"} if index in MATRICES else {"step", "exp_avg", "exp_avg_sq"}
        assert set(optimizer.state[param]) == expected, NAMES[index]


def test_without_names_the_shape_alone_decides(lab: Any) -> None:
    params = lab.make_params(SHAPES)
    optimizer = zoptim.Muon(params)
    by_muon = [p for group in optimizer.param_groups if group["use_muon"] for p in group["params"]]
    assert {id(p) for p in by_muon} == {id(p) for p in params if p.dim() >= 2}


@pytest.mark.parametrize("name", ["embed_tokens.weight", "model.Embedding.weight", "lm_head.weight"])
def test_embeddings_and_output_heads_are_no_matrices(name: str) -> None:
    assert not is_matrix(name, torch.zeros(4, 4))
    assert is_matrix("layers.0.weight", torch.zeros(4, 4))


def test_the_rule_can_be_replaced_and_groups_may_decide(lab: Any) -> None:
    named = make_named(lab)
    optimizer = zoptim.Muon(named, use_muon=lambda name, param: name == "lm_head.weight" and param.dim() == 2)
    assert optimizer.param_groups[0]["param_names"] == ["lm_head.weight"]
    assert optimizer.param_groups[0]["use_muon"] is True
    first, second = lab.make_params([(4, 4), (4, 4)])
    optimizer.add_param_group({"params": [("x", first)], "use_muon": True})
    optimizer.add_param_group({"params": [("y", second)]})
    assert [group["use_muon"] for group in optimizer.param_groups] == [True, False, True, False]


def test_each_half_has_its_own_learning_rate(lab: Any) -> None:
    optimizer = zoptim.Muon(make_named(lab), lr=1.0, muon_lr=0.02, adam_lr=3e-4)
    assert {group["use_muon"]: group["lr"] for group in optimizer.param_groups} == {True: 0.02, False: 3e-4}
    plain = zoptim.Muon(make_named(lab), lr=0.5)
    assert {group["lr"] for group in plain.param_groups} == {0.5}


# The class --------------------------------------------------------------------------------------------


def follow_the_rules(lab: Any, steps: int, **muon: Any) -> list[Tensor]:
    """Weights after `steps` of the pure rules in float64, tensor by tensor."""
    adam = {"lr": OPTIONS["lr"], "betas": OPTIONS["betas"], "eps": OPTIONS["eps"], "weight_decay": 0.1}
    weights = [param.detach().double() for param in lab.make_params(SHAPES)]
    memory: list[Any] = [None] * len(weights)
    for step in range(steps):
        for i, grad in enumerate(lab.make_grads(step, SHAPES)):
            weight, grad = weights[i], grad.double()
            if i in MATRICES:
                shape = (weight.size(0), -1)
                flat = torch.zeros_like(weight).view(shape) if memory[i] is None else memory[i]
                new, memory[i] = muon_rule(
                    weight.view(shape), grad.view(shape), flat, lr=0.02, weight_decay=0.1, **muon
                )
                weights[i] = new.view(weight.shape)
            else:
                state = AdamMoments.zeros(weight) if memory[i] is None else memory[i]
                weights[i], memory[i] = adamw_rule(weight, grad, state, **adam)
    return weights


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False, "momentum": 0.8},
        {"ns_method": "gram"},
        {"adjust_lr": "match_rms_adamw", "ns_steps": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-4)])
@pytest.mark.filterwarnings("ignore:.*plain torch operations")
def test_twelve_steps_follow_the_pure_rules(
    dtype: torch.dtype, tolerance: float, options: dict[str, Any], lab: Any
) -> None:
    named = make_named(lab, torch.float32)
    named = [(name, param.detach().to(dtype).requires_grad_()) for name, param in named]
    lab.run(zoptim.Muon(named, **OPTIONS, **options), tensors(named), range(12), SHAPES)
    lab.assert_near(tensors(named), follow_the_rules(lab, 12, **options), rtol=tolerance, atol=tolerance)


def test_the_adamw_half_equals_zoptim_adamw_bit_for_bit(lab: Any) -> None:
    shapes = [SHAPES[i] for i in (1, 4, 6)]
    ours, alone = lab.make_params(shapes), lab.make_params(shapes)
    lab.run(zoptim.Muon([*zip("ab", ours), ("embed", ours[2])], **OPTIONS), ours, range(5), shapes)
    lab.run(zoptim.AdamW(alone, **OPTIONS), alone, range(5), shapes)
    lab.assert_bitwise(ours, alone)


def test_a_quadratic_over_matrices_converges(lab: Any) -> None:
    named = [
        ("w", random(12, 8, dtype=torch.float32).requires_grad_()),
        ("b", torch.full((8,), 3.0).requires_grad_()),
    ]
    target = random(12, 8, seed=5, dtype=torch.float32)
    optimizer = zoptim.Muon(named, lr=0.1, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, total_iters=300)
    for _ in range(300):
        optimizer.zero_grad()
        ((named[0][1] - target).square().sum() + named[1][1].square().sum()).backward()
        optimizer.step()
        schedule.step()
    assert (named[0][1] - target).abs().max() < 0.1
    assert named[1][1].abs().max() < 0.1


@pytest.mark.parametrize("form", ["bf16", "8bit"])
def test_momentum_can_be_kept_in_few_bits(form: str, lab: Any) -> None:
    plain, small = make_named(lab), make_named(lab)
    lab.run(zoptim.Muon(plain, **OPTIONS), tensors(plain), range(10), SHAPES)
    optimizer = zoptim.Muon(small, **OPTIONS, state_dtype=form)
    lab.run(optimizer, tensors(small), range(10), SHAPES)
    kept = optimizer.state[small[0][1]]["momentum_buffer"]
    assert kept.dtype is (torch.bfloat16 if form == "bf16" else torch.uint8)
    start = make_named(lab)[0][1]
    assert (small[0][1] - plain[0][1]).norm() < 0.1 * (plain[0][1] - start).norm()


def test_a_split_master_trains_bf16_weights_as_float32(lab: Any) -> None:
    half = [(name, param.detach().bfloat16().requires_grad_()) for name, param in make_named(lab)]
    full = [(name, param.detach().float().requires_grad_()) for name, param in half]
    grads = [grad.bfloat16() for grad in lab.make_grads(0, SHAPES)]
    ours, reference = zoptim.Muon(half, **OPTIONS, split_master=True), zoptim.Muon(full, **OPTIONS)
    for _ in range(5):
        for (_, a), (_, b), grad in zip(half, full, grads):
            a.grad, b.grad = grad.clone(), grad.float()
        ours.step()
        reference.step()
    for (_, a), (_, b) in zip(half, full):
        torch.testing.assert_close(a.float(), b, rtol=2**-8, atol=1e-6)


# Signals and state ------------------------------------------------------------------------------------


def test_a_power_of_two_scale_changes_no_bit_and_gradients_are_never_written(lab: Any) -> None:
    plain, scaled = make_named(lab), make_named(lab)
    lab.run(zoptim.Muon(plain, **OPTIONS), tensors(plain), range(3), SHAPES)
    optimizer = zoptim.Muon(scaled, **OPTIONS)
    optimizer.grad_scale = torch.tensor(512.0)
    for step in range(3):
        grads = [512 * grad for grad in lab.make_grads(step, SHAPES)]
        for (_, param), grad in zip(scaled, grads):
            param.grad = grad.clone()
        optimizer.step()
        lab.assert_bitwise([param.grad for _, param in scaled], grads)
    lab.assert_bitwise(tensors(scaled), tensors(plain))


@pytest.mark.parametrize("steps_before", [0, 3])
def test_found_inf_leaves_everything_untouched(steps_before: int, lab: Any) -> None:
    named, undisturbed = make_named(lab), make_named(lab)
    optimizer, other = zoptim.Muon(named, **OPTIONS), zoptim.Muon(undisturbed, **OPTIONS)
    lab.run(optimizer, tensors(named), range(steps_before), SHAPES)
    before = lab.snapshot(optimizer, tensors(named)) if steps_before else [p.detach().clone() for p in tensors(named)]
    for param in tensors(named):
        param.grad = torch.full_like(param, float("nan"))
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    lab.assert_bitwise(lab.snapshot(optimizer, tensors(named))[: len(before)], before)
    optimizer.found_inf = None
    lab.run(optimizer, tensors(named), range(steps_before, 6), SHAPES)
    lab.run(other, tensors(undisturbed), range(6), SHAPES)
    lab.assert_bitwise(lab.snapshot(optimizer, tensors(named)), lab.snapshot(other, tensors(undisturbed)))


@pytest.mark.parametrize("form", [None, "bf16", "8bit"])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(form: str | None, lab: Any) -> None:
    straight, first = make_named(lab), make_named(lab)
    lab.run(zoptim.Muon(straight, **OPTIONS, state_dtype=form), tensors(straight), range(6), SHAPES)
    optimizer = zoptim.Muon(first, **OPTIONS, state_dtype=form)
    lab.run(optimizer, tensors(first), range(3), SHAPES)
    resumed = [(name, param.detach().clone().requires_grad_()) for name, param in first]
    restored = zoptim.Muon(resumed, **OPTIONS, state_dtype=form)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    lab.run(restored, tensors(resumed), range(3, 6), SHAPES)
    lab.assert_bitwise(tensors(resumed), tensors(straight))


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["copy", "pickle"])
def test_a_copy_is_independent_and_steps_alike(twin_of: Callable[[Any], Any], lab: Any) -> None:
    named = make_named(lab)
    optimizer = zoptim.Muon(named, **OPTIONS)
    lab.run(optimizer, tensors(named), range(2), SHAPES)
    twin = twin_of(optimizer)
    order = [p for group in optimizer.param_groups for p in group["params"]]
    twins = [p for group in twin.param_groups for p in group["params"]]
    shapes = [tuple(param.shape) for param in order]
    lab.run(optimizer, order, range(2, 4), shapes)
    lab.run(twin, twins, range(2, 4), shapes)
    lab.assert_bitwise(twins, order)
    assert twins[0] is not order[0]


def test_the_momentum_of_torch_muon_is_adopted(lab: Any) -> None:
    shapes = [(8, 5), (5, 8)]
    theirs = lab.make_params(shapes)
    source = torch.optim.Muon(theirs, lr=0.02, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    lab.run(source, theirs, range(3), shapes)
    ours = [param.detach().clone().requires_grad_() for param in theirs]
    target = zoptim.Muon(ours, lr=0.5)
    target.load_state_dict(copy.deepcopy(source.state_dict()))
    group = target.param_groups[0]
    assert (group["lr"], group["momentum"], group["adjust_lr"]) == (0.02, 0.9, "match_rms_adamw")
    assert group["use_muon"] is True
    lab.run(source, theirs, range(3, 6), shapes)
    lab.run(target, ours, range(3, 6), shapes)
    for a, b in zip(ours, theirs):
        assert (a - b).abs().max() < 0.02 * 0.2 * 8**0.5 * 0.1  # torch iterates in bf16
        momenta = target.state[a]["momentum_buffer"], source.state[b]["momentum_buffer"]
        torch.testing.assert_close(*momenta, rtol=1e-5, atol=1e-6)


# Refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, r"lr is -1\.0; it must be a number in \[0, inf\)"),
        ({"muon_lr": -1.0}, r"lr is -1\.0"),
        ({"momentum": 1.0}, r"momentum is 1\.0; it must be a number in \[0, 1\)"),
        ({"ns_steps": 0}, "ns_steps is 0; it must be a whole number >= 1"),
        ({"ns_method": "fast"}, "ns_method is 'fast'; it must be one of 'standard', 'gram'"),
        ({"adjust_lr": "rms"}, "adjust_lr is 'rms'; it must be one of 'original', 'match_rms_adamw'"),
        ({"weight_decay": -0.1}, r"weight_decay is -0\.1"),
        ({"state_dtype": "fp8"}, "state_dtype is 'fp8'"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_options_out_of_range_raise(options: dict[str, Any], message: str, lab: Any) -> None:
    with pytest.raises(ValueError, match=message):
        zoptim.Muon(make_named(lab), **options)


def test_wrong_kinds_of_options_raise(lab: Any) -> None:
    with pytest.raises(TypeError, match=r"nesterov is 1 .*must be True or False"):
        zoptim.Muon(make_named(lab), nesterov=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="empty parameter list"):
        zoptim.Muon([])


def test_empty_matrices_pass(lab: Any) -> None:
    for shape in ((0, 5), (5, 0)):
        param = torch.zeros(shape, requires_grad=True)
        param.grad = torch.zeros(shape)
        zoptim.Muon([param]).step()


def test_parameters_that_torch_rejects_raise() -> None:
    with pytest.raises(TypeError, match="ordered"):
        zoptim.Muon([{"params": {torch.zeros(4, 4, requires_grad=True)}}])
    with pytest.raises(TypeError, match="can only optimize Tensors"):
        zoptim.Muon([torch.zeros(4, 4, requires_grad=True), 1])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="use_muon is True; it must be a function"):
        zoptim.Muon([torch.zeros(4, 4, requires_grad=True)], use_muon=True)  # type: ignore[arg-type]


def test_a_group_with_one_invalid_half_is_not_added() -> None:
    matrix, vector = torch.zeros(4, 4, requires_grad=True), torch.zeros(4, dtype=torch.complex64, requires_grad=True)
    optimizer = zoptim.Muon([torch.zeros(3, 3, requires_grad=True)])
    with pytest.raises(zoptim.UnsupportedTensorError, match="complex"):
        optimizer.add_param_group({"params": [matrix, vector]})
    assert len(optimizer.param_groups) == 1


def test_a_rule_may_answer_with_anything_true_or_false(lab: Any) -> None:
    named = make_named(lab)
    optimizer = zoptim.Muon(named, use_muon=lambda name, param: name.count("weight") and param.dim())  # type: ignore[arg-type]
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(named)


def test_a_stack_is_cut_without_changing_results(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut = make_named(lab), make_named(lab)
    lab.run(zoptim.Muon(whole, **OPTIONS), tensors(whole), range(3), SHAPES)
    monkeypatch.setattr("zoptim.optimizers.muon.STACK_NUMEL", 41)
    lab.run(zoptim.Muon(cut, **OPTIONS), tensors(cut), range(3), SHAPES)
    lab.assert_near(tensors(cut), tensors(whole), rtol=1e-4, atol=1e-4)


def test_torch_muon_loads_our_state(lab: Any) -> None:
    shapes = [(8, 5), (5, 8)]
    ours = lab.make_params(shapes)
    source = zoptim.Muon(ours, lr=0.02, momentum=0.9, adjust_lr="match_rms_adamw")
    lab.run(source, ours, range(3), shapes)
    theirs = [param.detach().clone().requires_grad_() for param in ours]
    target = torch.optim.Muon(theirs)
    target.load_state_dict(copy.deepcopy(source.state_dict()))
    group = target.param_groups[0]
    assert (group["lr"], group["momentum"], group["adjust_lr_fn"]) == (0.02, 0.9, "match_rms_adamw")
    lab.run(target, theirs, range(3, 4), shapes)
    lab.run(source, ours, range(3, 4), shapes)
    for a, b in zip(ours, theirs):
        momenta = source.state[a]["momentum_buffer"], target.state[b]["momentum_buffer"]
        torch.testing.assert_close(*momenta, rtol=1e-5, atol=1e-6)


def test_state_of_torch_muon_with_other_coefficients_raises(lab: Any) -> None:
    theirs = lab.make_params([(4, 4)])
    source = torch.optim.Muon(theirs, ns_coefficients=(2.0, -1.5, 0.5))
    target = zoptim.Muon(lab.make_params([(4, 4)]))
    with pytest.raises(
        ValueError, match=r"ns_coefficients \(2\.0, -1\.5, 0\.5\); zoptim\.Muon supports only \(3\.4445"
    ):
        target.load_state_dict(source.state_dict())
