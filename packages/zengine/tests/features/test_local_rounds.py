"""DiLoCo in the engine against a simulation in one process: torch's AdamW in each group, torch's SGD outside."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
import zengine
from zcomm.testing import run_ranks
from zengine.features.local_rounds import LocalRounds

WIDTH, STEPS = 8, 9
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.square().mean()


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def inner(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.01)


def plain(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def engine_of(
    optimizer: Any = inner, stage: int = 0, shift: int = 0, model: type[Stack] = Stack, **diloco: Any
) -> zengine.DeepSpeedEngine:
    """Return an engine; `shift` makes the first weights of later ranks differ, which the first group's replace."""
    made = model()
    if shift and zcomm.detect().rank >= shift:
        with torch.no_grad():
            made.embed.weight.add_(1.0)
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 100},
        "diloco": {"sync_every": 3, "outer": OUTER, **diloco},
    }
    return zengine.initialize(model=made, optimizer=optimizer, config=config)[0]


def train(engine: zengine.DeepSpeedEngine, steps: range) -> None:
    for step in steps:
        engine.backward(engine(batch(step, zcomm.group_rank())))
        engine.step()


def local_weights(engine: zengine.DeepSpeedEngine) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in engine.state_dict().items()}


def start_of(engine: zengine.DeepSpeedEngine) -> dict[str, torch.Tensor]:
    """Return the weights of the last exchange that this rank holds, by name and first element."""
    rounds = next(feature for feature in engine._features if isinstance(feature, LocalRounds)).rounds
    return {f"{shard.name}[{shard.span[0]}]": shard.tensor.clone() for shard in rounds.shards()}


