import copy
from typing import Any

import pytest
import torch
from small_decoders import HEADS, SIZE, TIME, VOCABULARY, WIDTH, Block, Model, model
from torch import Tensor, nn

from zengine.adapters import LoRAConfig, add_lora, merged_weights, quantize_base
from zengine.inference.cache import KVCache
from zengine.inference.decoder import DecoderPass
from zengine.inference.quantized import projections
from zengine.inference.quantized_modules import with_weights_of
from zengine.inference.recognize import NotRecognized, recognize
from zengine.inference.structure import MLP, FusedQKV, MLPInput, RotaryStyle
from zengine.inference.verify import verify

FORMS: dict[str, dict[str, Any]] = {
    "rotary": {},
    "learnt positions": {"rotary": False},
    "a soft cap": {"softcap": 2.0},
    "a window": {"window": 5},
    "in parallel": {"parallel": True},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_decoder_is_recognized_by_what_it_computes(form: str, dtype: torch.dtype) -> None:
    subject = model(**FORMS[form]).to(dtype)
    decoder = recognize(subject)
    attention = decoder.blocks[1].attention
    assert (attention.num_heads, attention.num_kv_heads, attention.head_size) == (HEADS, HEADS, SIZE)
    assert attention.fused is FusedQKV.STACKED
    assert (attention.softcap, attention.window) == (FORMS[form].get("softcap", 0.0), FORMS[form].get("window", 0))
    if form == "learnt positions":
        assert (attention.rotary, decoder.max_positions) == (None, TIME)
    else:
        assert attention.rotary is not None
        assert (attention.rotary.style, attention.rotary.size) == (RotaryStyle.NEIGHBOURS, SIZE)
    kind = MLPInput.BLOCK if form == "in parallel" else MLPInput.RESIDUAL
    assert [block.mlp_input for block in decoder.blocks] == [kind] * 2
    assert all(isinstance(block.mlp, MLP) for block in decoder.blocks)
    verified = verify(decoder, subject, num_tokens=48)
    assert max(verified.prompt_error, verified.decode_error) < (1e-12 if dtype is torch.float64 else 2e-6)


def test_the_decoder_follows_the_weights_of_the_module() -> None:
    subject = model()
    decoder = recognize(subject)
    with torch.no_grad():
        subject.blocks[0].qkv.weight.mul_(0.5)
        subject.head.weight.add_(0.1)
    verify(decoder, subject)


def test_observing_leaves_no_hook_and_no_gradient() -> None:
    subject = model()
    before = copy.deepcopy(subject.state_dict())
    recognize(subject)
    assert all(torch.equal(before[name], value) for name, value in subject.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in subject.modules())
    assert all(param.grad is None for param in subject.parameters())


class Mixture(nn.Module):
    """Two experts, chosen for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.route = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.route(x).argmax(-1, keepdim=True)
        return torch.where(chosen == 0, self.experts[0](x), self.experts[1](x)).relu()


class MixedBlock(Block):
    """A block whose MLP is a module of its own."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        del self.grow, self.shrink
        self.mixture = Mixture()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        parts = self.qkv(self.one(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mixture(self.two(x))


def test_an_mlp_of_another_kind_is_called_as_it_is() -> None:
    subject = model(block=MixedBlock)
    decoder = recognize(subject)
    assert all(isinstance(block.mlp, Mixture) for block in decoder.blocks)
    assert decoder.opaque == ("blocks.0.mlp", "blocks.1.mlp")
    verify(decoder, subject)


class Bidirectional(Block):
    """Attention that sees later tokens, too."""

    def seen(self, time: int) -> Tensor:
        return torch.ones(time, time, dtype=torch.bool)


class Wider(Block):
    """A block that adds three times what its MLP wrote."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return 3 * super().forward(x, cos, sin)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (Bidirectional, r"blocks\.0: what blocks\.0\.out reads is no causal attention of what blocks\.0\.qkv wrote"),
        (Wider, r"blocks\.0 does not return the sum of its input, attention and MLP"),
    ],
)
def test_what_is_no_decoder_is_said_with_its_place(block: type[Block], message: str) -> None:
    with pytest.raises(NotRecognized, match=message):
        recognize(model(block=block))


class Torchs(nn.Module):
    """A decoder of torch's own transformer layers."""

    def __init__(self, *, is_embedding: bool) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.places = nn.Embedding(TIME, WIDTH) if is_embedding else nn.Parameter(torch.randn(TIME, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids: Tensor) -> Tensor:
        time, places = ids.shape[1], self.places
        x = self.tokens(ids) + (places(torch.arange(time)) if isinstance(places, nn.Embedding) else places[:time])
        mask = nn.Transformer.generate_square_subsequent_mask(time)
        logits: Tensor = self.head(self.blocks(x, mask=mask, is_causal=True))
        return logits


def test_decoders_of_torchs_layers_are_rejected_with_what_to_write() -> None:
    with pytest.raises(
        NotRecognized, match=r"blocks\.layers\.0\.self_attn is an nn\.MultiheadAttention.*in_proj_weight"
    ):
        recognize(Torchs(is_embedding=True).eval())
    with pytest.raises(
        NotRecognized, match=r"no sum of embeddings \(tokens\); learnt positions are known as an nn\.Emb"
    ):
        recognize(Torchs(is_embedding=False).eval())


def test_models_without_blocks_or_tokens_are_rejected() -> None:
    with pytest.raises(NotRecognized, match="Linear has no embedding of tokens"):
        recognize(nn.Linear(3, 3).eval())
    with pytest.raises(NotRecognized, match=r"Sequential has no list of blocks"):
        recognize(nn.Sequential(nn.Embedding(5, 5), nn.Linear(5, 5)).eval())
    with pytest.raises(ValueError, match="needs a model in eval mode"):
        recognize(model().train())


def test_verification_finds_a_wrong_decoder() -> None:
    subject = model()
    decoder = recognize(subject)
    subject.blocks[1].shrink.bias = nn.Parameter(torch.ones(WIDTH))  # another tensor: the decoder keeps the old one
    with pytest.raises(NotRecognized, match="the decoder made from Model differs from it"):
        verify(decoder, subject)


class Masked(Block):
    """A window of 32 that no attribute names."""

    def seen(self, time: int) -> Tensor:
        distance = torch.arange(time)[:, None] - torch.arange(time)
        return (distance >= 0) & (distance < 32)


def test_verification_finds_a_window_that_is_longer_than_the_observed_pass() -> None:
    subject = model(block=Masked)
    with pytest.raises(NotRecognized, match="differs from it on 272 tokens"):
        verify(recognize(subject), subject)
    verify(recognize(subject), subject, longest=31)  # what it computes up to there


class Lengthening(nn.Module):
    """Rotary tables whose base grows with the length, as in dynamic NTK scaling."""

    def forward(self, places: Tensor) -> tuple[Tensor, Tensor]:
        base = 10_000.0 if len(places) <= 32 else 80_000.0
        angles = torch.outer(places, base ** -torch.arange(0, 1, 2 / SIZE))
        return angles.cos(), angles.sin()


class Dynamic(Model):
    """A model with such tables."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.turns = Lengthening()

    def forward(self, ids: Tensor) -> Tensor:
        x, (cos, sin) = self.tokens(ids), self.turns(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def test_positions_that_change_with_the_length_are_not_cached() -> None:
    torch.manual_seed(0)
    decoder = recognize(Dynamic().eval())
    DecoderPass(decoder, KVCache.create(decoder, 1, 32))
    with pytest.raises(ValueError, match=r"change with the length of a sequence.*use the module itself"):
        DecoderPass(decoder, KVCache.create(decoder, 1, 40))


def test_a_prompt_in_parts_gives_the_logits_of_the_whole() -> None:
    subject = model(window=7)
    steps = DecoderPass(decoder := recognize(subject), KVCache.create(decoder, 2, TIME))
    ids = torch.randint(0, VOCABULARY, (30,), generator=torch.Generator().manual_seed(3))
    steps.forward(ids[:11], 1)
    steps.forward(ids[11:12], 1)
    with torch.no_grad():
        wanted = subject(ids[None])[0, -1]
    assert torch.allclose(steps.forward(ids[12:], 1), wanted, atol=1e-4)


def test_a_full_slot_raises_and_keeps_what_it_holds() -> None:
    decoder = recognize(model())
    steps = DecoderPass(decoder, KVCache.create(decoder, 1, 8))
    steps.forward(torch.arange(6), 0)
    with pytest.raises(ValueError, match=r"6 tokens and 3 more do not fit into a cache of 8"):
        steps.forward(torch.arange(3), 0)
    assert steps.cache.lengths == [6]
    with pytest.raises(ValueError, match="exceeds the 64 positions that the model has learnt"):
        KVCache.create(recognize(model(rotary=False)), 1, TIME + 1)


@pytest.mark.parametrize("kind", ["ours", "peft", "quantized"])
def test_layers_with_adapters_are_projections_with_merged_weights(kind: str) -> None:
    subject: Any = model()
    names = sorted({name.rpartition(".")[2] for name, each in subject.named_modules() if isinstance(each, nn.Linear)})
    if kind == "quantized":
        quantize_base(subject, "nf4-g32", names)
    if kind != "peft":
        add_lora(subject, LoRAConfig(lora_r=2, lora_alpha=1.0, target_mods=names))
    else:
        peft = pytest.importorskip("peft")
        adapted = peft.get_peft_model(subject, peft.LoraConfig(r=2, lora_alpha=1.0, target_modules=names))
        subject = adapted.base_model.model.eval()
    with torch.no_grad():
        for name, param in subject.named_parameters():
            if "lora_B" in name:
                param.normal_(std=0.1)
    decoder = recognize(subject)
    merged = dict(merged_weights(subject))
    found = {each.name: each.weight for each in projections(decoder)}
    assert sorted(found) == sorted(merged)
    assert all(torch.equal(weight, found[name]) for name, weight in merged.items())
    verify(decoder, subject)
    with torch.no_grad():  # an update of the adapters is in the next decoder
        for param in subject.parameters():
            if param.requires_grad:
                param.mul_(-1)
                break
    fresh = with_weights_of(decoder, subject)
    verify(fresh, subject)
    assert any(not torch.equal(each.weight, found[each.name]) for each in projections(fresh))


def _rotated(x: Tensor) -> Tensor:
    """x: (batch, heads, time, size), rotated by code that no attribute describes."""
    half = x.shape[-1] // 2
    speeds = 10_000.0 ** (-torch.arange(half) / half)
    angles = torch.outer(torch.arange(x.shape[2]), speeds)
    one, two = x[..., :half], x[..., half:]
    return torch.cat((one * angles.cos() - two * angles.sin(), two * angles.cos() + one * angles.sin()), -1)


class _Plain(nn.Module):
    """A block without names for its sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(36), nn.LayerNorm(36)
        self.q, self.k, self.v, self.out = (nn.Linear(36, 36) for _ in range(4))
        self.up, self.down = nn.Linear(36, 48), nn.Linear(48, 36)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        query, key, value = (layer(y).unflatten(-1, (3, 12)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(_rotated(query), _rotated(key), value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.silu(self.up(self.norm2(x))))


def test_rotations_inside_a_block_are_found_without_names() -> None:
    torch.manual_seed(0)
    blocks = nn.Sequential(_Plain(), _Plain())
    subject = nn.Sequential(nn.Embedding(VOCABULARY, 36), blocks, nn.LayerNorm(36), nn.Linear(36, 29)).eval()
    decoder = recognize(subject)
    rotary = decoder.blocks[1].attention.rotary
    assert rotary is not None
    assert (rotary.style, rotary.size, decoder.blocks[0].attention.num_heads) == (RotaryStyle.HALVES, 12, 3)
    verify(decoder, subject)
