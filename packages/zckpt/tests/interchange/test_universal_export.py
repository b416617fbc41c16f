"""Universal checkpoints for DeepSpeed, as written: names, contents, and errors.

That DeepSpeed 0.19.8 itself trains on from them was tried with fixtures/deepspeed/resume.py, see its README.
"""

from pathlib import Path

import pytest
import torch

import zckpt
from zckpt import CheckpointExists, CheckpointInputError
from zckpt.containers.torch_file import open_torch_file
from zckpt.containers.torch_write import write_torch_file
from zckpt.containers.unpickler import Record
from zckpt.interchange import ForeignCheckpoint, export_universal, import_deepspeed, read_deepspeed
from zckpt.interchange.engine_state import engine_objects, from_json, to_json

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "deepspeed"
CASES = ("zero0_fp32", "zero2_fp16", "zero3_bf16", "pipe_zero1_fp32", "moe_zero2_bf16", "universal_zero3_fp32")


@pytest.mark.parametrize("case", CASES)
def test_what_is_written_is_read_back(tmp_path: Path, case: str) -> None:
    root = tmp_path / "ours"
    import_deepspeed(FIXTURES / case, root)
    source = zckpt.find(root)
    folder = export_universal(source, tmp_path / "back" / "step3_universal")
    assert (tmp_path / "back" / "latest_universal").read_text() == "step3_universal"
    with read_deepspeed(tmp_path / "back") as opened:
        found = ForeignCheckpoint.of(opened)
        assert found.path == folder
        assert found.names() == source.names()
        for name in source.names():
            assert torch.equal(found.tensor(name), source.tensor(name).to(found.tensor(name).dtype)), name
        for key in ("client_state", "clock", "optimizer", "scheduler", "scaler", "tied"):
            assert found.objects[key] == source.objects[key], key


def test_the_files_are_those_that_deepspeed_reads(tmp_path: Path) -> None:
    with read_deepspeed(FIXTURES / "zero1_bf16") as opened:
        folder = export_universal(ForeignCheckpoint.of(opened), tmp_path / "universal")
    theirs = FIXTURES / "universal_zero1_bf16" / "global_step3_universal"
    names = {path.relative_to(theirs).as_posix() for path in theirs.rglob("*.pt")}
    extra = {f"zero/{name}/fp32.pt" for name in ("frozen.weight", "frozen.bias", "gain", "head.weight")}
    ours = {path.relative_to(folder).as_posix() for path in folder.rglob("*.pt")}
    assert ours == names - extra | {"zero_pp_rank_0_mp_rank_00_model_states.pt"}
    for name in sorted(names - extra):
        if name.count("/") == 2:
            one, other = (torch.load(root / name, weights_only=True) for root in (folder, theirs))
            for mine, wanted in ((one["param"], other["param"]),) if isinstance(one, dict) else ((one, other),):
                assert torch.equal(mine, wanted), name
    state = torch.load(folder / "zero" / "optimizer_state.pt", weights_only=True)
    assert [group["weight_decay"] for group in state["param_groups"]] == [0.1, 0.0]
    assert state["optimizer_state_dict"]["state"][0]["step"].item() == 3.0
    model = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=True)
    assert (model["global_steps"], model["lr_scheduler"], model["epoch"]) == (3, {"last_batch_iteration": 2}, 2)
    assert set(model["module"]) == {"frozen.weight", "frozen.bias", "gain"}


def test_the_loss_scale_is_deepspeeds_own_object(tmp_path: Path) -> None:
    with read_deepspeed(FIXTURES / "zero2_fp16") as opened:
        folder = export_universal(ForeignCheckpoint.of(opened), tmp_path / "universal")
    theirs = FIXTURES / "universal_zero2_fp16" / "global_step3_universal"
    mine, wanted = (open_torch_file(root / "zero" / "optimizer_state.pt") for root in (folder, theirs))
    with mine, wanted:
        assert mine.value["loss_scaler"].kind == wanted.value["loss_scaler"].kind
        assert mine.value["loss_scaler"].state == wanted.value["loss_scaler"].state
        assert mine.value["dynamic_loss_scale"] is True


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    zckpt.save(tmp_path / "weights", "w", tensors={"a": torch.zeros(2)})
    with pytest.raises(CheckpointInputError, match=r"export its weights instead"):
        export_universal(zckpt.find(tmp_path / "weights"), tmp_path / "universal")
    with read_deepspeed(FIXTURES / "zero1_fp32") as opened:
        checkpoint = ForeignCheckpoint.of(opened)
        (tmp_path / "taken").mkdir()
        with pytest.raises(CheckpointExists, match=r"taken exists"):
            export_universal(checkpoint, tmp_path / "taken")
    assert {path.name for path in tmp_path.iterdir()} == {"weights", "taken"}


