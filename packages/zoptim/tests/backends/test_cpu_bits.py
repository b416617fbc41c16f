"""Every rule in every format: the same bits on every instruction set and any number of threads; NaN, infinities."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

import zoptim
from zoptim.backends import native, select
from zoptim.optimizers.flat import FlatOptimizer

# Lengths around blocks (256), pieces (1024) and lanes (64), and one that two threads share.
SHAPES = [(1,), (63,), (255,), (3, 86), (1023,), (1025,), (), (0,), (2, 1500)]
LARGE = [(20_000,), (5,), (0,), (15_001,), (1024,)]
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@attrs.frozen
class Format:
    """The formats of an optimizer's streams."""

    name: str
    weight: torch.dtype
    options: dict[str, Any]
    copy: torch.dtype | None = None  # of low-precision weights that follow float32 masters, and of their gradients


FORMATS = [
    Format("fp32", torch.float32, {}),
    Format("offload bf16", torch.float32, {}, torch.bfloat16),
    Format("offload fp16", torch.float32, {}, torch.float16),
    Format("split", torch.bfloat16, {"split_master": True}),
    Format("bf16 states", torch.float32, {"state_dtype": "bf16"}),
    Format("8bit", torch.float32, {"state_dtype": "8bit"}),
    Format("offload 8bit", torch.float32, {"state_dtype": "8bit"}, torch.bfloat16),
    Format("split bf16", torch.bfloat16, {"split_master": True, "state_dtype": "bf16"}),
    Format("split 8bit", torch.bfloat16, {"split_master": True, "state_dtype": "8bit"}),
    Format("all bf16", torch.bfloat16, {}),
    Format("bf16 weights", torch.bfloat16, {"state_dtype": "fp32"}),
    Format("fp16", torch.float16, {}),
]


@pytest.fixture(params=FORMATS, ids=lambda found: found.name)
def kept(request: pytest.FixtureRequest) -> Format:
    """All formats of weights and states."""
    return request.param


class Training:
    """An optimizer in one format, whose gradients are given as float32."""

    def __init__(self, row: Any, kept: Format, lab: Any, shapes: list[tuple[int, ...]]) -> None:
        self.lab, self.shapes, self.params = lab, shapes, lab.make_params(shapes, kept.weight)
        self.optimizer: FlatOptimizer = row.make(self.params, **kept.options)
        self.weights = [p.detach().to(kept.copy).requires_grad_() for p in self.params] if kept.copy else self.params
        if kept.copy:
            for master, weight in zip(self.params, self.weights):
                self.optimizer.mirror(master, weight)

    def step(self, number: int, spoil: Any = None) -> None:
        for weight, grad in zip(self.weights, self.lab.make_grads(number, self.shapes)):
            weight.grad = grad.to(weight.dtype)
            if spoil is not None and grad.numel():
                weight.grad.view(-1)[:: max(1, grad.numel() // 3)] = spoil
        self.optimizer.step()

    def tensors(self) -> list[Tensor]:
        """Copies of weights, low-precision weights and all state."""
        return [
            *self.lab.snapshot(self.optimizer, self.params),
            *(weight.detach().clone() for weight in self.weights),
        ]


def bits(tensor: Tensor) -> Tensor:
    """A view of the bits."""
    return tensor.contiguous().view(-1).view(WORDS[tensor.element_size()])


def assert_same_bits(found: list[Tensor], expected: list[Tensor]) -> None:
    """Compare bits; all NaN are equal, since compilers choose which of two NaN operands an operation returns."""
    for a, b in zip(found, expected, strict=True):
        assert a.dtype is b.dtype
        if a.is_floating_point():
            a, b = (torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor) for tensor in (a, b))
        assert torch.equal(bits(a), bits(b)), f"{int((bits(a) != bits(b)).sum())} of {a.numel()} elements differ"


@pytest.fixture
def threads() -> Iterator[Any]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# The same bits ----------------------------------------------------------------------------------------


def levels() -> tuple[str, ...]:
    found = select.kernels().levels
    assert found, "these tests are about the C kernels: build them"
    return found


def test_every_instruction_set_gives_the_same_bits(row: Any, kept: Format, lab: Any) -> None:
    results = []
    for level in levels():
        with native.use_level(level):
            training = Training(row, kept, lab, SHAPES)
            for number in range(3):
                training.step(number)
            results.append(training.tensors())
    for other in results[1:]:
        assert_same_bits(other, results[0])


@pytest.mark.parametrize("spoil", [float("inf"), float("nan"), 1e-42, 3e38], ids=str)
def test_every_instruction_set_gives_the_same_bits_for_odd_values(
    kind: Any, kept: Format, spoil: float, lab: Any
) -> None:
    results = []
    for level in levels():
        with native.use_level(level):
            training = Training(kind, kept, lab, [(700,), (3,)])
            for number in range(3):
                training.step(number, spoil)
            results.append(training.tensors())
    for other in results[1:]:
        assert_same_bits(other, results[0])


def test_any_number_of_threads_gives_the_same_bits(kind: Any, kept: Format, lab: Any, threads: Any) -> None:
    results = []
    for number_of_threads in (1, 2, 3):
        threads(number_of_threads)
        training = Training(kind, kept, lab, LARGE)
        for number in range(2):
            training.step(number)
        results.append(training.tensors())
    for other in results[1:]:
        assert_same_bits(other, results[0])


def test_two_runs_give_the_same_bits_and_two_steps_different_noise(kept: Format, lab: Any) -> None:
    runs = [Training(FakeRow(zoptim.AdamW, {"lr": 1e-3}), kept, lab, SHAPES) for _ in range(2)]
    for training in runs:
        training.step(0)
        training.step(0)
    assert_same_bits(runs[0].tensors(), runs[1].tensors())


@attrs.frozen
class FakeRow:
    """An optimizer with options of its own."""

    ours: Any
    options: dict[str, Any]

    def make(self, params: list[Tensor], **more: Any) -> FlatOptimizer:
        return self.ours(params, **self.options, **more)


def test_rounding_has_new_noise_at_every_step_and_in_every_stream() -> None:
    """Equal values in one tensor are rounded alike in a step, and differently in the next."""
    param = torch.full((4096,), 1.0, dtype=torch.bfloat16).requires_grad_()
    optimizer = zoptim.SGD([param], lr=1.0)
    step = 1 / 1024  # an eighth of the distance to the bf16 neighbour above
    param.grad = -step * torch.linspace(0.5, 1.5, 4096).bfloat16()
    rounded_up = []
    for _ in range(24):
        with torch.no_grad():
            param.fill_(1.0)
        optimizer.step()
        rounded_up.append(param.detach() > 1)
    found = torch.stack(rounded_up).float().mean().item()
    assert found == pytest.approx(1 / 8, abs=0.02)
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(rounded_up))


