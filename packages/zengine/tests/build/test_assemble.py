"""Parts that a plan gets. (tests/parity tests them together.)"""

from __future__ import annotations

import attrs
import pytest
import torch
from torch import nn

import zcomm
import zengine
import zoptim
import zprecision
from zengine.build.assemble import (
    Client,
    assemble,
    make_divisor,
    make_optimizer,
    make_overflow_policy,
    make_runner,
    make_scheduler,
)
from zengine.config import Facts, Plan, load, resolve
from zengine.engine.nonfinite import SkipNonFinite, apply_always
from zengine.engine.optimizer_calls import OptimizerCalls
from zengine.engine.parts import Numbers
from zengine.engine.runners import AutocastRunner, CastingRunner, RunnerWithCleanup, Sequential
from zengine.features import Balancing, DumpState, Unfreezing
from zpartition.activations import Checkpointing
from zpartition.experts import Router, RoutingRule

CPU = torch.device("cpu")


def numbers(scale: float = 4.0, remainder: float = 1.0) -> Numbers:
    """Of gradients whose norm is 8, scale and all."""
    return Numbers(is_finite=True, norm=8.0, scale=scale, drift=0.0, num_unused=0, loss=0.0, remainder=remainder)


def plan_of(**config: object) -> Plan:
    return resolve(load({"train_batch_size": 1, **config}), Facts(world_size=1, replicas=1))


def test_nothing_is_divided_when_there_is_neither_clipping_nor_scaling():
    assert make_divisor(plan_of(gradient_clipping=0), CPU)(numbers()) is None


@pytest.mark.parametrize(
    ("config", "divisor"),
    [
        ({"gradient_clipping": 0, "fp16": {"enabled": True}}, 4.0),
        ({"gradient_clipping": 1.0, "fp16": {"enabled": True}}, 8.0),
        ({"gradient_clipping": 100.0}, 4.0),
    ],
)
def test_the_divisor_undoes_the_scale_and_clips(config, divisor):
    assert make_divisor(plan_of(**config), CPU)(numbers()).item() == pytest.approx(divisor, rel=1e-5)


def test_what_weights_leave_is_part_of_the_divisor():
    assert make_divisor(plan_of(gradient_clipping=0), CPU)(numbers(remainder=0.5)).item() == 2.0
    clipped = make_divisor(plan_of(gradient_clipping=1.0), CPU)
    assert clipped(numbers(remainder=0.5)).item() == pytest.approx(clipped(numbers(scale=2.0)).item())


def test_gradients_of_float64_are_divided_by_a_float64_of_40_bits():
    divisor = make_divisor(plan_of(gradient_clipping=0.3), CPU, dtype=torch.float64)
    found = [divisor(attrs.evolve(numbers(scale=1.0), norm=1 / 3 + ulps * 2.0**-54)) for ulps in range(4)]
    assert {each.dtype for each in found} == {torch.float64}
    assert len({each.item() for each in found}) == 1, "norms that differ in their last bits divide alike"
    assert found[0].item() == pytest.approx((1 / 3 + 1e-6) / 0.3, rel=2.0**-41)
    assert found[0].item() != found[0].float().item()


def test_non_finite_updates_are_left_out_unless_bf16_says_otherwise():
    scaler = zprecision.NoScaling()
    assert isinstance(make_overflow_policy(plan_of(), scaler, None), SkipNonFinite)
    lax = plan_of(bf16={"enabled": True, "check_grad_overflow": False})
    assert make_overflow_policy(lax, scaler, None) is apply_always


def test_inputs_are_cast_only_when_asked():
    def runner(**config: object) -> object:
        return make_runner(plan_of(**config), nn.Sequential(nn.Linear(2, 2)), torch.device("cpu"), Checkpointing)

    assert not isinstance(runner(fp16={"enabled": True}), CastingRunner)
    assert isinstance(runner(fp16={"enabled": True, "auto_cast": True}), CastingRunner)
    assert runner(torch_autocast={"enabled": True}) == AutocastRunner("cpu", torch.bfloat16)
    kept = runner(bf16={"enabled": True}, data_types={"keep_in_fp32_modules": ["0"]})
    assert isinstance(kept, RunnerWithCleanup)
    assert kept.changes[0].names == ("",)  # all of the module
    assert isinstance(runner(data_types={"keep_in_fp32_modules": ["0"]}), Sequential)


