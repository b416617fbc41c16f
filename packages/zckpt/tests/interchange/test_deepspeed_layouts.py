"""Folders of pipelines, experts and universal checkpoints: what each shard is, and damaged or contradicting files.

tests/recovery trains on from them.
"""

import shutil
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

import zckpt
from zckpt import CheckpointCorrupt, CheckpointError, CheckpointInputError, CheckpointMismatch
from zckpt.interchange import ForeignCheckpoint, import_deepspeed, read_deepspeed
from zckpt.interchange.deepspeed_experts import deepspeed_names
from zckpt.interchange.deepspeed_pipeline import deepspeed_name, engine_name

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "deepspeed"
PIPELINES = sorted(path.name for path in FIXTURES.glob("pipe_*"))
EXPERTS = sorted(path.name for path in FIXTURES.glob("moe_*"))
UNIVERSAL = sorted(path.name for path in FIXTURES.glob("universal_*"))
BODY = {f"{layer}.{part}.{kind}" for layer in (1, 3) for part in ("up", "down") for kind in ("weight", "bias")}


def tensors(case: str) -> dict[str, torch.Tensor]:
    """Every tensor of a fixture, whole."""
    with read_deepspeed(FIXTURES / case) as found:
        checkpoint = ForeignCheckpoint.of(found)
        return {name: checkpoint.tensor(name) for name in checkpoint.names()}


@pytest.mark.parametrize("case", PIPELINES)
def test_a_pipeline_has_the_names_of_our_module(case: str) -> None:
    found = tensors(case)
    own = {"4.weight", "4.bias"} | ({"0.word.weight"} if "zero0" in case else set())
    trained = {f"layers.{name}" for name in BODY | own} | (set() if "zero0" in case else {"tied.embed.word.weight"})
    wanted = {f"model.{name}" for name in trained | {"layers.1.gain", "layers.3.gain"}}
    assert set(found) == wanted | {
        f"optimizer.{key}.{n}" for n in trained for key in ("exp_avg", "exp_avg_sq", "step")
    }
    layer = torch.load(FIXTURES / case / "global_step3/layer_03-model_states.pt", weights_only=True)
    for name, weight in layer.items():
        assert torch.equal(found[f"model.layers.3.{name}"].to(weight.dtype), weight), name


@pytest.mark.parametrize("case", EXPERTS)
def test_experts_are_stacked_by_their_global_numbers(case: str) -> None:
    found = tensors(case)
    step = FIXTURES / case / "global_step3"
    for number in range(4):
        expert = torch.load(step / f"layer_1_expert_{number}_mp_rank_00_model_states.pt", weights_only=True)
        for name, weight in expert.items():
            rest = name.partition(f"deepspeed_experts.{number}.")[2]
            mine = found[f"model.second.experts.stacked.{rest}"][number]
            assert torch.equal(mine.to(weight.dtype), weight), name
    assert found["optimizer.exp_avg.first.experts.stacked.up.weight"].shape == (4, 7, 5)
    assert found["optimizer.step.first.experts.stacked.up.weight"].item() == 3.0
    moments = found["optimizer.exp_avg.first.experts.stacked.up.weight"]
    assert len({tuple(expert.flatten().tolist()) for expert in moments}) == 4, "each expert has its own"
    assert {"model.first.gate.weight", "model.second.coefficient.weight", "model.second.mlp.up.bias"} <= set(found)


@pytest.mark.parametrize("case", UNIVERSAL)
def test_a_universal_checkpoint_holds_what_its_source_holds(case: str) -> None:
    found, source = tensors(case), tensors(case.removeprefix("universal_"))
    left_out = {name for name in source if name.endswith("gain")} if "pipe" in case else set()
    assert set(found) == set(source) - left_out
    assert all(torch.equal(found[name], source[name]) for name in found)
    with read_deepspeed(FIXTURES / case) as one, read_deepspeed(FIXTURES / case.removeprefix("universal_")) as other:
        mine, theirs = one.objects(), other.objects()
    for key in ("client_state", "clock", "optimizer", "scheduler", "scaler", "tied"):
        assert mine[key] == theirs[key], key
    assert mine.get("left_out", []) == sorted(name.removeprefix("model.") for name in left_out)
    assert mine["imported"]["stage"] == theirs["imported"]["stage"]


@pytest.mark.parametrize("case", [*PIPELINES, *EXPERTS, "universal_zero2_fp16"])
def test_an_import_has_the_tensors_of_the_opened_folder(tmp_path: Path, case: str) -> None:
    import_deepspeed(FIXTURES / case, tmp_path)
    found, opened = zckpt.find(tmp_path), tensors(case)
    assert set(found.names()) == set(opened)
    assert all(torch.equal(found.tensor(name), opened[name]) for name in opened)


def test_an_opened_folder_fills_boxes_and_spans_of_other_dtypes() -> None:
    with read_deepspeed(FIXTURES / "moe_zero1_fp32") as found:
        checkpoint = ForeignCheckpoint.of(found)
        name = "model.first.experts.stacked.up.weight"
        part = torch.zeros(20, dtype=torch.bfloat16)
        shard = zckpt.Shard(name, (4, 7, 5), ((2, 4), (0, 7), (0, 5)), (30, 50), part)
        checkpoint.read([shard], strict=False, cast=True)
        assert torch.equal(part, checkpoint.tensor(name)[2:4].reshape(-1)[30:50].bfloat16())
        with pytest.raises(CheckpointMismatch, match=r"no tensor 'model.x'"):
            checkpoint.tensor("model.x")
        with pytest.raises(CheckpointMismatch):
            checkpoint.read([zckpt.Shard(name, (4, 7), ((0, 4), (0, 7)), (0, 28), torch.zeros(28))], strict=False)