# Signals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spoil", [float("nan"), float("inf")])
def test_found_inf_leaves_every_bit_of_every_stream(kind: Any, kept: Format, spoil: float, lab: Any) -> None:
    training = Training(kind, kept, lab, SHAPES)
    training.step(0)
    training.step(1)
    before = training.tensors()
    training.optimizer.found_inf = torch.tensor(1.0)
    training.step(2, spoil)
    assert_same_bits(training.tensors(), before)
    training.optimizer.found_inf = torch.tensor(0.0)
    training.step(2)
    assert not all(torch.equal(bits(a), bits(b)) for a, b in zip(training.tensors(), before))


NANS = [0x7FC00000, 0x7FFFFFFF, -1, -0x400000]  # bits: of CPUs, of GPUs, and both with a sign


@pytest.mark.parametrize("pattern", NANS, ids=lambda pattern: f"{pattern & 0xFFFFFFFF:08x}")
def test_nan_stays_visible_in_the_weights_without_found_inf(kind: Any, kept: Format, pattern: int, lab: Any) -> None:
    training = Training(kind, kept, lab, [(700,)])
    training.step(0)
    training.step(1)
    (weight,) = training.weights
    nan = torch.tensor(pattern, dtype=torch.int32).view(torch.float32)
    weight.grad[3] = nan  # type: ignore[index]
    if weight.dtype is torch.float32:
        assert bits(weight.grad)[3].item() == pattern  # type: ignore[arg-type]
    training.optimizer.step()
    # LAMB's second reading sees moments as they are kept, and a block of 8-bit codes shares its scale.
    block = kind.ours is zoptim.LAMB and kept.options.get("state_dtype") == "8bit"
    for tensor in (weight.detach(), training.params[0].detach()):
        assert tensor.isnan().nonzero().flatten().tolist() == (list(range(256)) if block else [3])


