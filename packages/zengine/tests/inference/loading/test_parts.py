"""Lists whose files hold parts of tensors for tensor-parallel ranks: the whole model's outputs, or errors by name."""

from __future__ import annotations

import functools
import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers_models import model

import zengine.deepspeed as deepspeed
from zengine.inference import load_model
from zengine.inference.loading.sources import open_source

pytest.importorskip("transformers")
IDS = torch.tensor([[5, 9, 11, 3, 60, 7, 8, 2]])
# How the files of two ranks were cut: end of a name -> dim, and sizes of the projections in it (0: each of a third).
CUTS: dict[str, dict[str, tuple[int, tuple[int, ...]]]] = {
    "LLaMA-3, scaled rotary": {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head", "embed_tokens"), (0, ())),
        **dict.fromkeys(("o_proj", "down_proj"), (1, ())),
    },
    "GPT-2": {
        "c_attn.weight": (1, (48, 48, 48)),
        "c_attn.bias": (0, (48, 48, 48)),
        "attn.c_proj.weight": (0, ()),
        "c_fc.weight": (1, ()),
        "c_fc.bias": (0, ()),
        "mlp.c_proj.weight": (0, ()),
    },
    "Phi-3, fused projections": {
        "qkv_proj": (0, (48, 16, 16)),
        "gate_up_proj": (0, (72, 72)),
        **dict.fromkeys(("o_proj", "down_proj"), (1, ())),
    },
    "GPT-NeoX, grouped projection": {
        **dict.fromkeys(
            ("query_key_value.weight", "query_key_value.bias", "h_to_4h.weight", "h_to_4h.bias"), (0, ())
        ),
        **dict.fromkeys(("attention.dense.weight", "4h_to_h.weight"), (1, ())),
    },
}


def cut(name: str, tensor: Tensor, cuts: dict[str, tuple[int, tuple[int, ...]]]) -> list[Tensor]:
    """What two ranks have of a tensor."""
    found = next(
        (each for end, each in cuts.items() if name.removesuffix(".weight").endswith(end) or name.endswith(end)), None
    )
    if found is None:
        return [tensor, tensor]
    dim, sizes = found
    inner = tensor.split(sizes or (tensor.shape[dim],), dim)
    return [torch.cat([each.chunk(2, dim)[rank] for each in inner], dim) for rank in range(2)]


def parts_of(subject: nn.Module, cuts: Any) -> list[dict[str, Tensor]]:
    return _ranks(subject.state_dict(), cuts)


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("kind", ["ds_model", "bloom", "Megatron"])
def test_parts_give_the_outputs_of_the_whole_model(name: str, kind: str, tmp_path: Path) -> None:
    subject = model(name)
    for rank, part in enumerate(parts_of(subject, CUTS[name])):
        torch.save(part, tmp_path / f"rank{rank}.pt")
    given = {"type": kind, "checkpoints": ["rank0.pt", "rank1.pt"], "tp_size": 2, "version": 2.0}
    (tmp_path / "list.json").write_text(json.dumps(given))
    made = load_model(tmp_path / "list.json", module=model(name), dtype=torch.float32)
    assert torch.equal(made.module(IDS).logits, subject(IDS).logits)
    with torch.no_grad():
        empty = model(name)
        for param in empty.parameters():
            param.zero_()
    engine = deepspeed.init_inference(empty, dtype="fp32", checkpoint=str(tmp_path / "list.json"))
    assert torch.equal(engine(IDS).logits, subject(IDS).logits)


