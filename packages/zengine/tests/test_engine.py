"""The engine's contract, at world size 1 unless a test says otherwise."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import zengine
from zcomm.testing import run_ranks
from zengine import CallOrderError, Feature, LossScaleExhausted


class Net(nn.Module):
    """A regression net with a method and an attribute of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(3, 3)
        self.tail = nn.Linear(3, 1)
        self.color = "blue"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tail(torch.tanh(self.body(x))).square().mean()

    def describe(self) -> str:
        return f"net of {self.color}"


def make(model: nn.Module | None = None, **config: object):
    base = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    return zengine.initialize(model=model or Net(), config={**base, **config})


def one_step(engine, x: torch.Tensor | None = None):
    report = None
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(torch.ones(2, 3) if x is None else x))
        report = engine.step()
    return report


def test_initialize_returns_the_four_things():
    data = [torch.full((3,), float(i)) for i in range(8)]
    engine, optimizer, loader, scheduler = zengine.initialize(
        model=Net(),
        training_data=data,
        config={
            "train_batch_size": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
        },
    )
    assert isinstance(engine, zengine.Engine)
    assert isinstance(engine, nn.Module)
    assert engine.optimizer is optimizer
    assert engine.lr_scheduler is scheduler
    assert engine.training_dataloader is loader
    assert [batch.shape for batch in loader] == [(2, 3)] * 4


def test_what_neither_the_caller_nor_the_config_gives_is_none():
    engine, optimizer, loader, scheduler = zengine.initialize(model=Net(), config={"train_batch_size": 1})
    assert (optimizer, loader, scheduler) == (None, None, None)
    engine.backward(engine(torch.ones(2, 3)))
    with pytest.raises(ValueError, match=r"step\(\) needs an optimizer, and this engine has none"):
        engine.step()


def test_it_is_a_module_that_stands_in_for_the_model():
    model = Net()
    engine, *_ = make(model)
    assert engine.module is model
    assert engine.train() is engine
    assert engine.eval() is engine
    assert not model.training
    assert engine.device == torch.device("cpu")
    assert list(engine.state_dict()) == list(model.state_dict())
    assert engine.describe() == "net of blue"


def test_an_unknown_attribute_names_engine_and_module():
    engine, *_ = make()
    with pytest.raises(AttributeError, match=r"neither the engine nor its module \(Net\) has an attribute 'colour'"):
        engine.colour  # noqa: B018


def test_load_state_dict_reaches_the_masters():
    source = Net()
    with torch.no_grad():
        source.body.weight.fill_(0.25)
    engine, *_ = make(bf16={"enabled": True})
    engine.load_state_dict(source.state_dict())
    one_step(engine, torch.zeros(2, 3, dtype=torch.bfloat16))
    torch.testing.assert_close(engine.module.body.weight.float(), torch.full((3, 3), 0.25))


def test_between_boundaries_step_returns_none_and_changes_nothing():
    engine, *_ = make(gradient_accumulation_steps=2)
    before = copy.deepcopy(engine.state_dict())
    loss = engine(torch.ones(2, 3))
    returned = engine.backward(loss)
    assert returned == pytest.approx(loss.item() / 2)
    assert not engine.is_gradient_accumulation_boundary()
    assert engine.step() is None
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.state_dict().items())
    assert engine.is_gradient_accumulation_boundary()
    engine.backward(engine(torch.ones(2, 3)))
    report = engine.step()
    assert report
    assert (report.step, report.applied_steps, report.samples) == (1, 1, 4)
    assert report.loss == pytest.approx(loss.item())
    assert any(not torch.equal(before[name], tensor) for name, tensor in engine.state_dict().items())


def test_the_report_explains_the_step():
    model, engine = Net(), make(gradient_clipping=0.01)[0]
    model(torch.ones(2, 3)).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    report = one_step(engine)
    assert (report.applied, report.reason, report.loss_scale, report.lr) == (True, "", 1.0, (0.1,))
    assert report.grad_norm == pytest.approx(norm, rel=1e-6)
    assert engine.get_global_grad_norm() == report.grad_norm
    assert engine.was_step_applied()
    assert engine.last_report is report


def test_wrong_orders_are_refused_and_the_engine_goes_on():
    engine, *_ = make()
    with pytest.raises(CallOrderError, match=r"step\(\) called in phase IDLE"):
        engine.step()
    loss = engine(torch.ones(2, 3))
    with pytest.raises(CallOrderError, match=r"step\(\) called in phase FORWARD"):
        engine.step()
    engine.backward(loss)
    assert engine.step()
    with pytest.raises(CallOrderError, match=r"backward\(\) called in phase IDLE"):
        engine.backward(loss)


