"""`ds_elastic -c ds_config.json [-w WORLD_SIZE]`: print the elastic batch size of a config and its worlds."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from zengine.as_deepspeed import API_VERSION
from zengine.config.grammar.source import read
from zengine.deepspeed.elasticity.config import ElasticityError
from zengine.deepspeed.elasticity.elasticity import compute_elastic_config

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser("ds_elastic", description=__doc__)
    parser.add_argument("-c", "--config", required=True, help="DeepSpeed's config, a JSON file")
    parser.add_argument("-w", "--world-size", type=int, default=0, help="ranks of the job")
    options = parser.parse_args(argv)
    try:
        data: Any = read(options.config).data
        config = dict(data or {})
        found = compute_elastic_config(config, API_VERSION, world_size=options.world_size)
    except (ElasticityError, ValueError, OSError) as error:
        print(f"ds_elastic: {error}", file=sys.stderr)
        return 2
    print(json.dumps(config["elasticity"], indent=4, sort_keys=True))
    print(f"final_batch_size .... {found[0]}")
    print(f"valid_gpus .......... {found[1]}")
    if len(found) == 3:
        print(f"micro_batch_size .... {found[2]}")
        replicas = options.world_size // int(config["elasticity"].get("model_parallel_size", 1))
        print(f"gradient_accumulation_steps .... {found[0] // (found[2] * replicas)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