def run(shift: int = 0, **options: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    engine = engine_of(shift=shift, **options)
    train(engine, range(STEPS))
    found = local_weights(engine), start_of(engine)
    engine.close()
    return found


# -- the oracle ------------------------------------------------------------------------------------


def simulate(
    num_groups: int,
    group_size: int,
    *,
    model: type[Stack] = Stack,
    optimizer: Any = inner,
    sync_every: int = 3,
    start_step: int = 0,
    outer: dict[str, Any] | None = None,
    sync_delay: int = 0,
    merge_alpha: float = 0.0,
    fragment_of: Any = lambda name: 0,
    fragments: int = 1,
) -> list[dict[str, torch.Tensor]]:
    """Return the local weights of each group after STEPS steps of DiLoCo."""
    first = model()
    replicas = [copy.deepcopy(first) for _ in range(num_groups)]
    optimizers = [optimizer(replica.parameters()) for replica in replicas]
    start = {name: nn.Parameter(param.detach().clone()) for name, param in first.named_parameters()}
    outer_optimizer = torch.optim.SGD(start.values(), **(outer or OUTER))
    waiting: list[tuple[int, dict[str, torch.Tensor]]] = []
    offsets = {-(-(f + 1) * sync_every // fragments) % sync_every: f for f in range(fragments)}
    for step in range(1, STEPS + 1):
        for group, replica in enumerate(replicas):
            for rank in range(group * group_size, (group + 1) * group_size):
                (replica(batch(step - 1, rank)) / group_size).backward()
        if step <= start_step:
            average_gradients(replicas)
        for own in optimizers:
            own.step()
            own.zero_grad()
        if step == start_step:
            for name, param in replicas[0].named_parameters():
                start[name].data.copy_(param.detach())
        if step > start_step and (step - start_step) % sync_every in offsets:
            here = offsets[(step - start_step) % sync_every]
            moved = {
                name: sum(value.detach() - dict(replica.named_parameters())[name].detach() for replica in replicas)
                for name, value in start.items()
                if fragment_of(name) == here
            }
            waiting.append((step + sync_delay, {name: value / num_groups for name, value in moved.items()}))
        for ends, moved in [each for each in waiting if each[0] == step]:
            waiting.remove((ends, moved))
            for name, value in start.items():
                value.grad = moved.get(name)
            outer_optimizer.step()
            for replica in replicas:
                for name, param in replica.named_parameters():
                    if name in moved:
                        param.data = torch.lerp(start[name].detach(), param.detach(), merge_alpha)
    return [{name: value.clone() for name, value in replica.state_dict().items()} for replica in replicas]


def average_gradients(replicas: list[Stack]) -> None:
    """Give all replicas the mean of their gradients."""
    for params in zip(*(replica.parameters() for replica in replicas)):
        mean = sum(param.grad for param in params) / len(replicas)
        for param in params:
            param.grad = mean.clone()


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 0.0) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance)


# -- laws ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_groups_of_one_rank_equal_the_simulation_bit_for_bit(num_ranks: int, stage: int) -> None:
    found = run_ranks(run, num_ranks, shift=1, stage=stage)
    for (own, _), expected in zip(found, simulate(num_ranks, 1)):
        assert_equal(own, expected)


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_data_parallelism_before_the_first_round_equals_the_simulation(num_ranks: int, stage: int) -> None:
    """Bit for bit on two ranks; four add a gradient in another order."""
    found = run_ranks(run, num_ranks, shift=1, stage=stage, start_step=4)
    for (own, _), expected in zip(found, simulate(num_ranks, 1, start_step=4)):
        assert_equal(own, expected, 0.0 if num_ranks == 2 else 1e-6)


def test_groups_of_two_ranks_are_one_group_before_the_first_round() -> None:
    found = run_ranks(run, 4, shift=2, stage=3, groups=2, start_step=STEPS + 1)
    for own, _ in found:
        assert_equal(own, found[0][0])
    for rank, expected in enumerate(simulate(2, 2, start_step=STEPS + 1)[group] for group in (0, 0, 1, 1)):
        assert_equal(found[rank][0], expected, 1e-6)


def test_gradients_are_averaged_up_to_the_first_round_only() -> None:
    for log in run_ranks(traffic, 2, sync_every=3, start_step=2):
        steps = [(step, label.partition("[")[0]) for step, _, label, _, _ in log]
        assert {step for step, label in steps if label == "gradients of all groups"} == {1, 2}
        assert {step for step, label in steps if label == "outer gradient"} == {5}  # of 6


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_groups_of_two_ranks_equal_the_simulation(stage: int) -> None:
    """Up to rounding: ranks sum a gradient in another order than one process."""
    found = run_ranks(run, 4, shift=2, stage=stage, groups=2)
    for rank, expected in enumerate(simulate(2, 2)[group] for group in (0, 0, 1, 1)):
        assert_equal(found[rank][0], expected, 1e-6)
        assert_equal(found[rank][0], found[rank // 2 * 2][0])


def fragment_of(name: str) -> int:
    """Return the fragment of a parameter of `Blocks` when there are two."""
    return int(name.split(".")[1]) % 2


@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize("delay", [0, 1])
def test_fragments_with_a_delay_equal_the_simulation_bit_for_bit(delay: int, alpha: float) -> None:
    options = {"sync_every": 4, "fragments": 2, "sync_delay": delay, "merge_alpha": alpha}
    found = run_ranks(run_blocks, 2, **options)
    expected = simulate(2, 1, model=Blocks, fragment_of=fragment_of, **options)
    for own, of_group in zip(found, expected):
        assert_equal(own, of_group)


class Blocks(Stack):
    """Layers alone, so that every tensor is in one fragment."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Identity()


def run_blocks(**options: Any) -> dict[str, torch.Tensor]:
    return run(model=Blocks, **options)[0]


def test_a_round_of_one_step_with_outer_rate_1_averages_the_weights() -> None:
    """SGD is linear, so groups that average their weights each step equal data parallelism, up to rounding."""
    found = run_ranks(run, 2, optimizer=plain, sync_every=1, outer={"lr": 1.0, "momentum": 0.0, "nesterov": False})
    model = Stack()
    optimizer = plain(model.parameters())
    for step in range(STEPS):
        for rank in range(2):
            (model(batch(step, rank)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for own, start in found:
        assert_equal(own, model.state_dict(), 1e-6)
        assert_equal(start, found[0][1])


def test_classical_momentum_equals_the_simulation() -> None:
    outer = {"lr": 0.5, "momentum": 0.6, "nesterov": False}
    for (own, _), expected in zip(run_ranks(run, 2, outer=outer), simulate(2, 1, outer=outer)):
        assert_equal(own, expected)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("delay", [0, 2])
def test_quantized_exchanges_keep_the_groups_equal_and_near_the_law(bits: int, delay: int) -> None:
    options = {"quantize_bits": bits, "sync_delay": delay, "merge_alpha": 0.5 * bool(delay)}
    found = run_ranks(run, 4, **options)
    exact = run_ranks(run, 4, sync_delay=delay, merge_alpha=0.5 * bool(delay))
    for (own, start), (exact_own, exact_start) in zip(found, exact):
        assert_equal(start, found[0][1])
        assert any(not torch.equal(value, exact_start[name]) for name, value in start.items())
        assert_equal(start, exact_start, 0.05 if bits == 4 else 0.005)
        assert_equal(own, exact_own, 0.05 if bits == 4 else 0.005)


def traffic(sync_every: int, **options: Any) -> list[tuple[int, str, str, int, int]]:
    """Return (step, operation, label, bytes, ranks) of each message."""
    engine = engine_of(sync_every=sync_every, **options)
    found = []
    for step in range(1, 2 * sync_every + 1):
        with zcomm.traced([]) as log:
            train(engine, range(step - 1, step))
        found += [(step, each.op, each.label, each.nbytes, each.group_size) for each in log]
    engine.close()
    return found


def test_a_round_sends_nothing_but_one_message_a_fragment() -> None:
    numel = sum(param.numel() for param in Stack().parameters())
    for log in run_ranks(traffic, 2, sync_every=4, fragments=2):
        assert [(step, op, label) for step, op, label, _, _ in log] == [
            (step, "all_reduce", f"outer gradient[{index % 2}]") for index, step in enumerate((2, 4, 6, 8))
        ]
        assert {nbytes for *_, nbytes, _ in log} == {numel * 4 // 2}


def test_groups_of_several_ranks_meet_only_ranks_of_equal_index() -> None:
    for log in run_ranks(traffic, 4, sync_every=4, groups=2, stage=3):
        outer = [each for each in log if each[2].startswith("outer")]
        assert {step for step, *_ in outer} == {4, 8}
        assert all(ranks == 2 for *_, ranks in log)


def absent() -> tuple[list[str], bool]:
    engine = zengine.initialize(
        model=Stack(), config={"train_micro_batch_size_per_gpu": 3, "optimizer": {"type": "SGD", "params": {}}}
    )[0]
    names = [type(feature).__name__ for feature in engine._features]
    engine.close()
    return names, engine.parts.groups.independent


def test_off_is_absent() -> None:
    names, is_independent = absent()
    assert "LocalRounds" not in names
    assert not is_independent


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fragments": 4}, "Use at most 3 fragments"),
        ({"fragments": 2, "sync_delay": 1}, "Use at most 0"),
        ({"quantize_bits": 5}, "Use 4 or 8"),
        ({"groups": 2}, "does not divide the 1 replicas"),
    ],
)
def test_a_round_that_cannot_be_is_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(zengine.ConfigError, match=message):
        engine_of(**changes)


# -- checkpoints -----------------------------------------------------------------------------------


def resumed(folder: str, at: int, **options: Any) -> tuple[Any, Any]:
    """Return (weights, start) after STEPS steps of a run that another engine continued after `at` of them."""
    engine = engine_of(**options)
    train(engine, range(at))
    engine.save_checkpoint(folder)
    engine.close()
    engine = engine_of(shift=1, **options)
    engine.load_checkpoint(folder)
    train(engine, range(at, STEPS))
    found = local_weights(engine), start_of(engine)
    engine.close()
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"stage": 0},
        {"stage": 3, "groups": 2},
        {"stage": 1, "start_step": 5},
        {"sync_every": 4, "fragments": 2, "sync_delay": 1, "merge_alpha": 0.5, "quantize_bits": 4},
    ],
)
@pytest.mark.parametrize("at", [4, 6])
def test_a_resumed_run_continues_bit_for_bit(tmp_path: Any, at: int, options: dict[str, Any]) -> None:
    num_ranks = 2 * options.get("groups", 1)
    found = run_ranks(resumed, num_ranks, str(tmp_path), at, **options)
    expected = run_ranks(run, num_ranks, **options)
    for (own, start), (expected_own, expected_start) in zip(found, expected):
        assert_equal(own, expected_own)
        assert_equal(start, expected_start)


def shortened(folder: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the start before and after the step at which a shorter round begins, with an exchange in flight."""
    engine = engine_of(sync_every=6, sync_delay=3)
    train(engine, range(7))  # it began after 6 steps, and would end after 9
    engine.save_checkpoint(folder)
    train(engine, range(7, 9))
    expected = start_of(engine)
    engine.close()
    engine = engine_of(sync_every=4, sync_delay=1)
    engine.load_checkpoint(folder)
    before = start_of(engine)
    train(engine, range(7, 8))  # the next one begins after 8
    found = start_of(engine)
    engine.close()
    return before, found, expected


def test_an_exchange_in_flight_is_applied_before_the_next_one_of_a_shorter_round(tmp_path: Any) -> None:
    for before, found, expected in run_ranks(shortened, 2, str(tmp_path)):
        assert_equal(found, expected)
        assert any(not torch.equal(found[name], before[name]) for name in found)


def saved(folder: str, steps: int, **options: Any) -> dict[str, torch.Tensor]:
    engine = engine_of(**options)
    train(engine, range(steps))
    engine.save_checkpoint(folder)
    found = start_of(engine)
    engine.close()
    return found


def loaded(folder: str, **options: Any) -> tuple[Any, Any]:
    engine = engine_of(shift=1, **options)
    engine.load_checkpoint(folder)
    found = local_weights(engine), start_of(engine)
    train(engine, range(5, 6))
    engine.close()
    return found


def loaded_plain(folder: str, module_only: bool) -> dict[str, torch.Tensor]:
    config = {"train_micro_batch_size_per_gpu": 3, "gradient_clipping": 0.0}
    engine = zengine.initialize(model=Stack(), optimizer=inner, config=config)[0]
    engine.load_checkpoint(folder, load_module_only=module_only)
    found = local_weights(engine)
    engine.close()
    return found


def flat(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{name}[0]": value.reshape(-1) for name, value in weights.items()}


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_another_number_of_groups_begins_at_the_last_exchange(tmp_path: Any, num_ranks: int, caplog: Any) -> None:
    start = run_ranks(saved, 2, str(tmp_path), 5)[0]
    if num_ranks == 1:
        found = [loaded(str(tmp_path))]
        assert "saved by 2 replica groups, and this run has 1" in caplog.text
    else:
        found = run_ranks(loaded, num_ranks, str(tmp_path))
    for own, found_start in found:
        assert_equal(flat(own), start)
        assert_equal(found_start, start)


@pytest.mark.parametrize("module_only", [False, True])
def test_an_engine_without_groups_loads_the_weights_of_the_last_exchange(tmp_path: Any, module_only: bool) -> None:
    start = run_ranks(saved, 2, str(tmp_path), 5)[0]
    assert_equal(flat(loaded_plain(str(tmp_path), module_only)), start)


def loads_weights(kind: str, folder: str) -> tuple[Any, Any, Any]:
    engine = engine_of(sync_every=4)
    train(engine, range(5))
    given = {name: value + zcomm.group_rank() for name, value in Stack().state_dict().items()}
    if kind == "state_dict":
        engine.load_state_dict(given)
    else:
        torch.save(Stack().state_dict(), f"{folder}/{zcomm.group_rank()}.pt")
        engine.load_weights(f"{folder}/{zcomm.group_rank()}.pt")
    found = local_weights(engine), start_of(engine)
    train(engine, range(5, 8))
    return *found, start_of(engine)


@pytest.mark.parametrize("kind", ["state_dict", "weights"])
def test_loaded_weights_begin_a_round(tmp_path: Any, kind: str) -> None:
    for own, start, after in run_ranks(loads_weights, 2, kind, str(tmp_path)):
        assert_equal(own, Stack().state_dict())
        assert_equal(start, flat(Stack().state_dict()))
        assert max((after[name] - value).abs().max().item() for name, value in start.items()) < 0.1


def test_a_damaged_state_is_rejected() -> None:
    engine = engine_of()
    feature = next(feature for feature in engine._features if isinstance(feature, LocalRounds))
    with pytest.raises(ValueError, match="are no numbers"):
        feature.prepare_load({"groups": 1, "fragments": 1, "pending": {"fragment": "x", "ends": 0}})
    with pytest.raises(ValueError, match="fragment 7 is in flight"):
        feature.prepare_load({"groups": 1, "fragments": 1, "pending": {"fragment": 7, "ends": 0}})
    engine.close()