@pytest.mark.parametrize("pattern", NANS, ids=lambda pattern: f"{pattern & 0xFFFFFFFF:08x}")
@pytest.mark.parametrize("options", [{"split_master": True}, {}], ids=["split", "all bf16"])
@pytest.mark.parametrize("foreach", [None, True], ids=["kernel", "torch"])
def test_a_bf16_weight_is_nan_for_every_float32_nan(pattern: int, options: Any, foreach: Any) -> None:
    param = torch.ones(8, dtype=torch.bfloat16, requires_grad=True)
    if not hasattr(param, "grad_dtype"):
        pytest.skip("this torch ties the gradient's dtype to the parameter's")
    param.grad_dtype = torch.float32
    param.grad = torch.ones(8)
    bits(param.grad)[3] = pattern
    optimizer = zoptim.SGD([param], lr=0.1, foreach=foreach, **options)
    for _ in range(70):
        optimizer.step()
        assert param.detach().isnan().nonzero().flatten().tolist() == [3]


def test_nan_in_8bit_states_spoils_its_block_and_is_seen_there(lab: Any) -> None:
    param = torch.ones(700, requires_grad=True)
    optimizer = zoptim.AdamW([param], state_dtype="8bit")
    param.grad = torch.ones(700)
    param.grad[300] = float("nan")
    optimizer.step()
    assert optimizer.state[param]["exp_avg_scale"].isnan().tolist() == [False, True, False]
    param.grad = torch.ones(700)
    optimizer.step()
    assert param.detach().isnan().nonzero().flatten().tolist() == list(range(256, 512))


def test_infinities_in_the_gradient_reach_the_weight_by_the_rule(row: Any, lab: Any) -> None:
    param = torch.ones(70, requires_grad=True)
    optimizer = row.make([param])
    param.grad = torch.ones(70)
    param.grad[3] = float("inf")
    optimizer.step()
    expected, _ = row.rule(torch.ones(70).double(), param.grad.double(), None)
    assert torch.equal(param.detach().isnan(), expected.isnan())
    assert torch.equal(param.detach().isinf(), expected.isinf())


# Low-precision weights --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("state_dtype", [None, "bf16", "8bit"])
def test_weights_that_follow_a_master_are_its_nearest_neighbours(
    kind: Any, dtype: torch.dtype, state_dtype: str | None, lab: Any
) -> None:
    training = Training(kind, Format("", torch.float32, {"state_dtype": state_dtype}, dtype), lab, SHAPES)
    for number in range(3):
        training.step(number)
        assert_same_bits([w.detach() for w in training.weights], [p.detach().to(dtype) for p in training.params])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_master_reads_the_gradient_of_its_weight_as_if_it_were_its_own(
    kind: Any, dtype: torch.dtype, lab: Any
) -> None:
    training = Training(kind, Format("", torch.float32, {}, dtype), lab, SHAPES)
    params = lab.make_params(SHAPES)
    optimizer = kind.make(params)
    for number in range(3):
        training.step(number)
        for param, grad in zip(params, lab.make_grads(number, SHAPES)):
            param.grad = grad.to(dtype).float()
        optimizer.step()
    if kind.options.get("momentum"):  # the first momentum is made by torch, in one way for each
        lab.assert_near(training.params, params, rtol=2e-6, atol=1e-6)
    else:
        lab.assert_bitwise(training.params, params)


def test_a_master_with_a_gradient_of_its_own_reads_that() -> None:
    master, weight = torch.ones(8, requires_grad=True), torch.ones(8, dtype=torch.bfloat16, requires_grad=True)
    optimizer = zoptim.SGD([master], lr=0.25)
    optimizer.mirror(master, weight)
    master.grad, weight.grad = torch.ones(8), torch.full_like(weight, -1.0)
    optimizer.step()
    assert weight.detach().float().tolist() == master.detach().tolist() == [0.75] * 8


def test_values_at_the_edges_of_a_format_are_rounded_as_torch_rounds() -> None:
    edges = [65504.0, 65519.9, 65520.0, 6e-8, 2.9e-8, 3.1e-8, 6.1e-5, 3.39e38, 1e-40, 1.00390625, 1.01171875]
    values = torch.tensor([sign * value for value in edges for sign in (1, -1)])
    for dtype in (torch.bfloat16, torch.float16):
        master, weight = values.clone().requires_grad_(), torch.zeros(len(values), dtype=dtype, requires_grad=True)
        optimizer = zoptim.SGD([master], lr=0.0)
        optimizer.mirror(master, weight)
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
        assert_same_bits([weight.detach()], [values.to(dtype)])