def features_of(model: nn.Module, **config: object) -> list[type]:
    engine, *_ = zengine.initialize(model=model, config={"train_batch_size": 1, **config})
    found = [type(feature) for feature in engine._features]
    engine.close()
    return found


def test_a_feature_that_is_off_is_absent():
    frozen = nn.Linear(2, 2)
    frozen.bias.requires_grad_(False)
    assert features_of(nn.Linear(2, 2)) == []
    assert features_of(nn.Linear(2, 2), optimizer={"type": "SGD"}) == [OptimizerCalls]
    assert features_of(frozen) == [Unfreezing]
    assert features_of(frozen, dump_state=True) == [Unfreezing, DumpState]
    assert features_of(Router(4, 2, RoutingRule())) == []
    assert features_of(Router(4, 2, RoutingRule(balance_rate=0.1))) == [Balancing]


def test_the_optimizer_is_made_over_all_that_can_be_trained_unless_others_are_given():
    module = nn.Linear(2, 2)
    module.bias.requires_grad_(False)
    module.codes = nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False)
    plan = plan_of(optimizer={"type": "AdamW", "params": {"lr": 0.5}})
    made = make_optimizer(module, Client(), plan)
    assert isinstance(made, zoptim.AdamW)
    assert made.param_groups[0]["params"] == [module.weight, module.bias]
    given = make_optimizer(module, Client(parameters=[{"params": [module.weight], "lr": 0.25}]), plan)
    assert given.param_groups[0]["lr"] == 0.25
    assert make_optimizer(module, Client(), plan_of()) is None


def test_muon_is_told_names_so_that_embeddings_are_no_matrices():
    model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "body": nn.Linear(4, 4)})
    groups = [{"params": [p for p in model.parameters() if p.dim() > 1]}, {"params": [model["body"].bias], "lr": 0.5}]
    plan = plan_of(optimizer={"type": "Muon", "params": {"lr": 0.1}})
    for parameters in (None, groups):
        optimizer = make_optimizer(model, Client(parameters=parameters), plan)
        matrices = [p for group in optimizer.param_groups if group["use_muon"] for p in group["params"]]
        assert [id(p) for p in matrices] == [id(model["body"].weight)]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1, 0.5]


def test_parameters_that_are_no_parameters_of_the_module_get_no_names():
    model, stranger = nn.Linear(2, 2), nn.Parameter(torch.zeros(1))
    plan = plan_of(optimizer={"type": "SGD"})
    groups = [{"params": (p for p in [model.weight])}, {"params": stranger}]
    for parameters in ([model.weight, stranger], groups):
        optimizer = make_optimizer(model, Client(parameters=parameters), plan)
        members = [p for group in optimizer.param_groups for p in group["params"]]
        assert [id(p) for p in members] == [id(model.weight), id(stranger)]
        assert "param_names" not in optimizer.param_groups[0]  # torch takes names for all or for none


def test_a_schedule_is_an_instance_a_maker_or_a_name():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    ready = torch.optim.lr_scheduler.ConstantLR(optimizer)
    assert make_scheduler(optimizer, Client(scheduler=ready), plan_of()) is ready
    made = make_scheduler(optimizer, Client(scheduler=torch.optim.lr_scheduler.ConstantLR), plan_of())
    assert isinstance(made, torch.optim.lr_scheduler.ConstantLR)
    named = plan_of(scheduler={"type": "WarmupLR", "params": {}})
    assert isinstance(make_scheduler(optimizer, Client(), named), zoptim.WarmupLR)
    assert make_scheduler(optimizer, Client(), plan_of()) is None


