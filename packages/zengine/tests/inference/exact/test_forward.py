import copy
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from small_decoders import VOCABULARY, model
from torch import Tensor, nn

from zengine.adapters import LoRAConfig, adapters_disabled, add_lora
from zengine.inference.cache import KVCache
from zengine.inference.exact.choices import NotExact
from zengine.inference.exact.forward import ExactForward, exact_forward
from zengine.inference.exact.modules import Replaced
from zengine.inference.recognize import NotRecognized

both = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 300,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPS = {"num_key_value_heads": 2}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "LLaMA": ("Llama", GROUPS),
    "Qwen3": ("Qwen3", dict(head_dim=16, **GROUPS)),
    "Gemma2": ("Gemma2", dict(head_dim=16, sliding_window=16, **GROUPS)),
    "GPT-NeoX": ("GPTNeoX", {}),
    "Granite": (
        "Granite",
        dict(logits_scaling=3.0, residual_multiplier=0.7, embedding_multiplier=2.5, **GROUPS),
    ),
    "GPT-2": ("GPT2", NO_DROPOUT),
    "Mixtral": ("Mixtral", dict(num_local_experts=5, **GROUPS)),
    "Qwen2-MoE": ("Qwen2Moe", dict(shared_expert_intermediate_size=56, norm_topk_prob=True, **EXPERTS, **GROUPS)),
    "Qwen3-MoE": ("Qwen3Moe", dict(head_dim=16, **EXPERTS, **GROUPS)),
}
each_model = pytest.mark.parametrize("name", MODELS)


def made(name: str, **given: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    family, own = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **own, **given})
    kind = {"GPT2": "GPT2LMHeadModel"}.get(family, f"{family}ForCausalLM")
    return getattr(transformers, kind)(config)  # type: ignore[no-any-return]


def draw(*shape: int, seed: int = 0, vocabulary: int = 97) -> Tensor:
    return torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def trained(subject: nn.Module, ids: Tensor, **given: Any) -> Tensor:
    """Logits of the module in train mode, float32, after a backward."""
    subject.train()
    subject.zero_grad()
    output = subject(ids, **given)
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    torch.log_softmax(logits.float(), -1)[..., 3].mean().backward()
    return logits.detach().float()


@both
@each_model
def test_generation_and_training_have_the_same_bits(name: str, dtype: torch.dtype) -> None:
    subject, ids = made(name).to(dtype), draw(5, 60)
    with exact_forward(subject) as exact:
        wanted = trained(subject, ids)
        steps = exact.steps(KVCache.create(exact.decoder, 4, 64))
        assert torch.equal(steps.forward_all(ids[1, :33], 2), wanted[1, :33])
        steps.forward(ids[0, :20], 0)
        for at in range(15):
            found = steps.forward_each(torch.stack((ids[0, 20 + at], ids[1, 33 + at])), [0, 2])
            assert torch.equal(found[0], wanted[0, 20 + at])
            assert torch.equal(found[1], wanted[1, 33 + at])
        log_probs = torch.log_softmax(wanted, -1)
        assert torch.equal(torch.log_softmax(found[1], -1), log_probs[1, 47]), "log-probabilities, row by row"


@both
@each_model
def test_gradients_are_as_good_as_those_of_the_module(name: str, dtype: torch.dtype) -> None:
    subject, ids = made(name), draw(3, 40)
    copy_of: Any = copy.deepcopy(subject).double()
    copy_of.config._experts_implementation = "eager"  # the other one has no float64
    trained(copy_of, ids)
    wanted = {name: param.grad for name, param in copy_of.named_parameters()}
    subject = subject.to(dtype)
    trained(subject, ids)
    before = _errors(subject, wanted)
    with exact_forward(subject):
        trained(subject, ids)
        found = _errors(subject, wanted)
    most = 2e-6 if dtype == torch.float32 else 2e-2
    assert set(found) == set(before), "the same parameters have gradients"
    assert max(found.values()) < max(most, 1.3 * max(before.values()))
    assert sum(found.values()) < 1.3 * sum(before.values()) + most


