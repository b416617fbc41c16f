"""Every name that the installed libraries use from `deepspeed` exists in zengine.deepspeed.

The names are read from their sources without importing them; a new release that needs another name fails here.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

LIBRARIES = ("transformers", "accelerate", "lightning", "trl", "peft")
# Members used on the engine; a list, because the sources call it engine, model or self.deepspeed.
ENGINE = (
    *("backward", "step", "set_gradient_accumulation_boundary", "get_global_grad_norm", "destroy", "config"),
    *("save_checkpoint", "load_checkpoint", "zero_gather_16bit_weights_on_model_save", "module", "compile"),
    *("_zero3_consolidated_16bit_state_dict", "_consolidated_16bit_state_dict", "save_16bit_model"),
)


def sources(library: str) -> Iterator[Path]:
    """Return the files that import deepspeed, without the library's tests."""
    spec = importlib.util.find_spec(library)
    if spec is None or spec.origin is None:
        pytest.skip(f"{library} is not installed (requirements-dev.txt has it)")
    root = Path(spec.origin).parent
    for path in sorted(root.rglob("*.py")):
        if "test_utils" not in path.parts:
            text = path.read_text(encoding="utf-8")
            if "import deepspeed" in text or "from deepspeed" in text:
                yield path


def names_in(text: str) -> set[str]:
    """Return the dotted names below `deepspeed` that a source uses, through imports and aliases."""
    tree = ast.parse(text)
    found: set[str] = set()
    aliases = {"deepspeed": "deepspeed"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "deepspeed":
            for alias in node.names:
                found.add(f"{node.module}.{alias.name}")
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "deepspeed"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (chain := dotted(node)):
            head, _, rest = chain.partition(".")
            if head in aliases and not is_shadowed(tree, head):
                found.add(f"{aliases[head]}.{rest}")
    return found


def dotted(node: ast.expr) -> str:
    """Return `a.b.c` of an attribute chain; "" if it does not begin with a name."""
    if isinstance(node, ast.Name):
        return node.id
    inner = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{inner}.{node.attr}" if inner and isinstance(node, ast.Attribute) else ""


def is_shadowed(tree: ast.Module, name: str) -> bool:
    """True if the source also imports the name from elsewhere (`torch.distributed as dist`)."""
    return any(
        (alias.asname or alias.name) == name
        and not str(getattr(node, "module", None) or alias.name).startswith("deep")
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    )


@functools.cache
def resolve(name: str) -> object:
    """Find the object of a dotted name below zengine.deepspeed, by import and attribute."""
    parts = ["zengine", *name.split(".")]
    for cut in range(len(parts), 1, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_name_that_a_library_uses_from_deepspeed_exists(library: str):
    places: dict[str, str] = {}
    for path in sources(library):
        for name in names_in(path.read_text(encoding="utf-8")):
            places.setdefault(name, path.name)
    missing = []
    for name, place in sorted(places.items()):
        try:
            resolve(name)
        except (ModuleNotFoundError, AttributeError):
            missing.append(f"{place}: {name}")
    assert len(places) >= 5, "the search finds what it looks for"
    assert not missing, "\n".join(missing)


def test_the_engine_has_the_members_that_they_call():
    engine = resolve("deepspeed.DeepSpeedEngine")
    missing = [name for name in ENGINE if not hasattr(engine, name) and name != "module"]
    assert not missing


def test_the_search_follows_aliases_and_leaves_other_names_alone():
    text = (
        "import deepspeed\nfrom deepspeed import comm as dist\nfrom deepspeed.utils import groups\n"
        "import other as dist2\n"
        "deepspeed.zero.Init(x.y)\ndist.barrier()\ngroups._get()\ndist2.thing()\nself.deepspeed.step()\n"
    )
    assert names_in(text) == {
        *("deepspeed", "deepspeed.comm", "deepspeed.utils.groups", "deepspeed.zero", "deepspeed.zero.Init"),
        *("deepspeed.comm.barrier", "deepspeed.utils.groups._get"),
    }