def test_a_callers_optimizer_with_states_as_narrow_as_the_masters_is_warned_of(caplog):
    low = {"enabled": True, "bf16_master_weights_and_grads": True}
    kinds = {
        "torch": (torch.optim.AdamW, {}, low),
        "zoptim": (zoptim.AdamW, {"state_dtype": "fp32"}, low),
        "asked": (torch.optim.AdamW, {}, {**low, "bf16_optimizer_states": True}),
        "wide masters": (torch.optim.AdamW, {}, {"enabled": True}),
    }
    for name, (kind, options, section) in kinds.items():
        caplog.clear()
        model = nn.Linear(2, 2)
        optimizer = kind(model.parameters(), **options)
        zengine.initialize(model=model, optimizer=optimizer, config={"train_batch_size": 1, "bf16": section})[
            0
        ].close()
        assert ("AdamW keeps its states in the dtype of the masters, bfloat16" in caplog.text) == (name == "torch")


def test_a_callers_optimizer_with_states_in_float16_is_refused():
    config = {"train_batch_size": 1, "fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}
    for kind, options, is_fine in [
        (torch.optim.AdamW, {}, False),
        (zoptim.AdamW, {}, False),
        (zoptim.AdamW, {"state_dtype": "fp32"}, True),
        (torch.optim.SGD, {"lr": 0.1}, True),
    ]:
        model = nn.Linear(2, 2)
        optimizer = kind(model.parameters(), **options)
        if is_fine:
            zengine.initialize(model=model, optimizer=optimizer, config=config)[0].close()
        else:
            with pytest.raises(
                ValueError, match="AdamW would keep its states in float16, where second moments become 0"
            ):
                zengine.initialize(model=model, optimizer=optimizer, config=config)


def test_8_bit_layers_are_refused_by_the_device_and_leave_the_module_free(monkeypatch):
    plan = resolve(
        load({"train_batch_size": 1, "fp8": {"enabled": True}}), Facts(world_size=1, replicas=1, device_type="cuda")
    )
    layer = nn.Sequential(nn.Linear(16, 16))
    with pytest.raises(ValueError, match="8-bit products need an NVIDIA GPU"):
        make_runner(plan, layer, torch.device("cpu"), Checkpointing)
    monkeypatch.setattr("zprecision.float8.has_float8", lambda device: True)
    runner = make_runner(plan, layer, torch.device("cpu"), Checkpointing)
    assert type(layer[0]) is zprecision.Float8Linear
    assert runner.forward(layer, (torch.ones(2, 16),), {}).shape == (
        2,
        16,
    )  # torch multiplies 8-bit floats on a CPU too
    runner.close()
    assert type(layer[0]) is nn.Linear


def test_what_was_opened_is_closed_when_a_later_part_cannot_be_made(monkeypatch):
    opened: list[str] = []
    closed: list[str] = []

    class Part:
        def __init__(self, name: str) -> None:
            self.name = name
            opened.append(name)

        def close(self) -> None:
            closed.append(self.name)

    def fail(*_: object) -> None:
        raise OSError("islands")

    monkeypatch.setattr("zengine.build.assemble.make_telemetry", lambda *_, **__: Part("telemetry"))
    monkeypatch.setattr("zengine.build.assemble.make_saver", lambda *_: Part("saver"))
    monkeypatch.setattr(zprecision.Float8, "convert", lambda *_, **__: Part("float8"))
    monkeypatch.setattr(zprecision.Fp32Modules, "install", fail)
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "bf16": {"enabled": True},
        "fp8": {"enabled": True},
        "data_types": {"keep_in_fp32_modules": ["0"]},
    }
    plan = resolve(load(config), Facts(world_size=1, replicas=1, device_type="cuda"))
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with zcomm.init(environ={}, device="cpu") as world, pytest.raises(OSError, match="islands"):
        assemble(module, Client(), plan, world, zcomm.Groups.of(zcomm.Degrees(), 1, 0))
    assert opened == ["telemetry", "saver", "float8"]
    assert closed == opened[::-1]


def test_a_pattern_that_keeps_nothing_is_told(caplog):
    kept = plan_of(bf16={"enabled": True}, data_types={"keep_in_fp32_modules": ["0", "nrom"]})
    make_runner(kept, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.device("cpu"), Checkpointing).close()
    assert "'nrom' matches no parameter or buffer" in caplog.text
    assert "'0'" not in caplog.text
