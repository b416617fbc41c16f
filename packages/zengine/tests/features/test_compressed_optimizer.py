"""1-bit Adam in the engine: its law, the engine's own reduction, and what is rejected."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
import zengine
import zoptim
from zcomm.testing import recorded, run_ranks

FREEZE = 3
PARAMS = {"lr": 0.01, "freeze_step": FREEZE, "betas": [0.9, 0.99]}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(33, 50), nn.Tanh(), nn.Linear(50, 7))
        self.spare = nn.Parameter(torch.ones(5))  # without a gradient

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.to(self.spare.dtype)).float().square().mean()


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "OneBitAdam": PARAMS,
    "OneBitLamb": {**PARAMS, "lr": 0.02},
    "ZeroOneAdam": {
        "lr": 0.01,
        "var_freeze_step": 5,
        "var_update_scaler": 2,
        "local_step_scaler": 2,
        "local_step_clipper": 4,
    },
}


def config(stage: int = 0, **changes: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "OneBitAdam", "params": PARAMS},
        "zero_optimization": {"stage": stage},
        **changes,
    }


def engine_of(stage: int = 0, **changes: Any) -> zengine.Engine:
    return zengine.initialize(model=Model(), config=config(stage, **changes))[0]


def batch(step: int, rank: int) -> torch.Tensor:
    x = torch.randn(4, 33, generator=torch.Generator().manual_seed(100 * step + rank))
    return x * (1 + step % 3)


def train(engine: Any, steps: range, micro: int = 1) -> list[float]:
    rank, norms = zcomm.group_rank(), []
    for step in steps:
        for part in range(micro):
            engine.backward(engine(batch(micro * step + part, rank)))
            report = engine.step()
        norms.append(report.grad_norm)
    return norms


def weights(engine: Any) -> list[torch.Tensor]:
    return [param.detach().clone() for param in engine.module.parameters()]


# -- the law -----------------------------------------------------------------------------------------


def _by_hand(steps: int, clip: float) -> list[torch.Tensor]:
    """Train without an engine: local gradients, a plain all-reduce, then 1-bit Adam over one packed message."""
    rank, size, model = zcomm.group_rank(), zcomm.group_size(), Model()
    params = [param for param in model.parameters() if param is not model.spare]
    optimizer = zoptim.OneBitAdam(params, **PARAMS)
    layout = zcomm.SignLayout.packed([param.numel() for param in params], size)
    reduce = zcomm.CompressedAllReduce(layout)
    optimizer.connect(zoptim.WholeTensors(reduce.mean, world_size=size))
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step, rank)).backward()
        squares = torch.zeros(1).double()
        for param in params:
            if not optimizer.needs_local_gradients:
                zcomm.all_reduce(param.grad)
                param.grad /= size
            squares += param.grad.double().square().sum()
        if optimizer.needs_local_gradients:
            zcomm.all_reduce(squares)
            squares /= size
        norm = float(squares.sqrt())
        optimizer.grad_scale = torch.tensor(max(1.0, norm / clip)) if clip else None
        optimizer.step()
    return [param.detach().clone() for param in params]


def _engine_and_hand(clip: float) -> None:
    engine = engine_of(gradient_clipping=clip)
    train(engine, range(FREEZE))
    for found, expected in zip(weights(engine)[1:], _by_hand(FREEZE, clip)):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    engine.close()


@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_the_warm_up_is_that_of_a_plain_loop(clip: float) -> None:
    run_ranks(_engine_and_hand, 2, clip)


def _simulates(clip: float) -> None:
    """Compare the compressed stage with the published law, over the buckets of the engine, in float64."""
    rank, size, steps = zcomm.group_rank(), zcomm.group_size(), FREEZE + 4
    engine = engine_of(gradient_clipping=clip)
    train(engine, range(FREEZE))
    partition, optimizer = engine.parts.partition, engine.optimizer
    (shard,) = (holder.tensor for holder in partition.holders)
    (bucket,) = partition.layout.buckets
    state = {key: value.double() for key, value in optimizer.state[shard].items() if value.dim()}
    model, weight = copy.deepcopy(engine.module), shard.detach().double().clone()
    named = dict(model.named_parameters())
    workers, server = torch.zeros(size, bucket.numel).double(), torch.zeros(bucket.numel).double()
    for step in range(FREEZE, steps):
        gradients = torch.zeros(size, bucket.numel).double()
        for other in range(size):
            model.zero_grad()
            model(batch(step, other)).backward()
            for slot in bucket.slots:
                if named[slot.name].grad is not None:
                    gradients[other, slot.offset : slot.end] = named[slot.name].grad.flatten().double()
        norm = float(gradients.square().sum(1).mean().sqrt())
        gradients /= max(1.0, (norm + 1e-6) / clip) if clip else 1.0
        both = 0.9 * state["exp_avg"] + 0.1 * gradients + workers
        sent = torch.zeros_like(both)
        for slot in bucket.slots:
            part = both[:, slot.offset : slot.end]
            sent[:, slot.offset : slot.end] = _signs(part) * part.norm(dim=1, keepdim=True) / slot.numel**0.5
        workers = both - sent
        total, mean = sent.mean(0) + server, torch.zeros(bucket.numel).double()
        for slot in bucket.slots:
            for owner in range(size):
                lo, hi = (
                    max(slot.offset, owner * bucket.numel // size),
                    min(slot.end, (owner + 1) * bucket.numel // size),
                )
                if lo < hi:
                    mean[lo:hi] = _signs(total[lo:hi]) * total[lo:hi].norm() / (hi - lo) ** 0.5
        server = total - mean
        for slot in bucket.gaps():
            server[slice(*slot)], workers[:, slice(*slot)] = 0.0, 0.0
        state["exp_avg"] = mean
        before = weight.clone()
        weight = weight - 0.01 * mean / (state["exp_avg_sq"].sqrt() + 1e-8)
        for slot in bucket.slots:
            if slot.name == "spare":
                weight[slot.offset : slot.end] = before[slot.offset : slot.end]
            named[slot.name].data.copy_(weight[slot.offset : slot.end].view(slot.shape))
        (found,) = train(engine, range(step, step + 1))
        assert found == pytest.approx(norm, rel=1e-4), "the norm is the root of the mean of squares over ranks"
        for name, param in engine.module.named_parameters():
            torch.testing.assert_close(param.detach(), named[name].detach(), rtol=1e-4, atol=1e-5)
    assert rank == partition.rank
    engine.close()


def _signs(values: torch.Tensor) -> torch.Tensor:
    return torch.where(values >= 0, 1.0, -1.0).double()


@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_the_compressed_stage_follows_the_published_law(clip: float) -> None:
    run_ranks(_simulates, 2, clip)


# -- what the engine does ------------------------------------------------------------------------------


def _named_engine(kind: str, stage: int = 0, **changes: Any) -> zengine.Engine:
    return engine_of(stage, optimizer={"type": kind, "params": OPTIMIZERS[kind]}, **changes)


def _trained(stage: int, micro: int, changes: dict[str, Any]) -> list[torch.Tensor]:
    engine = engine_of(stage, gradient_accumulation_steps=micro, gradient_clipping=0.05, **changes)
    train(engine, range(FREEZE + 4), micro)
    found = weights(engine)
    engine.close()
    return found


FORMATS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("micro", [1, 2])
def test_stages_0_and_1_give_the_same_bits_on_every_rank(micro: int, name: str) -> None:
    whole, sharded = (run_ranks(_trained, 2, stage, micro, FORMATS[name]) for stage in (0, 1))
    start = [param.detach() for param in Model().parameters()]
    for first, second, other in zip(whole[0], whole[1], sharded[1]):
        assert torch.equal(first, second)
        assert torch.equal(first, other)
    assert not torch.equal(whole[0][1], start[1].to(whole[0][1].dtype))
    assert torch.equal(whole[0][0], start[0].to(whole[0][0].dtype)), "no rank has a gradient of it"


def _collectives(stage: int) -> tuple[list[str], list[str], float]:
    engine = engine_of(stage)
    train(engine, range(FREEZE - 1))
    with recorded() as warm:
        train(engine, range(FREEZE - 1, FREEZE))
    train(engine, range(FREEZE, FREEZE + 1))
    with recorded() as frozen:
        train(engine, range(FREEZE + 1, FREEZE + 2))
    dense = sum(record.nbytes for record in warm.records if record.label.startswith("gradients["))
    signs = sum(record.nbytes for record in frozen.records if record.label == "compressed momenta")
    engine.close()
    factor = 2.0 if stage == 0 else 1.0  # an all-reduce moves every byte twice
    return warm.labels, frozen.labels, factor * dense / signs


@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_are_sent_in_the_warm_up_and_momenta_in_one_message_a_phase_afterwards(stage: int) -> None:
    for warm, frozen, ratio in run_ranks(_collectives, 2, stage):
        assert "gradients[0]" in warm
        assert "compressed momenta" not in warm
        assert frozen.count("compressed momenta") == 2, "signs to the owners, and back"
        assert not [label for label in frozen if label.startswith("gradients[")]
        assert ratio > (28 if stage == 0 else 14)  # scales of five small tensors, and padding


def _overflows() -> tuple[bool, bool, int]:
    engine = engine_of(fp16={"enabled": True, "initial_scale_power": 8, "hysteresis": 1})
    train(engine, range(FREEZE + 1))
    before = weights(engine)
    bad = batch(9, zcomm.group_rank()) * (float("inf") if zcomm.group_rank() == 1 else 1.0)
    engine.backward(engine(bad))
    report = engine.step()
    same = all(torch.equal(a, b) for a, b in zip(before, weights(engine)))
    calls = engine.optimizer.param_groups[0]["calls"]
    engine.close()
    return report.applied, same, calls


def test_a_non_finite_gradient_of_one_rank_skips_the_update_on_all() -> None:
    assert run_ranks(_overflows, 2) == [(False, True, FREEZE + 1)] * 2


def test_one_rank_trains_without_communication() -> None:
    engine = engine_of()
    with recorded() as log:
        train(engine, range(FREEZE + 2))
    assert log.count() == 0
    assert engine.optimizer.param_groups[0]["frozen"]
    engine.close()


def test_what_excludes_local_gradients_is_rejected_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"OneBitAdam averages its momenta .*sparse_gradients: rows have no place"):
        engine_of(sparse_gradients=True)
    with pytest.raises(ValueError, match="stage = 2 shards what OneBitAdam needs whole on every rank"):
        engine_of(2)
    plan, model = {**config(2)}, Model()
    del plan["optimizer"]
    with pytest.raises(ValueError, match=r"OneBitAdam averages its momenta .*from stage 2 on no rank keeps"):
        zengine.initialize(model=model, optimizer=zoptim.OneBitAdam(model.parameters()), config=plan)


def test_options_without_effect_are_told() -> None:
    optimizer = {"type": "OneBitAdam", "params": {**PARAMS, "cuda_aware": False, "comm_backend_name": "nccl"}}
    engine = engine_of(optimizer=optimizer)
    (notice,) = [each for each in engine.plan.notices if "comm_backend_name" in each]
    assert "optimizer.params.cuda_aware, optimizer.params.comm_backend_name have no effect" in notice
    engine.close()


def test_other_optimizers_have_no_such_feature() -> None:
    engine = zengine.initialize(model=Model(), config=config(optimizer={"type": "AdamW", "params": {"lr": 0.1}}))[0]
    assert not [each for each in engine._features if type(each).__name__ == "CompressedOptimizer"]
    engine.close()


# -- the other two ---------------------------------------------------------------------------------------


def _lamb(stage: int) -> list[torch.Tensor]:
    engine = _named_engine("OneBitLamb", stage)
    train(engine, range(FREEZE))
    warm = weights(engine)
    with recorded() as log:
        train(engine, range(FREEZE, FREEZE + 5))
    assert log.labels.count("compressed momenta") == 10, "two messages for each of five steps"
    found = weights(engine)
    engine.close()
    return [*warm, *found]


def test_1_bit_lamb_at_stage_1_is_that_of_stage_0() -> None:
    whole, sharded = run_ranks(_lamb, 2, 0), run_ranks(_lamb, 2, 1)
    for index, (first, second, other) in enumerate(zip(whole[0], whole[1], sharded[0])):
        assert torch.equal(first, second)
        if index < len(whole[0]) // 2:  # the warm-up: sums of squares in another order
            torch.testing.assert_close(first, other, rtol=1e-5, atol=1e-6)
        else:  # where an element and its error cancel, the last bit decides its sign
            assert (first - other).norm() <= 0.02 * first.norm()


def _zero_one() -> tuple[list[list[str]], list[bool]]:
    engine, kinds, equal = _named_engine("ZeroOneAdam"), [], []
    for step in range(18):
        with recorded() as log:
            train(engine, range(step, step + 1))
        labels = set(log.labels) & {"gradients[0]", "compressed momenta"}
        kinds.append(sorted(labels))
        flat = torch.cat([param.flatten() for param in weights(engine)])
        everyone = torch.empty(2 * flat.numel())
        zcomm.all_gather(everyone, flat)
        equal.append(bool(torch.equal(*everyone.view(2, -1))))
    engine.close()
    return kinds, equal


def test_0_1_adam_reduces_gradients_in_its_intervals_only() -> None:
    kinds, equal = run_ranks(_zero_one, 2)[0]
    exact, compressed, nothing = ["gradients[0]"], ["compressed momenta"], list[str]()
    assert kinds[:6] == [exact, exact, compressed, exact, compressed, exact], "updates at 1, 2, 4 and 6"
    # frozen after step 6: synchronizations at 7, 8 and then at every second and every fourth step
    assert kinds[6:16] == [
        compressed,
        compressed,
        nothing,
        compressed,
        nothing,
        compressed,
        *[nothing] * 3,
        compressed,
    ]
    for step, kind in enumerate(kinds):
        assert equal[step] == (kind != nothing), f"weights differ between synchronizations only (step {step + 1})"


def test_0_1_adam_is_rejected_at_stage_1() -> None:
    with pytest.raises(
        ValueError,
        match=r"stage = 1 shards what ZeroOneAdam needs .*: between .* differ from rank to rank.*OneBitAdam",
    ):
        _named_engine("ZeroOneAdam", 1)


# -- checkpoints -----------------------------------------------------------------------------------------


def _resumed(kind: str, stage: int, folder: str, cut: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    steps = cut + 4
    straight = _named_engine(kind, stage)
    train(straight, range(cut))
    straight.save_checkpoint(folder)
    train(straight, range(cut, steps))
    other = _named_engine(kind, stage)
    train(other, range(20, 22))
    other.load_checkpoint(folder)
    train(other, range(cut, steps))
    found = weights(straight), weights(other)
    straight.close()
    other.close()
    return found


@pytest.mark.parametrize(
    ("kind", "stage", "cut"),
    [
        ("OneBitAdam", 0, 2),
        ("OneBitAdam", 0, 5),
        ("OneBitAdam", 1, 5),
        ("OneBitLamb", 0, 5),
        ("OneBitLamb", 1, 5),
        ("ZeroOneAdam", 0, 3),
        ("ZeroOneAdam", 0, 9),
    ],
)
def test_a_resumed_run_continues_bit_for_bit(kind: str, stage: int, cut: int, tmp_path: Any) -> None:
    for straight, other in run_ranks(_resumed, 2, kind, stage, str(tmp_path), cut):
        for first, second in zip(straight, other):
            assert torch.equal(first, second)


def _saves(folder: str, kind: str) -> int:
    engine = _named_engine(kind)
    train(engine, range(FREEZE + 2))
    engine.save_checkpoint(folder)
    errors = sum(tensor.numel() for tensor in engine.optimizer.rank_tensors().values())
    engine.close()
    return errors


def _loads(folder: str, kind: str, stage: int) -> tuple[float, bool, list[str]]:
    notes: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: notes.append(record.getMessage())  # type: ignore[method-assign]
    engine = _named_engine(kind, stage)
    logging.getLogger("zengine").addHandler(handler)
    engine.load_checkpoint(folder)
    logging.getLogger("zengine").removeHandler(handler)
    errors = sum(float(tensor.abs().sum()) for tensor in engine.optimizer.rank_tensors().values())
    frozen = engine.optimizer.param_groups[0]["frozen"]
    (norm,) = train(engine, range(FREEZE + 2, FREEZE + 3))
    assert norm > 0
    engine.close()
    return errors, frozen, [note for note in notes if "compression errors" in note]


def test_errors_are_a_tensor_of_each_rank_and_fit_the_other_stage(tmp_path: Any) -> None:
    saved = run_ranks(_saves, 2, str(tmp_path), "OneBitAdam")
    assert saved[0] > 0
    for stage in (0, 1):
        for errors, frozen, notes in run_ranks(_loads, 2, str(tmp_path), "OneBitAdam", stage):
            assert errors > 0
            assert frozen
            assert not notes


def test_another_number_of_ranks_starts_with_errors_of_0_and_says_so(tmp_path: Any) -> None:
    run_ranks(_saves, 2, str(tmp_path), "OneBitAdam")
    for rank, (errors, frozen, notes) in enumerate(run_ranks(_loads, 3, str(tmp_path), "OneBitAdam", 0)):
        assert errors == 0.0
        assert frozen
        assert len(notes) == (rank == 0)
        assert all("of 2 ranks, which do not fit this run of 3 ranks" in note for note in notes)
