"""Lazy names are imported once, on first use; unknown and old names raise."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

import zengine.deepspeed
from zengine.imports import homes_below, lazy_attributes


def test_a_name_is_imported_on_first_use_and_kept(monkeypatch):
    package = types.ModuleType("lazy_example")
    monkeypatch.setitem(sys.modules, package.__name__, package)
    package.__all__ = ["OrderedDict"]
    package.__getattr__, package.__dir__ = lazy_attributes(package.__name__, {"OrderedDict": "collections"})
    assert "OrderedDict" not in vars(package)
    assert "OrderedDict" in dir(package)
    from collections import OrderedDict

    assert package.OrderedDict is OrderedDict
    assert vars(package)["OrderedDict"] is OrderedDict
    with pytest.raises(AttributeError, match="module 'lazy_example' has no attribute 'Other'"):
        package.Other  # noqa: B018 - the look is the test


def test_an_old_name_is_an_error_that_has_the_new_one(monkeypatch):
    package = types.ModuleType("renamed_example")
    monkeypatch.setitem(sys.modules, package.__name__, package)
    package.__getattr__, _ = lazy_attributes(package.__name__, {}, {"Old": "renamed_example.New"})
    with pytest.raises(
        AttributeError, match=r"renamed_example\.Old was renamed in 0\.3\.0; use renamed_example\.New\."
    ):
        package.Old  # noqa: B018 - the look is the test
    with pytest.raises(ImportError):
        from renamed_example import Old  # noqa: F401


def test_an_engine_of_a_whole_model_loads_no_feature_that_is_off_and_nothing_that_splits_models():
    script = """
import logging, sys
logging.disable()
from torch import nn
import zengine
zengine.initialize(model=nn.Linear(2, 2), config={"train_batch_size": 1, "optimizer": {"type": "AdamW"}})
splits = ("tensor", "pipeline", "sequence", "experts", "activations")
found = [name for name in sys.modules if name.startswith("zpartition.") and name.split(".")[1] in splits]
off = ("features.random_ltd", "features.measuring", "telemetry.sinks.table", "telemetry.telemetry", "planning")
found += [name for name in sys.modules if name.startswith(tuple(f"zengine.{part}" for part in off))]
print(found + sorted({"torch._dynamo", "cffi", "tensorboard", "transformers"} & set(sys.modules)))
"""
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_name_may_differ_from_that_in_its_module_and_submodules_are_names(tmp_path: Path, monkeypatch):
    (tmp_path / "lazy_folder").mkdir()
    (tmp_path / "lazy_folder/part.py").write_text("value = 3")
    (tmp_path / "lazy_folder/no_package").mkdir()
    (tmp_path / "lazy_folder/__init__.py").write_text("""
from zengine.imports import lazy_attributes
__getattr__, _ = lazy_attributes(__name__, {"Ordered": "collections:OrderedDict"}, with_submodules=True)
""")
    monkeypatch.syspath_prepend(tmp_path)
    from collections import OrderedDict

    import lazy_folder

    assert lazy_folder.Ordered is OrderedDict
    assert lazy_folder.part.value == 3
    for name in ("no_such_module", "no_package", "__wrapped__"):
        assert not hasattr(lazy_folder, name)
    assert homes_below("a.b", {"c": "d e", "f.g": "h"}) == {"d": "a.b.c", "e": "a.b.c", "h": "a.b.f.g"}


def loaded_after(code: str) -> set[str]:
    """Return the modules of a fresh process that runs `code`."""
    script = f"import sys\n{code}\nimport json\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_import_deepspeed_loads_no_part_that_nobody_touches():
    found = loaded_after("import zengine.deepspeed as d; assert 'ops' in dir(d) and d.NotAvailable")
    assert not {"torch", "numpy", "zcomm", "zpartition", "zoptim", "zckpt", "zprecision"} & found
    allowed = {"zengine", "zengine.imports", "zengine.initialize", "zengine.as_deepspeed", "zengine.deepspeed"}
    assert {name for name in found if name.startswith("zengine")} == {*allowed, "zengine.deepspeed.absent"}
    touched = loaded_after("import zengine.deepspeed as d; d.initialize, d.zero.Init, d.comm.all_reduce, d.moe.layer")
    heavy = {"torch._dynamo", "sympy", "transformers", "tensorboard", "pandas", "scipy", "cffi", "cupy"}
    assert not heavy & touched


LAZY = [
    path
    for path in Path(zengine.deepspeed.__file__).parent.rglob("__init__.py")
    if "lazy_attributes(" in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("path", LAZY, ids=lambda path: path.parent.name)
def test_lazy_names_are_those_that_type_checkers_see(path: Path):
    relative = path.parent.relative_to(Path(zengine.deepspeed.__file__).parent)
    package = importlib.import_module(".".join(["zengine.deepspeed", *relative.parts]))
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {item.asname or item.name: (str(node.module), item.name) for node in imports for item in node.names}
    assert set(seen) <= set(package.__all__) <= set(dir(package))
    for name in package.__all__:
        found = getattr(package, name)
        if name in seen:
            home, own_name = seen[name]
            module = importlib.import_module(home)
            assert found is (
                getattr(module, own_name)
                if hasattr(module, own_name)
                else importlib.import_module(f"{home}.{own_name}")
            )
