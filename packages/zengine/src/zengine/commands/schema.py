"""`zengine schema > ds_config.schema.json`: the JSON Schema of a config, which editors use for completion."""

from __future__ import annotations

import argparse
import json

from zengine.config.reading.json_schema import json_schema


def run(arguments: argparse.Namespace) -> int:
    """Print the schema."""
    print(json.dumps(json_schema(), indent=1, ensure_ascii=False))
    return 0
