"""Loading weights from files into shards: each rank reads its rows; errors load nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zcomm
import zpartition
from zcomm.testing import run_ranks
from zpartition import ZeroPolicy, tensor
from zpartition.layout.address import Address, Shard, cut
from zpartition.pipeline import LayerSpec, PipelineModule
from zpartition.testing.tensor_models import PLAN, Language


class Rows:
    """A file's tensor that counts what is read of it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.numel_read = tensor, 0

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, box: tuple[slice, ...]) -> Tensor:
        found = self.tensor[box]
        self.numel_read += found.numel()
        return found


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, 16)
        self.body = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 16))
        self.frozen = nn.Linear(16, 16)
        self.frozen.requires_grad_(False)
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.head = nn.Linear(16, 300, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.zeros(5, 2))


def values() -> dict[str, Tensor]:
    torch.manual_seed(9)
    return {name: torch.randn(tensor.shape) for name, tensor in Net().state_dict().items() if name != "head.weight"}


def _loads(stage: int, dtype: torch.dtype) -> tuple[dict[str, Tensor], list[Tensor], int]:
    torch.manual_seed(zcomm.group_rank())
    model = Net().to(dtype)
    policy = ZeroPolicy(stage=stage, bucket_numel=3000, unit_numel=3000, persist_numel=30)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    partition = zpartition.shard(model, optimizer, policy=policy)
    rows = {name: Rows(tensor) for name, tensor in values().items()}
    zpartition.load_slices(partition, rows)
    masters = [shard.tensor.clone() for shard in partition.shards() if shard.name == "embed.weight"]
    return dict(model.state_dict()), masters, rows["embed.weight"].numel_read


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_weights_masters_frozen_parameters_and_buffers_are_filled(stage: int, dtype: torch.dtype) -> None:
    expected = values()
    found = run_ranks(_loads, 2, stage, dtype)
    for state, _, read in found:
        assert all(torch.equal(state[name], tensor.to(dtype)) for name, tensor in expected.items())
        assert torch.equal(state["head.weight"], state["embed.weight"])
        assert read == 300 * 16 if stage == 0 else read < 300 * 16, "rows that another rank has are not read"
    masters = torch.cat([part for _, parts, _ in (found if stage else found[:1]) for part in parts])
    assert torch.equal(masters, expected["embed.weight"].flatten()), "in full precision"


def test_a_safetensors_file_is_read_slice_by_slice(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    save_file = pytest.importorskip("safetensors.torch").save_file
    save_file(values(), str(tmp_path / "model.safetensors"))
    model = Net()
    partition = zpartition.shard(model)
    with safetensors.safe_open(str(tmp_path / "model.safetensors"), "pt") as file:
        zpartition.load_slices(partition, {name: file.get_slice(name) for name in file.keys()})  # noqa: SIM118
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in values().items())


def test_long_tensors_are_read_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zpartition.tensors.loading, "_CHUNK_NUMEL", 10)
    target, source = torch.zeros(50), Rows(torch.arange(60.0).view(15, 4))
    zpartition.tensors.loading._read(Shard("w", (15, 4), ((0, 15), (0, 4)), (3, 53), target), source)
    assert torch.equal(target, torch.arange(3.0, 53.0))
    assert source.numel_read == 50
    target, source = torch.zeros(40), Rows(torch.arange(72.0).view(2, 3, 12))
    zpartition.tensors.loading._read(Shard("w", (2, 3, 12), ((0, 2), (1, 3), (2, 12)), (0, 40), target), source)
    assert torch.equal(target, torch.arange(72.0).view(2, 3, 12)[:, 1:, 2:].flatten()), "rows longer than a chunk"
    assert source.numel_read == 40


def test_what_does_not_fit_is_rejected_by_name_and_nothing_is_loaded() -> None:
    model = Net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    partition = zpartition.shard(model)
    given = {**values(), "gian": torch.zeros(()), "frozen.bias": torch.zeros(17)}
    del given["gain"]
    message = (
        r"missing: gain; unexpected: gian; of another shape: frozen.bias has shape \(17,\), the module's \(16,\)"
    )
    with pytest.raises(ValueError, match=message):
        zpartition.load_slices(partition, given)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    given["frozen.bias"] = torch.ones(16)
    zpartition.load_slices(partition, given, strict=False)
    assert bool((model.frozen.bias == 1).all())
    assert torch.equal(model.gain, before["gain"])


def _loads_a_wrong_shape() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    partition = zpartition.shard(model, policy=ZeroPolicy(stage=2))
    with pytest.raises(ValueError, match=r"0.weight has shape \(32, 64\)"):
        zpartition.load_slices(partition, {"0.weight": torch.zeros(32, 64), "1.weight": torch.zeros(64, 64)})


def test_a_wrong_shape_is_rejected_on_ranks_that_hold_nothing_of_it() -> None:
    run_ranks(_loads_a_wrong_shape, 2)


class _Table:
    """What a partition of parts would offer to be filled, and the shapes of the whole."""

    def __init__(self, addresses: dict[str, Address]) -> None:
        self.module, self.published = nn.Module(), 0
        self.addresses = addresses
        self.parts = {name: torch.zeros(torch.Size(a.shape).numel() - 3) for name, a in addresses.items()}

    def names(self) -> list[str]:
        return list(self.addresses)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: address.global_shape for name, address in self.addresses.items()}

    def shards_to_fill(self):
        for name, address in self.addresses.items():
            part = self.parts[name]
            yield from cut(Shard, name, address, (2, 2 + part.numel()), part.__getitem__)

    def publish(self) -> None:
        self.published += 1