def _errors(subject: nn.Module, wanted: dict[str, Tensor | None]) -> dict[str, float]:
    """Errors of gradients, relative to the norm of all."""
    whole = sum(float(grad.square().sum()) for grad in wanted.values() if grad is not None) ** 0.5
    return {
        name: float((param.grad.double() - wanted[name]).norm()) / whole
        for name, param in subject.named_parameters()
        if param.grad is not None
    }


@both
@each_model
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_and_batch_change_no_bit(name: str, dtype: torch.dtype, side: str) -> None:
    subject, lengths = made(name).to(dtype), (7, 40, 23, 1)
    tokens = [draw(length, seed=length) for length in lengths]
    ids, mask = torch.zeros(2, 4, 40, dtype=torch.int64)
    for row, each in enumerate(tokens):
        where = slice(40 - len(each), None) if side == "left" else slice(0, len(each))
        ids[row, where], mask[row, where] = each, 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with exact_forward(subject):
        found = trained(subject, ids, attention_mask=mask, position_ids=positions)
        for row, each in enumerate(tokens):
            assert torch.equal(found[row][mask[row].bool()], trained(subject, each[None])[0])


def test_positions_count_from_the_first_token_of_the_mask() -> None:
    subject, ids = made("LLaMA"), draw(1, 20)
    padded = torch.cat((torch.zeros(1, 9, dtype=torch.int64), ids), 1)
    mask = torch.cat((torch.zeros(1, 9, dtype=torch.int64), torch.ones_like(ids)), 1)
    before = trained(subject, padded, attention_mask=mask)[:, 9:]
    with exact_forward(subject):
        found = trained(subject, padded, attention_mask=mask)[:, 9:]
        assert torch.equal(found, trained(subject, ids))
    assert torch.allclose(found, before, atol=1e-5)


def test_close_leaves_the_module_as_it_was() -> None:
    subject = model()
    subject.norm.forward = before = subject.norm.forward  # someone else's
    state, owned = copy.deepcopy(subject.state_dict()), [set(vars(each)) for each in subject.modules()]
    wanted = subject(draw(2, 30, vocabulary=VOCABULARY))
    exact = ExactForward.install(subject)
    assert any(set(vars(each)) != names for each, names in zip(subject.modules(), owned, strict=True))
    exact.close()
    assert [set(vars(each)) for each in subject.modules()] == owned
    assert subject.norm.forward is before
    assert torch.equal(subject(draw(2, 30, vocabulary=VOCABULARY)), wanted)
    assert all(torch.equal(value, state[name]) for name, value in subject.state_dict().items()), "no bit was changed"


def test_modes_of_modules_come_back() -> None:
    subject = model().train()
    subject.norm.eval()
    ExactForward.install(subject).close()
    assert subject.training
    assert not subject.norm.training


def test_hooks_of_modules_run() -> None:
    subject, seen = model(), []
    subject.blocks[0].grow.register_forward_hook(lambda *_: seen.append("grow"))
    subject.blocks[0].one.register_forward_hook(lambda *_: seen.append("one"))
    with exact_forward(subject):
        seen.clear()
        subject(draw(1, 5, vocabulary=VOCABULARY))
    assert seen == ["one", "grow"]


def test_norms_that_are_equal_at_first_are_told_apart() -> None:
    subject = model(parallel=True)
    for block in subject.blocks:
        for norm in (block.one, block.two):
            nn.init.ones_(norm.weight)
            nn.init.zeros_(norm.bias)
    with exact_forward(subject):
        subject(draw(2, 9, vocabulary=VOCABULARY)).square().sum().backward()
    assert all(block.two.weight.grad is not None for block in subject.blocks)
    assert torch.equal(subject.blocks[0].two.weight, torch.ones(24)), "the bits before"