def test_a_bad_loss_drops_the_step_and_the_engine_goes_on():
    engine, *_ = make()
    engine(torch.ones(2, 3))
    with pytest.raises(ValueError, match="scalar loss"):
        engine.backward(torch.ones(2, requires_grad=True))
    assert one_step(engine)


def test_after_an_exception_in_backward_a_clean_step_equals_one_that_never_failed():
    def run(fail: bool) -> dict[str, torch.Tensor]:
        engine, *_ = make(gradient_accumulation_steps=2, zero_optimization={"stage": 2})
        one_step(engine)
        if fail:
            engine.backward(engine(torch.ones(2, 3)))
            engine.step()
            loss = engine(torch.full((2, 3), 9.0))
            hook = engine.module.body.weight.register_hook(lambda _grad: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.backward(loss)
            hook.remove()
        one_step(engine)
        assert engine.global_steps == 2
        return dict(engine.state_dict())

    failed, clean = run(True), run(False)
    assert all(torch.equal(failed[name], clean[name]) for name in clean)


def test_evaluation_needs_no_backward_and_leaves_no_trace():
    engine, *_ = make()
    engine.eval()
    with torch.no_grad():
        engine(torch.ones(2, 3))
    engine.train()
    assert one_step(engine).samples == 2


def test_a_loss_of_another_graph_is_told():
    engine, *_ = make()
    engine(torch.ones(2, 3))
    other = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="reaches no parameter of this engine"):
        engine.backward(other(torch.ones(1)).sum())


# -- loss scaling: the two defects that others shipped -------------------------------------------


