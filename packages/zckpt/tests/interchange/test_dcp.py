import os
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint

import zckpt
from zckpt import CheckpointCorrupt, CheckpointError, CheckpointInputError, CheckpointMismatch, CheckpointNotFound
from zckpt.interchange import dcp, export_dcp, import_dcp

TENSORS = {
    "model.w": torch.arange(12.0).view(3, 4),
    "model.b": torch.ones(5, dtype=torch.bfloat16),
    "optimizer.step.w": torch.tensor(3.0),
    "model.n": torch.arange(3),
}
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def checkpoint(tmp_path: Path) -> zckpt.Checkpoint:
    shards = [zckpt.whole(name, tensor) for name, tensor in TENSORS.items()]
    zckpt.save(tmp_path / "run", "t", shards=shards, objects={"client_state": {"a": [1, None]}}, step=9)
    return zckpt.find(tmp_path / "run")


def test_torch_loads_what_is_exported(tmp_path: Path, checkpoint: Any) -> None:
    folder = export_dcp(checkpoint, tmp_path / "out")
    wanted = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    torch_checkpoint.load(wanted, checkpoint_id=folder, no_dist=True)
    assert all(torch.equal(wanted[name], tensor) for name, tensor in TENSORS.items())


def test_there_and_back_is_the_same_checkpoint(tmp_path: Path, checkpoint: Any) -> None:
    import_dcp(export_dcp(checkpoint, tmp_path / "out"), tmp_path / "back", tag="again")
    found = zckpt.find(tmp_path / "back")
    assert (found.tag, found.step) == ("again", 9)
    assert found.names() == checkpoint.names()
    assert all(torch.equal(found.tensor(name), tensor) for name, tensor in TENSORS.items())
    assert found.objects["client_state"] == {"a": [1, None]}


def test_a_tied_weight_is_exported_by_each_name_and_comes_back_once(tmp_path: Path) -> None:
    shards = [zckpt.whole("model.embed", torch.arange(6.0))]
    zckpt.save(tmp_path / "run", "t", shards=shards, objects={"tied": {"head": "embed"}})
    folder = export_dcp(zckpt.find(tmp_path / "run"), tmp_path / "out")
    wanted = {"model.embed": torch.zeros(6), "model.head": torch.zeros(6)}
    torch_checkpoint.load(wanted, checkpoint_id=folder, no_dist=True)
    assert torch.equal(wanted["model.embed"], torch.arange(6.0))
    assert torch.equal(wanted["model.head"], torch.arange(6.0))
    import_dcp(folder, tmp_path / "back")
    found = zckpt.find(tmp_path / "back")
    assert found.names() == ("model.embed",)
    assert found.objects["tied"] == {"head": "embed"}


def test_a_tensor_is_read_when_the_writer_asks_for_it(tmp_path: Path, monkeypatch: Any) -> None:
    """Tensors are freed after they are written: the writer holds at most the previous one."""
    shards = [zckpt.whole(f"w{n}", torch.full((100,), float(n))) for n in range(8)]
    zckpt.save(tmp_path / "run", "t", shards=shards, objects={})
    alive: list[weakref.ref[Any]] = []
    real = zckpt.Checkpoint.tensor

    def watched(self: Any, name: str, **keywords: Any) -> torch.Tensor:
        assert sum(each() is not None for each in alive) <= 1
        made = real(self, name, **keywords)
        alive.append(weakref.ref(made.untyped_storage()))
        return made

    monkeypatch.setattr(zckpt.Checkpoint, "tensor", watched)
    export_dcp(zckpt.find(tmp_path / "run"), tmp_path / "out")
    assert len(alive) == len(shards)


