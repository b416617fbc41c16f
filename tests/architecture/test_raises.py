"""Public functions and classes say in their docstrings that they raise."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import repo

FROZEN = Path(__file__).with_name("public_api.txt")
# of our bugs, of abstract methods, and of protocols of Python that a docstring need not repeat
UNSAID = {"AssertionError", "NotImplementedError", "AttributeError", "StopIteration", "SystemExit"}
SCOPES = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef


def raised(function: ast.FunctionDef) -> set[str]:
    """Return the names of the exceptions that the body itself raises."""
    found, stack = set(), list[ast.AST](function.body)
    while stack:
        node = stack.pop()
        if isinstance(node, SCOPES):
            continue
        if isinstance(node, ast.Raise) and node.exc is not None:
            error = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            found.add(ast.unparse(error).rpartition(".")[2])
        stack += ast.iter_child_nodes(node)
    return {name for name in found if name[0].isupper()} - UNSAID


def raised_with_helpers(function: ast.FunctionDef, module: ast.Module) -> set[str]:
    """Return what `raised` does, and the same of the module's private functions that the function calls."""
    called = {
        each.func.id for each in ast.walk(function) if isinstance(each, ast.Call) and isinstance(each.func, ast.Name)
    }
    helpers = [each for each in module.body if isinstance(each, ast.FunctionDef) and each.name in called]
    private = [raised(each) for each in helpers if each.name.startswith("_")]
    return raised(function).union(*private)


def says(*docstrings: str | None) -> bool:
    return any("rais" in (text or "").lower() or "reject" in (text or "").lower() for text in docstrings)


def silent(node: ast.stmt, module: ast.Module) -> Iterator[str]:
    """Yield the function, or the methods of the class, that raise and have a docstring which does not say so."""
    if isinstance(node, ast.FunctionDef):
        if raised_with_helpers(node, module) and not says(ast.get_docstring(node)):
            yield ""
    elif isinstance(node, ast.ClassDef):
        for method in node.body:
            if not isinstance(method, ast.FunctionDef) or not raised(method):
                continue
            own = ast.get_docstring(method)
            if method.name in ("__init__", "__attrs_post_init__"):
                if not says(own, ast.get_docstring(node)):
                    yield f".{method.name}"
            elif not method.name.startswith("_") and own and not says(own):  # without one it inherits its base's
                yield f".{method.name}"


def test_what_a_public_name_raises_is_in_its_docstring() -> None:
    modules: dict[str, ast.Module] = {}
    found = set()
    names = [line for line in FROZEN.read_text().splitlines() if line and not line.startswith("#")]
    for name in names:
        place, _, attribute = name.rpartition(".")
        thing = inspect.unwrap(getattr(importlib.import_module(place), attribute))
        try:
            file = inspect.getsourcefile(thing)
        except TypeError:  # a value
            continue
        if file is None or not Path(file).is_relative_to(repo.ROOT):
            continue
        module = modules.setdefault(file, ast.parse(Path(file).read_text(encoding="utf-8")))
        wanted = getattr(thing, "__qualname__", attribute)
        for node in module.body:
            if getattr(node, "name", "") == wanted:
                found |= {f"{name}{method}" for method in silent(node, module)}
    assert not found, f"write `Raises ...` into the docstrings of {sorted(found)}"


def test_a_silent_function_is_found() -> None:
    text = 'def _check(x):\n    raise ValueError\n\ndef quiet(x):\n    """Return x."""\n    _check(x)\n'
    module = ast.parse(text + '\ndef loud(x):\n    """Return x.  Raises ValueError."""\n    _check(x)\n')
    assert [node.name for node in module.body for _ in silent(node, module)] == ["_check", "quiet"]  # type: ignore[attr-defined]