def test_a_part_of_a_tensor_reads_its_boxes_and_their_rows_alone() -> None:
    boxes = {
        "columns": (((0, 8), (3, 5)),),
        "rows": (((2, 6), (0, 6)),),
        "blocks": (((1, 3), (0, 6)), ((5, 7), (0, 6))),
    }
    table = _Table({name: Address((8, 6), found) for name, found in boxes.items()})
    whole_tensor = torch.arange(48.0).view(8, 6)
    rows = {name: Rows(whole_tensor) for name in boxes}
    zpartition.load_slices(table, rows)
    for name, found in boxes.items():
        local = torch.cat([whole_tensor[tuple(slice(*side) for side in box)] for box in found]).reshape(-1)
        assert torch.equal(table.parts[name], local[2:-1]), name
    assert [each.numel_read for each in rows.values()] == [part.numel() for part in table.parts.values()]
    assert table.published == 1


def _stages() -> tuple[dict[str, Tensor], list[str]]:
    layers = [LayerSpec(nn.Linear, 3, 3) for _ in range(4)]
    module = PipelineModule(layers, 2, loss_fn=nn.functional.mse_loss, names=[f"body.{i}" for i in range(4)])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    partition = zpartition.shard(module, optimizer, group=zpartition.replicas_of(module), policy=ZeroPolicy(stage=0))
    weights = {f"body.{i}.weight": torch.full((3, 3), float(i)) for i in range(4)}
    whole = weights | {f"body.{i}.bias": torch.full((3,), 10.0 + i) for i in range(4)}
    told = []
    for wrong in ({**whole, "body.9.bias": torch.ones(3)}, weights, {**whole, "body.3.bias": torch.ones(4)}):
        with pytest.raises(ValueError) as caught:
            zpartition.load_slices(partition, wrong)
        told.append(str(caught.value))
    zpartition.load_slices(partition, whole)
    return dict(module.state_dict()), told


def test_stages_take_their_layers_of_the_whole_and_are_told_of_each_others_mistakes() -> None:
    (first, told), (last, also_told) = run_ranks(_stages, 2)
    assert told == also_told
    assert "unexpected: body.9.bias" in told[0]
    assert "missing: body.0.bias, body.1.bias; missing: body.2.bias, body.3.bias" in told[1]
    assert "body.3.bias has shape (4,), the module's (3,)" in told[2]
    for i, state in enumerate((first, first, last, last)):
        assert state[f"body.{i}.weight"].eq(i).all()
        assert state[f"body.{i}.bias"].eq(10 + i).all()


def _own_parts() -> dict[str, tuple[int, int]]:
    """Elements read of each tensor, and held, by a rank of a split model."""
    torch.manual_seed(zcomm.group_rank())
    source, model = Language(), Language()
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    tensor.parallelize(model, PLAN)
    rows = {name: Rows(value) for name, value in source.state_dict().items() if name != "embed.weight"}
    zpartition.load_own_slices(model, rows)
    tokens = torch.arange(8).view(1, 8)
    torch.testing.assert_close(model(tokens), source(tokens))
    with pytest.raises(ValueError, match=r"head.weight has shape \(3, 3\), the module's \(29, 24\)"):
        zpartition.check_slices(model, {**rows, "head.weight": torch.ones(3, 3)})
    held = dict(model.named_parameters(remove_duplicate=False))
    return {name: (row.numel_read, held[name].numel()) for name, row in rows.items()}


def test_a_split_module_without_a_partition_reads_its_own_rows() -> None:
    for found in run_ranks(_own_parts, 2):
        for name in ("head.weight", "blocks.0.attention.q_proj.weight", "blocks.1.attention.qkv.weight"):
            assert found[name][0] == found[name][1], name
        assert found["head.weight"][1] < 29 * 24


def test_a_whole_module_without_a_partition_takes_all_or_nothing() -> None:
    model = Net()
    model.body[0].weight.data = torch.zeros(16, 64).t()  # stored the other way round
    given = {**values(), "gian": torch.zeros(())}
    with pytest.raises(ValueError, match=r"nothing was loaded: missing: table; unexpected: gian\.$"):
        zpartition.load_own_slices(model, {name: value for name, value in given.items() if name != "table"})
    assert not model.body[0].weight.any()
    zpartition.load_own_slices(model, values())
    assert all(torch.equal(model.state_dict()[name], value) for name, value in values().items())


def test_whoever_wants_to_know_is_told_when_tensors_are_touched() -> None:
    net = Net()
    partition = zpartition.shard(net)
    values = {name: torch.full_like(value, 3.0) for name, value in net.state_dict().items()}
    seen: list[str] = []

    @contextmanager
    def fill_context() -> Iterator[None]:
        seen.append("first")
        yield
        seen.append("last")

    with pytest.raises(ValueError, match="missing"):
        zpartition.load_slices(partition, {}, fill_context=fill_context)
    assert not seen
    zpartition.load_slices(partition, values, fill_context=fill_context)
    assert seen == ["first", "last"]
