"""Limits on sizes, which may only shrink.

The limits for functions and booleans are ratchets: `test_the_ratchets_are_tight` fails when the tree allows a lower
one; none is raised.
"""

from __future__ import annotations

import ast
from pathlib import Path

import repo
import sources
from torch import nn

import zengine
from zengine.engine.engine import Engine

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 45  # in packages, without the docstring: initialize(), whose signature is DeepSpeed's
MAX_OTHER_FUNCTION_LINES = 60  # in tests and tools
MAX_P90_FUNCTION_LINES = 20  # in packages
MAX_PUBLIC_PARAMETERS = 16  # zero.Init, whose signature is DeepSpeed's
MAX_PARAMETERS = 6
MAX_ENGINE_MEMBERS = 25  # including redefined names of nn.Module

# Classes with more than one boolean attribute, and how many: this table may only shrink.
BOOLEANS = {
    "zpartition.layout.policy.ZeroPolicy": 2,  # two independent switches of the user's config
    "zengine.engine.clock.MicroStep": 2,  # two facts of one frozen value
    "zengine.checkpoint.restore.RestoreScope": 3,
}

# The engine contains no type tests: features and policies are objects, or absent.
ENGINE = repo.source_folder("zengine") / "engine/engine.py"
FORBIDDEN_IN_ENGINE = {"isinstance", "hasattr", "getattr", "type", "issubclass"}

# Classes whose booleans are keys of the user's JSON, or arguments or switches with DeepSpeed's names, not states.
MIRRORS_THE_CONFIG = (
    "packages/zengine/src/zengine/config/",
    "packages/zengine/src/zengine/deepspeed/autotuning/config.py",
    "packages/zengine/src/zengine/adapters/config.py",
    "packages/zengine/src/zengine/rollout/values.py",
    "packages/zengine/src/zengine/deepspeed/profiling/config.py",
    "packages/zengine/src/zengine/deepspeed/compression/basic_layer.py",
    "packages/zengine/src/zengine/deepspeed/runtime/data_pipeline/data_sampling/variable_batch_size_and_lr.py",
    "packages/zengine/src/zengine/deepspeed/runtime/activation_checkpointing/config.py",
    "packages/zengine/src/zengine/deepspeed/runtime/precision_config.py",
)

PYTHON_FILES = [
    path for path in repo.files(".py") if path.parts[len(repo.ROOT.parts)] in ("packages", "tests", "tools")
]
SOURCES = [path for name in repo.PACKAGES for path in repo.source_modules(name)]


def place(path: Path) -> str:
    return path.relative_to(repo.ROOT).as_posix()


def all_functions(paths: list[Path]) -> list[tuple[str, sources.Function]]:
    return [
        (f"{place(path)}:{found.line} {found.name}", found) for path in paths for found in sources.functions(path)
    ]


def percentile_90(values: list[int]) -> int:
    return sorted(values)[int(0.9 * (len(values) - 1))]


def num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_no_file_is_longer_than_the_limit() -> None:
    bad = [f"{place(path)}: {num_lines(path)}" for path in PYTHON_FILES if num_lines(path) > MAX_FILE_LINES]
    assert not bad, "\n".join(["split these by subject:", *bad])


def test_no_function_is_longer_than_the_cap() -> None:
    bad = [
        f"{where}: {found.num_lines}"
        for where, found in all_functions(PYTHON_FILES)
        if found.num_lines > (MAX_FUNCTION_LINES if "/src/" in where else MAX_OTHER_FUNCTION_LINES)
    ]
    assert not bad, "\n".join(["functions over the cap, docstrings not counted:", *bad])


def test_nine_functions_in_ten_are_short() -> None:
    lengths = [found.num_lines for _, found in all_functions(SOURCES)]
    assert percentile_90(lengths) <= MAX_P90_FUNCTION_LINES


def test_public_functions_take_at_most_16_parameters_and_others_at_most_6() -> None:
    bad = [
        f"{where}: {found.num_parameters}"
        for where, found in all_functions(SOURCES)
        if found.num_parameters > (MAX_PUBLIC_PARAMETERS if found.is_public else MAX_PARAMETERS)
    ]
    assert not bad, "\n".join(["too many parameters; group them in a frozen value:", *bad])


def test_the_ratchets_are_tight() -> None:
    """Fails when the tree is better than the caps: lower them."""
    lengths = [found.num_lines for _, found in all_functions(SOURCES)]
    assert max(lengths) > MAX_FUNCTION_LINES - 10, f"the longest has {max(lengths)} lines: lower MAX_FUNCTION_LINES"
    p90 = percentile_90(lengths)
    assert p90 > MAX_P90_FUNCTION_LINES - 10, f"p90 is {p90}: lower MAX_P90_FUNCTION_LINES"
    parameters = max(found.num_parameters for _, found in all_functions(SOURCES) if not found.is_public)
    assert parameters > MAX_PARAMETERS - 2, f"the most is {parameters}: lower MAX_PARAMETERS"
    present = num_booleans()
    stale = [name for name, count in BOOLEANS.items() if present.get(name, 0) < count]
    assert not stale, f"fewer booleans now, lower or remove in BOOLEANS: {stale}"


def test_the_engine_has_no_base_but_module() -> None:
    assert Engine.__bases__ == (nn.Module,)


def test_the_engine_has_few_public_members() -> None:
    """Attributes of an instance count as well, since they hide the module's."""
    engine, *_ = zengine.initialize(model=nn.Linear(2, 1), config={"train_batch_size": 1})
    members = {name for name in (*vars(Engine), *vars(engine), *engine._modules) if not name.startswith("_")}
    assert len(members) <= MAX_ENGINE_MEMBERS, sorted(members)


def test_no_module_below_the_engine_imports_it() -> None:
    folders = ("engine", "features", "flops", "telemetry", "checkpoint", "build", "data", "config")
    paths = [path for name in folders for path in repo.files(".py", under=repo.source_folder("zengine") / name)]
    bad = [
        f"{place(path)}:{item.line}"
        for path in paths
        for item in sources.imports(path)
        if f"{item.module}.{item.name}" in ("zengine.engine.engine", "zengine.engine.engine.Engine", "zengine.Engine")
    ]
    assert not bad, "\n".join(["take a Run instead of the engine:", *bad])


def test_the_engine_contains_no_type_tests() -> None:
    calls = [node for node in ast.walk(sources.tree(ENGINE)) if isinstance(node, ast.Call)]
    asked = [f"line {c.lineno}: {ast.unparse(c)}" for c in calls if ast.unparse(c.func) in FORBIDDEN_IN_ENGINE]
    assert not asked, asked


def test_a_class_has_at_most_one_boolean_attribute() -> None:
    bad = [f"{name}: {count}" for name, count in num_booleans().items() if count > BOOLEANS.get(name, 1)]
    assert not bad, "\n".join(["make the states of these an enum, or the option an object that may be absent:", *bad])


def num_booleans() -> dict[str, int]:
    """Return the number of boolean attributes of every class, without the user's config sections."""
    return {
        f"{repo.module_name(path)}.{node.name}": sum(map(is_boolean, node.body))
        for path in SOURCES
        for node in sources.classes(path)
        if not place(path).startswith(MIRRORS_THE_CONFIG)
    }


def is_boolean(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.AnnAssign) and ast.unparse(statement.annotation) == "bool"
