"""Mutants without one wait: every call that orders streams, found in the syntax tree, is taken out by itself.

All modules of the packages are searched, so a wait that is added is a mutant by itself.  Many calls of these names
wait for threads, files or Gloo and order no stream; they are in `ELSEWHERE`, each with its reason.

A call of a method in `WAITS` becomes its receiver (so that a `popleft()` in it still happens); one in `MARKS` becomes
an event that was never recorded, for which nothing waits; one of a function in `FUNCTIONS` becomes None.  A `wait()`
whose result is used stays: without it the next line fails.

A mutant replaces the code of one function of a module that is already imported, so it costs no import.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

__all__ = ["ELSEWHERE", "Mutant", "applied", "find_mutants", "find_unused"]

ROOT = Path(__file__).resolve().parent.parent.parent

WAITS = frozenset({"record", "record_stream", "synchronize", "wait", "wait_device", "wait_event", "wait_for"})
WAITS |= {"wait_host", "wait_stream"}
MARKS = frozenset({"record_event", "ready"})
FUNCTIONS = frozenset({"_await", "_synchronize", "_wait"})

# Calls of these names that order no stream: the beginning of a module, or of "module: call".
ELSEWHERE = {
    "zcomm.compat: ": "Gloo's own links, between hosts",
    "zcomm.collectives.handles: observer().record(": "notes a collective for the report of a hang",
    "zcomm.collectives.shared_tensors: step.wait()": "memory that processes share",
    "zcomm.gloo: ": "Gloo, between hosts",
    "zcomm.shared.": "memory that processes share, and threads",
    "zckpt.saving.background: may_run.wait()": "lets a thread begin",
    "zckpt.saving.background: self.wait()": "joins a thread; its copies are over",
    "zckpt.testing.": "threads of a test",
    "zengine.checkpoint.": "joins the thread of a background save; its copies are over",
    "zengine.deepspeed.": "interfaces that do what their caller asks",
    "zengine.engine.engine: self.parts.checkpoints.wait()": "joins the thread of a background save",
    "zpartition.deferred.init: self.recorded.record(": "a log of calls",
    "zpartition.disk.": "reads and writes of files, whose memory is the host's",
    "zpartition.memory.placement: transfer.wait()": "a file",
    "zpartition.memory.placement: self.reading[1].wait()": "a file",
    "zpartition.memory.placement: self.writing.wait()": "a file",
    "zpartition.offload.disk_": "files",
    "zpartition.offload.offload_states: ": "files",
    "zpartition.partition: self.unfreeze_sync.wait()": "Gloo, between hosts",
    "zpartition.tensor.tracing: self.record(": "a log of calls",
    "zpartition.unfreeze: ": "Gloo, between hosts",
}


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


def find_mutants() -> list[Mutant]:
    """Return the mutants of all packages, in the order of the modules and their text."""
    return [call for call in _find_calls() if not any(_text(call).startswith(each) for each in ELSEWHERE)]


def find_unused() -> set[str]:
    """Return the beginnings in `ELSEWHERE` that no call has."""
    calls = [_text(call) for call in _find_calls()]
    return {each for each in ELSEWHERE if not any(call.startswith(each) for call in calls)}


@functools.cache
def _find_calls() -> list[Mutant]:
    found: list[Mutant] = []
    for path in sorted(ROOT.glob("packages/*/src/**/*.py")):
        text = path.read_text()
        if any(f"{name}(" in text for name in (*WAITS, *MARKS, *FUNCTIONS)):
            module = ".".join(path.with_suffix("").parts[path.parts.index("src") + 1 :])
            _visit(ast.parse(text), module, (), found)
    return found


def _text(call: Mutant) -> str:
    return f"{call.module}: {call.call}"


@contextlib.contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    """Run the body with the mutated function."""
    tree = ast.fix_missing_locations(_Removal(mutant).visit(_tree(mutant.module)))
    function, names = _function(mutant)
    code = _code_of(compile(tree, str(_path(mutant.module)), "exec"), names)
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
        elif isinstance(child, ast.Call) and _kind(child) and not _returns_message(node, child):
            found.append(Mutant(module, ".".join(names), ast.unparse(child), child.lineno, child.col_offset))
        _visit(child, module, inside, found)


def _returns_message(parent: ast.AST, call: ast.Call) -> bool:
    is_used = not isinstance(parent, ast.Expr)
    return is_used and isinstance(call.func, ast.Attribute) and call.func.attr == "wait"


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


def _function(mutant: Mutant) -> tuple[types.FunctionType, list[str]]:
    """Return the function object below decorators, and its names; the outer one of nested functions."""
    found: Any = importlib.import_module(mutant.module)
    names: list[str] = []
    for name in mutant.function.split("."):
        names.append(name)
        found = inspect.getattr_static(found, name)
        if isinstance(found, property):
            found = found.fget
        elif isinstance(found, (classmethod, staticmethod)):
            found = found.__func__
        found = inspect.unwrap(found)
        if isinstance(found, types.FunctionType):
            break
    assert isinstance(found, types.FunctionType), mutant
    return found, names
