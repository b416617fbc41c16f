"""The dtype policy."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple

import pytest
import torch
from torch import nn

from zprecision import BF16, FP16, FP32, Precision, measure_bf16_speedup

Pair = namedtuple("Pair", "left right")


class Mixed(nn.Module):
    """A parameter, tied, and a buffer of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.tied = nn.Linear(3, 3, bias=False)
        self.tied.weight = self.linear.weight
        self.register_buffer("mean", torch.full((3,), 0.5))
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("rotary", torch.tensor([1 + 2j]), persistent=False)


def test_the_presets_say_what_each_number_has() -> None:
    f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
    dtypes = [(p.param, p.accumulate, p.reduce, p.master) for p in (FP32, BF16, FP16)]
    assert dtypes == [(f32, f32, f32, f32), (bf16, f32, bf16, f32), (f16, f32, f16, f32)]


def test_float64_weights_are_summed_in_float64() -> None:
    policy = Precision(param=torch.float64)
    assert {policy.accumulate, policy.reduce, policy.master} == {torch.float64}


def test_the_wire_may_be_coarser_than_the_weights() -> None:
    assert Precision(reduce=torch.bfloat16).reduce == torch.bfloat16


def test_a_policy_is_a_value() -> None:
    assert Precision(param=torch.bfloat16) == BF16
    assert hash(Precision(param=torch.float32)) == hash(FP32)
    with pytest.raises(AttributeError):
        FP32.param = torch.float16
    with pytest.raises(TypeError):
        Precision(torch.float16)


@pytest.mark.parametrize(
    ("error", "given_", "message"),
    [
        (TypeError, {"param": "bf16"}, r"Precision\(param='bf16'\): param must be one of torch.float16, .*str"),
        (ValueError, {"param": torch.int32}, r"param=torch.int32.*must be one of"),
        (ValueError, {"reduce": torch.complex64}, "reduce=torch.complex64"),
        (
            ValueError,
            {"param": torch.float32, "master": torch.bfloat16},
            r"param=torch.float32, master=torch.bfloat16\): master cannot hold.*use torch.float32",
        ),
        (
            ValueError,
            {"param": torch.float16, "accumulate": torch.bfloat16},
            "accumulate cannot hold.*use torch.float32",
        ),
    ],
)
def test_impossible_policies_are_rejected_by_name(error: type, given_: dict, message: str) -> None:
    with pytest.raises(error, match=message):
        Precision(**given_)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_cast_module_casts_floating_tensors_and_no_others(dtype: torch.dtype) -> None:
    module = Mixed()
    returned = Precision(param=dtype, buffer=dtype).cast_module(module)
    assert returned is module
    assert {parameter.dtype for parameter in module.parameters()} == {dtype}
    assert module.mean.dtype == dtype
    assert (module.steps.dtype, module.steps.item()) == (torch.int64, 7)
    assert module.mask.dtype == torch.bool
    assert (module.rotary.dtype, module.rotary.item()) == (torch.complex64, 1 + 2j)


def test_the_identity_leaves_every_dtype() -> None:
    policy, module = Precision(), Mixed().double()
    module.linear.half()
    before = [tensor.dtype for tensor in (*module.parameters(), *module.buffers())]
    policy.cast_module(module)
    assert [tensor.dtype for tensor in (*module.parameters(), *module.buffers())] == before
    assert (policy.param, policy.accumulate, policy.reduce, policy.master) == (None, None, None, None)
    x = torch.ones(2, dtype=torch.float64)
    assert policy.cast_inputs((x,), {"x": x}) == ((x,), {"x": x})


def test_a_policy_without_weights_of_its_own_may_ask_for_wide_sums_and_masters() -> None:
    policy = Precision(accumulate=torch.float32, master=torch.float32)
    assert (policy.param, policy.accumulate, policy.master) == (None, torch.float32, torch.float32)


