import random
import shutil
from pathlib import Path

import pytest
import torch

import zckpt
from zckpt import CheckpointCorrupt, CheckpointError, CheckpointExists, CheckpointInputError
from zckpt.interchange import import_deepspeed, read_deepspeed

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "deepspeed"
CASES = sorted(path.name for path in FIXTURES.glob("zero*"))
NAMES = {"embed.weight", "body.weight", "body.bias", "norm.weight", "norm.bias", "head.bias"}


@pytest.mark.parametrize("case", CASES)
def test_an_imported_checkpoint_is_one_of_ours(tmp_path: Path, case: str) -> None:
    folder = import_deepspeed(FIXTURES / case, tmp_path)
    assert folder == tmp_path / "global_step3"
    found = zckpt.find(tmp_path)
    found.verify()
    assert (found.tag, found.step) == ("global_step3", 3)
    wanted = {f"model.{name}" for name in NAMES | {"frozen.weight", "frozen.bias", "gain"}}
    wanted |= {f"optimizer.{key}.{name}" for key in ("exp_avg", "exp_avg_sq", "step") for name in NAMES}
    assert set(found.names()) == wanted
    assert found.objects["optimizer"]["kind"] == "AdamW"
    assert [group["weight_decay"] for group in found.objects["optimizer"]["groups"]] == [0.1, 0.0]
    assert found.objects["client_state"] == {"epoch": 2, "note": "odd sizes"}
    assert found.objects["imported"]["stage"] == int(case[4])
    assert found.rank_objects(0) == {"rng": None, "loader": None}
    assert found.objects["tied"] == {"head.weight": "embed.weight"}
    with read_deepspeed(FIXTURES / case) as opened:
        for shard in opened.shards():
            part = torch.empty_like(shard.tensor)
            found.read([zckpt.Shard(shard.name, shard.global_shape, shard.box, shard.span, part)], strict=False)
            assert torch.equal(part, shard.tensor), shard.name


def test_a_flipped_byte_in_any_file_is_found_before_anything_is_written(tmp_path: Path) -> None:
    run = shutil.copytree(FIXTURES / "zero2_bf16", tmp_path / "run")
    for path in sorted(run.rglob("*.pt")):
        data = bytearray(path.read_bytes())
        at = data.index(b"PK\x03\x04", data.index(b"/data/0")) - 20  # near the end of the first tensor's bytes
        data[at] ^= 16
        path.write_bytes(data)
        with pytest.raises(CheckpointCorrupt, match=path.name):
            import_deepspeed(run, tmp_path / "ours")
        data[at] ^= 16
        path.write_bytes(data)
    assert not (tmp_path / "ours" / "global_step3").exists()
    import_deepspeed(run, tmp_path / "ours")


def test_a_tag_that_is_taken_and_one_that_is_wrong(tmp_path: Path) -> None:
    import_deepspeed(FIXTURES / "zero1_fp32", tmp_path, tag="global_step3")
    with pytest.raises(CheckpointExists):
        import_deepspeed(FIXTURES / "zero1_fp32" / "global_step3", tmp_path)
    with pytest.raises(CheckpointInputError):
        import_deepspeed(FIXTURES / "zero1_fp32", tmp_path, tag="../zero1_fp32")


def test_classes_that_the_files_do_not_name_can_be_given(tmp_path: Path) -> None:
    import_deepspeed(FIXTURES / "zero1_fp32", tmp_path, optimizer="LAMB", scheduler="StepLR")
    objects = zckpt.find(tmp_path).objects
    assert objects["optimizer"]["kind"] == "LAMB"
    assert objects["scheduler"]["kind"] == "StepLR"


def test_reading_copies_no_tensor() -> None:
    """Shards are views of the mapped files: two readings of one have the same memory."""
    with read_deepspeed(FIXTURES / "zero3_fp32") as opened:
        first, second = list(opened.shards()), list(opened.shards())
        for one, other in zip(first, second):
            assert one.name == other.name
            assert one.tensor.data_ptr() == other.tensor.data_ptr()


def test_a_byte_flipped_anywhere_is_a_named_error_or_changes_nothing(tmp_path: Path) -> None:
    """Headers, directory, pickle, padding and data alike; 400 flips, never another kind of error."""
    rng = random.Random(7)
    run = shutil.copytree(FIXTURES / "zero3_fp32", tmp_path / "run")
    with read_deepspeed(run) as opened:
        wanted = {(s.name, s.span): s.tensor.clone() for s in opened.shards()}
    paths, refused = sorted(run.rglob("*.pt")), 0
    for _ in range(400):
        path = rng.choice(paths)
        data = path.read_bytes()
        at = rng.randrange(len(data))
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :])
        try:
            with read_deepspeed(run) as opened:
                opened.verify()
                found = {(s.name, s.span): s.tensor for s in opened.shards()}
                assert set(found) == set(wanted)
                assert all(torch.equal(found[key], wanted[key]) for key in wanted)
        except CheckpointError:
            refused += 1
        path.write_bytes(data)
    assert refused > 100
