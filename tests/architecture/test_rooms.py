"""The structure inside each package: no circles, small folders in a fixed order, one class per name.

The graph of imports is drawn here from the syntax trees.  Imports under TYPE_CHECKING and inside functions count:
they do not run early, but a reader follows them all the same.
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

# The folders of a package, lowest first: a module imports from its own folder and from earlier ones.  Modules beside
# the folders are named here, too.  `zengine/deepspeed` has the paths of DeepSpeed.
ORDER = {
    "zcomm": ["compat", "hosts", "gloo", "hangs", "shared", "collectives", "groups", "testing"],
    "zprecision": [
        *("_compat", "casting", "checks", "buffers", "inspect", "rules", "keep_in_fp32", "scaling"),
        *("float8", "fp32_modules", "policy", "wide_buffers"),
    ],
    "zpartition": [
        *("_compat", "_renamed", "layout", "disk", "activations", "deferred", "pipeline", "replicated", "state"),
        *("memory", "gradients", "weights", "core", "offload", "ownership", "estimate", "unfreeze"),
        *("partition", "sharding", "tensors", "tensor", "experts", "sequence", "testing"),
    ],
    "zoptim": [
        *("_compat", "errors", "checks", "rules", "backends", "schedules", "states", "updates", "shards"),
        "optimizers",
    ],
    "zckpt": [
        *("errors", "format", "ranks", "sources", "storage", "loading", "testing", "saving", "interchange"),
        *("cli", "__main__"),
    ],
    "zengine": [
        *("_compat", "as_deepspeed", "imports", "trial_load", "step_report", "data", "config", "testing"),
        *("telemetry", "engine", "checkpoint", "flops", "features", "reporting", "build"),
        *(
            "deepspeed_engine",
            "pipeline_engine",
            "initialize",
            "deepspeed",
            "planning",
            "commands",
            "cli",
            "__main__",
        ),
    ],
}

each_package = pytest.mark.parametrize("package", repo.PACKAGES)


def modules(package: str) -> dict[str, Path]:
    """The modules of a package by dotted name; a package's `__init__` has the package's name."""
    return {repo.module_name(path): path for path in repo.source_modules(package)}


def graph(package: str) -> dict[str, set[str]]:
    """The modules that each module imports, within one package."""
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
def test_no_modules_import_each_other_in_a_circle(package: str) -> None:
    try:
        graphlib.TopologicalSorter(graph(package)).prepare()
    except graphlib.CycleError as error:
        pytest.fail("a circle of imports: " + " <- ".join(error.args[1]))


def place_of(module: str, package: str) -> str:
    """The folder of a module below its package, or the module itself if it lies beside the folders."""
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
    assert not bad, "\n".join([f"these arrows go up; the order is {order}:", *sorted(bad)])


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
def test_a_class_name_means_one_class(package: str) -> None:
    apart = {"deepspeed", "testing"}  # DeepSpeed has some names twice; models of tests are called alike
    counts = Counter(
        node.name
        for path in repo.source_modules(package)
        if not apart & set(path.parts)
        for node in sources.tree(path).body
        if isinstance(node, ast.ClassDef)
    )
    assert not [name for name, count in counts.items() if count > 1]


def docstrings() -> list[tuple[str, str]]:
    """Every docstring of the packages, with its place."""
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
