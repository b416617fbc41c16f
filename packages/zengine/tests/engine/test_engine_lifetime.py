"""Lifetime of engines: close removes everything, several coexist, and a failed one harms no other."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import zengine
from zengine import Feature
from zengine.features import CountFlops


def net(width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))


def make(model: nn.Module | None = None, **config: object) -> zengine.Engine:
    base = {"train_batch_size": 2, "gradient_clipping": 0, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    return zengine.initialize(model=model or net(), config={**base, **config})[0]


def step(engine: zengine.Engine) -> zengine.StepReport | None:
    dtype = next(engine.module.parameters()).dtype
    engine.backward(engine(torch.ones(2, 3, dtype=dtype)).square().mean())
    return engine.step()


def num_hooks(model: nn.Module) -> int:
    """Hooks of torch on modules and parameters."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")
    kinds += ("_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
    on_modules = sum(len(getattr(module, kind, ())) for module in model.modules() for kind in kinds)
    kinds = ("_post_accumulate_grad_hooks", "_backward_hooks")
    return on_modules + sum(len(getattr(param, kind, None) or ()) for param in model.parameters() for kind in kinds)


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


CONFIGS = [
    {"zero_optimization": {"stage": 0}},
    {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "disable_python_gc": True},
    {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
]


@pytest.mark.parametrize("config", CONFIGS)
def test_after_close_no_hook_and_no_state_is_left(config):
    model = net()
    engine = make(model, **config)
    step(engine)
    engine.compile(backend="eager")
    storages = [weakref.ref(storage) for storage in engine.parts.partition.storages]
    parts, optimizer = weakref.ref(engine.parts), weakref.ref(engine.optimizer)
    engine.close()
    dead = weakref.ref(engine)
    del engine
    gc.collect()
    assert num_hooks(model) == 0
    assert [dead(), parts(), optimizer(), *(storage() for storage in storages)] == [None] * (3 + len(storages))
    assert all(type(module._parameters) is dict and "forward" not in vars(module) for module in model.modules())
    assert model(torch.ones(2, 3, dtype=next(model.parameters()).dtype)).isfinite().all()
    step(make(model))  # free for another one


def test_thirty_engines_one_after_the_other_take_no_more_memory_than_ten():
    model, sizes = net(width=6_000), []  # 30 thousand parameters: an engine that stays is half a MB
    for index in range(30):
        with make(model, **CONFIGS[index % 2 * 2]) as engine:
            step(engine)
        del engine
        if index % 10 == 9:
            gc.collect()
            sizes.append(resident_bytes())
    assert sizes[2] - sizes[0] < 4e6  # twenty that stay would be 10


def test_a_with_block_closes_also_after_an_exception():
    def fail(engine: zengine.Engine) -> None:
        with engine:
            step(engine)
            raise ZeroDivisionError

    engine = make()
    with pytest.raises(ZeroDivisionError):
        fail(engine)
    assert num_hooks(engine.module) == 0


def test_whatever_fails_in_close_everything_is_given_back():
    class Fails(Feature):
        def close(self):
            raise OSError("the disk is full")

    engine = make()
    engine.add_feature(Fails())
    with pytest.raises(OSError, match="the disk is full"):
        engine.close()
    assert num_hooks(engine.module) == 0
    engine.close()


def test_an_optimizer_stays_with_the_engine_it_was_given_to():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zengine.initialize(model=model, optimizer=optimizer, config={"train_batch_size": 2})[0].close()
    with pytest.raises(ValueError, match=r"partitioned before keeps those shards.*create a new one"):
        zengine.initialize(model=model, optimizer=optimizer, config={"train_batch_size": 2})


WATCHED = {"bench_steps": 3, "timers": {"throughput": {"count_flops_at": 1}}}  # the first step is looked into


def test_an_engine_that_closes_in_the_middle_of_its_first_step_looks_no_more():
    engine = make(**WATCHED)
    (counting,) = (feature for feature in engine._features if isinstance(feature, CountFlops))
    engine(torch.ones(2, 3))
    seen = counting.counter.get_total_flops()
    engine.close()
    assert num_hooks(engine.module) == 0
    engine.module(torch.ones(2, 3))
    assert seen == counting.counter.get_total_flops() > 0


@pytest.mark.parametrize("stage", [1, 3])
def test_a_feature_that_does_not_fit_the_model_leaves_nothing_behind(stage):
    limits = {"min_value": 8, "max_value": 64, "schedule_type": "fixed_linear"}
    drop = {
        "enabled": True, "total_layer_num": 12, "random_ltd_layer_num": 2, "random_ltd_layer_id": [1, 2],
        "random_ltd_schedule": {**limits, "schedule_config": {"seq_per_step": 8, "require_steps": 4}},
    }  # fmt: skip
    routing = {"data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": drop}}}
    zero = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    model = net()
    with pytest.raises(ValueError, match="total_layer_num = 12"):
        make(model, **routing, **zero, disable_python_gc=True)
    assert gc.isenabled()
    assert num_hooks(model) == 0
    with make(net() if stage == 3 else model, **zero) as engine:
        assert step(engine)


