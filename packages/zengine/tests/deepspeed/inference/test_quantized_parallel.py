"""Quantized models over tensor ranks: parts of the whole's codes and scales, and the whole's results bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import zcomm
import zengine.deepspeed as deepspeed
import zpartition
from zcomm.testing import run_ranks
from zengine.inference.quantized_modules import QuantizedLinear, quantize_linears, scales_of
from zpartition import tensor
from zpartition.layout.address import Address
from zpartition.tensor import Column, Replicated, Row, RowSplit, Rule, TensorPlan, Vocabulary
from zpartition.testing.tensor_models import Language
from zprecision.quant import Format, Int4, Int8, PackedTensor, QuantizedTensor, quantize

TOKENS = torch.arange(14).view(2, 7) % 20
FORMATS: dict[str, dict[str, Any]] = {
    "int8": {"dtype": torch.int8},
    "int4": {"dtype": "fp32", "quant": {"weight": {"num_bits": 4}}},
    "int4-minmax": {"dtype": "fp32", "quant": {"weight": {"num_bits": 4, "q_type": "asymmetric"}}},
}


class Attention(nn.Module):
    """Six query heads of 8 around two key heads: their outputs do not fill groups of 32."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = 6, 2, 8
        self.q, self.k, self.v = nn.Linear(40, 48), nn.Linear(40, 16), nn.Linear(40, 16)
        self.out = nn.Linear(48, 40)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (each(x).unflatten(-1, (-1, 8)).transpose(1, 2) for each in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.attention, self.two = nn.LayerNorm(40), Attention(), nn.LayerNorm(40)
        self.gate, self.up, self.down = nn.Linear(40, 96), nn.Linear(40, 96, bias=False), nn.Linear(96, 40)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.one(x))
        y = self.two(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """Logits, (batch, time, 29)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(29, 40)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(40), nn.Linear(40, 29, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


SPLIT_LAYERS = TensorPlan(
    [
        *(Rule(f"layers.*.attention.{name}", Column()) for name in "qkv"),
        *(Rule(f"layers.*.{name}", Column()) for name in ("gate", "up")),
        *(Rule(f"layers.*.{name}", Row()) for name in ("attention.out", "down")),
        *(Rule("embed", Vocabulary()), Rule("head", Column(gathers=True))),
    ]
)
SPLIT = {"tensor_parallel": {"tp_size": 2, "partition_config": SPLIT_LAYERS}}


def parts(weight: Any) -> dict[str, Tensor]:
    return (weight.unpack() if isinstance(weight, PackedTensor) else weight).parts()


def layers(model: nn.Module) -> Iterator[tuple[str, QuantizedLinear]]:
    yield from ((name, each) for name, each in model.named_modules() if isinstance(each, QuantizedLinear))


def _answers(case: str) -> dict[str, bool]:
    """What holds on this rank: equal logits, and for each layer codes and scales of a part of the whole's rows."""
    given = FORMATS[case]
    whole = deepspeed.init_inference(Decoder(), given)
    split = deepspeed.init_inference(Decoder(), given | SPLIT)
    rank, halves = zpartition.model_parallel_group_of(split.module).rank, dict(layers(split.module))
    found = {"logits": torch.equal(split(TOKENS), whole(TOKENS))}
    for name, layer in layers(whole.module):
        rows = layer.weight.shape[0]
        mine = parts(halves[name].weight)
        start, length = (0, (rows + 1) // 2) if rank == 0 else ((rows + 1) // 2, rows // 2)
        if name.endswith((".gate", ".up")):  # in multiples of 32 columns
            start, length = (0, 64) if rank == 0 else (64, 32)
        wanted = parts(layer.weight.narrow(0, start, length))
        found[name] = all(torch.equal(part, wanted[key]) for key, part in mine.items())
    return found


@pytest.mark.parametrize("case", FORMATS)
def test_the_logits_are_those_of_the_whole_quantized_model(case: str) -> None:
    for found in run_ranks(_answers, 2, case):
        assert len(found) == 1 + 3 * 7 + 1
        assert all(found.values()), found


def _packed_answers(folder: str, with_plan: bool) -> bool:
    split = SPLIT if with_plan else {"tensor_parallel": {"tp_size": 2}}
    given = {"dtype": "int8", **split}
    subject = Decoder()
    with torch.device("meta"):
        unfilled = Decoder()
    for each in (subject, unfilled):
        each.dummy_inputs = {"tokens": TOKENS}  # a split that is not given is inferred
    wanted = deepspeed.init_inference(subject, {**given, "save_mp_checkpoint_path": folder})(TOKENS)
    zcomm.barrier()  # both parts are written
    return torch.equal(deepspeed.init_inference(unfilled, {**given, "checkpoint": folder})(TOKENS), wanted)


@pytest.mark.parametrize("with_plan", [True, False])
def test_a_split_model_is_packed_and_read_by_as_many_ranks(with_plan: bool, tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    assert run_ranks(_packed_answers, 2, str(folder), with_plan) == [True, True]
    assert {each.name for each in folder.iterdir()} >= {"rank_0_of_2", "rank_1_of_2"}


class Flat(nn.Module):
    """A column and a row layer, of 192 features: cuts at 96 are between groups of 32, not of 64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(48, 192), nn.Linear(192, 48)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


PLAIN = TensorPlan([Rule("up", Column()), Rule("down", Row())])


def _quantized_before(group: int) -> tuple[float, bool]:
    """Difference of a quantized model that is split afterwards, by inputs: cuts are between groups."""
    whole, split = Flat().eval(), Flat().eval()
    format: Format = Int8(group=group)
    for model in (whole, split):
        quantize_linears(model, lambda name: format)
    rank = zpartition.tensor.parallelize(split, PLAIN) and torch.distributed.get_rank()
    x = torch.randn(3, 48, generator=torch.Generator().manual_seed(1))
    wanted = parts(whole.down.weight.narrow(1, 96 * rank, 96))
    same = all(torch.equal(part, wanted[key]) for key, part in parts(split.down.weight).items())
    return float((split(x) - whole(x)).abs().max()), same


def test_a_quantized_module_is_split_between_groups() -> None:
    for error, same in run_ranks(_quantized_before, 2, 32):
        assert error < 1e-5
        assert same


class Blocked(nn.Module):
    """One layer of three parts, each of which is split, and a layer behind one of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(48, 3 * 40), nn.Linear(40, 48)

    def forward(self, x: Tensor) -> Tensor:
        one, two, three = self.up(x).chunk(3, -1)
        return self.down(one.tanh() * two + three)


BLOCKS = TensorPlan([Rule("up", Column(blocks=(40, 40, 40))), Rule("down", Row(split=RowSplit.OUTPUTS))])


def _fused_before() -> tuple[bool, int]:
    """Whether a quantized layer of several parts, split afterwards, computes the same; and its outputs here."""
    whole, split = Blocked().eval(), Blocked().eval()
    for model in (whole, split):
        quantize_linears(model, lambda name: Int4(group=None))
    tensor.parallelize(split, BLOCKS)
    x = torch.randn(4, 48, generator=torch.Generator().manual_seed(1))
    return torch.allclose(split(x), whole(x), rtol=0, atol=1e-6), split.up.out_features


def test_parts_of_a_fused_layer_are_joined() -> None:
    assert run_ranks(_fused_before, 2) == [(True, 60), (True, 60)]


def test_cuts_inside_groups_are_named_before_any_message() -> None:
    model = Flat()
    quantize_linears(model, lambda name: Int8(group=64))
    with pytest.raises(
        ValueError, match=r"down: its inputs are split at 96, .* multiples of 64 inputs only.*by_outputs"
    ):
        tensor.resolve(PLAIN, model, 2, 0)
    tensor.resolve(tensor.by_outputs(PLAIN), model, 2, 0)


def _split_before() -> None:
    model = Flat()
    tensor.parallelize(model, PLAIN)
    with pytest.raises(ValueError, match=r"down is split already, by inputs at 96, and int8-g64 has groups of 64"):
        quantize_linears(model, lambda name: Int8(group=64))
    with pytest.raises(ValueError, match=r"int4-row has one scale a row: pass the whole model"):
        quantize_linears(model, lambda name: Int4(group=None) if name == "down" else None)
    whole = Flat().eval()
    for each in (whole, model.eval()):
        quantize_linears(each, lambda name: Int8() if name == "down" else None)
    x = torch.randn(3, 48, generator=torch.Generator().manual_seed(1))
    assert float((model(x) - whole(x)).abs().max()) < 1e-5


def test_models_that_were_split_by_inputs_keep_whole_groups() -> None:
    run_ranks(_split_before, 2)


def _two_engines() -> list[float]:
    """Differences from one process: of an engine over two ranks, one over all four, and of both used in turns."""
    whole = deepspeed.init_inference(Language(), dtype="fp32")
    plan = TensorPlan([*(Rule(f"blocks.*.mlp.{name}", Column()) for name in ("gate", "up")), Rule("**.down", Row())])
    plan = TensorPlan([*plan.rules, Rule("**", Replicated())])
    given = [{"tensor_parallel": {"tp_size": size, "partition_config": plan}} for size in (2, 4)]
    engines = [deepspeed.init_inference(Language(), {"dtype": "fp32", **each}) for each in given]
    sizes = [torch.distributed.get_world_size(engine.mp_group) for engine in engines]
    assert sizes == [2, 4]
    assert whole.mp_group is None
    wanted = whole(TOKENS)
    return [float((engine(TOKENS) - wanted).abs()) for engine in (*engines, *engines)]


def test_engines_of_other_sizes_in_one_process_do_not_know_each_other() -> None:
    for errors in run_ranks(_two_engines, 4):
        assert max(errors) < 1e-5


def _scales() -> None:
    engine = deepspeed.init_inference(Decoder(), FORMATS["int8"] | SPLIT)
    whole = Decoder().layers[0].down.weight.detach()
    rank, scales = torch.distributed.get_rank(), engine.quantization_scales
    assert scales is not None
    assert torch.equal(scales["layers.0.down"], quantize(whole, "int8").narrow(0, 20 * rank, 20).scales)
    assert scales.keys() == scales_of(engine.module).keys()


def test_scales_are_those_of_this_rank() -> None:
    run_ranks(_scales, 2)


def test_joined_parts_are_the_whole() -> None:
    whole = quantize(torch.randn(10, 96), "int4")
    halves = [whole.narrow(0, 0, 3), whole.narrow(0, 3, 7)]
    joined: QuantizedTensor = halves[0].join(halves[1:])
    assert all(torch.equal(part, whole.parts()[name]) for name, part in joined.parts().items())


def _gathered(format: str) -> bool:
    """Whether shards over three ranks, cut at an address and sent as bytes, are the whole weight again."""
    whole = quantize(torch.randn(10, 128, generator=torch.Generator().manual_seed(0)), format)
    rank, equal = torch.distributed.get_rank(), []
    for dim, ends in ((0, (0, 4, 7, 10)), (1, (0, 64, 96, 128))):
        sides = [(0, 10), (0, 128)]
        sides[dim] = ends[rank], ends[rank + 1]
        shard = tensor.cut_weight(whole, Address((10, 128), (tuple(sides),)))
        assert shard.shape == tuple(hi - lo for lo, hi in sides)
        states = zcomm.all_gather_object({name: part.tolist() for name, part in shard.state_dict().items()})
        dtypes = {name: part.dtype for name, part in shard.state_dict().items()}
        shards = [
            QuantizedTensor.from_state_dict({k: torch.tensor(v, dtype=dtypes[k]) for k, v in state.items()})
            for state in states
        ]
        joined = shards[0].join(shards[1:], dim)
        equal.append(all(torch.equal(part, whole.parts()[name]) for name, part in joined.parts().items()))
    return all(equal)


@pytest.mark.parametrize("format", ["int8", "int4-minmax"])
def test_shards_are_cut_along_rows_and_groups_and_gathered_again(format: str) -> None:
    assert run_ranks(_gathered, 3, format) == [True] * 3


def _from_file(path: str) -> bool:
    """Whether ranks that read and quantize their own rows of a file answer as one rank with all of it."""
    whole = deepspeed.init_inference(Decoder(), FORMATS["int4"])
    with torch.device("meta"):
        model = Decoder()
    split = deepspeed.init_inference(model, {**FORMATS["int4"], **SPLIT, "checkpoint": path})
    return torch.equal(split(TOKENS), whole(TOKENS))


def test_ranks_quantize_the_rows_that_they_read(tmp_path: Path) -> None:
    safetensors.torch.save_file(Decoder().state_dict(), tmp_path / "model.safetensors")
    assert run_ranks(_from_file, 2, str(tmp_path)) == [True, True]
