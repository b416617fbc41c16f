"""JSON Schema (draft 2020-12) of a config, generated from the rows.

Editors use it for completion, descriptions and early errors: `zengine schema > ds_config.schema.json`.  It accepts
the configs that `load` accepts, with three exceptions: rules between keys, which a schema cannot express; keys of a
section that is off, where `load` allows values that it would otherwise reject; and dotted names at the top level.
"""

from __future__ import annotations

import sys
from typing import Any

import zckpt
from zengine.config.grammar.kinds import Mismatch
from zengine.config.grammar.scan import dotted
from zengine.config.grammar.table import COMMENT_KEYS, SECTION_IS_OFF, Key, Section, Support
from zengine.config.keys.root import ROOT
from zengine.config.reading.auto import AUTO

__all__ = ["default_of", "json_schema"]

Path = tuple[str, ...]
_AUTO = {"const": "auto"}


def json_schema() -> dict[str, Any]:
    """Return the schema of a whole config: plain data for `json.dumps`."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Training config of zengine, with the keys of DeepSpeed",
        **_object(ROOT, ()),
    }


def default_of(key: Key) -> Any:
    """Return the default as it would be written; None if it stands for "not given"."""
    try:
        is_value = key.kind.read(key.default) == key.default
    except (Mismatch, zckpt.CheckpointInputError):
        return None
    is_empty = key.default in ("", (), {}, sys.maxsize) and not isinstance(key.default, bool)
    return key.default if is_value and not is_empty else None


def _of(row: Key | Section, path: Path) -> dict[str, Any]:
    return _section(row, path) if isinstance(row, Section) else _key(row, path)


def _section(section: Section, path: Path) -> dict[str, Any]:
    """Return a schema of an object, null for an absent section, and the section's shorthand or list of members."""
    if section.rejection:
        return {"type": "null", "description": f"Rejected: {section.rejection}."}
    forms: list[dict[str, Any]] = [_object(section, path), {"type": "null"}]
    if section.members:
        forms.append({"type": "array", "items": _object(section.members[0], (*path, "*"))})
    if section.shorthand:
        forms.append({"type": "boolean"})
    return {"anyOf": forms, **_documented(f"Ignored: {section.idle}." if section.idle else _summary(section))}


def _object(section: Section, path: Path) -> dict[str, Any]:
    properties = {name: _of(row, (*path, name)) for name, row in section.keys.items()}
    others: Any = section.is_open
    if section.members:
        others = _object(section.members[0], (*path, "*"))
    return {
        "type": "object",
        "properties": properties,
        "patternProperties": {COMMENT_KEYS: True},
        "additionalProperties": others,
    }


def _summary(section: Section) -> str:
    """Return the first line of the settings class's docstring without the section's name."""
    line = (section.factory.__doc__ or "").partition("\n")[0] if section.factory is not dict else ""
    return line.partition(": ")[2] or line


def _key(key: Key, path: Path) -> dict[str, Any]:
    if key.support is Support.REJECTED:
        return {"not": {}, **_documented(f"Rejected: {key.why}. {key.hint}")}
    if key.support is Support.FIXED:
        return {"enum": list(key.matching), **_documented(f"Rejected at other values: {key.why}. {key.hint}")}
    schema = dict(key.kind.json_schema)
    if dotted(path) in AUTO or len(path) > 1:  # a section's keys are left out
        schema = {"anyOf": [schema, _AUTO]}
    if key.support is Support.RENAMED:
        new = ".".join((*path[:-1], *key.target))
        return {**schema, "deprecated": True, **_documented(f"Deprecated: {key.why} of {new}.")}
    if key.support is Support.IGNORED:
        why = "belongs to a feature that is not available" if key.why in ("", SECTION_IS_OFF) else key.why
        return {**schema, **_documented(f"Ignored: {why}.")}
    default = default_of(key)
    return {**schema, **({} if default is None else {"default": default}), **_documented(key.doc)}


def _documented(text: str) -> dict[str, str]:
    return {"description": text.strip()} if text.strip() else {}