def test_torchs_own_checkpoint_comes_in(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    state = {"net": model.state_dict(), "epoch": 3, "history": [1, 2]}
    torch_checkpoint.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    import_dcp(tmp_path / "dcp", tmp_path / "ours", step=4)
    found = zckpt.find(tmp_path / "ours")
    assert found.names() == ("model.net.bias", "model.net.weight")
    assert torch.equal(found.tensor("model.net.weight"), model.weight)
    assert found.step == 4
    assert found.objects["imported"]["left_out"] == ["epoch", "history"]


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


def metadata_of(folder: Path) -> Any:
    return pickle.loads((folder / ".metadata").read_bytes())


def test_metadata_that_would_run_something_are_refused(tmp_path: Path) -> None:
    marker, folder = tmp_path / "ran", tmp_path / "dcp"
    torch_checkpoint.save({"w": torch.ones(2)}, checkpoint_id=folder, no_dist=True)
    told = metadata_of(folder)
    told.planner_data = {"x": Evil(marker)}
    (folder / ".metadata").write_bytes(pickle.dumps(told))
    with pytest.raises(
        CheckpointCorrupt, match=r"names 'posix\.system', which does not describe a tensor. None of its code was run"
    ):
        import_dcp(folder, tmp_path / "ours")
    assert not marker.exists()
    metadata_of(folder)
    assert marker.exists(), "the exploit was none"


def test_metadata_lead_to_no_other_folder(tmp_path: Path) -> None:
    folder = tmp_path / "dcp"
    torch_checkpoint.save({"w": torch.ones(2)}, checkpoint_id=folder, no_dist=True)
    told = metadata_of(folder)
    for entry in told.storage_data.values():
        entry.relative_path = "../other/__0_0.distcp"
    (folder / ".metadata").write_bytes(pickle.dumps(told))
    with pytest.raises(CheckpointCorrupt, match="not a file of its folder"):
        import_dcp(folder, tmp_path / "ours")


@pytest.mark.parametrize(("size", "problem"), [((9,), "cover 2 of 9"), ((1,), "outside 0:1"), ((2, 1), "1 dims")])
def test_a_tensor_that_its_chunks_do_not_make_whole_is_refused(tmp_path: Path, size: Any, problem: str) -> None:
    """torch loads it and leaves the rest uninitialized."""
    folder = tmp_path / "dcp"
    torch_checkpoint.save({"w": torch.ones(2)}, checkpoint_id=folder, no_dist=True)
    told = metadata_of(folder)
    told.state_dict_metadata["w"].size = torch.Size(size)
    (folder / ".metadata").write_bytes(pickle.dumps(told))
    with pytest.raises(CheckpointCorrupt, match=f"tensor 'w' is not whole: .*{problem}"):
        import_dcp(folder, tmp_path / "ours")


@pytest.mark.parametrize("values", [[255, 0], [0.5], list(b"{}"), list(b"[]"), list(b'{"exported": {"step": "1"}}')])
def test_objects_that_no_export_wrote_are_named(tmp_path: Path, values: list[float]) -> None:
    state = {"w": torch.ones(2), "zckpt.objects": torch.tensor(values)}
    torch_checkpoint.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(CheckpointCorrupt, match=r"'zckpt\.objects' is not what an export wrote"):
        import_dcp(tmp_path / "dcp", tmp_path / "ours")


@pytest.mark.parametrize("data", [b"", b"x", b"\x80\x04N.", b"\x80\x04}.", b"\x80\x02ctorch\nSize\n)R."])
def test_metadata_that_make_no_sense_are_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(CheckpointCorrupt, match=r"\.metadata"):
        import_dcp(tmp_path, tmp_path / "ours")


@pytest.mark.parametrize("keep", [0, 100])
def test_files_that_are_damaged_or_gone_are_named(tmp_path: Path, keep: int) -> None:
    """torch raises a BaseException, which `except Exception` does not catch."""
    torch_checkpoint.save({"w": torch.ones(800)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for file in (tmp_path / "dcp").glob("*.distcp"):
        os.truncate(file, keep) if keep else file.unlink()
    with pytest.raises(CheckpointError, match="loading tensor 'w' failed: "):
        import_dcp(tmp_path / "dcp", tmp_path / "ours")


def test_a_damaged_checkpoint_of_ours_is_named_as_such(tmp_path: Path, checkpoint: Any) -> None:
    file = next(checkpoint.path.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointCorrupt, match="checksum is"):
        export_dcp(checkpoint, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_what_cannot_be_exported_or_imported_is_named(tmp_path: Path, checkpoint: Any) -> None:
    with pytest.raises(CheckpointInputError, match="exists"):
        export_dcp(checkpoint, tmp_path / "run")
    with pytest.raises(CheckpointNotFound, match=r"has no \.metadata"):
        import_dcp(tmp_path, tmp_path / "ours")
    torch_checkpoint.save({"n": 1}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(CheckpointMismatch, match="holds no tensors"):
        import_dcp(tmp_path / "dcp", tmp_path / "ours")


def test_an_export_that_fails_leaves_nothing(tmp_path: Path, checkpoint: Any, monkeypatch: Any) -> None:
    def broken(*args: Any, **keywords: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dcp, "save_dcp", broken)
    with pytest.raises(OSError, match="No space left"):
        export_dcp(checkpoint, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
