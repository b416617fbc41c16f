"""The fallback agrees with the kernels in every format, up to one rounding per step.

The noise of stochastic rounding is a hash of the value, so values that differ in their last bit may round apart: the
two paths are compared over single steps from the same weights and state.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import zoptim
from zoptim.backends import native
from zoptim.updates.fallback import fits_foreach
from zoptim.updates.plan import Entry

SHAPES = [(7,), (3, 200), (), (0,), (257,)]
STEP_OF = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.uint8: 2**-3}  # relative
FORMATS = [
    (dtype, state_dtype, {})
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for state_dtype in (None, "bf16", "8bit")
] + [(torch.bfloat16, state_dtype, {"split_master": True}) for state_dtype in (None, "bf16", "8bit")]
formats = pytest.mark.parametrize(("dtype", "state_dtype", "more"), FORMATS)


def twins(row: Any, lab: Any, dtype: torch.dtype, **more: Any) -> tuple[tuple[Any, list[Tensor]], ...]:
    first, second = lab.make_params(SHAPES, dtype), lab.make_params(SHAPES, dtype)
    return (row.make(first, **more), first), (row.make(second, foreach=True, **more), second)


def weight_of(optimizer: Any, param: Tensor) -> Tensor:
    """The full-precision weight."""
    return optimizer._state_spec(optimizer.param_groups[0]).read_weight(param, optimizer.state[param]).double()


def moments_of(optimizer: Any, param: Tensor) -> list[tuple[torch.dtype, Tensor]]:
    memory, state = optimizer._state_spec(optimizer.param_groups[0]), optimizer.state[param]
    return [(state[name].dtype, memory.read(state, name).double()) for name in memory.names if name in state]


@formats
def test_a_step_without_kernels_is_the_step_with_them_to_one_rounding(
    row: Any, dtype: torch.dtype, state_dtype: str | None, more: dict[str, Any], lab: Any
) -> None:
    (kernel, params), (torch_, others) = twins(row, lab, dtype, state_dtype=state_dtype, **more)
    for step in range(3):
        torch_.load_state_dict(
            copy.deepcopy({**kernel.state_dict(), "param_groups": torch_.state_dict()["param_groups"]})
        )
        before = [weight_of(kernel, param) if kernel.state[param] else param.detach().double() for param in params]
        for a, b in zip(params, others):
            b.data.copy_(a.data)
        lab.run(kernel, params, range(step, step + 1), SHAPES)
        lab.run(torch_, others, range(step, step + 1), SHAPES)
        for a, b, old in zip(params, others, before):
            assert_states_agree(moments_of(kernel, a), moments_of(torch_, b))
            found, expected = weight_of(kernel, a), weight_of(torch_, b)
            kept = torch.float32 if more else dtype
            if row.elementwise:
                room = STEP_OF[kept] * (expected.abs() + old.abs()) + 2e-5 * (expected - old).abs() + 1e-7
                assert ((found - expected).abs() <= room).all()
            else:  # LAMB's kernel takes the direction from moments as they are kept
                rounding = max([STEP_OF[d] for d, _ in moments_of(kernel, a)])
                room_of_all = 2 * rounding * (expected - old).norm() + 2 * STEP_OF[kept] * expected.norm() + 1e-7
                assert (found - expected).norm() <= room_of_all


def assert_states_agree(found: list[tuple[torch.dtype, Tensor]], expected: list[tuple[torch.dtype, Tensor]]) -> None:
    for (dtype, a), (other, b) in zip(found, expected, strict=True):
        assert dtype is other
        largest = float(b.abs().max()) if b.numel() else 0.0
        smallest = {torch.uint8: 2**-14 * largest, torch.float16: 6e-8}.get(dtype, 2e-6 * largest)
        torch.testing.assert_close(a, b, rtol=1.5 * STEP_OF[dtype], atol=smallest)


@formats
def test_both_paths_keep_the_same_state(
    kind: Any, dtype: torch.dtype, state_dtype: str | None, more: dict[str, Any], lab: Any
) -> None:
    (kernel, params), (torch_, others) = twins(kind, lab, dtype, state_dtype=state_dtype, **more)
    for optimizer, tensors in ((kernel, params), (torch_, others)):
        lab.run(optimizer, tensors, range(2), SHAPES)
    for a, b in zip(params, others):
        kinds = [
            {key: (v.dtype, v.shape, v.stride()) for key, v in optimizer.state[param].items()}
            for optimizer, param in ((kernel, a), (torch_, b))
        ]
        assert kinds[0] == kinds[1]
        if "step" in kernel.state[a]:
            assert kernel.state[a]["step"].item() == torch_.state[b]["step"].item() == 2.0


# Arithmetic that is the same in both paths to the last bit: powers of two, no step of the weights but of SGD, and no
# 8-bit second moments (torch's square root on CPUs is an ulp off for one number in five).
EXACT = [
    (zoptim.SGD, torch.bfloat16, {"lr": 0.25}),
    (zoptim.SGD, torch.bfloat16, {"lr": 0.25, "momentum": 0.5}),
    (zoptim.Lion, torch.float32, {"lr": 0.0, "betas": (0.5, 0.5), "state_dtype": "bf16"}),
    (zoptim.Lion, torch.float32, {"lr": 0.0, "betas": (0.5, 0.5), "state_dtype": "8bit"}),
    (zoptim.Adam, torch.float32, {"lr": 0.0, "betas": (0.5, 0.5), "amsgrad": True, "state_dtype": "bf16"}),
    (zoptim.Adagrad, torch.float32, {"lr": 0.0, "state_dtype": "bf16"}),
]


@pytest.mark.parametrize(("cls", "dtype", "options"), EXACT)
def test_rounding_uses_the_noise_of_the_kernels(
    cls: Any, dtype: torch.dtype, options: dict[str, Any], lab: Any
) -> None:
    params, others = lab.make_params(SHAPES, dtype), lab.make_params(SHAPES, dtype)
    kernel, torch_ = cls(params, **options), cls(others, foreach=True, **options)
    for optimizer, tensors in ((kernel, params), (torch_, others)):
        lab.run(optimizer, tensors, range(5), SHAPES)
    lab.assert_bitwise(lab.snapshot(kernel, params), lab.snapshot(torch_, others))


@pytest.mark.parametrize("state_dtype", [None, "bf16", "8bit"])
def test_a_skipped_step_changes_nothing_in_any_format(
    kind: Any, path: Any, state_dtype: str | None, lab: Any
) -> None:
    for dtype, more in ((torch.float32, {}), (torch.bfloat16, {}), (torch.bfloat16, {"split_master": True})):
        params = lab.make_params(SHAPES, dtype)
        optimizer = kind.make(params, state_dtype=state_dtype, **more, **path)
        lab.run(optimizer, params, range(2), SHAPES)
        before = lab.snapshot(optimizer, params)
        for param in params:
            param.grad = torch.full_like(param, float("nan"))
        optimizer.found_inf = torch.tensor(1.0)
        optimizer.step()
        lab.assert_bitwise(lab.snapshot(optimizer, params), before)


def test_without_the_extension_everything_trains_after_one_warning(kind: Any, lab: Any) -> None:
    params, others = lab.make_params(SHAPES), lab.make_params(SHAPES)
    optimizer, other = kind.make(params), kind.make(others, foreach=True)
    with (
        native.use_level("none"),
        pytest.warns(UserWarning, match="with plain torch operations, .* switched off") as seen,
    ):
        lab.run(optimizer, params, range(3), SHAPES)
    lab.run(other, others, range(3), SHAPES)
    lab.assert_bitwise(lab.snapshot(optimizer, params), lab.snapshot(other, others))
    assert len(seen) == 1


def test_torchs_own_path_divides_by_the_scale_without_touching_the_gradient(kind: Any, lab: Any) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        params, others = lab.make_params(SHAPES, dtype), lab.make_params(SHAPES, dtype)
        optimizer, other = kind.make(params, foreach=True), kind.make(others, foreach=True)
        for param, same in zip(params, others):
            same.grad = torch.ones_like(same)
            param.grad = torch.full_like(param, 8.0)
        optimizer.grad_scale = torch.tensor(8.0)
        optimizer.step()
        other.step()
        lab.assert_bitwise(params, others)
        assert all(bool(param.grad.eq(8).all()) for param in params if param.grad is not None)


@pytest.mark.parametrize(
    ("param", "grad", "state", "copy_of", "plain"),
    [
        (torch.ones(3), torch.ones(3), {"m": torch.ones(3), "step": torch.zeros(())}, None, True),
        (torch.ones(3), torch.ones(3), {}, None, True),
        (torch.ones(3).double(), torch.ones(3).double(), {"m": torch.ones(3).double()}, None, True),
        (torch.ones(3).bfloat16(), torch.ones(3).bfloat16(), {}, None, False),
        (torch.ones(3), torch.ones(3).bfloat16(), {}, None, False),
        (torch.ones(3), torch.ones(3), {"m": torch.ones(3).bfloat16()}, None, False),
        (torch.ones(3), torch.ones(3), {"m": torch.ones(3)}, torch.ones(3).bfloat16(), False),
    ],
)
def test_foreach_updates_entries_of_one_wide_dtype(
    param: Tensor, grad: Tensor, state: dict[str, Any], copy_of: Tensor | None, plain: bool
) -> None:
    assert fits_foreach([Entry(param, grad, state, 0, copy_of)]) is plain


def test_a_low_precision_copy_is_written_without_kernels_too() -> None:
    master, weight = torch.ones(300, requires_grad=True), torch.ones(300, dtype=torch.bfloat16, requires_grad=True)
    for optimizer in (zoptim.AdamW([master], lr=0.01, foreach=True), zoptim.SGD([master], lr=0.01, foreach=True)):
        optimizer.mirror(master, weight)
        weight.grad = torch.linspace(-1, 1, 300).bfloat16()
        optimizer.step()
        assert torch.equal(weight.detach(), master.detach().bfloat16())
        assert not master.detach().eq(1).all()