def test_thirds_of_megatrons_first_version_are_put_in_order(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query_key_value, self.dense = nn.Linear(8, 24), nn.Linear(8, 8)

    torch.manual_seed(0)
    whole = Model().state_dict()
    cuts = {"query_key_value.weight": (0, (8, 8, 8)), "query_key_value.bias": (0, (8, 8, 8)), "dense.weight": (1, ())}
    for rank, part in enumerate(_ranks(whole, cuts)):
        torch.save({"module": part}, tmp_path / f"mp_rank_0{rank}.pt")
    names = [str(tmp_path / f"mp_rank_0{rank}.pt") for rank in range(2)]
    for version, is_equal in ((None, True), (0, True), (2.0, False)):
        listed: dict[str, Any] = {"type": "Megatron", "checkpoints": names, "mp_size": 2}
        made = load_model({**listed, **({} if version is None else {"version": version})}, module=Model())
        found = made.module.state_dict()
        assert torch.equal(found["dense.weight"], whole["dense.weight"])
        assert torch.equal(found["query_key_value.weight"], whole["query_key_value.weight"]) is is_equal


class Torchs(nn.Module):
    """Torch's attention, which has queries, keys and values in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 3)


class Mambas(nn.Module):
    """A layer whose input projection has two halves, of 18 rows: no queries, keys and values."""

    def __init__(self, **config: int) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(**config)
        self.in_proj, self.out_proj = nn.Linear(12, 36), nn.Linear(18, 12)


@pytest.mark.parametrize(
    ("made", "cuts"),
    [
        (
            Torchs,
            {"in_proj_weight": (0, (12, 12, 12)), "in_proj_bias": (0, (12, 12, 12)), "out_proj.weight": (1, ())},
        ),
        (Mambas, {"in_proj.weight": (0, ()), "in_proj.bias": (0, ()), "out_proj.weight": (1, ())}),
        # of a model that has attention, too
        (
            functools.partial(Mambas, num_attention_heads=3, hidden_size=12, num_key_value_heads=1),
            {"in_proj.weight": (0, ()), "in_proj.bias": (0, ()), "out_proj.weight": (1, ())},
        ),
    ],
    ids=["torch", "Mamba", "Mamba and attention"],
)
def test_a_stack_of_three_is_torchs_alone(made: Callable[[], nn.Module], cuts: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole = made().state_dict()
    for rank, part in enumerate(_ranks(whole, cuts)):
        torch.save(part, tmp_path / f"{rank}.pt")
    listed = {"type": "ds_model", "checkpoints": ["0.pt", "1.pt"], "tp_size": 2}
    found = load_model(listed, module=made(), base_dir=str(tmp_path)).module.state_dict()
    assert whole.keys() == found.keys()
    for name, values in whole.items():
        assert torch.equal(found[name], values), name


def _ranks(state: dict[str, Tensor], cuts: Any) -> list[dict[str, Tensor]]:
    pairs = {name: cut(name, each, cuts) for name, each in state.items()}
    return [{name: each[rank].clone() for name, each in pairs.items()} for rank in range(2)]


def test_files_of_bloom_are_in_groups(tmp_path: Path) -> None:
    name = "GPT-NeoX, grouped projection"
    subject = model(name)
    ranks = parts_of(subject, CUTS[name])
    shared = {each for each in ranks[0] if torch.equal(ranks[0][each], ranks[1][each]) and "layers" not in each}
    torch.save({each: ranks[0][each] for each in shared}, tmp_path / "non-tp.pt")
    for rank, part in enumerate(ranks):
        for layer in range(2):
            own = {each: value for each, value in part.items() if f"layers.{layer}." in each}
            torch.save(own, tmp_path / f"tp_0{rank}_0{layer}.pt")
    files = [f"tp_0{rank}_0{layer}.pt" for layer in range(2) for rank in range(2)]
    listed = {"type": "BLOOM", "checkpoints": {"non_tp": ["non-tp.pt"], "tp": files}, "parallelization": "tp"}
    made = load_model({**listed, "tp_size": 2}, module=model(name), base_dir=str(tmp_path))
    assert torch.equal(made.module(IDS).logits, subject(IDS).logits)


PROBLEMS: dict[str, tuple[Any, str]] = {
    "a part of another size": (
        lambda parts: parts[1].update({"model.norm.weight": torch.ones(24)}),
        r"'model\.norm\.weight' do not give \(48,\), which the model has: \(48,\) in 0\.pt, \(24,\) in 1\.pt",
    ),
    "copies that differ": (
        lambda parts: parts[1]["model.norm.weight"].add_(1),
        r"'model\.norm\.weight' is whole in each file, and 0\.pt and 1\.pt have other values",
    ),
    "a part too many": (
        lambda parts: parts.append(dict(list(parts[0].items())[:1])),
        r"both hold '.*': a tensor must be in one file or, in parts, in tp_size = 3 of them, and is in 2",
    ),
    "a name that the model lacks": (
        lambda parts: [part.update({"other.weight": torch.ones(2, 2)}) for part in parts],
        r"'other\.weight' in 2 parts \(0\.pt, 1\.pt, \.\.\.\), and the model has no tensor of that name",
    ),
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_parts_that_do_not_fit_are_named(case: str, tmp_path: Path) -> None:
    name = "LLaMA-3, scaled rotary"
    parts = parts_of(model(name), CUTS[name])
    change, told = PROBLEMS[case]
    change(parts)
    for rank, part in enumerate(parts):
        torch.save(part, tmp_path / f"{rank}.pt")
    listed = {"type": "ds_model", "checkpoints": [f"{rank}.pt" for rank in range(len(parts))], "tp_size": 2}
    if len(parts) == 3:
        listed["tp_size"] = 3
    with pytest.raises(ValueError, match=told):
        load_model(listed, module=model(name), base_dir=str(tmp_path))


def test_parts_alone_have_no_shape(tmp_path: Path) -> None:
    for rank in range(2):
        torch.save({"a": torch.ones(2)}, tmp_path / f"{rank}.pt")
    listed = {"type": "ds_model", "checkpoints": ["0.pt", "1.pt"], "tp_size": 2}
    with open_source(listed, str(tmp_path)) as source, pytest.raises(ValueError, match="'a' in 2 parts"):
        source.tensors["a"].get_shape()
