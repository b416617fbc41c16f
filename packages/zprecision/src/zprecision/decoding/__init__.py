"""Decoding: one token of each of several sequences through a decoder's blocks, in one call of C."""

from zprecision.decoding.run import MOST_SEQUENCES, FusedDecoder, activate
from zprecision.decoding.values import (
    Activation,
    FusedAttention,
    FusedBlock,
    FusedCache,
    FusedHead,
    FusedJoin,
    FusedMixture,
    FusedMLP,
    FusedMLPInput,
    FusedNorm,
    FusedProjection,
    FusedRotary,
    FusedSum,
    unsupported,
)

__all__ = [
    "MOST_SEQUENCES",
    "Activation",
    "FusedAttention",
    "FusedBlock",
    "FusedCache",
    "FusedDecoder",
    "FusedHead",
    "FusedJoin",
    "FusedMLP",
    "FusedMLPInput",
    "FusedMixture",
    "FusedNorm",
    "FusedProjection",
    "FusedRotary",
    "FusedSum",
    "activate",
    "unsupported",
]