def test_weights_that_change_show_at_once() -> None:
    subject, ids = model(), draw(1, 9, vocabulary=VOCABULARY)
    with exact_forward(subject) as exact:
        steps = exact.steps(KVCache.create(exact.decoder, 1, 16))
        with torch.no_grad():
            for param in subject.parameters():
                param.add_(0.1)
        assert torch.equal(steps.forward_all(ids[0], 0), subject(ids)[0])


def test_checkpointed_activations_have_the_same_gradients() -> None:
    subject, ids = made("LLaMA"), draw(2, 30)
    with exact_forward(subject):
        trained(subject, ids)
        wanted = [param.grad.clone() for param in subject.parameters()]  # type: ignore[union-attr]
        subject.gradient_checkpointing_enable()  # type: ignore[operator]
        trained(subject, ids)
        assert all(torch.equal(p.grad, grad) for p, grad in zip(subject.parameters(), wanted, strict=True))


def _adapted(kind: str, dtype: torch.dtype) -> nn.Module:
    subject = made("LLaMA").to(dtype)
    if kind == "own":
        add_lora(subject, LoRAConfig(lora_r=4, lora_alpha=8, target_mods=["q_proj", "v_proj", "down_proj"]))
    else:
        peft = pytest.importorskip("peft")
        subject = peft.get_peft_model(
            subject, peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])
        )
    with torch.no_grad():
        for name, param in subject.named_parameters():
            if "lora_B" in name:
                param.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(1))
    return subject


@both
@pytest.mark.parametrize("kind", ["own", "PEFT"])
def test_adapters_compute_apart_from_their_base(kind: str, dtype: torch.dtype) -> None:
    subject, ids = _adapted(kind, dtype), draw(3, 40)
    state = copy.deepcopy(subject.state_dict())
    before = trained(subject, ids)
    grads = {name: param.grad for name, param in subject.named_parameters() if param.requires_grad}
    with exact_forward(subject) as exact:
        wanted = trained(subject, ids)
        steps = exact.steps(KVCache.create(exact.decoder, 1, 64))
        assert torch.equal(steps.forward_all(ids[2, :30], 0), wanted[2, :30])
        assert torch.equal(steps.forward_each(ids[2, 30:31], [0])[0], wanted[2, 30])
        with adapters_disabled(subject), torch.no_grad():
            steps.cache.clear(0)
            reference = subject(ids[2:]).logits[0].float()
            assert torch.equal(steps.forward_all(ids[2], 0), reference)
        assert not torch.allclose(reference, wanted[2], atol=1e-3)
        assert torch.equal(trained(subject, ids), wanted)
    assert (wanted - before).abs().max() / before.abs().max() < (1e-5 if dtype == torch.float32 else 3e-2)
    for name, param in subject.named_parameters():
        if param.requires_grad:
            error = (param.grad.double() - grads[name].double()).norm() / grads[name].double().norm()  # type: ignore[union-attr]
            assert error < (1e-5 if dtype == torch.float32 else 5e-2), name
        else:
            assert param.grad is None
    assert all(torch.equal(value, state[name]) for name, value in subject.state_dict().items())


# -- errors ------------------------------------------------------------------------------------------


def test_dropout_is_rejected_by_name() -> None:
    subject = made("GPT-2", resid_pdrop=0.1)
    with pytest.raises(ValueError, match=r"dropout: transformer\.h\.0\..*resid_dropout\.p is 0\.1"):
        ExactForward.install(subject)
    assert not any("forward" in vars(each) for each in subject.modules())


def test_other_dtypes_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"weights of torch\.float64"):
        ExactForward.install(model().double())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"output_router_logits": True}, r"config\.output_router_logits is True, and exact mixtures record none"),
        ({"router_jitter_noise": 0.1}, r"model\.layers\.0\.mlp\.jitter_noise is 0\.1"),
    ],
)
def test_experts_that_train_otherwise_than_they_generate_are_rejected(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExactForward.install(made("Mixtral", **given))


class Squared(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square()


def test_an_mlp_of_no_known_form_is_rejected_with_the_name_of_the_block() -> None:
    subject: Any = made("Mixtral")
    subject.model.layers[1].mlp = Squared(48, 48)
    with pytest.raises(NotExact, match=r"model\.layers\.1\.mlp is no MLP of a known form, and no mixture of experts"):
        ExactForward.install(subject)


def test_an_encoder_is_not_recognised() -> None:
    subject = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))
    with pytest.raises(NotRecognized, match="no list of blocks"):
        ExactForward.install(subject)


