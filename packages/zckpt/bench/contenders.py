"""Contenders of bench/save.py: the state, and the ways to write it to disk and read it back."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import xxhash

import zckpt
from zckpt.format import chunks

PIECE = 8 << 20


def shapes(millions: int) -> dict[str, tuple[int, ...]]:
    """A GPT with GPT-2's vocabulary, of about this many million parameters."""
    width = 64
    while 51281 * width + 12 * width**3 // 64 < millions * 1_000_000:  # a layer for every 64, as GPT-2
        width += 64
    layers = width // 64
    found = {"wte": (50257, width), "wpe": (1024, width)}
    for n in range(layers):
        for name, shape in {
            "ln1.weight": (width,), "ln1.bias": (width,), "attn.qkv.weight": (3 * width, width),
            "attn.qkv.bias": (3 * width,), "attn.out.weight": (width, width), "attn.out.bias": (width,),
            "ln2.weight": (width,), "ln2.bias": (width,), "mlp.up.weight": (4 * width, width),
            "mlp.up.bias": (4 * width,), "mlp.down.weight": (width, 4 * width), "mlp.down.bias": (width,),
        }.items():  # fmt: skip
            found[f"h.{n}.{name}"] = shape
    return found


class State:
    """One rank's part: a span of every weight and of its two moments."""

    def __init__(self, millions: int, rank: int, ranks: int) -> None:
        self.shards: list[zckpt.Shard] = []
        for name, shape in shapes(millions).items():
            box = tuple((0, size) for size in shape)
            numel = torch.Size(shape).numel()
            span = (numel * rank // ranks, numel * (rank + 1) // ranks)
            for key in ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq"):
                values = torch.rand(span[1] - span[0])
                self.shards.append(zckpt.Shard(f"{key}.{name}", shape, box, span, values))
        self.tensors = [shard.tensor for shard in self.shards]
        self.by_name = {f"{shard.name}.{rank}": shard.tensor for shard in self.shards}
        self.nbytes = sum(each.nbytes for each in self.tensors)

    def is_intact(self, expected: list[float]) -> bool:
        return [float(each.sum()) for each in self.tensors] == expected


class Contender:
    """A way to save the state into a folder of its own, and to load it back into the same tensors."""

    def __init__(self, state: State, folder: Path, rank: int) -> None:
        self.state, self.folder, self.rank = state, folder, rank

    def save(self) -> object: ...

    def load(self) -> object: ...


class Raw(Contender):
    """Bytes in the order of the tensors; lanes of them by size."""

    direct = 0

    def __init__(self, state: State, folder: Path, rank: int) -> None:
        super().__init__(state, folder, rank)
        data = torch.cat([each.view(torch.uint8) for each in state.tensors])  # contiguous: the floor pays no seams
        self.room = mmap.mmap(-1, len(data) // 2 * 2 + 4096)
        self.memory = memoryview(self.room)[: len(data) // 8192 * 8192]
        self.memory[:] = memoryview(data.numpy())[: len(self.memory)]
        half = len(self.memory) // 2
        self.lanes = [self.memory[:half], self.memory[half:]]

    def _path(self, lane: int) -> Path:
        return self.folder / f"raw{self.rank}-{lane}"

    def save(self) -> None:
        def write(lane: int) -> None:
            fd = os.open(self._path(lane), os.O_WRONLY | os.O_CREAT | self.direct, 0o666)
            for start in range(0, len(self.lanes[lane]), PIECE):
                part = self.lanes[lane][start : start + PIECE]
                self._written(lane, start, part)
                if os.write(fd, part) != len(part):
                    raise OSError("a short write")
            os.fsync(fd)
            os.close(fd)

        run([lambda lane=lane: write(lane) for lane in range(2)])
        fd = os.open(self.folder, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)

    def load(self) -> None:
        def read(lane: int, first: int, last: int) -> None:
            fd = os.open(self._path(lane), os.O_RDONLY | self.direct)
            for start in range(first, last, PIECE):
                part = self.lanes[lane][start : min(start + PIECE, last)]
                if os.preadv(fd, [part], start) != len(part):
                    raise OSError("a short read")
                self._was_read(lane, start, part)
            os.close(fd)

        def halves(lane: int) -> list[tuple[int, int]]:
            nbytes = len(self.lanes[lane])
            middle = nbytes // (2 * PIECE) * PIECE  # a piece is read as it was written
            return [(0, middle), (middle, nbytes)]

        run([lambda lane=lane, part=part: read(lane, *part) for lane in range(2) for part in halves(lane)])

    def _written(self, lane: int, start: int, piece: memoryview) -> None:
        """Called before a piece is written."""

    def _was_read(self, lane: int, start: int, piece: memoryview) -> None:
        """Called after a piece was read."""


class RawDirect(Raw):
    direct = os.O_DIRECT


class RawHashed(RawDirect):
    """The floor of a checkpoint that verifies: each piece is hashed while it is in memory anyway."""

    def __init__(self, state: State, folder: Path, rank: int) -> None:
        super().__init__(state, folder, rank)
        self.hashes: dict[tuple[int, int], bytes] = {}  # by lane and start

    def _written(self, lane: int, start: int, piece: memoryview) -> None:
        self.hashes[lane, start] = xxhash.xxh3_64_digest(piece)

    def _was_read(self, lane: int, start: int, piece: memoryview) -> None:
        if self.hashes[lane, start] != xxhash.xxh3_64_digest(piece):
            raise OSError("a piece is damaged")


def run(jobs: list[Callable[[], None]]) -> None:
    with ThreadPoolExecutor(len(jobs)) as threads:
        for job in [threads.submit(job) for job in jobs]:
            job.result()


class Ours(Contender):
    verify: bool | str = True

    def save(self) -> None:
        zckpt.save(self.folder, "a", shards=self.state.shards, objects={}, peers=zckpt.group_peers())

    def load(self) -> None:
        zckpt.find(self.folder, "a").read(self.state.shards, verify=self.verify, peers=zckpt.group_peers())  # type: ignore[arg-type]


class First(Ours):
    verify = "first"


class Unhashed(Ours):
    verify = False

    def save(self) -> None:
        real = chunks.Hasher, chunks.digests
        chunks.Hasher = NoHasher  # type: ignore[assignment, misc]
        chunks.digests = lambda data, chunk: "0" * 16 * chunks.num_chunks(len(data), chunk)
        try:
            super().save()
        finally:
            chunks.Hasher, chunks.digests = real  # type: ignore[misc]


class NoHasher:
    """Counts bytes instead of hashing them."""

    def __init__(self, chunk: int) -> None:
        self.chunk, self.nbytes = chunk, 0

    def update(self, data: memoryview) -> None:
        self.nbytes += len(data)

    def digests(self) -> str:
        return "0" * 16 * chunks.num_chunks(self.nbytes, self.chunk)


class Torch(Contender):
    """torch.save and torch.load of a dict for each rank, with an fsync."""

    def save(self) -> None:
        with open(self.folder / f"{self.rank}.pt", "wb") as file:
            torch.save(self.state.by_name, file)
            file.flush()
            os.fsync(file.fileno())

    def load(self) -> None:
        for name, values in torch.load(self.folder / f"{self.rank}.pt", weights_only=True).items():
            self.state.by_name[name].copy_(values)


class DCP(Contender):
    def save(self) -> None:
        import torch.distributed.checkpoint as dcp

        writer = dcp.FileSystemWriter(str(self.folder / "a"), thread_count=2)
        dcp.save(dict(self.state.by_name), storage_writer=writer)

    def load(self) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.load(dict(self.state.by_name), storage_reader=dcp.FileSystemReader(str(self.folder / "a")))


class DeepSpeed(Contender):
    def __init__(self, state: State, folder: Path, rank: int) -> None:
        super().__init__(state, folder, rank)
        from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

        self.engine = TorchCheckpointEngine()
        self.path = str(folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")

    def save(self) -> None:
        self.engine.save(self.state.by_name, self.path)

    def load(self) -> None:
        for name, values in self.engine.load(self.path, map_location="cpu").items():
            self.state.by_name[name].copy_(values)


class DeepSpeedSynced(DeepSpeed):
    def save(self) -> None:
        super().save()
        with open(self.path, "rb+") as file:
            os.fsync(file)


CONTENDERS = {
    "raw": Raw, "raw direct": RawDirect, "direct + hash": RawHashed, "zckpt": Ours, "no hash": Unhashed,
    "first": First, "torch": Torch, "DCP": DCP, "DeepSpeed": DeepSpeed, "DeepSpeed + fsync": DeepSpeedSynced,
}  # fmt: skip
