"""Memory of frozen quantized bases under trained adapters: by the pages that the kernel counts, and by live tensors.

Pages tell what is held outside of tensors, too; freed blocks between others, which malloc keeps, are no such memory.
At a width of 1536 they would be 2 to 7% of the total, since adapters are small blocks; so layers are wide here, and
malloc maps blocks from 32 KiB on by themselves.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_nets import config
from torch import Tensor, nn

import zengine
from zcomm.testing import end_ranks, run_ranks
from zengine.adapters import add_lora, quantize_base
from zengine.config import Facts, load, resolve
from zengine.planning.sizes import sizes

MADV_POPULATE_WRITE = 23  # Linux 5.14; older ones ignore it
WIDTH, NUM_LAYERS, SAMPLES = 3072, 10, 4
SOURCE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": SAMPLES,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


class Deep(nn.Module):
    """Square layers, copies of one: encoding takes long."""

    def __init__(self, format: str, num_layers: int) -> None:
        super().__init__()
        first = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
        quantize_base(first, format, ["0"])
        self.layers = nn.ModuleList(copy.deepcopy(first[0]) for _ in range(num_layers))
        add_lora(self, config(*(f"layers.{index}" for index in range(num_layers)), rank=4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def _held() -> int:
    """Return the bytes of this process by its resident pages; those that ranks share count in parts."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return sum(int(words[1]) * 1024 for words in lines if words[0] in ("Pss_Anon:", "Pss_Shmem:"))


def _of_tensors() -> int:
    """Return the bytes of the memory that live tensors have."""
    found: dict[int, int] = {}
    for each in gc.get_objects():
        if issubclass(type(each), Tensor) and not each.is_meta:
            with contextlib.suppress(RuntimeError):  # a fake tensor has no memory
                found[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return sum(found.values())


def _train(format: str, num_layers: int, steps: int = 2) -> tuple[int, int]:
    """Return the bytes that an engine holds after some steps, beyond those before, and those of tensors."""
    ctypes.CDLL(None).mallopt(-3, 1 << 15)  # freed blocks above 32 KiB go back at once
    before = _held()
    model = Deep(format, num_layers)
    trained = [param for param in model.parameters() if param.requires_grad]
    engine = zengine.initialize(model=model, model_parameters=trained, config=SOURCE)[0]
    del model, trained
    for step in range(steps):
        engine.backward(engine(torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(step))))
        engine.step()
    torch.distributed.barrier()  # shared pages are counted while both ranks have them
    found = _held() - before, _of_tensors()
    torch.distributed.barrier()
    engine.close()
    return found


def _own_pages() -> None:
    """Copy the pages that are shared with the fork server now, and not one by one when training writes to them."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, access, *_ = line.split()
        if access == "rw-p":
            start, end = (int(each, 16) for each in place.split("-"))
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_POPULATE_WRITE)


def _measure(format: str) -> tuple[int, int]:
    _train(format, 2)  # loads code
    _own_pages()
    return _train(format, NUM_LAYERS)


@pytest.fixture
def _own_processes() -> Iterator[None]:
    """Fresh ranks, ended afterwards: their malloc is changed for good."""
    end_ranks()
    yield
    end_ranks()


@pytest.mark.usefixtures("_own_processes")
@pytest.mark.parametrize("format", ["nf4", "int4"])
def test_ranks_hold_what_is_planned(format: str) -> None:
    plan = resolve(load(SOURCE), Facts(world_size=2, replicas=2))
    with torch.device("meta"):
        module = Deep(format, NUM_LAYERS)
    memory = sizes(module, plan, world_size=2, device="cpu").memory
    codes = NUM_LAYERS * WIDTH**2 * 9 // 16 // 2  # of one rank of two: 4.5 bits
    assert memory.parameters == pytest.approx(codes, rel=0.06)  # and adapters
    for pages, tensors in run_ranks(_measure, 2, format):
        assert tensors == pytest.approx(memory.total_bytes, rel=2e-3)
        assert pages == pytest.approx(memory.total_bytes, rel=0.02)
