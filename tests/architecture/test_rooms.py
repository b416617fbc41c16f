"""Structure inside each package: no import cycles, small folders in a fixed order, one class per name.

The import graph comes from syntax trees.  Imports under TYPE_CHECKING and inside functions count, because a reader
follows them too.
"""

from __future__ import annotations

import ast
import graphlib
from collections import Counter
from pathlib import Path

import pytest
import repo
import sources

MAX_MODULES = 20  # in one folder
MAX_QUESTIONS = 0.02  # of all docstrings: see QUESTIONS
QUESTIONS = ("What", "Who", "Which", "Where", "Whether", "From")

# The folders of a package, lowest first: a module imports from its own folder and from earlier ones.  The list
# includes modules beside the folders.  `zengine/deepspeed` mirrors DeepSpeed's paths.
ORDER = {
    "zcomm": ["compat", "hosts", "hangs", "gloo", "shared", "collectives", "groups", "testing"],
    "zprecision": [
        *("_compat", "backends", "casting", "checks", "curvature", "inspect", "rules", "keep_in_fp32", "scaling"),
        *("float8", "fp32_modules", "policy", "wide_buffers", "quant", "decoding"),
    ],
    "zpartition": [
        *("_compat", "_renamed", "layout", "disk", "activations", "deferred", "pipeline", "state"),
        *(
            "memory",
            "gradients",
            "weights",
            "core",
            "bucket_exchange",
            "selective",
            "offload",
            "weight_shards",
            "ownership",
        ),
        *("estimate", "unfreeze"),
        *("partition", "rounds", "sharding", "tensors", "tensor", "experts", "sequence", "testing"),
    ],
    "zoptim": [
        *("_compat", "errors", "checks", "options", "rules", "backends", "schedules", "states", "updates", "shards"),
        "optimizers",
    ],
    "zckpt": [
        *(
            "errors",
            "gc_pause",
            "format",
            "ranks",
            "sources",
            "storage",
            "loading",
            "testing",
            "saving",
            "containers",
            "interchange",
        ),
        *("cli", "__main__"),
    ],
    "zengine": [
        *(
            "_compat",
            "as_deepspeed",
            "imports",
            "pages",
            "progress",
            "trial_load",
            "step_report",
            "data",
            "config",
            "testing",
        ),
        *(
            "telemetry",
            "engine",
            "checkpoint",
            "flops",
            "adapters",
            "planning",
            "compression",
            "features",
            "reporting",
            "build",
            "captured_step",
            "inference",
            "rollout",
            "sparse_attention",
        ),
        *(
            "deepspeed_getters",
            "deepspeed_engine",
            "pipeline_engine",
            "hybrid_engine",
            "initialize",
            "deepspeed",
            "ordering",
            "commands",
            "cli",
            "__main__",
        ),
    ],
}

each_package = pytest.mark.parametrize("package", repo.PACKAGES)


def modules(package: str) -> dict[str, Path]:
    """Return the modules of a package by dotted name; an `__init__` has its package's name."""
    return {repo.module_name(path): path for path in repo.source_modules(package)}


def graph(package: str) -> dict[str, set[str]]:
    """Return the imports of each module within one package."""
    known = modules(package)
    found: dict[str, set[str]] = {}
    for name, path in known.items():
        targets = set()
        for item in sources.imports(path):
            submodule = f"{item.module}.{item.name}".strip(".")
            targets.add(submodule if submodule in known else item.module)
        found[name] = {target for target in targets if target in known and target != name}
    return found


@each_package
def test_there_are_no_import_cycles(package: str) -> None:
    try:
        graphlib.TopologicalSorter(graph(package)).prepare()
    except graphlib.CycleError as error:
        pytest.fail("an import cycle: " + " <- ".join(error.args[1]))


def place_of(module: str, package: str) -> str:
    """Return the folder of a module below its package, or the module itself beside the folders."""
    below = module.removeprefix(package).lstrip(".").split(".")
    return below[0]


@each_package
def test_folders_import_only_from_lower_folders(package: str) -> None:
    order = ORDER[package]
    bad = []
    for module, targets in graph(package).items():
        for target in targets:
            here, there = place_of(module, package), place_of(target, package)
            if here and there and here != there and order.index(there) >= order.index(here):
                bad.append(f"{module} -> {target}")
    assert not bad, "\n".join([f"these imports contradict the order {order}:", *sorted(bad)])


@each_package
def test_the_order_names_every_folder_and_module(package: str) -> None:
    places = {place_of(name, package) for name in modules(package)} - {""}
    assert sorted(ORDER[package]) == sorted(places)


@each_package
def test_a_folder_has_at_most_20_modules(package: str) -> None:
    counts = Counter(path.parent for path in repo.source_modules(package) if path.name != "__init__.py")
    bad = [f"{folder.relative_to(repo.ROOT)}: {count}" for folder, count in counts.items() if count > MAX_MODULES]
    assert not bad, "\n".join(["sort these into folders:", *bad])


@each_package
def test_imports_of_our_own_packages_are_absolute(package: str) -> None:
    bad = [
        f"{path.relative_to(repo.ROOT)}:{node.lineno}"
        for path in repo.source_modules(package)
        for node in ast.walk(sources.tree(path))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not bad, "\n".join(bad)


@each_package
def test_class_names_are_unique(package: str) -> None:
    apart = {"deepspeed", "testing"}  # DeepSpeed has some names twice; test models share names
    counts = Counter(
        node.name
        for path in repo.source_modules(package)
        if not apart & set(path.parts)
        for node in sources.tree(path).body
        if isinstance(node, ast.ClassDef)
    )
    assert not [name for name, count in counts.items() if count > 1]


def docstrings() -> list[tuple[str, str]]:
    """Return every docstring of the packages, with its place."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        (f"{path.relative_to(repo.ROOT)}:{getattr(node, 'lineno', 1)}", text)
        for package in repo.PACKAGES
        for path in repo.source_modules(package)
        for node in ast.walk(sources.tree(path))
        if isinstance(node, kinds) and (text := ast.get_docstring(node))
    ]


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    found = docstrings()
    bad = [f"{where} {text.splitlines()[0]}" for where, text in found if text.split()[0].rstrip(",:") in QUESTIONS]
    assert len(bad) <= MAX_QUESTIONS * len(found), "\n".join([f"{len(bad)} of {len(found)}:", *bad])
