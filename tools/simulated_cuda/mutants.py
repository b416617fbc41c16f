"""Mutants without one wait: every call that orders streams, found in the syntax tree, is taken out by itself.

A call of a method in `WAITS` becomes its receiver (so that a `popleft()` in it still happens); one in `MARKS` becomes
an event that was never recorded, for which nothing waits; one of a function in `FUNCTIONS` becomes None.

A mutant replaces the code of one function of a module that is already imported, so it costs no import.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

__all__ = ["MODULES", "Mutant", "applied", "find_mutants"]

WAITS = frozenset(
    {"wait_stream", "wait_event", "wait_for", "wait_host", "wait_device", "record_stream", "synchronize"}
)
MARKS = frozenset({"record_event", "ready"})
FUNCTIONS = frozenset({"_synchronize"})

# Where streams and the host meet; `tests/simulated/test_waits.py` has scenarios for each.
MODULES = (
    "zpartition.memory.mover",
    "zpartition.memory.placement",
    "zpartition.memory.buffers",
    "zpartition.offload.manager",
    "zpartition.offload.offload_states",
    "zpartition.gradients.speculate",
    "zpartition.partition",
    "zpartition.activations.stores",
    "zpartition.activations.streams",
    "zckpt.saving.background",
    "zckpt.loading.copy",
    "zengine.data.loaders.fetch",
)


@attrs.frozen
class Mutant:
    """One call that is taken out."""

    module: str
    function: str  # qualified name in the module
    call: str  # its text
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.module.rpartition('.')[2]}.{self.function}: {self.call}"


def find_mutants(modules: Sequence[str] = MODULES) -> list[Mutant]:
    """Return the mutants of the modules, in the order of the text."""
    found: list[Mutant] = []
    for module in modules:
        _visit(_tree(module), module, (), found)
    return found


@contextlib.contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    """Run the body with the mutated function."""
    tree = _Removal(mutant).visit(_tree(mutant.module))
    path = _path(mutant.module)
    code = _code_of(compile(ast.fix_missing_locations(tree), str(path), "exec"), mutant.function.split("."))
    function = _function(mutant)
    before = function.__code__
    assert code.co_freevars == before.co_freevars, mutant
    function.__code__ = code
    try:
        yield
    finally:
        function.__code__ = before


def _path(module: str) -> Path:
    return Path(str(inspect.getsourcefile(importlib.import_module(module))))


def _tree(module: str) -> ast.Module:
    return ast.parse(_path(module).read_text())


def _visit(node: ast.AST, module: str, names: tuple[str, ...], found: list[Mutant]) -> None:
    for child in ast.iter_child_nodes(node):
        inside = names
        if isinstance(child, (ast.ClassDef, ast.FunctionDef)):
            inside = (*names, child.name)
        elif isinstance(child, ast.Call) and _kind(child):
            found.append(Mutant(module, ".".join(names), ast.unparse(child), child.lineno, child.col_offset))
        _visit(child, module, inside, found)


def _kind(call: ast.Call) -> str:
    """Return how a call is taken out; "" for one that stays."""
    match call.func:
        case ast.Attribute(attr=name) if name in WAITS:
            return "wait"
        case ast.Attribute(attr=name) if name in MARKS:
            return "mark"
        case ast.Name(id=name) if name in FUNCTIONS:
            return "function"
    return ""


class _Removal(ast.NodeTransformer):
    def __init__(self, mutant: Mutant) -> None:
        self._at = mutant.line, mutant.column, mutant.call

    def visit_Call(self, node: ast.Call) -> ast.AST:
        kind = _kind(node)
        if not kind or (node.lineno, node.col_offset, ast.unparse(node)) != self._at:
            return self.generic_visit(node)
        if kind == "wait":
            assert isinstance(node.func, ast.Attribute)
            return node.func.value
        text = "None" if kind == "function" else "__import__('torch').cuda.Event()"
        return ast.copy_location(ast.parse(text, mode="eval").body, node)


def _code_of(code: types.CodeType, names: list[str]) -> types.CodeType:
    for name in names:
        code = next(each for each in code.co_consts if isinstance(each, types.CodeType) and each.co_name == name)
    return code


def _function(mutant: Mutant) -> types.FunctionType:
    """Return the function object, below decorators."""
    found: Any = importlib.import_module(mutant.module)
    for name in mutant.function.split("."):
        found = inspect.getattr_static(found, name)
        if isinstance(found, property):
            found = found.fget
        elif isinstance(found, (classmethod, staticmethod)):
            found = found.__func__
    found = inspect.unwrap(found)
    assert isinstance(found, types.FunctionType), mutant
    return found
