"""`deepspeed.checkpoint.ds_to_universal`: a universal checkpoint of DeepSpeed, from its checkpoints or from ours.

    python -m zengine.deepspeed.checkpoint.ds_to_universal --input_folder runs/a/step9 --output_folder runs/a/u9

DeepSpeed loads the result with `"checkpoint": {"load_universal": true}`; our engine loads it as any other folder.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zckpt
from zckpt.interchange import ForeignCheckpoint, detect_format, export_universal, read_deepspeed

__all__ = ["main", "parse_arguments"]


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line of DeepSpeed's tool."""
    parser = argparse.ArgumentParser(prog="ds_to_universal", description="Write a universal checkpoint of DeepSpeed.")
    parser.add_argument("--input_folder", required=True, help="checkpoint (save_dir/tag), of DeepSpeed or ours")
    parser.add_argument("--output_folder", required=True, help="folder to write; latest_universal is put beside it")
    for option, text in {"num_extract_workers": "extract", "num_merge_workers": "merge"}.items():
        parser.add_argument(f"--{option}", type=int, default=1, help=f"no effect: one process does not {text} twice")
    parser.add_argument("--keep_temp_folder", action="store_true", help="no effect: there is no intermediate folder")
    parser.add_argument(
        "--no_strict", dest="strict", action="store_false", help="no effect: the files are always checked"
    )
    parser.add_argument(
        "--inject_missing_state", action="store_true", help="no effect: universal_checkpoint_info is always written"
    )
    return parser.parse_args(argv)


def main(args: Any) -> None:
    """Convert `args.input_folder` into `args.output_folder`; the other options have no effect.

    Raises zckpt.CheckpointError: the input is no checkpoint, damaged, or without an optimizer's state, or the output
    exists.
    """
    source = Path(args.input_folder)
    if (source / "manifest.json").is_file():
        _write(zckpt.open_checkpoint(source), args)
        return
    if detect_format(source) != "deepspeed":
        raise zckpt.CheckpointInputError(
            f"{source} is no checkpoint: pass the folder of one tag, which has a manifest.json or *_model_states.pt"
        )
    with read_deepspeed(source) as found:
        _write(ForeignCheckpoint.of(found), args)


def _write(checkpoint: Any, args: Any) -> None:
    made = export_universal(checkpoint, os.path.normpath(args.output_folder))
    print(f"{args.input_folder}: wrote the universal checkpoint {made}")


if __name__ == "__main__":
    main(parse_arguments())