class Weight(nn.Module):
    """loss = 2 w: the gradient is 2 everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, factor: float = 1.0) -> torch.Tensor:
        return (2.0 * self.w).sum() * factor


def scaled_engine(stage: int, **fp16: object):
    return make(Weight(), fp16={"enabled": True, **fp16}, zero_optimization={"stage": stage})[0]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_fp16_multiplies_the_loss_at_every_stage(stage):
    engine = scaled_engine(stage, initial_scale_power=10)
    engine.backward(engine())
    engine.step()
    torch.testing.assert_close(engine.module.w.float(), torch.full((4,), 0.8), rtol=1e-3, atol=0)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_update_at_which_the_scale_doubles_is_not_half_size(stage):
    engine = scaled_engine(stage, initial_scale_power=4, loss_scale_window=2)
    updates, scales = [], []
    for _ in range(8):
        before = engine.module.w.float().clone()
        engine.backward(engine())
        report = engine.step()
        updates.append((before - engine.module.w.float()).mean().item())
        scales.append(report.loss_scale)
        assert report.grad_norm == pytest.approx(4.0)
    assert len(set(scales)) > 1
    assert updates == pytest.approx([0.2] * 8, rel=2e-2)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_an_overflow_skips_the_update_says_where_and_counts(stage):
    engine = scaled_engine(stage, initial_scale_power=4, hysteresis=1)
    engine.backward(engine())
    engine.step()
    before = copy.deepcopy(engine.state_dict())
    engine.backward(engine(float("inf")))
    report = engine.step()
    assert not report
    assert report.reason == "gradient of w is inf (step 2, loss scale 16): step skipped, scale now 8"
    assert (report.step, report.applied_steps, report.skipped_steps) == (2, 1, 1)
    assert not engine.was_step_applied()
    assert torch.equal(before["w"], engine.state_dict()["w"])
    engine.backward(engine())
    assert engine.step()


def test_nan_gradients_are_skipped_in_fp32_too():
    engine = make(Weight())[0]
    engine.backward(engine(float("nan")))
    report = engine.step()
    assert report.reason == "gradient of w is nan (step 1, loss scale 1): step skipped"
    assert torch.equal(engine.module.w, torch.ones(4))


def test_bf16_applies_whatever_comes_when_told_not_to_check():
    engine = make(Weight(), bf16={"enabled": True, "check_grad_overflow": False})[0]
    engine.backward(engine(float("nan")))
    assert engine.step()
    assert engine.module.w.isnan().all()


def test_a_scale_at_its_floor_that_still_overflows_ends_the_run_with_the_parameter():
    engine = scaled_engine(0, initial_scale_power=0, hysteresis=1)
    engine.backward(engine(float("inf")))
    with pytest.raises(LossScaleExhausted, match="gradient of w is inf in step 1, with the loss scale at its floor"):
        engine.step()


def test_the_schedule_moves_with_applied_updates_only():
    engine = make(
        Weight(),
        fp16={"enabled": True, "initial_scale_power": 4},
        scheduler={
            "type": "WarmupLR",
            "params": {"warmup_max_lr": 1.0, "warmup_num_steps": 4, "warmup_type": "linear"},
        },
    )[0]
    rates = []
    for factor in (1.0, 1.0, float("inf"), 1.0, 1.0):
        engine.backward(engine(factor))
        rates.append(engine.step().lr[0])
    assert rates == pytest.approx([0.0, 0.0, 0.25, 0.25, 0.5])


# -- what callers bring --------------------------------------------------------------------------


def test_optimizer_and_schedule_may_be_callables_or_instances():
    model = Net()
    engine, optimizer, _, scheduler = zengine.initialize(
        model=model,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        lr_scheduler=lambda opt: torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5),
        config={"train_batch_size": 1},
    )
    assert isinstance(optimizer, torch.optim.SGD)
    rates = [one_step(engine).lr[0] for _ in range(3)]
    assert rates == pytest.approx([0.1, 0.05, 0.025])
    assert scheduler.last_epoch == 3
    engine.close()
    instance = torch.optim.SGD(model.parameters(), lr=0.5)
    assert zengine.initialize(model=model, optimizer=instance, config={"train_batch_size": 1})[1] is instance


def test_a_callers_optimizer_wins_over_the_config_with_a_warning(caplog):
    model = Net()
    mine = torch.optim.SGD(model.parameters(), lr=0.5)
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    assert zengine.initialize(model=model, optimizer=mine, config=config)[1] is mine
    assert '"optimizer" section (AdamW) is not used' in caplog.text


def test_a_schedule_without_an_optimizer_is_refused():
    with pytest.raises(ValueError, match="needs an optimizer"):
        zengine.initialize(model=Net(), lr_scheduler=lambda opt: None, config={"train_batch_size": 1})


def test_the_same_model_cannot_have_two_engines_until_the_first_is_closed():
    model = Net()
    engine, *_ = make(model)
    with pytest.raises(ValueError, match=r"close\(\) the partition \(or the engine\)"):
        make(model)
    engine.close()
    make(model)[0].close()


def test_two_engines_in_one_process_do_not_know_each_other():
    first, second = make()[0], make(zero_optimization={"stage": 2})[0]
    alone = make()[0]
    for _ in range(3):
        loss = first(torch.ones(2, 3))
        one_step(second)
        first.backward(loss)
        first.step()
        one_step(alone)
    assert all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), alone.state_dict().values()))


def test_a_closed_engine_leaves_no_hook_and_dies():
    model = Net()
    engine, *_ = make(model)
    one_step(engine)
    engine.close()
    engine.destroy()
    with pytest.raises(CallOrderError, match="the engine is closed"):
        engine(torch.ones(2, 3))
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    dead = weakref.ref(engine)
    del engine
    gc.collect()
    assert dead() is None


def test_features_see_every_phase_in_order():
    seen: list[str] = []

    class Spy(Feature):
        def attach(self, engine):
            seen.append("attach")

        def forward_begin(self, args, kwargs):
            seen.append("forward_begin")
            return (args[0] * 2, *args[1:]), kwargs

        def forward_end(self, output):
            seen.append("forward_end")
            return output

        def backward_begin(self, micro, loss):
            seen.append(f"backward_begin {micro.index}")
            return loss * 0

        def step_begin(self):
            seen.append("step_begin")

        def step_end(self, report):
            seen.append(f"step_end {report.step}")

    engine, *_ = make()
    engine.add_feature(Spy())
    assert one_step(engine).grad_norm == 0.0
    assert seen == ["attach", "forward_begin", "forward_end", "backward_begin 0", "step_begin", "step_end 1"]


def test_dump_state_prints_the_plan_with_origins_and_the_bytes(capsys):
    make(dump_state=True)
    printed = capsys.readouterr().out
    assert "gradient_clipping" in printed
    assert "parameters: " in printed


def test_fp16_auto_cast_casts_floating_inputs():
    engine = make(fp16={"enabled": True, "auto_cast": True})[0]
    assert engine(torch.ones(2, 3)).dtype == torch.float16


def test_the_caller_may_decide_the_boundary():
    engine = make(gradient_accumulation_steps=2)[0]
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(engine(torch.ones(2, 3)))
    assert engine.step()
    engine.set_gradient_accumulation_boundary(False)
    for _ in range(3):
        engine.backward(engine(torch.ones(2, 3)))
        assert engine.step() is None


def _nan_on_rank_1(stage: int) -> str:
    import zcomm

    engine = make(Weight(), zero_optimization={"stage": stage})[0]
    engine.backward(engine(float("nan") if zcomm.group_rank() == 1 else 1.0))
    report = engine.step()
    assert torch.equal(engine.module.w, torch.ones(4))
    return report.reason


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_all_ranks_decide_alike_when_one_has_a_nan(stage):
    assert run_ranks(_nan_on_rank_1, 2, stage) == ["gradient of w is nan (step 1, loss scale 1): step skipped"] * 2