# -- side by side --------------------------------------------------------------------------------


class Critic(nn.Module):
    """Scores pairs of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.body(x))


def gan(generator, critic, generator_step, critic_step) -> list[torch.Tensor]:
    """Two rounds of an adversarial loop, each with a step of both; the weights after it."""
    noise = torch.linspace(-1, 1, 6).view(2, 3)
    for _ in range(2):
        fake = generator(noise)
        generator_step((1 - critic(fake)).square().mean())
        critic_step(critic(fake.detach()).square().mean() + (1 - critic(torch.ones(2, 1))).square().mean())
    return [param.detach().clone() for each in (generator, critic) for param in each.parameters()]


def test_a_gan_of_two_engines_trains_like_plain_torch():
    torch.manual_seed(1)
    models = net(), Critic()
    plain = copy.deepcopy(models)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in plain]

    def plain_step(index: int):
        def run(loss: torch.Tensor) -> None:
            for each in optimizers:
                each.zero_grad()
            loss.backward()
            optimizers[index].step()

        return run

    wanted = gan(*plain, plain_step(0), plain_step(1))
    generator = make(models[0], zero_optimization={"stage": 2})
    critic = make(models[1], zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 0})

    def engine_step(engine: zengine.Engine):
        def run(loss: torch.Tensor) -> None:
            engine.zero_grad()
            engine.backward(loss)
            assert engine.step()

        return run

    gan(generator, critic, engine_step(generator), engine_step(critic))
    generator.close()
    critic.close()
    found = [param for each in (generator, critic) for param in each.module.parameters()]
    torch.testing.assert_close([param.detach() for param in found], wanted)


def test_a_student_learns_from_a_teacher_that_has_no_optimizer():
    config = {"train_batch_size": 2, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    teacher = zengine.initialize(model=net(width=16), config=config)[0].eval()
    student = make(zero_optimization={"stage": 1})
    before = copy.deepcopy(teacher.state_dict())
    losses = []
    for _ in range(5):
        x = torch.ones(2, 3)
        with torch.no_grad():
            target = teacher(x.bfloat16()).float()
        student.backward(nn.functional.mse_loss(student(x), target))
        losses.append(student.step().loss)
    assert losses[-1] < losses[0]
    assert teacher.optimizer is None
    assert all(torch.equal(before[name], value) for name, value in teacher.state_dict().items())
    teacher.backward(teacher(torch.ones(2, 3).bfloat16()).sum())
    with pytest.raises(ValueError, match="step\\(\\) needs an optimizer"):
        teacher.step()


def test_a_failure_of_one_engine_does_not_touch_the_other():
    failing = make(zero_optimization={"stage": 2})
    other, alone = (make(fp16={"enabled": True}) for _ in range(2))
    hook = failing.module[0].weight.register_hook(lambda _grad: 1 / 0)
    for _ in range(2):
        loss = failing(torch.ones(2, 3)).sum()
        with pytest.raises(ZeroDivisionError):
            failing.backward(loss)
        assert step(other) == step(alone)
    hook.remove()
    failing.close()
    assert step(other) == step(alone)
    assert all(torch.equal(a, b) for a, b in zip(other.state_dict().values(), alone.state_dict().values()))