def test_codes_of_8_bits_are_left_alone() -> None:
    module = Mixed()
    module.codes = nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn), requires_grad=False)
    BF16.cast_module(module)
    assert module.codes.dtype == torch.float8_e4m3fn


def test_cast_module_keeps_parameters_the_same_objects_and_tied_ones_tied() -> None:
    module = Mixed()
    before = list(map(id, module.parameters()))
    BF16.cast_module(module)
    assert list(map(id, module.parameters())) == before
    assert module.tied.weight is module.linear.weight


def test_cast_module_casts_gradients_along() -> None:
    module = nn.Linear(2, 1)
    module(torch.ones(1, 2)).sum().backward()
    BF16.cast_module(module)
    assert module.weight.grad.dtype == torch.bfloat16


def test_casting_a_float32_module_to_float32_leaves_its_memory() -> None:
    module = Mixed()
    before = [tensor.data_ptr() for tensor in (*module.parameters(), *module.buffers())]
    FP32.cast_module(module)
    assert [tensor.data_ptr() for tensor in (*module.parameters(), *module.buffers())] == before


def test_cast_inputs_reaches_floating_tensors_at_any_depth() -> None:
    x, ids = torch.ones(2), torch.arange(2)
    args, kwargs = BF16.cast_inputs(
        (x, ids, [x, (x, "text")], Pair(x, ids)),
        {"nested": {"x": x, "ids": ids}, "flag": True, "nothing": None},
    )
    assert args[0].dtype == args[2][0].dtype == args[2][1][0].dtype == args[3].left.dtype == torch.bfloat16
    assert args[1] is ids
    assert type(args[3]) is Pair
    assert args[3].right is ids
    assert args[2][1][1] == "text"
    assert kwargs["nested"]["x"].dtype == torch.bfloat16
    assert kwargs["nested"]["ids"] is ids
    assert (kwargs["flag"], kwargs["nothing"]) == (True, None)


def test_cast_inputs_leaves_what_was_given_as_it_was() -> None:
    x = torch.ones(2)
    inner = {"x": x}
    FP16.cast_inputs(([x],), {"inner": inner})
    assert inner["x"] is x
    assert x.dtype == torch.float32


def test_cast_inputs_keeps_kinds_of_containers() -> None:
    ordered = OrderedDict(b=torch.ones(1), a=torch.ones(1))
    counted = defaultdict(list, x=torch.ones(1))
    (ordered, counted), _ = FP16.cast_inputs((ordered, counted), {})
    assert type(ordered) is OrderedDict
    assert list(ordered) == ["b", "a"]
    assert counted["missing"] == []
    assert counted["x"].dtype == torch.float16


def test_inputs_that_have_the_dtype_are_not_copied() -> None:
    x = torch.ones(2)
    (same,), _ = FP32.cast_inputs((x,), {})
    assert same is x


def test_gradients_flow_through_cast_inputs() -> None:
    x = torch.ones(2, requires_grad=True)
    (cast,), _ = BF16.cast_inputs((x,), {})
    cast.sum().backward()
    assert x.grad.tolist() == [1, 1]


def test_the_speed_of_bf16_is_a_positive_ratio_and_draws_no_random_number() -> None:
    state = torch.get_rng_state()
    assert measure_bf16_speedup("cpu") > 0
    assert torch.equal(torch.get_rng_state(), state)


def test_the_speed_of_bf16_compares_the_best_times_because_others_can_only_disturb(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from zprecision import policy

    disturbed = [9.0, 4.0, 6.0, 20.0, 5.0, 30.0, 4.5, 8.0]  # the first call warms up
    seconds = {torch.float32: iter(disturbed), torch.bfloat16: iter([9.0, 2.0, 2.5, 90.0, 3.0, 2.1, 7.0, 2.2])}
    monkeypatch.setattr(policy, "_seconds", lambda matrix: next(seconds[matrix.dtype]))
    monkeypatch.setattr(policy, "_BUDGET_S", 0.0)
    assert measure_bf16_speedup(torch.device("cpu")) == 2.0
