"""Errors of saving and loading. (tests/recovery tests exact resumption.)"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
import torch
from torch import nn

import zckpt
import zcomm
import zengine
import zoptim
from zcomm.testing import run_ranks

ADAMW = {"type": "AdamW", "params": {"lr": 0.1}}


def make(model: nn.Module | None = None, **config: object) -> zengine.Engine:
    base = {"train_micro_batch_size_per_gpu": 2, "optimizer": ADAMW}
    return zengine.initialize(model=model or nn.Linear(3, 2), config={**base, **config})[0]


def one_step(engine: zengine.Engine) -> zengine.Engine:
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(torch.ones(2, 3)).square().mean())
        engine.step()
    return engine


def test_client_state_that_is_no_data_is_refused_with_its_place(tmp_path):
    with pytest.raises(TypeError, match=r"client_state\.best is a object"):
        make().save_checkpoint(tmp_path, client_state={"best": object()})
    assert not any(tmp_path.iterdir())


def test_client_state_comes_back_clean(tmp_path):
    state = {"epoch": 3, "best": float("inf"), "shape": (2, 3), "seen": {1: "a"}}
    make().save_checkpoint(tmp_path, client_state=state)
    path, back = make().load_checkpoint(tmp_path)
    assert back == state
    assert Path(path) == tmp_path / "global_step0"


@pytest.mark.parametrize("background", [False, True])
def test_tensors_in_client_state_come_back(tmp_path, background):
    average = {"weight": torch.arange(6.0).view(2, 3).t(), "steps": torch.tensor(7)}
    engine = make(checkpoint={"async_save": background})
    engine.save_checkpoint(tmp_path, client_state={"average": average, "metrics": {"classes": torch.ones(2)}})
    average["weight"] = average["weight"] * 1.0
    engine.wait_for_checkpoint()
    assert zckpt.find(tmp_path).objects["metrics"] == {}
    found = [make().load_checkpoint(tmp_path)[1]] + ([engine.restore_from_memory()] if background else [])
    for each in found:
        assert each["average"]["weight"].equal(average["weight"])
        assert each["average"]["steps"] == 7


def test_old_checkpoints_go_as_the_config_says(tmp_path):
    """The best is judged by client_state["metrics"]; what is no number is no metric."""
    engine = make(checkpoint={"keep": {"last": 1, "best": "loss"}})
    for step, loss in ((1, 3.0), (2, torch.tensor(1.0)), (3, float("nan")), (4, 2.0)):
        one_step(engine)
        engine.save_checkpoint(tmp_path, client_state={"metrics": {"loss": loss, "note": "x"}})
        assert zckpt.find(tmp_path).step == step
    assert [seen.step for seen in zckpt.list_checkpoints(tmp_path)] == [4, 2]
    assert zckpt.find(tmp_path, "global_step2").objects["metrics"] == {"loss": 1.0}


def test_a_url_is_a_place_too():
    url = "memory://zengine-checkpointing/run"
    engine = one_step(make())
    engine.save_checkpoint(url)
    other = make()
    path, _ = other.load_checkpoint(url)
    assert path == "memory:/zengine-checkpointing/run/global_step1"
    assert torch.equal(other.module.weight, engine.module.weight)


SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


@pytest.mark.parametrize(
    ("other", "config", "message"),
    [
        (nn.Sequential(nn.Linear(3, 2)), {}, r"2 tensors are missing in it \(0\.bias, 0\.weight\), 2 are"),
        (nn.Linear(3, 4), {}, r"weight"),
        (nn.Linear(3, 2), SGD, r"holds the state of AdamW, and this engine's optimizer is SGD"),
    ],
)
def test_another_model_or_optimizer_is_named_and_nothing_is_loaded(tmp_path, other, config, message):
    one_step(make()).save_checkpoint(tmp_path)
    engine = make(other, **config)
    before = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
    with pytest.raises(zckpt.CheckpointMismatch, match=message):
        engine.load_checkpoint(tmp_path)
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.state_dict().items())


def test_a_checkpoint_without_optimizer_state_is_an_error_unless_asked_for(tmp_path):
    bare = zengine.initialize(model=nn.Linear(3, 2), config={"train_batch_size": 1})[0]
    bare.save_checkpoint(tmp_path)
    with pytest.raises(zckpt.CheckpointMismatch, match=r"holds no optimizer state.*load_optimizer_states=False"):
        make().load_checkpoint(tmp_path)
    engine = make()
    engine.load_checkpoint(tmp_path, load_optimizer_states=False)
    assert torch.equal(engine.module.weight, bare.module.weight)


def test_an_optimizer_without_state_of_its_own_resumes(tmp_path):
    config = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine = one_step(make(**config))
    engine.save_checkpoint(tmp_path)
    other = make(**config)
    other.load_checkpoint(tmp_path)
    assert one_step(engine).last_report == one_step(other).last_report


def test_the_state_format_is_the_runs_and_everything_else_the_checkpoints(tmp_path):
    def build(**params: object) -> zengine.Engine:
        torch.manual_seed(0)
        return make(optimizer={"type": "SGD", "params": {"lr": 0.1, **params}})

    engine = one_step(build(momentum=0.9))
    engine.save_checkpoint(tmp_path)
    other = build(state_dtype="bf16")  # has no momentum, until the checkpoint says so
    other.load_checkpoint(tmp_path)
    (group,) = other.optimizer.param_groups
    assert (group["momentum"], group["state_dtype"]) == (0.9, "bf16")
    (state,) = other.optimizer.state.values()
    assert state["momentum_buffer"].dtype is torch.bfloat16
    assert state["momentum_buffer"].any()
    assert one_step(other).last_report.loss == pytest.approx(one_step(engine).last_report.loss, rel=1e-2)


def test_a_split_master_is_refused_beside_masters_of_the_engine():
    model = nn.Linear(3, 2).bfloat16()
    optimizer = zoptim.AdamW(model.parameters(), split_master=True)
    with pytest.raises(ValueError, match=r"split_master=True .*keeps fp32 masters.* Leave split_master out"):
        zengine.initialize(
            model=model, optimizer=optimizer, config={"train_batch_size": 2, "bf16": {"enabled": True}}
        )


def test_nothing_there_says_so(tmp_path):
    with pytest.raises(zckpt.CheckpointNotFound, match=str(tmp_path)):
        make().load_checkpoint(tmp_path / "runs")


def test_hyperparameters_and_tensor_learning_rates_come_back(tmp_path):
    def build() -> tuple[zengine.Engine, torch.optim.Optimizer]:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5), betas=(0.8, 0.9))
        return zengine.initialize(model=model, optimizer=optimizer, config={"train_batch_size": 2})[:2]

    engine, optimizer = build()
    optimizer.param_groups[0]["lr"].fill_(0.125)
    optimizer.param_groups[0]["betas"] = (0.7, 0.75)
    one_step(engine).save_checkpoint(tmp_path)
    other, restored = build()
    lr = restored.param_groups[0]["lr"]
    other.load_checkpoint(tmp_path)
    assert restored.param_groups[0]["lr"] is lr
    assert lr.item() == 0.125
    assert restored.param_groups[0]["betas"] == (0.7, 0.75)


def test_a_load_forgets_the_gradients_of_an_unfinished_step(tmp_path):
    def after(pending: bool) -> zengine.StepReport:
        engine = make(gradient_accumulation_steps=2)
        engine.load_checkpoint(tmp_path)
        if pending:
            engine.backward(engine(torch.full((2, 3), 9.0)).mean())
            engine.step()
            engine.load_checkpoint(tmp_path)
        return one_step(engine).last_report

    one_step(make(gradient_accumulation_steps=2)).save_checkpoint(tmp_path)
    assert after(pending=True) == after(pending=False)


def test_a_load_that_fails_leaves_optimizer_scaler_and_schedule_as_they_were(tmp_path):
    config = {"fp16": {"enabled": True, "initial_scale_power": 4}, "scheduler": {"type": "WarmupLR", "params": {}}}

    def build() -> zengine.Engine:
        torch.manual_seed(0)
        return make(nn.Linear(3, 2), **config)

    def step(engine: zengine.Engine) -> zengine.Engine:
        engine.backward(engine(torch.ones(2, 3, dtype=torch.float16)).float().square().mean())
        engine.step()
        return engine

    saved = Path(step(build()).save_checkpoint(tmp_path))
    data = next(saved.glob("*.safetensors"))
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    engine, twin = step(step(build())), step(step(build()))
    with pytest.raises(zckpt.CheckpointCorrupt):
        engine.load_checkpoint(tmp_path)
    assert step(engine).last_report == step(twin).last_report
    assert all(torch.equal(a, b) for a, b in zip(engine.state_dict().values(), twin.state_dict().values()))


def test_another_kind_of_schedule_is_named_and_another_scaler_starts_afresh(tmp_path, caplog):
    warmup = {"scheduler": {"type": "WarmupLR", "params": {}}}
    one_step(make(**warmup)).save_checkpoint(tmp_path)
    with pytest.raises(zckpt.CheckpointMismatch, match=r"schedule WarmupLR, .* ConstantRate.*load_lr_scheduler_st"):
        make().load_checkpoint(tmp_path)
    half = make(fp16={"enabled": True, "initial_scale_power": 4}, **warmup)
    half.load_checkpoint(tmp_path)
    assert half.current_loss_scale == 16.0
    assert "the loss scale starts from its initial value" in caplog.text


def _bad_client_state_on_rank_1() -> str:
    root = zcomm.all_gather_object(tempfile.mkdtemp())[0]
    state = {"x": object()} if zcomm.group_rank() == 1 else {}
    try:
        make().save_checkpoint(root, client_state=state)
    except (TypeError, ValueError) as error:
        return str(error)
    return "saved"


def test_a_bad_value_on_one_rank_is_told_to_all():
    first, second = run_ranks(_bad_client_state_on_rank_1, 2)
    assert first.startswith("nothing was saved, because of rank 1: client_state.x is a object")
    assert second.startswith("client_state.x is a object")


def _differing_client_state() -> list[object]:
    root, rank = zcomm.all_gather_object(tempfile.mkdtemp())[0], zcomm.group_rank()
    make().save_checkpoint(root, client_state={"rank": rank, "seconds": torch.full((2,), rank)})
    state = make().load_checkpoint(root)[1]
    return [state["rank"], state["seconds"].tolist()]


def test_rank_0s_client_state_is_saved():
    """As in DeepSpeed at stages 0 to 2; times and other states of callbacks differ between ranks."""
    assert run_ranks(_differing_client_state, 2) == [[0, [0, 0]]] * 2


def _tags(validation: str) -> list[str]:
    engine = make(checkpoint={"tag_validation": validation})
    root = zcomm.all_gather_object(tempfile.mkdtemp())[0]
    try:
        return [Path(engine.save_checkpoint(root, tag=f"rank{zcomm.group_rank()}")).name]
    except ValueError as error:
        return [str(error)]


def test_ranks_that_name_different_tags_save_under_rank_0s_or_fail_as_the_config_says():
    assert run_ranks(_tags, 2, "WARN") == [["rank0"], ["rank0"]]
    for message in run_ranks(_tags, 2, "FAIL"):
        assert "different tags (rank 0: 'rank0', rank 1: 'rank1')" in message[0]


def _rewritten(root: str, tag: str, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """The checkpoint of `root` once more as `tag`, with its tensors changed; by rank 0."""
    if zcomm.group_rank() == 0:
        found = zckpt.find(root)
        tensors = {name: found.tensor(name) for name in found.names()}
        change(tensors)
        zckpt.save(root, tag, tensors=tensors, objects=found.objects, rank_objects=found.rank_objects(0), step=99)
    zcomm.barrier()


def _state_that_lacks_something_on_rank_0() -> list[str]:
    root = zcomm.all_gather_object(tempfile.mkdtemp())[0]
    model = nn.Sequential(
        nn.Linear(3, 1, bias=False), nn.Linear(1, 64, bias=False)
    )  # rank 1 holds of the second only
    engine = one_step(make(model, zero_optimization={"stage": 1}))
    engine.save_checkpoint(root)
    _rewritten(root, "odd", lambda tensors: [tensors.pop(f"optimizer.exp_avg.{i}.weight") for i in (0, 1)])
    try:
        engine.load_checkpoint(root, "odd")
    except ValueError as error:
        return [str(error)]
    return []


def test_a_restore_that_one_rank_refuses_is_every_ranks_error():
    (first,), (second,) = run_ranks(_state_that_lacks_something_on_rank_0, 2)
    assert "lacks exp_avg; it has" in first
    assert second.startswith("nothing was loaded, because of rank 0:")


def test_what_a_load_that_is_not_strict_leaves_out_is_said(tmp_path, caplog):
    one_step(make(nn.Sequential(nn.Linear(3, 2)))).save_checkpoint(tmp_path)
    other = make(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)))
    kept = other.module[1].weight.clone()
    other.load_checkpoint(tmp_path, load_module_strict=False)
    assert (
        "2 tensors are missing in it (1.bias, 1.weight), 0 are unknown to the model (none): missing tensors"
        in caplog.text
    )
    assert "no optimizer state of 1.bias (2 parameters in all): it starts from zero" in caplog.text
    assert other.module[1].weight.equal(kept)


def test_weights_that_no_engine_saved_are_loaded_when_only_they_are_wanted(tmp_path):
    plain = nn.Linear(3, 2)
    zckpt.save(tmp_path, "plain", tensors=zckpt.views(plain, torch.optim.AdamW(plain.parameters())))
    engine = make()
    with pytest.raises(zckpt.CheckpointMismatch, match=r"not saved by an engine.*load_module_only=True"):
        engine.load_checkpoint(tmp_path)
    assert engine.load_checkpoint(tmp_path, load_module_only=True)[1] == {}
    assert engine.module.weight.equal(plain.weight)


class _Loader:
    """Of which one rank's position cannot be told."""

    def state_dict(self) -> dict[str, int]:
        if zcomm.group_rank():
            raise RuntimeError("the workers are gone")
        return {"epoch": 1}


