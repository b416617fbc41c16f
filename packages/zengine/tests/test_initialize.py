"""Arguments and results of `initialize`."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import zengine
import zengine.deepspeed
import zpartition
from zcomm.testing import run_ranks


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


def test_the_configs_schedule_without_an_optimizer_has_no_effect(caplog):
    """Transformers evaluates with the config of a training run, less its optimizer."""
    config = {"train_batch_size": 1, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}}
    assert zengine.initialize(model=Net(), config=config)[3] is None
    assert '"scheduler" section (WarmupLR) has no effect' in caplog.text


def test_the_same_model_cannot_have_two_engines_until_the_first_is_closed():
    model = Net()
    engine, *_ = make(model)
    with pytest.raises(ValueError, match=r"close\(\) the partition \(or the engine\)"):
        make(model)
    engine.close()
    make(model)[0].close()


def test_a_model_is_needed():
    with pytest.raises(TypeError, match=r"needs model=, a torch.nn.Module; got NoneType"):
        zengine.initialize(config={"train_batch_size": 1})


CONFIG = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


@pytest.mark.parametrize("start", [zengine.initialize, zengine.deepspeed.initialize])
@pytest.mark.parametrize("form", ["dict", "text", "path", "keyword"])
def test_model_and_config_may_be_given_by_position(start, form, tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    config = {"dict": CONFIG, "text": json.dumps(CONFIG), "path": tmp_path / "ds.json"}.get(form)
    model, plain = Net(), Net()
    engine = start(model, config)[0] if config is not None else start(model, config=CONFIG)[0]
    assert engine.module is model
    report = one_step(engine)
    plain(torch.ones(2, 3)).backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert report.applied
    torch.testing.assert_close(engine.state_dict(), plain.state_dict())


def test_other_arguments_by_position_say_how_to_call():
    optimizer = torch.optim.SGD(Net().parameters(), lr=0.1)
    with pytest.raises(
        TypeError, match=r"initialize\(Net, SGD\): the first two arguments are args and model.*config="
    ):
        zengine.initialize(Net(), optimizer, config=CONFIG)
    with pytest.raises(zengine.ConfigError, match=r"given 2 times \(the second argument is"):
        zengine.initialize(Net(), CONFIG, config=CONFIG)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"lr_scheduler": "cosine"}, r"initialize\(lr_scheduler='cosine'\): pass a schedule.*\"WarmupCosineLR\""),
        ({"optimizer": "adamw"}, r"initialize\(optimizer='adamw'\): pass a torch.optim.Optimizer.*\"AdamW\""),
    ],
)
def test_the_name_of_an_optimizer_or_a_schedule_is_an_error_at_once(monkeypatch, argument, message):
    monkeypatch.setattr("zcomm.init", lambda: pytest.fail("a process group was asked for"))
    with pytest.raises(TypeError, match=message):
        zengine.initialize(model=Net(), config=CONFIG, **argument)


class Signs(torch.optim.Optimizer):
    """Steps of a fixed size; its groups have no learning rate."""

    elementwise = True

    def __init__(self, params) -> None:
        super().__init__(params, {"size": 0.25})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param -= group["size"] * param.grad.sign()


def _without_lr() -> int:
    for stage in range(4):
        engine, optimizer, _, _ = zengine.initialize(
            model=Net(),
            optimizer=Signs,
            config={"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}},
        )
        plain = Net()
        signs = Signs(plain.parameters())
        for _ in range(3):
            assert one_step(engine).lr == (0.0,)
            plain(torch.ones(2, 3)).backward()
            signs.step()
            signs.zero_grad()
        torch.testing.assert_close(engine.state_dict(), plain.state_dict())
        assert engine.get_lr() == [0.0]
        with pytest.raises(ValueError, match=r"Signs has no learning rate in its parameter groups \[0\]"):
            engine.set_lr(0.1)
        assert "lr" not in optimizer.param_groups[0]
        engine.close()
    return 4


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_optimizer_without_a_learning_rate_trains(world_size):
    assert run_ranks(_without_lr, world_size) == [4] * world_size


def test_the_model_is_on_the_device_and_no_argument_leaves_it_elsewhere():
    model = Net()
    engine = zengine.initialize(model=model, config={"train_batch_size": 2})[0]
    assert {param.device for param in model.parameters()} == {engine.device}
    with pytest.raises(TypeError, match="dont_change_device"):  # an argument of DeepSpeed's class, not of initialize
        zengine.deepspeed.initialize(model=Net(), config=CONFIG, dont_change_device=True)


def test_dist_init_required_false_wants_a_group(monkeypatch):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    with pytest.raises(ValueError, match=r"but torch\.distributed has no default"):
        zengine.initialize(model=Net(), config={"train_batch_size": 1}, dist_init_required=False)


def test_a_config_mistake_is_found_before_any_process_group_exists(monkeypatch):
    monkeypatch.setattr("zcomm.init", lambda: pytest.fail("a process group was asked for"))
    with pytest.raises(zengine.ConfigError, match="Did you mean"):
        zengine.initialize(model=Net(), config={"train_batch_size": 1, "gradient_cliping": 1.0})


def test_an_optimizer_maker_must_return_an_optimizer():
    with pytest.raises(TypeError, match=r"optimizer= returned a list"):
        zengine.initialize(model=Net(), optimizer=lambda params: [], config={"train_batch_size": 1})


@pytest.mark.parametrize("bad", ["data", "schedule"])
def test_an_initialize_that_fails_leaves_the_model_free(bad):
    model, config = Net(), {"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    broken = {"training_data": [torch.ones(3)]} if bad == "data" else {"lr_scheduler": lambda optimizer: 1 / 0}
    with pytest.raises((ValueError, ZeroDivisionError)):
        zengine.initialize(model=model, config=config, **broken)
    engine, *_ = zengine.initialize(model=model, config=config)
    assert one_step(engine)


def _without_memory(deferred: bool, section: str) -> list[float]:
    torch.manual_seed(4)
    with zpartition.Init(enabled=deferred):
        model = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 12))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_unit_size": 300},
        **({"bf16": {"enabled": True}} if section else {}),
        **({"data_types": {"keep_in_fp32_modules": ["2."]}} if section == "bf16, last kept" else {}),
    }
    engine = zengine.initialize(model=model, config=config)[0]
    losses = []
    for step in range(4):
        inputs = torch.full((4, 12), 0.1 * step, dtype=next(model.parameters()).dtype)
        assert model[2].weight.dtype == (torch.bfloat16 if section == "bf16" else torch.float32)
        engine.backward(engine(inputs).float().square().mean())
        losses.append(engine.step().loss)
    engine.close()
    return losses


@pytest.mark.parametrize("section", ["", "bf16", "bf16, last kept"])
def test_a_model_without_memory_trains_like_one_that_was_built(section: str) -> None:
    expected = run_ranks(_without_memory, 2, False, section)
    assert run_ranks(_without_memory, 2, True, section) == expected
    assert len(set(expected[0])) == 4
