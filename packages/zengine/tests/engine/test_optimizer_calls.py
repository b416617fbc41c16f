"""The returned optimizer called in torch's style: every loop equals a plain torch loop."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zengine
from zcomm.testing import run_ranks
from zengine import CallOrderError
from zengine.testing import Regression, rank_batch, small_engine

ADAM = {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.1}}
STEPS = 4


def initialize(**config: Any) -> Any:
    base = {"train_micro_batch_size_per_gpu": 2, "optimizer": ADAM, "gradient_clipping": 0.5}
    return zengine.initialize(model=Regression(), config={**base, **config})


def num_ranks() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def batch_of(index: int, rank: int) -> Tensor:
    return torch.linspace(-1, 1 + index + rank, 6).view(2, 3)


def plain_weights(accumulation: int) -> list[Tensor]:
    """Of a torch loop in one process over the batches of all ranks, with AdamW and clipping."""
    model, count = Regression(), num_ranks() * accumulation
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    for step in range(STEPS):
        for micro in range(accumulation):
            for rank in range(num_ranks()):
                (model(batch_of(step * accumulation + micro, rank)) / count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in model.parameters()]


def weights(engine: zengine.Engine) -> list[Tensor]:
    return list(engine.state_dict().values())


def after_every_micro_step(engine: Any, optimizer: Any, accumulation: int) -> None:
    for index in range(STEPS * accumulation):
        engine.backward(engine(rank_batch(index)))
        optimizer.step()
        optimizer.zero_grad()


def after_the_last_micro_step(engine: Any, optimizer: Any, accumulation: int) -> None:
    for index in range(STEPS * accumulation):
        engine.backward(engine(rank_batch(index)))
        if (index + 1) % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()


def gradients_dropped_first(engine: Any, optimizer: Any, accumulation: int) -> None:
    for index in range(STEPS * accumulation):
        loss = engine(rank_batch(index))
        optimizer.zero_grad()
        engine.backward(loss)
        optimizer.step()


def with_a_closure(engine: Any, optimizer: Any, accumulation: int) -> None:
    for index in range(STEPS * accumulation):

        def closure(index: int = index) -> Tensor:
            optimizer.zero_grad()
            loss = engine(rank_batch(index))
            engine.backward(loss)
            return loss

        assert optimizer.step(closure).item() > 0


def scaled(engine: Any, optimizer: Any, accumulation: int) -> None:
    for index in range(STEPS * accumulation):
        engine.scale(engine(rank_batch(index))).backward()
        optimizer.step()
        optimizer.zero_grad()


def plain_backward(engine: Any, optimizer: Any, accumulation: int) -> None:
    for index in range(STEPS * accumulation):
        optimizer.zero_grad()
        engine(rank_batch(index)).backward()
        optimizer.step()


def past_the_engine(engine: Any, optimizer: Any, accumulation: int) -> None:
    """With the model that was given to `initialize`, as if nothing had happened to it."""
    for index in range(STEPS * accumulation):
        optimizer.zero_grad()
        engine.module(rank_batch(index)).backward()
        optimizer.step()


LOOPS: tuple[Callable[[Any, Any, int], None], ...] = (
    after_every_micro_step,
    after_the_last_micro_step,
    gradients_dropped_first,
    with_a_closure,
    scaled,
    plain_backward,
    past_the_engine,
)


def _equal_plain_torch(accumulation: int) -> int:
    wanted, count = plain_weights(accumulation), 0
    for stage in (0, 1, 2, 3):
        for loop in LOOPS:
            engine, optimizer, _, _ = initialize(
                gradient_accumulation_steps=accumulation, zero_optimization={"stage": stage}
            )
            loop(engine, optimizer, accumulation)
            assert engine.global_steps == engine.applied_steps == STEPS, (stage, loop.__name__)
            assert engine.global_samples == STEPS * accumulation * 2 * num_ranks()
            torch.testing.assert_close(weights(engine), wanted, rtol=1e-5, atol=1e-6)
            engine.close()
            count += 1
    return count


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("world_size", [1, 2])
def test_every_torch_style_loop_equals_plain_torch_at_every_stage(world_size, accumulation):
    assert run_ranks(_equal_plain_torch, world_size, accumulation) == [4 * len(LOOPS)] * world_size


@pytest.mark.parametrize(
    "section", [{"fp16": {"enabled": True, "initial_scale_power": 6}}, {"bf16": {"enabled": True}}]
)
def test_the_optimizers_step_scales_clips_and_skips_as_the_engines_does(section):
    def run(step_of: Callable[[Any, Any], Callable[[], object]]) -> tuple[Any, list[Tensor]]:
        engine, optimizer, _, _ = initialize(**section)
        for index in range(STEPS):
            loss = engine(rank_batch(index).to(next(engine.module.parameters()).dtype))
            engine.backward(loss * (float("inf") if index == 1 else 1.0))
            step_of(engine, optimizer)()
        return engine.last_report, weights(engine)

    assert run(lambda engine, optimizer: optimizer.step) == run_equal(run(lambda engine, optimizer: engine.step))


def run_equal(result: tuple[Any, list[Tensor]]) -> Any:
    """Compares reports and weights bit for bit."""

    class Equal:
        def __eq__(self, other: Any) -> bool:
            return other[0] == result[0] and all(torch.equal(a, b) for a, b in zip(other[1], result[1]))

        __hash__ = None  # type: ignore[assignment]

    return Equal()


@pytest.mark.parametrize("made_by", ["config", "torch"])
def test_the_schedule_stays_with_the_engines_step(made_by):
    model = Regression()
    theirs = torch.optim.SGD(model.parameters(), lr=1.0) if made_by == "torch" else None
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 1.0, "warmup_num_steps": 4, "warmup_type": "linear"}}
    engine, optimizer, _, scheduler = zengine.initialize(
        model=model,
        optimizer=theirs,
        lr_scheduler=theirs and torch.optim.lr_scheduler.ExponentialLR(theirs, 0.5),
        config={
            "train_micro_batch_size_per_gpu": 2,
            **({} if theirs else {"optimizer": {"type": "SGD", "params": {"lr": 1.0}}, "scheduler": schedule}),
        },
    )
    before = engine.get_lr()
    engine.backward(engine(rank_batch(0)))
    optimizer.step()
    assert engine.get_lr() == before
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's, of a schedule that steps before its optimizer
        scheduler.step()
        scheduler.step()
    assert engine.get_lr() != before
    after = engine.get_lr()
    engine.backward(engine(rank_batch(0)))
    engine.step()
    assert engine.get_lr() != after


@pytest.mark.parametrize("through", ["engine", "optimizer"])
def test_a_torch_schedule_made_over_the_returned_optimizer_works_without_a_warning(through):
    engine, optimizer, _, _ = initialize()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for index in range(2):
            engine.backward(engine(rank_batch(index)))
            (engine if through == "engine" else optimizer).step()
            schedule.step()
    assert engine.applied_steps == 2
    assert engine.get_lr() == [pytest.approx(0.05 / 4)]


def test_zero_grad_drops_the_gradients_of_a_step_that_has_just_begun():
    engine, optimizer, _, _ = initialize()
    engine.backward(engine(1000 * rank_batch(0)))
    optimizer.zero_grad()
    after_every_micro_step(engine, optimizer, 1)
    torch.testing.assert_close(weights(engine), plain_weights(1), rtol=1e-5, atol=1e-6)


def test_zero_grad_drops_what_another_backward_left_in_the_parameters():
    engine, optimizer, _, _ = initialize()
    engine.module(1000 * rank_batch(0)).backward()
    optimizer.zero_grad()
    assert all(param.grad is None for param in engine.module.parameters())
    after_every_micro_step(engine, optimizer, 1)
    torch.testing.assert_close(weights(engine), plain_weights(1), rtol=1e-5, atol=1e-6)


def test_zero_grad_in_the_middle_of_a_step_is_told_what_it_would_drop():
    engine, optimizer, _, _ = initialize(gradient_accumulation_steps=3)
    engine.backward(engine(rank_batch(0)))
    optimizer.step()
    optimizer.zero_grad()  # between two micro-steps: the engine keeps what it counts
    engine.backward(engine(rank_batch(1)))
    with pytest.raises(CallOrderError, match="would drop gradients of earlier micro-steps"):
        optimizer.zero_grad()


def test_a_step_after_neither_one_nor_all_micro_steps_is_told_how_many_the_config_asks_for():
    engine, optimizer, _, _ = initialize(gradient_accumulation_steps=3)
    for index in range(2):
        engine.backward(engine(rank_batch(index)))
    with pytest.raises(CallOrderError, match=r"after 2 micro-steps.*gradient_accumulation_steps = 3"):
        optimizer.step()
    engine.backward(engine(rank_batch(2)))
    optimizer.step()  # nothing was lost
    assert engine.applied_steps == 1


@pytest.mark.parametrize("past", [False, True], ids=["plain", "past"])
def test_a_step_after_backwards_that_may_be_any_number_of_micro_steps_raises(past):
    engine, optimizer, _, _ = initialize(gradient_accumulation_steps=2)
    for index in range(2):
        loss = engine.module(rank_batch(index)) if past else engine(rank_batch(index))
        engine.backward(loss) if past else loss.backward()
    with pytest.raises(CallOrderError, match=r"after 2 .*whose micro-steps it cannot count: call engine.step\(\)"):
        optimizer.step()
    assert engine.step() is None  # counts them as one


def test_several_losses_of_one_forward_are_one_micro_step():
    engine, optimizer, _, _ = initialize(gradient_accumulation_steps=2)
    for index in range(2):
        loss = engine(rank_batch(index))
        engine.backward(loss / 2, retain_graph=True)
        engine.backward(loss / 2)
        optimizer.step()
    assert engine.applied_steps == 1


def test_a_step_without_gradients_changes_nothing_and_says_so():
    engine, optimizer, _, _ = initialize()
    before = copy.deepcopy(weights(engine))
    with pytest.warns(UserWarning, match=r"optimizer\.step\(\) found no gradients.*engine\.backward\(loss\)"):
        optimizer.step()
    engine.backward(engine(rank_batch(0)))
    engine.step()
    trained = copy.deepcopy(weights(engine))
    with pytest.warns(UserWarning, match="found no gradients"):
        optimizer.step()
    assert not torch.equal(before[0], trained[0])
    assert all(torch.equal(a, b) for a, b in zip(trained, weights(engine)))
    assert engine.global_steps == 1


def test_a_plain_backward_that_misses_the_loss_scale_is_told_of_by_the_optimizer_too():
    engine, optimizer, _, _ = initialize(fp16={"enabled": True, "initial_scale_power": 4})
    engine(rank_batch(0).half()).backward()
    with pytest.raises(CallOrderError, match="the loss scale, 16 now"):
        optimizer.step()


def test_a_closed_engine_gives_the_optimizers_own_methods_back():
    engine, optimizer, _, _ = initialize()
    assert "step" in vars(optimizer)
    engine.close()
    assert "step" not in vars(optimizer)
    assert "zero_grad" not in vars(optimizer)


def test_the_optimizer_can_be_copied_and_its_state_dict_is_that_of_its_class(tmp_path):
    engine, optimizer, _, _ = initialize()
    after_every_micro_step(engine, optimizer, 1)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert set(optimizer.state_dict()) == {"state", "param_groups"}
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    twin = copy.deepcopy(optimizer)
    assert "step" not in vars(twin)  # a copy is its own: the engine knows nothing of it


def test_an_engine_without_an_optimizer_has_nothing_to_call():
    engine = zengine.initialize(model=Regression(), config={"train_micro_batch_size_per_gpu": 2})[0]
    assert engine.optimizer is None
    engine.close()


def test_the_engine_is_collected_with_its_optimizer_alive():
    import gc
    import weakref

    engine, optimizer = (lambda made: (weakref.ref(made[0]), made[1]))(initialize())
    gc.collect()
    assert engine() is None
    with pytest.raises(RuntimeError, match=r"engine .* was deleted"):
        optimizer.step()


def test_small_engines_optimizer_is_called_through_the_engine_as_well():
    engine = small_engine()
    engine.backward(engine(rank_batch(0)))
    engine.optimizer.step()
    assert engine.applied_steps == 1
