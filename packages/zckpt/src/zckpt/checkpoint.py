"""A committed checkpoint, opened: what it holds, and the verb `read`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import final

import attrs
import torch
from torch import Tensor

from .canonical import JSON
from .errors import CheckpointCorrupt, CheckpointMismatch, CheckpointReadError
from .manifest import Manifest, Piece
from .peers import ALONE, Peers
from .reading import Item, LoadReport, merge, plan_read, refuse
from .regions import intersect
from .shard import ShardLike, whole
from .storage import Reader, Storage
from .team import Team, os_error_text
from .transfer import Source, fill
from .verifying import Verifier


@final
@attrs.define(eq=False)
class Checkpoint:
    """Made by `find`; its manifest is checked and its files have the right sizes.  Tensors are read on demand."""

    path: Path
    manifest: Manifest
    storage: Storage
    notes: tuple[str, ...] = ()  # what was odd about finding it, for a log
    verifier: Verifier = attrs.field(init=False)  # remembers what it has hashed

    def __attrs_post_init__(self) -> None:
        self.verifier = Verifier(self.path, self.manifest, self.storage)

    @property
    def tag(self) -> str:
        return self.manifest.tag

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def objects(self) -> dict[str, JSON]:
        """The run's JSON values."""
        return self.manifest.objects

    def rank_objects(self, rank: int) -> dict[str, JSON]:
        """The JSON values that this rank saved; CheckpointMismatch if fewer ranks saved."""
        count = self.manifest.world_size
        if not 0 <= rank < count:
            raise CheckpointMismatch(
                f"checkpoint {self.path} was saved by {count} ranks: it has no objects of rank {rank}"
            )
        return self.manifest.rank_objects[rank]

    def names(self) -> tuple[str, ...]:
        """Names of the tensors, sorted."""
        return tuple(sorted(self.manifest.tensors))

    def read(
        self,
        wanted: Iterable[ShardLike],
        strict: bool = True,
        verify: bool = True,
        *,
        cast: bool = False,
        peers: Peers = ALONE,
    ) -> LoadReport:
        """Fill the wanted tensors in place, whatever boxes and spans the checkpoint was saved with.

        strict: refuse if a wanted name is missing, or if the checkpoint holds a name that nobody wants.
        verify: first read every piece that is touched and compare its checksum (once per Checkpoint).
        cast: convert between floating dtypes; otherwise dtypes must be equal.
        peers: the ranks that read together.  They fail together, and a name counts as extra only if no rank wants it;
            a rank that holds a part of the names and reads ALONE needs strict=False.

        Phases: check all addresses; verify all bytes; only then copy.  Until the copy no tensor is touched.
        Raises CheckpointInputError, CheckpointMismatch, CheckpointCorrupt, CheckpointReadError.
        """
        team = Team(peers, f"load of {self.path}", CheckpointReadError)
        shards = list(wanted)
        plans = []  # this rank's, out of the closure that the team runs

        def check() -> JSON:
            plans.append(plan_read(self.manifest, shards, cast=cast))
            return plans[0].as_json()

        report, problems = merge(team.together("checking", check), self.manifest)
        refuse(problems, strict=strict, where=f"checkpoint {self.path}")
        items = plans[0].items
        if verify:
            team.together("verifying", lambda: self._verify(items))
        read_nbytes = team.together("copying", lambda: self._copy(items))
        return attrs.evolve(report, read_nbytes=read_nbytes[peers.rank])

    def tensor(self, name: str, verify: bool = True) -> Tensor:
        """One tensor whole, on the CPU, in its stored dtype and global shape."""
        entry = self.manifest.tensors.get(name)
        if entry is None:
            raise CheckpointMismatch(f"checkpoint {self.path} has no tensor {name!r}")
        made = torch.empty(entry.shape, dtype=entry.dtype)
        self.read([whole(name, made)], strict=False, verify=verify)
        return made

    def verify(self) -> None:
        """Read everything and compare every checksum; CheckpointCorrupt lists the first ten that are wrong."""
        problems: dict[str, None] = {}  # a damaged header is the problem of many tensors: told once
        for _, entry in sorted(self.manifest.tensors.items()):
            try:
                self.verifier.check(entry.pieces)
            except CheckpointCorrupt as error:
                problems[str(error)] = None
            except OSError as error:
                problems[f"checkpoint {self.path}: {os_error_text(error)}"] = None
        if problems:
            more = f"\n... and {len(problems) - 10} more" if len(problems) > 10 else ""
            raise CheckpointCorrupt("\n".join([*problems][:10]) + more, path=str(self.path))

    def _verify(self, items: Sequence[Item]) -> JSON:
        self.verifier.check(piece for item in items for piece in item.pieces)
        return None

    def _copy(self, items: Sequence[Item]) -> int:
        """Bytes read.  Each file is opened once."""
        read_nbytes = 0
        with contextlib.ExitStack() as stack:
            readers: dict[str, Reader] = {}
            for item in items:
                for piece in item.pieces:
                    if piece.file not in readers:
                        readers[piece.file] = stack.enter_context(self.storage.open(self.path / piece.file))
                    read_nbytes += self._copy_piece(item, piece, readers[piece.file])
        return read_nbytes

    def _copy_piece(self, item: Item, piece: Piece, reader: Reader) -> int:
        source = Source(reader, piece.offset, item.entry.dtype)
        return fill(item.shard.tensor.detach(), source, intersect(item.region, piece.region))
