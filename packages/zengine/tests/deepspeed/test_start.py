"""deepspeed.initialize: DeepSpeed's arguments, leaf modules said before, and the overflow flag."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import zengine
import zengine.deepspeed as deepspeed
from zcomm.testing import run_ranks
from zengine.checkpoint.recovery_script import is_url
from zengine.deepspeed import start
from zengine.engine.clock import Phase

CONFIG = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def test_it_takes_deepspeeds_arguments_and_returns_its_four_things():
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        model=model(), training_data=[torch.ones(3)] * 4, config_params=CONFIG, mesh_param=(1, 1), mpu=None
    )
    assert isinstance(engine, deepspeed.DeepSpeedEngine)
    assert engine.optimizer is optimizer
    assert (len(loader), scheduler) == (2, None)


def test_it_logs_the_version_as_transformers_tests_expect(caplog: pytest.LogCaptureFixture):
    with caplog.at_level("INFO", logger=deepspeed.utils.logger.name):
        deepspeed.initialize(model=model(), config=CONFIG)
    assert f"DeepSpeed info: version={deepspeed.__version__} (zengine {zengine.__version__})" in caplog.text


@pytest.mark.parametrize("stage", [0, 1])
def test_the_recovery_script_lies_beside_checkpoints_of_zero(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stage: int
):
    engine, *_ = deepspeed.initialize(model=model(), config={**CONFIG, "zero_optimization": {"stage": stage}})
    engine.save_checkpoint(str(tmp_path))
    assert (tmp_path / "zero_to_fp32.py").exists() == (stage > 0)
    with caplog.at_level("INFO", logger=deepspeed.utils.logger.name):
        engine._change_recovery_script_permissions(str(tmp_path / "nowhere/zero_to_fp32.py"))
    assert "nowhere/zero_to_fp32.py is not executable" in caplog.text
    engine.destroy()


def test_a_saved_checkpoint_stays_saved_where_the_recovery_script_cannot_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    engine, *_ = deepspeed.initialize(model=model(), config={**CONFIG, "zero_optimization": {"stage": 1}})
    (tmp_path / "zero_to_fp32.py").mkdir()
    with caplog.at_level("WARNING", logger=deepspeed.utils.logger.name):
        assert engine.save_checkpoint(str(tmp_path), tag="now")
    assert "zero_to_fp32.py could not be written beside the checkpoints" in caplog.text
    assert engine.load_checkpoint(str(tmp_path))[0].endswith("now")
    engine.destroy()


def test_a_bucket_is_no_folder_for_a_script():
    urls = ["s3://bucket/run", "gs://bucket", "memory://run"]
    assert [is_url(path) for path in [*urls, "runs/one", "/runs", Path("run")]] == [True] * 3 + [False] * 3


def test_it_needs_a_model():
    for given in ({}, {"model": None}):
        with pytest.raises(AssertionError, match="requires a model: pass model="):
            deepspeed.initialize(config=CONFIG, **given)  # type: ignore[arg-type]


def test_phases_are_timed_by_deepspeeds_names():
    engine, *_ = deepspeed.initialize(
        model=model(),
        config={"train_batch_size": 4, "gradient_accumulation_steps": 2, **CONFIG, "wall_clock_breakdown": True},
    )
    assert engine.get_wall_clock_timers() == {}
    assert engine.engine_timers.forward_timers == ["fwd_microstep", "fwd"]
    for _ in range(2):
        for is_last in (False, True):
            engine.backward(engine(torch.ones(2, 3)).sum())
            assert all(engine.timers(name).elapsed(reset=False) > 0 for name in ("fwd", "bwd", "bwd_inner"))
            assert bool(engine.step()) == is_last
        found = engine.get_wall_clock_timers()
        assert found.keys() == set(engine.engine_timers.active_timers())
        assert min(found[name] for name in ("fwd", "step", "bwd", "bwd_inner")) > 0
        assert found["bwd"] >= found["bwd_inner"]
        assert engine.timers("fwd").elapsed() == 0


def test_an_engine_has_the_config_as_deepspeeds_object():
    engine, *_ = deepspeed.initialize(model=model(), config={**CONFIG, "zero_optimization": {"stage": 2}})
    config = engine._config
    assert isinstance(config, deepspeed.DeepSpeedConfig)
    assert (config.zero_config.stage, config.train_batch_size, config.world_size) == (2, 2, 1)
    assert (config.optimizer_name, config._param_dict["optimizer"]["params"]) == ("sgd", {"lr": 0.1})
    assert (engine.engine_timers.active_timers(), engine.get_wall_clock_timers()) == ([], {})
    with pytest.raises(AssertionError, match="random-LTD is off"):
        engine.random_ltd_initialize()


def check_averages(stage: int) -> None:
    """Compare sums with means of the same gradients."""
    engine, *_ = deepspeed.initialize(model=model(), config={**CONFIG, "zero_optimization": {"stage": stage}})
    x = torch.full((2, 3), 1.0 + engine.global_rank)

    def step(operation: bool) -> float:
        engine.gradient_average = operation
        assert engine.gradient_average is operation
        engine.backward(engine(x).sum() * 1e-3)
        with pytest.raises(RuntimeError, match="change the averaging after step"):
            engine.gradient_average = not operation
        before = [param.detach().clone() for param in engine.module.parameters()]
        engine.step()
        return sum(float((a - b).abs().sum()) for a, b in zip(before, engine.module.parameters()))

    mean, total, again = step(True), step(False), step(True)
    assert total == pytest.approx(2 * mean, rel=1e-2)
    assert again == pytest.approx(mean, rel=1e-2)


@pytest.mark.parametrize("stage", [0, 2])
def test_gradients_become_sums_when_the_engine_is_told(stage: int):
    run_ranks(check_averages, 2, stage)


def check_evaluated_then_trained(stage: int) -> None:
    """Evaluate with an engine that is kept, train, and evaluate again, as TRL does."""
    given, x = model(), torch.ones(2, 3)
    expected = given(x).detach()
    alone = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
    first, *_ = deepspeed.initialize(model=given, config=alone)
    with torch.no_grad():
        assert torch.equal(first.eval()(x), expected)
    second, *_ = deepspeed.initialize(model=given, config={**CONFIG, "zero_optimization": {"stage": 3}})
    with torch.no_grad():
        assert torch.equal(first(x), expected)
    second.backward(second(x).sum())
    assert second.step()
    with torch.no_grad():
        assert torch.equal(first(x), second(x))
        assert not torch.equal(first(x), expected)
    with pytest.raises(ValueError, match="partitioned already"):
        zengine.initialize(model=given, config=CONFIG)
    first.destroy()
    assert all(hasattr(param, "ds_id") for param in given.parameters())
    second.destroy()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_module_that_was_evaluated_can_be_trained(stage: int):
    run_ranks(check_evaluated_then_trained, 2, stage)


def test_overflow_tells_whether_the_last_update_was_left_out():
    engine, optimizer, _, _ = deepspeed.initialize(model=model(), config=CONFIG)
    assert optimizer.overflow is False
    for value, expected in ((1.0, False), (float("inf"), True), (1.0, False)):
        engine.backward(engine(torch.ones(2, 3)).mean() * value)
        engine.step()
        assert optimizer.overflow is expected


def test_an_engine_without_an_optimizer_has_nothing_to_flag():
    engine, optimizer, _, _ = deepspeed.initialize(model=model(), config={"train_batch_size": 1})
    assert optimizer is None
    assert engine(torch.ones(1, 3)).shape == (1, 1)


@pytest.mark.parametrize("form", ["dict", "text", "file"])
def test_leaf_modules_that_were_named_before_reach_the_config_in_any_form(form: str, tmp_path: Path):
    net = model()
    deepspeed.utils.set_z3_leaf_modules_by_name(net, ["0"])
    config = {**CONFIG, "zero_optimization": {"stage": 3, "leaf_module": {"names": ["2"]}}}
    given: object = config
    if form != "dict":
        given = json.dumps(config)
    if form == "file":
        (tmp_path / "ds.json").write_text(str(given))
        given = tmp_path / "ds.json"
    engine = deepspeed.initialize(model=net, config=given)[0]
    assert engine.plan.leaf_modules["names"] == ("2", "0")
    assert config["zero_optimization"]["leaf_module"] == {"names": ["2"]}


def test_problems_of_a_file_are_told_with_their_lines_when_leaf_modules_were_named(tmp_path: Path):
    net = model()
    deepspeed.utils.set_z3_leaf_modules_by_name(net, ["0"])
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 2,\n "train_batch_size": 4,\n "gradient_clippin": 1}')
    with pytest.raises(zengine.ConfigError) as caught:
        deepspeed.initialize(model=net, config=str(path))
    assert f"{path}:3:2" in str(caught.value)
    assert "given twice, on lines 1 and 2" in str(caught.value)
    for bad in ({"zero_optimization": 3}, {"zero_optimization": {"leaf_module": {"names": 3}}}):
        with pytest.raises(zengine.ConfigError, match="zero_optimization"):
            deepspeed.initialize(model=net, config={"train_batch_size": 2, **bad})


def test_parallelism_that_is_not_there_is_refused_by_name():
    with pytest.raises(ValueError, match="sequence_parallel=2 does not hold"):
        deepspeed.initialize(model=model(), config=CONFIG, mesh_param=(1, 2))
    with pytest.raises(ValueError, match=r"mesh_param=\(3, 1\): 3 replicas do not divide 1 ranks"):
        deepspeed.initialize(model=model(), config=CONFIG, mesh_param=(3, 1))
    with pytest.raises(TypeError, match="got injection; allowed are model, tp_size, dtype, config, inputs"):
        deepspeed.tp_model_init(model(), tp_size=2, dtype=torch.bfloat16, injection=1)
    assert next(deepspeed.tp_model_init(model(), 1, torch.bfloat16).parameters()).dtype == torch.bfloat16


def test_two_configs_are_one_too_many_unless_they_are_equal():
    with pytest.raises(zengine.ConfigError, match="the config was given 2 times"):
        deepspeed.initialize(model=model(), config=CONFIG, config_params={**CONFIG, "gradient_clipping": 0.5})
    engine, *_ = deepspeed.initialize(model=model(), config=CONFIG, config_params=dict(CONFIG))
    engine.destroy()


def check_split() -> tuple[list[str], list[str], list[str]]:
    specs = {"layer_specs": [{"patterns": [r"0\..*"]}, {"patterns": [r"2\..*"], "partition_type": "row"}]}
    kinds = []
    for config, inputs in (
        ({"tensor_parallel": {"partition_config": specs}}, ()),
        (specs, ()),
        (None, (torch.ones(1, 3),)),
    ):
        net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
        split = deepspeed.tp_model_init(net, 2, torch.bfloat16, config, inputs=inputs)
        assert split is net
        assert net[0].weight.shape == (2, 3)
        kinds.append([f"{type(layer).__name__} {layer.weight.dtype}" for layer in (net[0], net[2])])
    return tuple(kinds)


def test_a_model_is_split_by_its_own_name_for_it():
    expected = ["ColumnLinear torch.bfloat16", "RowLinear torch.bfloat16"]
    assert run_ranks(check_split, 2) == [(expected, expected, expected)] * 2


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_untested_optimizers_are_rejected_if_the_config_says_so(kind):
    net = model()
    config = {"train_batch_size": 1, "zero_allow_untested_optimizer": False, "zero_optimization": {"stage": 1}}
    optimizer = kind(net.parameters(), lr=0.1)
    if kind is torch.optim.Adam:
        assert deepspeed.initialize(model=net, config=config, optimizer=optimizer)[1] is optimizer
    else:
        with pytest.raises(AssertionError, match="SGD is an untested ZeRO optimizer"):
            deepspeed.initialize(model=net, config=config, optimizer=optimizer)


def test_a_step_inside_no_sync_is_an_assertion_error_as_in_deepspeed():
    engine = deepspeed.initialize(model=model(), config=CONFIG)[0]
    with engine.no_sync():
        engine.backward(engine(torch.ones(2, 3)).mean())
        with pytest.raises(AssertionError, match=r"illegal to call Engine\.step"):
            engine.step()


def test_the_throughput_timer_counts_the_steps_of_the_engine():
    model = nn.Linear(2, 1)
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "optimizer": {"type": "Adam"}}
    engine = deepspeed.initialize(model=model, config=config)[0]
    for _ in range(8):
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
    engine.eval()
    engine(torch.ones(1, 2))
    timer = engine.tput_timer
    assert (timer.micro_step_count, timer.global_step_count, timer.batch_size) == (8, 4, 2)
    assert timer.avg_samples_per_sec() > 0
    timer.update_epoch_count()  # as DeepSpeed-Chat does
    assert (timer.epoch_count, timer.micro_step_count) == (1, 0)


def test_a_config_that_is_rejected_closes_no_engine():
    trained = model()
    judge, *_ = deepspeed.initialize(model=trained, config={"train_batch_size": 2})
    with pytest.raises(zengine.ConfigError, match="no_such_key"):
        deepspeed.initialize(model=trained, config={**CONFIG, "no_such_key": 1})
    assert judge.clock.phase is not Phase.CLOSED
    judge.close()


def test_an_engine_that_cannot_have_deepspeeds_names_leaves_the_module_free(monkeypatch: pytest.MonkeyPatch):
    trained = model()

    def fail(*_: object) -> None:
        raise OSError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(start, "mark_configured", fail)
        with pytest.raises(OSError, match="planted"):
            deepspeed.initialize(model=trained, config=CONFIG)
    engine, *_ = deepspeed.initialize(model=trained, config=CONFIG)
    engine.close()
