"""The cases: each is a step with the streams it moves, its contenders, and zoptim's limits."""

from __future__ import annotations

import attrs
import ours
import peers
import peers_numpy
import torch
from contenders import Contender

__all__ = ["CASES", "Case", "Limit", "Stream"]

F32, BF16, I16, U8 = torch.float32, torch.bfloat16, torch.int16, torch.uint8


@attrs.frozen
class Stream:
    """One list of tensors that a step moves."""

    name: str
    dtype: torch.dtype
    traffic: int  # passes of a step: 1 reads or writes, 2 reads and writes


@attrs.frozen
class Limit:
    """An upper bound on our time over another's."""

    at_most: float
    against: str = "floor"
    total: int = 100_000_000  # parameters it applies to; 0: any
    shapes: tuple[str, ...] = ("flat", "gpt2")
    devices: tuple[str, ...] = ("cpu",)


@attrs.frozen(kw_only=True)
class Case:
    """One table of the bench."""

    name: str  # for --only
    title: str
    loop: str  # of floors.c
    streams: tuple[Stream, ...]  # in the order of the loop
    contenders: tuple[Contender, ...]  # ours first
    limits: tuple[Limit, ...]
    tolerance: float  # how far results may differ, in units of the largest update
    dtype: torch.dtype = F32  # of the stream "weight", which every contender writes
    on_gpu: bool = True  # the default without --only

    @property
    def bytes_per_param(self) -> float:
        """Bytes that a step must move per parameter."""
        return sum(stream.dtype.itemsize * stream.traffic for stream in self.streams)


def _fp32(*moments: str, traffic: int = 2, dtype: torch.dtype = F32) -> tuple[Stream, ...]:
    states = [Stream(name, dtype, traffic) for name in moments]
    return Stream("weight", F32, traffic), Stream("grad", F32, 1), *states


def _offload(grad_traffic: int) -> tuple[Stream, ...]:
    return (
        Stream("master", F32, 2),
        Stream("grad", BF16, grad_traffic),
        Stream("exp_avg", F32, 2),
        Stream("exp_avg_sq", F32, 2),
        Stream("weight", BF16, 1),
    )


_ADAM = ("exp_avg", "exp_avg_sq")
_SPLIT = (
    Stream("weight", BF16, 2),
    Stream("grad", BF16, 1),
    Stream("exp_avg", F32, 2),
    Stream("exp_avg_sq", F32, 2),
    Stream("remainder", I16, 2),
)
_GPU_BYTES = Limit(1 / 0.9, total=0, devices=("cuda",))  # 90% of the copy bandwidth, at any size


def _small_rule(rule: str, title: str, moment: str, *others: Contender) -> Case:
    return Case(
        name=rule,
        title=title,
        loop="one_state",
        streams=_fp32(moment),
        contenders=(ours.ours_fp32(rule), *peers.fp32_peers(rule), *others, peers_numpy.numpy_fp32(rule)),
        limits=(Limit(1.1),),
        tolerance=0.01,
        on_gpu=False,
    )


def _low_states(name: str, title: str, loop: str, state_dtype: str, dtype: torch.dtype) -> Case:
    """Peers lack such state: they run the float32 step that it replaces, and so do we, as a reference."""
    return Case(
        name=name,
        title=title,
        loop=loop,
        streams=_fp32(*_ADAM, dtype=dtype),
        contenders=(
            ours.ours_fp32("adamw", state_dtype),
            ours.ours_fp32("adamw", name="ours fp32"),
            *(peer for peer in peers.fp32_peers("adamw") if peer.name != "torch for"),
        ),
        limits=(Limit(1.2), Limit(1.0, "ours fp32")) if dtype is BF16 else (Limit(1.0, "ours fp32"),),
        tolerance=0.1 if dtype is BF16 else 1.0,
        on_gpu=False,
    )


CASES = (
    Case(
        name="adamw",
        title="AdamW, float32",
        loop="adam",
        streams=_fp32(*_ADAM),
        contenders=(ours.ours_fp32("adamw"), *peers.fp32_peers("adamw"), peers_numpy.numpy_fp32("adamw")),
        limits=(Limit(1.05), Limit(1.3, total=1_000_000, shapes=("gpt2",)), _GPU_BYTES),
        tolerance=0.01,
    ),
    Case(
        name="offload",
        title="AdamW, bf16 gradient in, float32 master and states, bf16 weight out",
        loop="offload",
        streams=_offload(1),
        contenders=(ours.ours_offload(), *peers.offload_peers(), peers_numpy.numpy_offload()),
        limits=(Limit(1.05), _GPU_BYTES),
        tolerance=0.25,  # a unit in the last place of a bf16 weight
        dtype=BF16,
    ),
    Case(
        name="boundary",
        title="the whole boundary: norm, non-finite, unscale, clip, AdamW, bf16 weight out",
        loop="boundary",
        streams=_offload(2),
        contenders=(ours.ours_boundary(), *peers.boundary_peers(), peers_numpy.numpy_boundary()),
        limits=(
            Limit(1.15),
            Limit(1 / 1.6, "torch fused", total=0, devices=("cuda",)),
            Limit(1 / 1.6, "torch foreach", total=0, devices=("cuda",)),
        ),
        tolerance=0.25,
        dtype=BF16,
    ),
    Case(
        name="split",
        title="AdamW, split master: bf16 weight and gradient, 16-bit remainder, float32 states",
        loop="split",
        streams=_SPLIT,
        contenders=(
            ours.ours_split(),
            *(peer for peer in peers.offload_peers() if peer.name != "torch for"),
        ),
        limits=(Limit(1.05), _GPU_BYTES),
        tolerance=0.25,
        dtype=BF16,
    ),
    _low_states("bf16", "AdamW, bf16 states with stochastic rounding", "states_16", "bf16", BF16),
    _low_states("8bit", "AdamW, 8-bit states", "states_8", "8bit", U8),
    Case(
        name="lamb",
        title="LAMB",
        loop="lamb",
        streams=_fp32(*_ADAM, traffic=3),
        contenders=(ours.ours_fp32("lamb"), peers.by_hand("lamb"), peers_numpy.numpy_fp32("lamb")),
        limits=(Limit(1.1),),
        tolerance=0.01,
        on_gpu=False,
    ),
    _small_rule("lion", "Lion", "exp_avg", peers.by_hand("lion")),
    _small_rule("adagrad", "Adagrad", "sum"),
    _small_rule("sgd", "SGD with momentum", "momentum_buffer"),
)
