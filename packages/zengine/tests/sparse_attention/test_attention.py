"""Attention over layouts against scores that are computed one by one."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zengine.config import Facts, load, resolve
from zengine.config.grammar.errors import ConfigError
from zengine.sparse_attention import (
    BertSparseSelfAttention,
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    SparseAttentionUtils,
    SparseSelfAttention,
    SparsityConfig,
    VariableSparsityConfig,
    block_mask,
    make_sparsity_config,
    token_mask,
)

CONFIGS = [
    DenseSparsityConfig(num_heads=3, block=4),
    FixedSparsityConfig(num_heads=3, block=4, num_local_blocks=2, attention="unidirectional"),
    BigBirdSparsityConfig(num_heads=3, block=4, different_layout_per_head=True),
    VariableSparsityConfig(num_heads=3, block=4, local_window_blocks=[1, 2]),
    BSLongformerSparsityConfig(num_heads=3, block=4),
]


def tensors(length: int = 24, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    draws = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, length, 8, generator=draws, dtype=torch.float64).to(dtype) for _ in range(3)]


def reference(q: Tensor, k: Tensor, v: Tensor, layout: Tensor, block: int, bias: Tensor | float = 0.0) -> Tensor:
    """Return the attention by loops over tokens."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]) + bias
    out = torch.zeros_like(q)
    for head in range(q.shape[1]):
        for row in range(q.shape[2]):
            seen = [c for c in range(q.shape[2]) if layout[head, row // block, c // block]]
            weights = scores[:, head, row][:, seen].softmax(-1)
            out[:, head, row] = (weights[:, None] @ v[:, head][:, seen])[:, 0]
    return out


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_scores_outside_the_layout_do_not_count(config: SparsityConfig) -> None:
    attention = SparseSelfAttention(config, max_seq_length=32)
    q, k, v = (tensor.requires_grad_() for tensor in tensors())
    layout = attention.get_layout(24)
    expected = reference(q, k, v, layout, 4)
    found = attention(q, k, v)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(attention(q, k.transpose(-2, -1), v), expected, rtol=1e-10, atol=1e-12)
    weight = torch.randn_like(expected)
    for own, other in zip(*(torch.autograd.grad((each * weight).sum(), (q, k, v)) for each in (found, expected))):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_flex_attention_has_the_same_values(config: SparsityConfig) -> None:
    q, k, v = tensors(dtype=torch.float32)
    plain = SparseSelfAttention(config, max_seq_length=24)
    flex = SparseSelfAttention(config, max_seq_length=24, implementation="flex")
    torch.testing.assert_close(flex(q, k, v), plain(q, k, v), rtol=1e-5, atol=1e-6)


def test_masks_of_tokens_and_blocks_are_the_layout() -> None:
    layout = CONFIGS[2].make_layout(24)
    mask = token_mask(layout, 4)
    assert mask.shape == (3, 24, 24)
    for head, row, col in torch.cartesian_prod(torch.arange(3), torch.arange(24), torch.arange(24)).tolist():
        assert bool(mask[head, row, col]) == bool(layout[head, row // 4, col // 4])
    made = block_mask(layout, 4, block_size=8)
    assert made.to_dense()[0].bool().equal(mask.view(3, 3, 8, 3, 8).any(-1).any(2))


@pytest.mark.parametrize("mode", ["add", "mul"])
def test_padding_and_token_masks_and_relative_positions(mode: Any) -> None:
    attention = SparseSelfAttention(CONFIGS[3], mode, mode, max_seq_length=24)
    q, k, v = tensors()
    layout = attention.get_layout(24)
    padding = torch.ones(2, 24, dtype=torch.float64)
    padding[1, 20:] = 0
    causal = torch.ones(24, 24, dtype=torch.float64).tril()
    rpe = torch.randn(3, 24, 24, dtype=torch.float64)
    if mode == "mul":
        bias = torch.where((padding[:, None, None] != 0) & (causal != 0), 0.0, -math.inf)
    else:
        padding, causal = (1 - padding) * -3.0, (1 - causal) * -2.0
        bias = padding[:, None, None] + causal
    found = attention(q, k, v, rpe=rpe, key_padding_mask=padding[:, None, None], attn_mask=causal[None, None])
    kept = torch.isfinite(bias).expand(2, 3, 24, 24) & token_mask(layout, 4)
    scores = q @ k.transpose(-2, -1) / math.sqrt(8) + rpe + bias
    expected = torch.where(kept, scores, -math.inf).softmax(-1).nan_to_num() @ v
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_layouts_are_state_and_masks_follow_them() -> None:
    outer = nn.Sequential(SparseSelfAttention(CONFIGS[0], max_seq_length=24))
    assert list(outer.state_dict()) == ["0.master_layout"]
    q, k, v = tensors()
    before = outer[0](q, k, v)
    other = nn.Sequential(SparseSelfAttention(CONFIGS[1], max_seq_length=24))
    outer.load_state_dict(other.state_dict())
    assert not torch.equal(before, outer[0](q, k, v))
    torch.testing.assert_close(outer[0](q, k, v), other[0](q, k, v))
    outer.load_state_dict({"0.master_layout": torch.ones_like(other[0].master_layout)}, assign=True)
    torch.testing.assert_close(outer[0](q, k, v), before)


def test_what_does_not_fit_is_told() -> None:
    attention = SparseSelfAttention(CONFIGS[0], max_seq_length=24)
    q, k, v = tensors(20)
    with pytest.raises(ValueError, match="sequence of 22 tokens: the layout has blocks of 4 tokens, up to 24"):
        attention.get_layout(22)
    with pytest.raises(ValueError, match="sequence of 28 tokens"):
        attention.get_layout(28)
    with pytest.raises(ValueError, match="must have one shape"):
        attention(q, k, v[:, :2])
    with pytest.raises(ValueError, match='key_padding_mask_mode = \'times\' must be "add" or "mul"'):
        SparseSelfAttention(key_padding_mask_mode="times")
    with pytest.raises(ValueError, match="implementation = 'triton'"):
        SparseSelfAttention(implementation="triton")


def test_bert_attention_projects_and_attends() -> None:
    torch.manual_seed(0)
    config = SimpleNamespace(hidden_size=12, num_attention_heads=3)
    layer = BertSparseSelfAttention(config, CONFIGS[4], max_seq_length=24)
    hidden = torch.randn(2, 24, 12)
    mask = torch.zeros(2, 1, 1, 24)
    mask[1, ..., 16:] = -10000.0
    parts = [f(hidden).view(2, 24, 3, 4).transpose(1, 2) for f in (layer.query, layer.key, layer.value)]
    expected = reference(*parts, layer.sparse_self_attention.get_layout(24), 4, bias=mask)
    torch.testing.assert_close(layer(hidden, mask), expected.transpose(1, 2).reshape(2, 24, 12), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="num_attention_heads = 5 must divide hidden_size = 12"):
        BertSparseSelfAttention(SimpleNamespace(hidden_size=12, num_attention_heads=5))


def test_inputs_are_padded_to_whole_blocks_and_back() -> None:
    ids, mask = torch.arange(1, 11).view(2, 5), torch.ones(2, 5, dtype=torch.long)
    embed = nn.Embedding(20, 3)
    added, *padded = SparseAttentionUtils.pad_to_block_size(4, ids, mask, mask, None, embed(ids), 19, embed)
    assert added == 3
    assert padded[0][:, 5:].eq(19).all()
    assert padded[1].sum() == 10
    assert padded[3] is None
    assert padded[4].equal(embed(padded[0]))
    assert SparseAttentionUtils.unpad_sequence_output(added, padded[4]).equal(embed(ids))
    assert SparseAttentionUtils.unpad_sequence_output(0, padded[4]).equal(padded[4])
    assert SparseAttentionUtils.pad_to_block_size(5, ids, mask, mask, None, None, 19, None)[0] == 0
    with pytest.raises(ValueError, match="needs input_ids or inputs_embeds"):
        SparseAttentionUtils.pad_to_block_size(4, None, None, None, None, None, 0, None)


def test_position_embeddings_repeat() -> None:
    model = nn.Module()
    model.bert = nn.Module()
    model.bert.embeddings = nn.Module()
    model.bert.embeddings.position_embeddings = nn.Embedding(8, 3)
    model.config = SimpleNamespace(max_position_embeddings=8)
    rows = model.bert.embeddings.position_embeddings.weight.detach().clone()
    SparseAttentionUtils.extend_position_embedding(model, 16)
    assert model.bert.embeddings.position_embeddings.weight.equal(torch.cat([rows, rows]))
    assert model.config.max_position_embeddings == 16
    with pytest.raises(ValueError, match="must be a multiple of the present 16"):
        SparseAttentionUtils.extend_position_embedding(model, 24)
    with pytest.raises(ValueError, match=r"neither \.bert nor .roberta"):
        SparseAttentionUtils.extend_position_embedding(nn.Linear(1, 1), 16)
    tokenizer = SimpleNamespace(model_max_length=8, init_kwargs={})
    assert SparseAttentionUtils.update_tokenizer_model_max_length(tokenizer, 16).init_kwargs["model_max_length"] == 16


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({}, FixedSparsityConfig(4)),
        ({"mode": "dense", "block": 32}, DenseSparsityConfig(4, block=32)),
        (
            {"mode": "fixed", "num_local_blocks": 2, "attention": "unidirectional"},
            FixedSparsityConfig(4, num_local_blocks=2, attention="unidirectional"),
        ),
        (
            {"mode": "variable", "local_window_blocks": [2, 4], "global_block_indices": [1], "num_random_blocks": 1},
            VariableSparsityConfig(4, local_window_blocks=[2, 4], global_block_indices=[1], num_random_blocks=1),
        ),
        ({"mode": "bigbird", "num_random_blocks": 2}, BigBirdSparsityConfig(4, num_random_blocks=2)),
        (
            {"mode": "bslongformer", "global_block_indices": [0], "global_block_end_indices": [2]},
            BSLongformerSparsityConfig(4, global_block_indices=[0], global_block_end_indices=[2]),
        ),
    ],
)
def test_the_section_of_the_config_makes_the_pattern(section: dict[str, Any], expected: SparsityConfig) -> None:
    settings = load({"train_batch_size": 1, "sparse_attention": section}).settings
    made = make_sparsity_config(settings.sparse_attention, 4)
    assert type(made) is type(expected)
    assert made.make_layout(256).equal(expected.make_layout(256))


def test_keys_that_the_mode_does_not_take_are_told() -> None:
    section = {"mode": "bigbird", "num_local_blocks": 2, "local_window_blocks": [1]}
    plan = resolve(load({"train_batch_size": 1, "sparse_attention": section}), Facts(world_size=1, replicas=1))
    unused = "sparse_attention.num_local_blocks, sparse_attention.local_window_blocks"
    assert f'dict: {unused} have no effect here: the mode is "bigbird"' in plan.notices
    assert plan["sparse_attention.mode"] == "bigbird"


def test_an_unknown_mode_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r'sparse_attention.mode = "strided"'):
        load({"train_batch_size": 1, "sparse_attention": {"mode": "strided"}})


def bert(kind: str, **changes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = getattr(transformers, f"{kind}Config")(**sizes, vocab_size=50, max_position_embeddings=66, **changes)
    return getattr(transformers, f"{kind}ForMaskedLM")(config).eval()


@pytest.mark.parametrize("kind", ["Bert", "Roberta"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_bert_with_the_dense_pattern_computes_what_it_did(kind: str, attention: str) -> None:
    model = bert(kind, attn_implementation=attention)
    ids = torch.randint(2, 50, (2, 64), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 64, dtype=torch.long)
    mask[1, 40:] = 0
    expected = model(input_ids=ids, attention_mask=mask).logits
    names = set(model.state_dict())
    replace = SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention
    assert replace(model, 64, DenseSparsityConfig(num_heads=2)) is model
    found = model(input_ids=ids, attention_mask=mask).logits
    assert torch.allclose(found, expected, rtol=0, atol=1e-5)
    assert names <= set(model.state_dict())
    replace(model, 64, FixedSparsityConfig(num_heads=2, num_local_blocks=2))
    fixed = model(input_ids=ids, attention_mask=mask).logits
    assert fixed.isfinite().all()
    assert not torch.allclose(fixed, expected, rtol=0, atol=2e-5)


def test_other_models_and_decoders_keep_their_attention() -> None:
    replace = SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention
    with pytest.raises(ValueError, match=r"Linear has neither \.bert nor \.roberta"):
        replace(nn.Linear(1, 1), 16)
    model = bert("Bert", is_decoder=True)
    with pytest.raises(ValueError, match=r"config\.is_decoder is true"):
        replace(model, 64)
    layer = replace(bert("Bert"), 64).bert.encoder.layer[0].attention.self
    with pytest.raises(ValueError, match="takes no past_key_values"):
        layer(torch.ones(1, 16, 32), past_key_values=object())