@attrs.frozen
class Parts:
    """A foreign format of one tensor."""

    given: list[zckpt.Shard]
    path: Path = Path("somewhere")
    tag: str = "t"
    step: int = 0

    def objects(self) -> Any:
        return {}

    def shards(self) -> Any:
        return self.given

    def close(self) -> None: ...


def test_parts_of_ranks_are_joined_by_box_and_span() -> None:
    whole = torch.arange(12.0).view(3, 4)
    places = [(((0, 3), (0, 2)), (0, 4)), (((0, 3), (0, 2)), (4, 6)), (((0, 3), (2, 4)), (0, 6))]
    parts = [
        zckpt.Shard("w", (3, 4), box, span, whole[:, slice(*box[1])].reshape(-1)[slice(*span)].clone())
        for box, span in places
    ]
    assert torch.equal(ForeignCheckpoint.of(Parts(parts)).tensor("w"), whole)
    with pytest.raises(CheckpointCorrupt, match=r"somewhere: its files hold 6 of the 12 elements of 'w'"):
        ForeignCheckpoint.of(Parts(parts[:2]))


def test_names_of_both_sides() -> None:
    for theirs, ours in {"3.up.weight": "layers.3.up.weight", "tied_modules.embed.w": "tied.embed.w"}.items():
        assert engine_name(theirs) == ours
        assert deepspeed_name(ours) == theirs
    stacked = deepspeed_names("a.experts.stacked.up.bias", (2, 7), {"a."})
    assert stacked == [f"a.deepspeed_moe.experts.deepspeed_experts.{n}.up.bias" for n in (0, 1)]
    assert deepspeed_names("a.gate.weight", (2, 5), {"a."}) == ["a.deepspeed_moe.gate.wg.weight"]
    assert deepspeed_names("b.gate.weight", (2, 5), {"a."}) == ["b.gate.weight"]


# -- what contradicts itself ---------------------------------------------------------------------


@pytest.fixture
def copy(tmp_path: Path) -> Any:
    def make(case: str) -> Path:
        return next(Path(shutil.copytree(FIXTURES / case, tmp_path / case)).glob("global_step3*"))

    return make


@pytest.mark.parametrize(
    ("case", "name", "message"),
    [
        ("moe_zero1_fp32", "layer_0_expert_2_mp_rank_00_model_states.pt", "MoE layer 0 has .* but no expert 2"),
        ("moe_zero1_fp32", "zero_pp_rank_3_mp_rank_00_optim_states.pt", "partition counts"),
        ("pipe_zero1_fp32", "zero_pp_rank_0_mp_rank_01_optim_states.pt", "missing"),
        ("pipe_zero1_fp32", "mp_rank_00_model_states.pt", "tensor-parallel rank 0 are missing"),
        ("universal_zero2_fp16", "zero/optimizer_state.pt", "optimizer_state.pt"),
        ("universal_zero2_fp16", "zero/body.weight/fp32.pt", "zero/body.weight has no fp32.pt"),
        ("universal_zero2_fp16", "zero/body.weight", "zero/body.weight is missing"),
    ],
)  # fmt: skip
def test_a_missing_file_is_named(copy: Any, case: str, name: str, message: str) -> None:
    folder = copy(case)
    lost = folder / name
    shutil.rmtree(lost) if lost.is_dir() else lost.unlink()
    with pytest.raises(CheckpointError, match=message), read_deepspeed(folder) as found:
        ForeignCheckpoint.of(found)


def test_files_with_other_content_are_named(copy: Any) -> None:
    folder = copy("universal_zero2_fp16")
    for key, content, message in [
        ("exp_avg", {"param": torch.zeros(3)}, "body.weight/exp_avg.pt has 3 elements, and fp32.pt has 35"),
        ("exp_avg", {"weight": torch.zeros(35)}, "body.weight/exp_avg.pt holds no tensor"),
        ("step", torch.zeros(2), "body.weight/step.pt holds .2,. numbers"),
    ]:
        path = folder / "zero" / "body.weight" / f"{key}.pt"
        before = path.read_bytes()
        torch.save(content, path)
        with read_deepspeed(folder) as found, pytest.raises(CheckpointCorrupt, match=message):
            list(found.shards())
        path.write_bytes(before)
    path = copy("moe_zero0_fp32") / "layer_0_expert_1_mp_rank_00_model_states.pt"
    torch.save([1], path)
    with pytest.raises(CheckpointCorrupt, match=r"layer_0_expert_1.* contradicts its name"):
        read_deepspeed(path.parent)


def test_weights_that_are_not_the_masters_are_refused(copy: Any) -> None:
    path = copy("pipe_zero1_fp32") / "layer_03-model_states.pt"
    layer = torch.load(path, weights_only=True)
    torch.save({**layer, "up.weight": layer["up.weight"] + 1}, path)
    with read_deepspeed(path.parent) as found, pytest.raises(CheckpointMismatch, match=r"3.up.weight"):
        list(found.shards())


def test_a_tied_pipeline_at_stage_0_needs_the_layer_of_its_key(copy: Any) -> None:
    """The untied fixture, whose first layer is named: the assignment by shapes finds it in the first stage."""
    with read_deepspeed(FIXTURES / "pipe_zero0_fp32", tied_layers={"embed": 0}) as found:
        names = {shard.name for shard in found.shards()}
    assert {"model.tied.embed.word.weight", "optimizer.exp_avg.tied.embed.word.weight"} <= names
    path = copy("pipe_zero0_fp32") / "layer_00-model_states.pt"
    torch.save({"word.weight": torch.zeros(10, 5)}, path)
    with read_deepspeed(path.parent) as found, pytest.raises(CheckpointInputError, match=r"--tied-layer embed=0"):
        list(found.shards())
