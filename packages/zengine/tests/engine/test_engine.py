"""Contract of the engine, at world size 1 unless a test says otherwise."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import zengine
from zengine import CallOrderError, Feature


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
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        engine.backward(loss)
    assert one_step(engine)


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

        def gradients_ready(self, partition):
            seen.append("gradients_ready")
            assert all(holder.tensor.grad is not None for holder in partition.holders)

        def step_end(self, report):
            seen.append(f"step_end {report.step}")

    engine, *_ = make()
    engine.add_feature(Spy())
    assert one_step(engine).grad_norm == 0.0
    assert seen[:4] == ["attach", "forward_begin", "forward_end", "backward_begin 0"]
    assert seen[4:] == ["step_begin", "gradients_ready", "step_end 1"]


def test_the_caller_may_decide_the_boundary():
    engine = make(gradient_accumulation_steps=2)[0]
    engine.set_gradient_accumulation_boundary(True)
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 3)))
        assert engine.step()
    engine.set_gradient_accumulation_boundary(False)
    for _ in range(3):
        engine.backward(engine(torch.ones(2, 3)))
        assert engine.step() is None


def test_a_caller_who_steps_at_boundaries_only_gets_the_same_counts_and_weights():
    managed, counted = (make(gradient_accumulation_steps=2)[0] for _ in range(2))
    for index in range(4):
        managed.set_gradient_accumulation_boundary(index % 2 == 1)
        managed.backward(managed(torch.ones(2, 3)))
        if index % 2 == 1:
            report = managed.step()
    for _ in range(2):
        expected = one_step(counted)
    assert report == expected
    assert managed.micro_steps == counted.micro_steps == 4
    assert all(torch.equal(a, b) for a, b in zip(managed.state_dict().values(), counted.state_dict().values()))


def test_an_exception_in_the_schedule_leaves_no_gradient_behind():
    engine, *_ = zengine.initialize(
        model=Net(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.0),
        lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau,
        config={"train_batch_size": 2, "gradient_clipping": 0},
    )
    clean = make()[0]
    with pytest.raises(TypeError, match="metrics"):
        one_step(engine)
    engine.backward(engine(torch.ones(2, 3)))
    assert engine.step(lr_kwargs={"metrics": 1.0}).grad_norm == one_step(clean).grad_norm