@attrs.frozen
class Wrong:
    given: Callable[[Tensor], dict[str, Any]]
    message: str


WRONG = {
    "hole": Wrong(
        lambda ids: {"attention_mask": (ids != ids[0, 4]).long()}, "attention_mask with padding between tokens"
    ),
    "4d": Wrong(
        lambda ids: {"attention_mask": torch.ones(1, 1, 9, 9)}, r"attention_mask that is not \(batch, time\)"
    ),
    "packed": Wrong(lambda _ids: {"position_ids": torch.arange(9)[None] % 5}, "packed sequences"),
}


@pytest.mark.parametrize("row", WRONG.values(), ids=list(WRONG))
def test_what_has_no_exact_attention_is_rejected(row: Wrong) -> None:
    subject, ids = made("LLaMA"), torch.arange(9)[None]
    with exact_forward(subject), pytest.raises(ValueError, match=row.message):
        subject(ids, **row.given(ids))


def test_a_cache_of_the_module_is_rejected() -> None:
    subject, ids = made("LLaMA").eval(), draw(1, 9)
    cache = subject(ids, use_cache=True).past_key_values
    with exact_forward(subject), pytest.raises(ValueError, match="leave past_key_values out"):
        subject(ids[:, -1:], past_key_values=cache)


def test_a_part_that_depends_on_the_batch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from zengine.inference.exact import modules

    plain = modules.linear

    def uneven(products: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return plain(products, x, weight, bias) * (1 + 1e-6 * (x.numel() // x.shape[-1] > 30))

    monkeypatch.setattr(modules, "linear", uneven)
    subject = model()
    with pytest.raises(NotExact, match=r"other logits, by .*: block blocks\.0 depends on the batch"):
        ExactForward.install(subject)
    assert not any("forward" in vars(each) for each in subject.modules())


def test_a_forward_is_replaced_once() -> None:
    subject, replaced = nn.Linear(2, 2), Replaced()
    replaced.replace(subject, lambda x: x + 1)
    replaced.replace(subject, lambda x: x + 2)
    assert subject(torch.zeros(1)) == 1
    replaced.close()
    assert "forward" not in vars(subject)


@both
def test_sixteen_bits_may_be_coarse_at_a_few_positions_but_not_at_most(dtype: torch.dtype) -> None:
    """A model of large weights in bfloat16 is 5% from itself in float32 at some positions; another form is at all."""
    subject, ids, is_wide = made("LLaMA").to(dtype).eval(), draw(2, 12), dtype == torch.float32
    with torch.no_grad(), exact_forward(subject) as exact:
        own = subject(ids[:1]).logits.float()  # some models return float32 logits of narrow weights
        largest = own.abs().max()

        def moved(positions: slice, by: float) -> Tensor:
            other = own.clone()
            other[:, positions, 0] += by * largest
            return other

        def run(module: nn.Module, tokens: Tensor) -> Any:
            return module(tokens).logits

        exact.check(subject, run, moved(slice(3, 5), 1e-5 if is_wide else 0.1), ids)
        for positions, by, said in (
            (slice(3, 4), 0.3, r"[23]\.\de-01"),
            (slice(0, 12), 0.1, r"(1\.0e-01|9\.\de-02)"),
            (slice(3, 4), torch.nan, "nan"),
        ):
            with pytest.raises(NotExact, match=f"differs from its own by {said} of .* at the worst position"):
                exact.check(subject, run, moved(positions, by), ids)
        if is_wide:
            with pytest.raises(NotExact, match="differs from its own by"):
                exact.check(subject, run, moved(slice(3, 5), 1e-3), ids)
