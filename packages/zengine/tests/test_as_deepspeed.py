"""`import deepspeed` as zengine.deepspeed: found with a version after `install`, and gone after `uninstall`."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from zengine import as_deepspeed

SCRIPT = """
import argparse, json, sys
import torch
import deepspeed
from deepspeed.utils import safe_get_full_fp32_param

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--out")
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()
deepspeed.init_distributed()
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
data = [torch.full((3,), i / 8) for i in range(8)]
engine, optimizer, loader, _ = deepspeed.initialize(
    args=args, model=model, model_parameters=model.parameters(), training_data=data
)
losses = []
for batch in loader:
    loss = (engine(batch.to(engine.device)) - 1).square().mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
assert safe_get_full_fp32_param(model.weight).shape == (1, 3)
with open(args.out, "w") as file:
    json.dump({"name": __name__, "argv": sys.argv[1:], "losses": losses, "file": deepspeed.__file__}, file)
engine.destroy()
"""


@pytest.fixture(autouse=True)
def nobody_has_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries that other tests have imported, when there was no deepspeed, are as if they had not."""
    for name in as_deepspeed._LOOK_ONCE:
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.fixture
def installed() -> Iterator[None]:
    as_deepspeed.install()
    try:
        yield
    finally:
        as_deepspeed.uninstall()


def test_without_being_asked_there_is_no_deepspeed():
    assert not any(type(finder).__module__ == as_deepspeed.__name__ for finder in sys.meta_path)
    found = importlib.util.find_spec("deepspeed")  # the real one may be installed
    assert found is None or "zengine" not in str(found.origin)


@pytest.mark.usefixtures("installed")
def test_a_module_under_either_name_is_one_object_under_its_own_name():
    ours = importlib.import_module("zengine.deepspeed.runtime.lr_schedules")
    theirs = importlib.import_module("deepspeed.runtime.lr_schedules")
    assert theirs is ours
    assert theirs.__name__ == "zengine.deepspeed.runtime.lr_schedules"
    assert theirs.__spec__.name == theirs.__name__
    assert importlib.import_module("deepspeed") is importlib.import_module("zengine.deepspeed")


@pytest.mark.usefixtures("installed")
def test_the_distribution_has_the_version_that_we_speak():
    assert importlib.metadata.version("deepspeed") == "0.19.8"
    assert importlib.metadata.metadata("deepspeed")["Name"] == "deepspeed"
    assert importlib.metadata.packages_distributions()["deepspeed"] == ["deepspeed"]
    assert importlib.util.find_spec("deepspeed") is not None
    assert importlib.util.find_spec("deepspeed.no_such_part") is None


def test_installing_twice_is_installing_once_and_uninstalling_leaves_nothing():
    before = list(sys.meta_path)
    as_deepspeed.install()
    as_deepspeed.install()
    assert len(sys.meta_path) == len(before) + 1
    importlib.import_module("deepspeed.comm")
    as_deepspeed.uninstall()
    assert sys.meta_path == before
    assert not [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]


def test_another_deepspeed_that_is_imported_already_is_not_shadowed(monkeypatch):
    stranger = type(sys)("deepspeed")
    stranger.__file__ = "/somewhere/deepspeed/__init__.py"
    monkeypatch.setitem(sys.modules, "deepspeed", stranger)
    with pytest.raises(ImportError, match=r"imported already, from /somewhere/deepspeed.*before the first `import"):
        as_deepspeed.install()


def test_a_library_that_has_looked_for_deepspeed_and_found_none_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate.utils", type(sys)("accelerate.utils"))
    with pytest.raises(ImportError, match=r"accelerate\.utils is imported already, looked for deepspeed"):
        as_deepspeed.install()


def test_a_script_that_cannot_be_edited_trains_and_leaves_the_process_as_it_was(tmp_path: Path):
    (tmp_path / "train.py").write_text(SCRIPT)
    config = {"train_batch_size": 2, "optimizer": {"type": "Adam", "params": {"lr": 0.01}}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "zengine.as_deepspeed", str(tmp_path / "train.py"), "--local_rank=0"]
    command += ["--deepspeed", "--deepspeed_config", str(tmp_path / "ds.json"), "--out", str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["name"] == "__main__"
    assert found["argv"][:2] == ["--local_rank=0", "--deepspeed"]
    assert "zengine/deepspeed" in found["file"]
    assert len(found["losses"]) == 4
    assert found["losses"][-1] < found["losses"][0]


def test_a_part_that_is_not_there_is_told_to_be_ours(tmp_path: Path, monkeypatch, capsys):
    (tmp_path / "wants.py").write_text("from deepspeed.ops.transformer import Layer\n")
    monkeypatch.setattr(sys, "argv", ["pytest"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    try:
        with pytest.raises(ModuleNotFoundError):
            as_deepspeed.main([str(tmp_path / "wants.py")])
    finally:
        as_deepspeed.uninstall()
    assert "zengine.deepspeed has no part 'deepspeed.ops.transformer'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "status", "told"),
    [
        ([], 2, "usage: python -m zengine.as_deepspeed"),
        (["--help"], 0, "means zengine.deepspeed"),
        (["-m"], 2, "-m needs the name of a module"),
        (["nowhere.py"], 2, "no such script: nowhere.py"),
    ],
)
def test_a_command_line_that_names_no_script_says_what_is_missing(argv, status, told, capsys):
    assert as_deepspeed.main(argv) == status
    found = capsys.readouterr()
    assert told in found.out + found.err


def test_a_module_is_run_with_its_arguments(tmp_path: Path, monkeypatch, capsys):
    (tmp_path / "za_probe.py").write_text(
        "import sys, deepspeed\nprint(__name__, sys.argv[1:], deepspeed.__version__)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["pytest"])
    try:
        assert as_deepspeed.main(["-m", "za_probe", "x"]) == 0
    finally:
        as_deepspeed.uninstall()
    assert capsys.readouterr().out == "__main__ ['x'] 0.19.8\n"
