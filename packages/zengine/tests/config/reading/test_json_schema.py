"""The JSON Schema accepts what the strict reader accepts, and nothing that it rejects."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from zengine.cli import main
from zengine.config.grammar.kinds import Mismatch
from zengine.config.grammar.table import Key, Support, walk
from zengine.config.keys.root import ROOT
from zengine.config.reading.json_schema import default_of, json_schema

jsonschema: Any = pytest.importorskip("jsonschema")

PACKAGE = Path(__file__).parents[3]
PUBLISHED = sorted((PACKAGE / "tests/commands/published").glob("*.json")) + sorted(PACKAGE.glob("examples/*.json"))
SCHEMA = json_schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
VALUES: tuple[Any, ...] = (
    *(True, False, None, "auto", "text", "", "fp16", "half", "torch.float32", "cpu", "none", "warn", "WARN"),
    *(0, 1, 2, 3, 4, -1, -2, 126, 127, 0.0, 0.5, 1.5, 5e8, ["a"], [1], [1.5], [], {"a": 1}, {}),
)


def is_valid(config: object) -> bool:
    return bool(VALIDATOR.is_valid(config))


def readme_examples() -> list[dict[str, Any]]:
    blocks = re.findall(r"```json\n(.*?)```", (PACKAGE / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    return [json.loads(block if block.startswith("{") else f"{{{block}}}") for block in blocks]


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.name)
def test_published_configs_are_valid_and_with_a_misspelt_key_they_are_not(path: Path) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    VALIDATOR.validate(config)
    assert not is_valid({**config, "zero_optimisation": {"stage": 2}})
    assert not is_valid({**config, "zero_optimization": {"stagee": 2}})
    assert is_valid({**config, "_comment": "about", "zero_optimization": {"stage": 2, "_comment": "about"}})


def test_the_examples_of_the_readme_are_valid() -> None:
    assert readme_examples()
    for config in readme_examples():
        VALIDATOR.validate(config)


def parts() -> list[tuple[str, Key, dict[str, Any]]]:
    """Every key that takes values, with its schema."""
    found = []
    for path, row in walk(ROOT):
        if not isinstance(row, Key) or row.support in (Support.FIXED, Support.REJECTED):
            continue
        here: Any = SCHEMA
        for name in path:
            here = here["anyOf"][0] if "anyOf" in here else here
            here = here["additionalProperties"] if name == "*" else here.get("properties", {}).get(name)
            if here is None:
                break  # inside a section that is rejected as a whole
        if here is not None:
            found.append((".".join(path), row, here))
    return found


@pytest.mark.parametrize(("path", "key", "schema"), [pytest.param(*part, id=part[0]) for part in parts()])
def test_a_value_is_valid_if_the_reader_takes_it(path: str, key: Key, schema: dict[str, Any]) -> None:
    for value in VALUES:
        try:
            key.kind.read(value)
        except Mismatch:
            expected = value == "auto" and {"const": "auto"} in schema.get("anyOf", ())
        else:
            expected = True
        if expected or path != "checkpoint.keep.best":  # no schema says what METRIC[:min|max[:N]] is
            assert jsonschema.Draft202012Validator(schema).is_valid(value) is expected, value


def test_every_key_is_described_and_a_default_is_valid() -> None:
    for path, key, schema in parts():
        assert schema.get("description"), path
        if key.support is Support.HONOURED and default_of(key) is not None:
            default = json.loads(json.dumps(schema["default"]))
            assert jsonschema.Draft202012Validator(schema).is_valid(default), path


def test_keys_that_do_not_act_say_so() -> None:
    zero = SCHEMA["properties"]["zero_optimization"]["anyOf"][0]["properties"]
    assert zero["reduce_scatter"]["description"].startswith("Ignored: ")
    assert SCHEMA["properties"]["zero"]["description"].startswith("Rejected: ")
    experts = SCHEMA["properties"]["expert_parallel"]["anyOf"][0]["properties"]
    assert experts["load_balance_coeff"]["description"].startswith("Rejected at other values: ")
    assert zero["mics_shard_size"]["deprecated"] is True
    assert "zero_optimization.shard_group_size" in zero["mics_shard_size"]["description"]


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(SCHEMA))