def engine_checkpoint(folder: Path, client_state: object, names: tuple[str, str] = ("a.weight", "b.weight")) -> None:
    """A checkpoint as an engine writes it: two weights, of which the second missed one of two updates."""
    tensors = {f"model.{name}": torch.ones(2) for name in names}
    for count, name in zip((2.0, 1.0), names):
        tensors |= {f"optimizer.exp_avg.{name}": torch.ones(2), f"optimizer.step.{name}": torch.tensor(count)}
    objects = engine_objects(
        {"client_state": client_state, "optimizer": {"kind": "Lion", "groups": [{"lr": 0.1}]}}, {"from": "us"}
    )
    zckpt.save(folder, "t", tensors={**tensors, "client_state.0": torch.arange(3)}, objects=objects)


def test_client_state_goes_with_it_and_updates_are_counted_as_deepspeed_does(tmp_path: Path) -> None:
    stored = {"$stored": ["client_state.0", "int64", [3]]}
    client = {"t": stored, "p": {"$path": "/a"}, "d": {"$dtype": "bfloat16"}, "n": {"$tuple": [1]}}
    engine_checkpoint(tmp_path / "run", client)
    folder = export_universal(zckpt.find(tmp_path / "run"), tmp_path / "universal")
    model = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=True)
    assert torch.equal(model["t"], torch.arange(3))
    assert (model["p"], model["d"], model["n"]) == ("/a", torch.bfloat16, (1,))
    steps = [torch.load(folder / "zero" / name / "step.pt", weights_only=True) for name in ("a.weight", "b.weight")]
    assert steps == [torch.tensor(2.0)] * 2
    state = torch.load(folder / "zero" / "optimizer_state.pt", weights_only=True)
    assert "clip_grad" not in state  # DeepSpeed keeps its own
    clipped = export_universal(zckpt.find(tmp_path / "run"), tmp_path / "other", config={"gradient_clipping": 0.5})
    assert torch.load(clipped / "zero" / "optimizer_state.pt", weights_only=True)["clip_grad"] == 0.5


def test_names_that_would_replace_other_things_are_refused(tmp_path: Path) -> None:
    engine_checkpoint(tmp_path / "taken", {"global_steps": 77, "note": 1})
    with pytest.raises(CheckpointInputError, match=r"client state has global_steps, which are keys of DeepSpeed"):
        export_universal(zckpt.find(tmp_path / "taken"), tmp_path / "universal")
    for name in ("../../../escaped/w", "a/../../b", "/tmp/w"):
        root = tmp_path / str(len(name))
        engine_checkpoint(root, {}, (name, "b"))
        with pytest.raises(CheckpointInputError, match=r"is no file of a universal checkpoint"):
            export_universal(zckpt.find(root), tmp_path / "universal")
    assert not list(tmp_path.rglob("escaped"))
    assert not (tmp_path / "universal").exists()


def test_one_expert_is_no_stack_of_experts(tmp_path: Path) -> None:
    engine_checkpoint(tmp_path / "run", {}, ("moe.experts.stacked.up", "moe.gate.weight"))
    tensors = {"model.moe.experts.stacked.up": torch.ones(1, 4, 2)}
    tensors["optimizer.exp_avg.moe.experts.stacked.up"] = torch.ones(1, 4, 2)
    objects = zckpt.find(tmp_path / "run").objects
    zckpt.save(tmp_path / "one", "t", tensors=tensors, objects=objects)
    folder = export_universal(zckpt.find(tmp_path / "one"), tmp_path / "universal")
    (path,) = folder.glob("zero/*/fp32.pt")
    assert path.parent.name == "moe.deepspeed_moe.experts.deepspeed_experts.0.up"
    assert torch.load(path, weights_only=True)["param"].shape == (4, 2)


def test_torchs_files_hold_every_plain_value(tmp_path: Path) -> None:
    value = {"a": [1, -2, 2**70, 1.5, None, True], "b": ("x", {}), 3: torch.arange(6.0).view(2, 3).T, "d": torch.half}
    write_torch_file(tmp_path / "a.pt", {**value, "r": Record("deepspeed.x.Y", (), {"z": 1})})
    with open_torch_file(tmp_path / "a.pt") as found:
        assert found.value["r"].kind == "deepspeed.x.Y"
        assert found.value["r"].state == {"z": 1}
    write_torch_file(tmp_path / "b.pt", value)
    loaded = torch.load(tmp_path / "b.pt", weights_only=True)
    assert torch.equal(loaded.pop(3), value.pop(3))
    assert loaded == value
    with pytest.raises(TypeError, match=r"a set has no plain form"):
        write_torch_file(tmp_path / "c.pt", {"s": {1}})


def test_json_is_decoded_as_it_was_encoded() -> None:
    value = {"a": (1, 2.5, None), "b": {1: [True]}, "c": float("inf"), "e": {"$tuple": 1}}
    assert from_json(to_json(value)) == value
    assert from_json(to_json(torch.tensor([3]))) == torch.tensor([3])
    with pytest.raises(ValueError, match=r"no key"):
        from_json({"$pairs": [[{}, 1]]})
    for wrong in ({"$other": 1}, {"$tuple": 1}, {"$dtype": "nn"}, {"$stored": ["a", "int64", [1]]}):
        with pytest.raises(ValueError, match=r"no mark|no dtype|elsewhere"):
            from_json(wrong)