def _loader_that_fails_on_rank_1() -> str:
    root = zcomm.all_gather_object(tempfile.mkdtemp())[0]
    engine = make()
    engine._run = attrs.evolve(engine._run, parts=attrs.evolve(engine.parts, loader=_Loader()))
    try:
        engine.save_checkpoint(root)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "saved"


def test_what_one_rank_cannot_say_of_itself_is_told_to_all():
    first, second = run_ranks(_loader_that_fails_on_rank_1, 2)
    assert (first, second) == ("nothing was saved, because of rank 1: the workers are gone", "the workers are gone")


def test_a_damaged_checkpoint_that_is_passed_over_is_said(tmp_path, caplog):
    engine = make()
    for _ in range(2):
        newest = Path(one_step(engine).save_checkpoint(tmp_path))
    next(newest.glob("*.safetensors")).write_bytes(b"")
    (tmp_path / "latest").unlink()
    assert Path(make().load_checkpoint(tmp_path)[0]).name == "global_step1"
    assert "skipped 'global_step2' (step 2): checkpoint" in caplog.text


def test_weights_that_a_load_rounds_are_told(tmp_path, caplog):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    model[1].requires_grad_(False)  # a frozen weight has no master
    one_step(make(model)).save_checkpoint(tmp_path)
    same = make(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)))
    same.load_checkpoint(tmp_path, load_module_only=True)
    assert "it is rounded" not in caplog.text
    half = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    half[1].requires_grad_(False)
    make(half, bf16={"enabled": True}).load_checkpoint(tmp_path, load_module_only=True)
    assert "has 1.weight in float32 and this engine in bfloat16: it is rounded (2 tensors in all)" in caplog.text
