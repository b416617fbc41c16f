"""The state of a parameter in each format: keys, dtypes, bytes, and round trips of values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from zoptim.states.formats import StateFormat
from zoptim.states.spec import Master, StateSpec, num_blocks, scale_key

FORMATS = [None, *StateFormat]


def memory(state_format: StateFormat | None = None, master: Master = Master.WEIGHT, **more: Any) -> StateSpec:
    fields: dict[str, Any] = {"names": ("m", "v"), "squares": frozenset({"v"}), "counts": True, **more}
    return StateSpec(format=state_format, master=master, **fields)


def values(param: Tensor) -> tuple[Tensor, Tensor]:
    """A mean and a square, in the parameter's shape."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(param.shape, generator=generator)
    return mean, mean.square() * torch.rand(param.shape, generator=generator)


@pytest.mark.parametrize(
    ("state_format", "master", "dtype", "wanted"),
    [
        (None, Master.WEIGHT, torch.float32, torch.float32),
        (None, Master.WEIGHT, torch.float64, torch.float64),
        (None, Master.WEIGHT, torch.bfloat16, torch.bfloat16),
        (None, Master.SPLIT, torch.bfloat16, torch.float32),
        (StateFormat.FP32, Master.WEIGHT, torch.bfloat16, torch.float32),
        (StateFormat.BF16, Master.SPLIT, torch.bfloat16, torch.bfloat16),
        (StateFormat.FP16, Master.WEIGHT, torch.float32, torch.float16),
        (StateFormat.INT8, Master.WEIGHT, torch.float32, torch.uint8),
    ],
)
def test_moments_have_the_dtype_that_was_asked_for_or_the_parameters(
    state_format: StateFormat | None, master: Master, dtype: torch.dtype, wanted: torch.dtype
) -> None:
    param = torch.ones(5, dtype=dtype)
    state = memory(state_format, master).make(param)
    assert state["m"].dtype is state["v"].dtype is wanted
    assert state["m"].shape == param.shape


def test_a_dtype_that_is_too_narrow_for_a_rule_is_followed_only_when_asked_for() -> None:
    param, narrow = torch.ones(5, dtype=torch.float16), frozenset({torch.float16})
    assert memory(too_narrow=narrow).dtype_for(param) is torch.float32
    assert memory(StateFormat.FP16, too_narrow=narrow).dtype_for(param) is torch.float16
    assert memory(too_narrow=narrow).dtype_for(param.bfloat16()) is torch.bfloat16


@pytest.mark.parametrize(
    ("state_format", "master", "keys"),
    [
        (None, Master.WEIGHT, ["step", "m", "v"]),
        (StateFormat.INT8, Master.WEIGHT, ["step", "m", "v", "m_scale", "v_scale"]),
        (StateFormat.INT8, Master.SPLIT, ["step", "m", "v", "m_scale", "v_scale", "remainder"]),
        (StateFormat.BF16, Master.SPLIT, ["step", "m", "v", "remainder"]),
    ],
)
def test_the_keys_of_a_format(state_format: StateFormat | None, master: Master, keys: list[str]) -> None:
    made = memory(state_format, master).make(torch.ones(300, dtype=torch.bfloat16))
    assert set(made) == set(keys)
    assert all(not bool(value.any()) and not value.requires_grad for value in made.values())
    if state_format is StateFormat.INT8:
        assert made["m_scale"].shape == (2,)


def test_lazy_state_is_created_by_the_first_update() -> None:
    lazy = memory(StateFormat.INT8, lazy=frozenset({"m"}))
    param = torch.ones(300)
    assert set(lazy.first_keys_for(param)) == {"step", "v", "v_scale"}
    assert set(lazy.keys_for(param)) == {"step", "m", "v", "m_scale", "v_scale"}


@pytest.mark.parametrize(
    ("fields", "dtype", "counts"),
    [
        ({"counts": False}, torch.float32, False),
        ({"counts": False, "state_format": StateFormat.BF16}, torch.float32, True),
        ({"counts": False, "state_format": StateFormat.INT8}, torch.float32, True),
        ({"counts": False, "state_format": StateFormat.BF16, "names": ()}, torch.float32, False),
        ({"counts": False, "names": ()}, torch.bfloat16, True),
        ({"counts": False, "names": (), "master": Master.SPLIT}, torch.bfloat16, False),
        ({"counts": False}, torch.float16, False),
        ({"counts": True, "names": ()}, torch.float32, True),
    ],
)
def test_updates_are_counted_for_rules_that_ask_and_for_stochastic_rounding(
    fields: dict[str, Any], dtype: torch.dtype, counts: bool
) -> None:
    assert memory(**fields).counts_for(torch.ones(3, dtype=dtype)) is counts


@pytest.mark.parametrize("state_format", FORMATS)
def test_moments_may_begin_at_a_value(state_format: StateFormat | None) -> None:
    kept = memory(state_format, names=("v",), first=0.25)
    param = torch.ones(700)
    state = kept.make(param)
    assert torch.equal(kept.read(state, "v"), torch.full((700,), 0.25))


@pytest.mark.parametrize(("state_format", "rtol"), [
    (None, 0), (StateFormat.FP32, 0), (StateFormat.BF16, 2**-7), (StateFormat.FP16, 2**-9), (StateFormat.INT8, 2**-3)
])  # fmt: skip
@pytest.mark.parametrize("seed", [None, 7])
def test_a_moment_comes_out_as_it_went_in_to_rounding(
    state_format: StateFormat | None, rtol: float, seed: int | None
) -> None:
    kept, param = memory(state_format), torch.ones(3, 300)
    state = kept.make(param)
    for name, value in zip(("m", "v"), values(param)):
        kept.write(state, name, value, seed)
        found = kept.read(state, name)
        assert (found.shape, found.dtype) == (param.shape, torch.float32)
        torch.testing.assert_close(found, value, rtol=rtol, atol=4e-4 * rtol * 8)


