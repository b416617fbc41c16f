"""The pieces, in the order in which they run.  A new piece is a line here and a function in pieces/."""

from __future__ import annotations

import attrs

__all__ = ["PIECES", "Piece", "choose"]

LONGEST_S = 480  # of any piece: machines that are lent for minutes run them one by one


@attrs.frozen
class Piece:
    """One row."""

    name: str  # for --only
    title: str  # what it shows, for reports and READMEs
    function: str  # module:function below acceptance.pieces
    limit_s: int = attrs.field(validator=attrs.validators.le(LONGEST_S))  # then it is ended, and has failed
    packages: tuple[str, ...]  # whose READMEs quote it
    on_simulated: bool = True  # False: it only measures, or needs what that device lacks


PIECES = (
    Piece("kernel-bits", "bits of the GPU kernels", "kernels:bits", 480, ("zoptim",)),
    Piece("kernel-speed", "bandwidth of the GPU kernels", "kernels:speed", 300, ("zoptim",), on_simulated=False),
    Piece("racecheck", "races inside the GPU kernels", "kernels:racecheck", 480, ("zoptim",), on_simulated=False),
    Piece("stages-fp32", "ZeRO 0 to 3 in fp32", "contract:in_float32", 240, ("zengine", "zpartition")),
    Piece("stages-bf16", "ZeRO 0 to 3 in bf16", "contract:in_bfloat16", 240, ("zengine", "zpartition")),
    Piece("stages-fp16", "ZeRO 0 to 3 in fp16", "contract:in_float16", 240, ("zengine", "zpartition")),
    Piece("two-ranks", "two ranks on one GPU", "contract:two_ranks", 240, ("zcomm", "zengine", "zpartition")),
    Piece("nccl", "collectives of one rank over NCCL", "contract:nccl", 120, ("zcomm",), on_simulated=False),
    Piece("offload", "offload to the host", "offload:host", 480, ("zpartition",)),
    Piece("disk", "offload to disk", "offload:disk", 480, ("zpartition",)),
    Piece("float8", "products in 8-bit floats", "products:float8", 180, ("zprecision",)),
    Piece("quantized", "products with quantized weights", "products:quantized_weights", 240, ("zprecision",)),
    Piece("grouped", "grouped products of experts", "products:grouped", 180, ("zpartition",)),
    Piece("graphs", "whole steps in CUDA graphs", "graphs:steps", 240, ("zengine",)),
    Piece("checkpoints", "checkpoints of CUDA tensors", "checkpoints:run", 300, ("zckpt", "zengine")),
    Piece("loaders", "batches copied ahead", "loaders:run", 180, ("zengine",)),
    Piece("timers", "telemetry's timers", "timers:run", 60, ("zengine",)),
    Piece("planner", "planned peaks of memory", "planner:run", 300, ("zengine",)),
    Piece("trace", "replayed order of streams", "traces:run", 240, ("zpartition", "zengine")),
)


def choose(only: str) -> list[Piece]:
    """Return the pieces of a comma-separated list of names; all for "".  Raises ValueError for an unknown name."""
    names = [name.strip() for name in only.split(",") if name.strip()]
    known = {piece.name: piece for piece in PIECES}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"--only {','.join(unknown)}: no such piece; choose from {', '.join(known)}")
    return [known[name] for name in names] or list(PIECES)
