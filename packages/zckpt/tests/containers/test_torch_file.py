import io
import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from zckpt import CheckpointCorrupt, CheckpointReadError
from zckpt.containers.torch_file import open_torch_file, read_torch_file

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
          torch.int8, torch.uint8, torch.bool, torch.complex64, torch.uint16, torch.float8_e4m3fn]  # fmt: skip


def saved(tmp_path: Path, value: Any) -> Path:
    torch.save(value, tmp_path / "a.pt")
    return tmp_path / "a.pt"


def test_every_dtype_and_layout_comes_back(tmp_path: Path) -> None:
    base = torch.arange(24.0).view(4, 6)
    value = {str(dtype): torch.ones(3, dtype=torch.float32).to(dtype) for dtype in DTYPES}
    value |= {"slice": base[1:3, ::2], "turned": base.t(), "scalar": torch.tensor(3.5), "empty": torch.empty(0, 3)}
    with open_torch_file(saved(tmp_path, value)) as opened:
        opened.verify()
        assert list(opened.value) == list(value)
        for name, tensor in value.items():
            found = opened.value[name]
            assert found.dtype == tensor.dtype
            assert torch.equal(
                found.float() if "float8" in name else found, tensor.float() if "float8" in name else tensor
            )


def test_a_module_an_optimizer_and_plain_values_come_back(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    value = {
        "module": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "args": {"lr": 0.1, "names": ("a", None), "ordered": OrderedDict(a=1), "dtype": torch.bfloat16},
    }
    with open_torch_file(saved(tmp_path, value)) as opened:
        found = opened.value
        assert found["args"] == value["args"]
        assert all(torch.equal(found["module"][name], tensor) for name, tensor in model.state_dict().items())
        assert torch.equal(found["parameter"], torch.ones(2))
        assert found["optimizer"]["param_groups"] == optimizer.state_dict()["param_groups"]
        assert torch.equal(found["optimizer"]["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


def test_tied_tensors_share_their_memory(tmp_path: Path) -> None:
    weight = torch.ones(4, 4)
    with open_torch_file(saved(tmp_path, {"a": weight, "b": weight})) as opened:
        assert opened.value["a"].data_ptr() == opened.value["b"].data_ptr()


def test_what_is_read_shares_memory_as_in_the_file(tmp_path: Path) -> None:
    weight = torch.arange(1000.0)
    path = saved(
        tmp_path, {"a": weight, "b": weight, "rows": [weight[k:] for k in range(40)], "t": weight.view(10, 100).T}
    )
    found = read_torch_file(path)
    tensors = [found["a"], found["b"], *found["rows"], found["t"]]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    assert all(torch.equal(row, weight[k:]) for k, row in enumerate(found["rows"]))
    assert torch.equal(found["t"], weight.view(10, 100).T)
    found["a"].zero_()  # its own memory, not the file's
    assert torch.equal(read_torch_file(path)["a"], weight)


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {os.environ['ZCKPT_TEST_MARKER']}",)


def test_an_exploit_in_a_real_file_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = tmp_path / "ran"
    monkeypatch.setenv("ZCKPT_TEST_MARKER", str(marker))
    path = saved(tmp_path, {"module": {"w": torch.ones(2)}, "extra": [Evil()]})
    with pytest.raises(CheckpointCorrupt, match=r"a\.pt: it names 'posix.system', which is not allowed"):
        open_torch_file(path)
    assert not marker.exists()
    torch.load(path, weights_only=False)
    assert marker.exists(), "the exploit was none"


class Model(torch.nn.Module):
    pass


def test_a_whole_module_is_an_error_that_names_its_class(tmp_path: Path) -> None:
    with pytest.raises(CheckpointCorrupt, match=r"Model'|names 'torch.nn"):
        open_torch_file(saved(tmp_path, Model()))


def rewritten(path: Path, **members: bytes) -> Path:
    """The same archive with other members."""
    with zipfile.ZipFile(path) as archive:
        kept = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    kept |= {f"{path.stem}/{name.replace('__', '/')}": data for name, data in members.items() if name != "pickle"}
    if "pickle" in members:
        kept[f"{path.stem}/data.pkl"] = members["pickle"]
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in kept.items():
            archive.writestr(name, data)
    return path


def test_big_endian_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointCorrupt, match="big-endian"):
        open_torch_file(rewritten(saved(tmp_path, [1]), byteorder=b"big"))


class Storage(pickle.Pickler):
    """Pickles strings that begin with * as persistent ids."""

    def persistent_id(self, value: Any) -> Any:
        return value[0] if isinstance(value, list) and len(value) == 1 else None


@pytest.mark.parametrize(
    "told", ["x", ("storage", 1), ("storage", torch.float32, "../secret", "cpu", 4), ("module", 1, 2, 3, 4),
             ("storage", torch.float32, "0", "cpu", 2**40), ("storage", torch.float32, "0", "cpu", -1),
             ("storage", "float", "0", "cpu", 1), ("storage", torch.float32, ["0"], "cpu", 1)],
)  # fmt: skip
def test_forged_storages_are_refused(tmp_path: Path, told: Any) -> None:
    stream = io.BytesIO()
    Storage(stream, 2).dump({"w": [told]})
    with pytest.raises(CheckpointCorrupt, match=r"a\.pt: "):
        open_torch_file(rewritten(saved(tmp_path, [torch.ones(4)]), pickle=stream.getvalue()))


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointReadError, match=r"none\.pt"):
        open_torch_file(tmp_path / "none.pt")
    with zipfile.ZipFile(tmp_path / "b.pt", "w") as archive:
        archive.writestr("b/other", b"x")
    with pytest.raises(CheckpointCorrupt, match=r"no member 'data\.pkl'"):
        open_torch_file(tmp_path / "b.pt")