@pytest.mark.parametrize("state_format", FORMATS)
def test_reading_and_writing_back_is_the_identity(state_format: StateFormat | None) -> None:
    """State moves to float32 and back any number of times without loss."""
    kept, param = memory(state_format), torch.ones(30, 3001)
    state = kept.make(param)
    for name, value in zip(("m", "v"), values(param)):
        kept.write(state, name, value, 3)
    before = {key: value.clone() for key, value in state.items()}
    for name in ("m", "v"):
        kept.write(state, name, kept.read(state, name).clone())
    assert all(torch.equal(state[key], before[key]) for key in before)


@pytest.mark.parametrize("turned", [False, True])
def test_8bit_blocks_are_counted_in_the_order_of_memory_as_kernels_do(turned: bool) -> None:
    base = torch.ones(40, 30)
    param = base.t() if turned else base
    kept = memory(StateFormat.INT8)
    state = kept.make(param)
    assert state["m"].stride() == param.stride()
    value = torch.logspace(-4, 0, 1200).view(40, 30)  # blocks of very different sizes
    kept.write(state, "m", value.t() if turned else value)
    largest = value.flatten()[[255, 511, 767, 1023, 1199]]
    assert torch.equal(state["m_scale"], largest)
    found = kept.read(state, "m")
    torch.testing.assert_close(found.t() if turned else found, value, rtol=2**-3, atol=0)


def test_float64_moments_stay_float64() -> None:
    kept, param = memory(), torch.ones(3, dtype=torch.float64)
    state = kept.make(param)
    kept.write(state, "m", torch.full((3,), 1 / 3, dtype=torch.float64), 1)
    assert torch.equal(kept.read(state, "m"), torch.full((3,), 1 / 3, dtype=torch.float64))


@pytest.mark.parametrize("state_format", [StateFormat.BF16, StateFormat.INT8])
def test_stochastic_rounding_depends_on_the_seed_and_nearest_on_nothing(state_format: StateFormat) -> None:
    kept, param = memory(state_format), torch.ones(2000)

    def written(seed: int | None) -> Tensor:
        state = kept.make(param)
        kept.write(state, "m", values(param)[0], seed)
        return kept.read(state, "m")

    assert torch.equal(written(1), written(1))
    assert not torch.equal(written(1), written(2))
    assert torch.equal(written(None), written(None))


# Weights ----------------------------------------------------------------------------------------------


def test_a_split_master_is_an_exact_float32_weight() -> None:
    kept = memory(master=Master.SPLIT)
    value = values(torch.ones(1000))[0]
    param = torch.zeros(1000, dtype=torch.bfloat16)
    state = kept.make(param)
    kept.write_weight(param, state, value, 0)
    assert torch.equal(kept.read_weight(param, state), value)
    error = (param.float() - value).abs()
    assert (error <= value.abs() * 2**-8).all(), "the bf16 weight is the master, rounded to nearest"


def test_a_fresh_split_master_is_the_bf16_weight() -> None:
    kept, param = memory(master=Master.SPLIT), values(torch.ones(50))[0].bfloat16()
    assert torch.equal(kept.read_weight(param, kept.make(param)), param.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_other_weights_are_rounded_to_nearest(dtype: torch.dtype) -> None:
    kept, param = memory(), torch.zeros(100, dtype=dtype)
    value = values(param)[0].double() * (1 + 1e-10)
    kept.write_weight(param, kept.make(param), value, 5)
    assert torch.equal(param, value.to(dtype))
    assert kept.read_weight(param, {}).dtype is (torch.float64 if dtype is torch.float64 else torch.float32)


def test_bf16_weights_are_rounded_up_as_often_as_their_value_asks_for() -> None:
    kept, param = memory(), torch.zeros(20_000, dtype=torch.bfloat16)
    value = torch.linspace(1.0, 1.0078125, 20_000)  # between two neighbours
    kept.write_weight(param, {}, value, 5)
    assert set(param.float().unique().tolist()) == {1.0, 1.0078125}
    assert param.float().mean().item() == pytest.approx(value.mean().item(), abs=1e-4)


# Streams ----------------------------------------------------------------------------------------------


def test_streams_come_in_the_order_of_the_names() -> None:
    kept = memory(StateFormat.INT8, names=("v", "m"))
    state = kept.make(torch.ones(3))
    states, scales = kept.streams(dict(reversed(state.items())))
    assert [id(t) for t in (*states, *scales)] == [id(state[key]) for key in ("v", "m", "v_scale", "m_scale")]
    assert memory().streams({"m": 1, "v": 2}) == ([1, 2], [])


@pytest.mark.parametrize(("numel", "blocks"), [(0, 0), (1, 1), (256, 1), (257, 2), (512, 2)])
def test_a_block_is_256_elements(numel: int, blocks: int) -> None:
    assert num_blocks(torch.ones(numel)) == blocks
    assert scale_key("exp_avg") == "exp_avg_scale"


@pytest.mark.parametrize(("state_format", "bytes_per_element"), [("fp32", 4.0), ("bf16", 2.0), ("8bit", 1 + 4 / 256)])
def test_the_bytes_that_are_documented_are_the_bytes_that_are_kept(
    state_format: str, bytes_per_element: float
) -> None:
    parsed = StateFormat.parse(state_format)
    assert parsed is not None
    state = memory(parsed, counts=False, names=("m",)).make(torch.ones(4096))
    moments = [value for key, value in state.items() if key != "step"]
    assert sum(t.numel() * t.element_size() for t in moments) / 4096 == bytes_per_element == parsed.bytes_per_element
