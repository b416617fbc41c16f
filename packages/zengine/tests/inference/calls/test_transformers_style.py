"""`generate` of inference engines around modules that have none: a recognized decoder generates by itself."""

from __future__ import annotations

import copy
import logging
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from small_decoders import TIME, VOCABULARY, model
from torch import Tensor, nn

import zengine.deepspeed as deepspeed

IDS = torch.tensor([[3, 1, 4, 1, 5], [0, 0, 9, 2, 6]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])


def engine(**given: object) -> deepspeed.InferenceEngine:
    return deepspeed.init_inference(model(), {"dtype": "fp32", "replace_with_kernel_inject": True, **given})


def greedy(prompt: list[int], count: int) -> list[int]:
    """Tokens of the module, one whole pass for each."""
    subject, tokens = model(), list(prompt)
    for _ in range(count):
        with torch.no_grad():
            tokens.append(int(subject(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_greedy_tokens_follow_each_prompt_without_its_padding() -> None:
    found = engine().generate(IDS, MASK, max_new_tokens=6)
    wanted = [greedy([3, 1, 4, 1, 5], 6), greedy([9, 2, 6], 6)]
    assert torch.equal(found, torch.cat((IDS, torch.tensor(wanted)), dim=1))


def test_rows_end_with_end_tokens_and_are_padded() -> None:
    wanted = greedy([3, 1, 4, 1, 5], 6)
    end = wanted[2]
    first = wanted.index(end)
    found = engine().generate(IDS, MASK, max_new_tokens=6, eos_token_id=end)
    assert found[0, 5:].tolist() == [*wanted[: first + 1], *[end] * (found.shape[1] - 5 - first - 1)]
    other = engine().generate(IDS, MASK, max_new_tokens=6, eos_token_id=[end, VOCABULARY - 1], pad_token_id=30)
    assert set(other[0, 5 + first + 1 :].tolist()) <= {30}


def test_samples_depend_on_seeds_and_torchs_generator() -> None:
    subject = engine()

    def drawn(**given: object) -> Tensor:
        return subject.generate(
            IDS, MASK, max_new_tokens=8, do_sample=True, temperature=1.5, top_k=20, num_return_sequences=2, **given
        )

    torch.manual_seed(1)
    first, second = drawn(), drawn()
    torch.manual_seed(1)
    assert torch.equal(drawn(), first)
    assert not torch.equal(second, first)
    assert first.shape == (4, 13)
    assert not torch.equal(first[0], first[1])
    seeded = drawn(seeds=(5, 6))
    alone = subject.generate(IDS[1:, 2:], max_new_tokens=8, do_sample=True, temperature=1.5, top_k=20, seeds=(6,))
    assert torch.equal(seeded[3, 5:], alone[0, 3:]), "a sample does not depend on its batch"


def test_what_it_does_not_know_is_named() -> None:
    subject = engine(max_out_tokens=8)
    with pytest.raises(TypeError, match=r"generate.. got num_beams, but accepts do_sample, eos_token_id"):
        subject.generate(IDS, num_beams=2)
    with pytest.raises(RuntimeError, match="5 tokens and 5 new ones exceed max_out_tokens = 8"):
        subject.generate(IDS, max_new_tokens=5)
    with pytest.raises(ValueError, match="prompt 1 has no tokens"):
        subject.generate(IDS, torch.tensor([[1] * 5, [0] * 5]))


def test_quantized_decoders_generate_with_their_codes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "zengine"):
        subject = engine(quant={"weight": {"num_bits": 8}})
    assert "2 blocks of Model fused (attention, norms, positions, cache, MLPs); as they are: none" in caplog.text
    found = subject.generate(IDS[:1], max_new_tokens=4)[0, 5:].tolist()
    tokens = IDS[0].tolist()
    for token in found:
        logits = subject(torch.tensor([tokens]))[0, -1]
        assert logits[token] >= logits.max() - 1e-3
        tokens.append(token)


def test_learnt_positions_are_the_limit_that_is_named() -> None:
    subject = deepspeed.init_inference(model(rotary=False), dtype="fp32", replace_with_kernel_inject=True)
    assert subject.generate(IDS, max_new_tokens=TIME - 4).shape == (2, TIME + 1)
    told = r"exceed the 64 positions that the model has learnt: ask for at most 60 new tokens\."
    with pytest.raises(RuntimeError, match=told):
        subject.generate(IDS, max_new_tokens=TIME)
    with pytest.raises(RuntimeError, match=r"learnt: shorten the prompt to 64 tokens\."):
        subject.generate(IDS.repeat(1, 13), max_new_tokens=1)


def test_calls_written_for_transformers_are_understood() -> None:
    subject = engine()
    wanted = subject.generate(IDS, max_new_tokens=4, eos_token_id=VOCABULARY - 1)
    given = {
        "num_beams": 1,
        "use_cache": True,
        "temperature": None,
        "top_p": None,
        "top_k": None,
        "pad_token_id": None,
    }
    found = subject.generate(inputs=IDS, max_length=9, eos_token_id=torch.tensor(VOCABULARY - 1), **given)
    assert torch.equal(found, wanted)
    assert subject.generate(IDS, max_new_tokens=2, do_sample=True, seeds=(1, 2, 3)).shape == (6, 7)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"input_ids": IDS[0]}, r"\(batch, time\), not empty; it is torch.int64 of \(5,\)"),
        ({"input_ids": IDS.float()}, r"whole numbers.*it is torch.float32 of \(2, 5\)"),
        ({"input_ids": IDS[:0]}, r"it is torch.int64 of \(0, 5\)"),
        ({"input_ids": IDS.tolist()}, "it is a list"),
        (
            {"input_ids": IDS, "attention_mask": MASK[:, :4]},
            r"attention_mask has the shape \(2, 4\), and .* \(2, 5\)",
        ),
        ({"input_ids": IDS, "seeds": (1,), "num_return_sequences": 2}, "1 seeds for num_return_sequences = 2"),
        ({"input_ids": IDS, "max_new_tokens": 0}, "max_new_tokens is 0; it must be at least 1"),
        ({"input_ids": IDS, "max_length": 5}, "max_new_tokens is 0"),
        ({"input_ids": IDS + VOCABULARY}, "prompt 0 has token 40; the vocabulary has 37"),
    ],
)
def test_wrong_arguments_are_named(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        engine().generate(**given)
    with pytest.raises(TypeError, match=r"generate.. needs input_ids"):
        engine().generate(max_new_tokens=3)


QUANT: dict[str, Any] = {"plain": {}, "int8": {"quant": {"weight": {"num_bits": 8}}}}


@pytest.mark.parametrize("case", QUANT)
def test_copies_have_weights_and_caches_of_their_own(case: str) -> None:
    subject = engine(**QUANT[case])
    wanted = subject.generate(IDS, MASK, max_new_tokens=6)
    for made in (copy.deepcopy(subject), pickle.loads(pickle.dumps(subject))):
        assert torch.equal(made.generate(IDS, MASK, max_new_tokens=6), wanted)
        with torch.no_grad():
            made.module.norm.weight.neg_()
        assert not torch.equal(made.generate(IDS, MASK, max_new_tokens=6), wanted)
        assert torch.equal(subject.generate(IDS, MASK, max_new_tokens=6), wanted)


@pytest.mark.parametrize("case", QUANT)
def test_calls_of_several_threads_do_not_share_a_cache(case: str) -> None:
    subjects = [engine(**QUANT[case]) for _ in range(2)]
    prompts = [IDS[:1] + row for row in range(6)]
    calls = [(each, prompt) for each in subjects for prompt in prompts]
    wanted = [each.generate(prompt, max_new_tokens=12).tolist() for each, prompt in calls]
    with ThreadPoolExecutor(len(calls)) as pool:
        for _ in range(3):
            made = pool.map(lambda call: call[0].generate(call[1], max_new_tokens=12).tolist(), calls)
            assert list(made) == wanted


def test_the_largest_cache_stays_and_a_failed_call_returns_it() -> None:
    path = engine()._fused
    with path.empty_steps(2) as outer, path.empty_steps(1) as inner:
        assert inner is not outer
        inner.forward(IDS[0], 0)
    assert path.steps is outer

    def fail() -> None:
        with path.empty_steps(1) as steps:
            steps.forward(IDS[0], 0)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    with path.empty_steps(1) as last:
        assert last is outer
        assert last.cache.lengths == [0, 0]


@pytest.mark.parametrize("case", QUANT)
def test_loaded_weights_are_those_that_generate(case: str) -> None:
    wanted = engine(**QUANT[case])
    other = model()
    torch.manual_seed(7)
    with torch.no_grad():
        for param in other.parameters():
            param.add_(torch.randn_like(param) / 2)
    subject = deepspeed.init_inference(other, {"dtype": "fp32", "replace_with_kernel_inject": True, **QUANT[case]})
    before = subject.generate(IDS, MASK, max_new_tokens=6)
    subject.load_state_dict(wanted.state_dict())
    found = subject.generate(IDS, MASK, max_new_tokens=6)
    assert torch.equal(found, wanted.generate(IDS, MASK, max_new_tokens=6))
    assert not torch.equal(found, before)


class Conv1D(nn.Module):
    """As Transformers': the weight is (in, out)."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.nf, self.weight = layer.out_features, nn.Parameter(layer.weight.detach().t().contiguous())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def test_a_cast_module_generates_with_its_new_weights() -> None:
    subject = model()
    for block in subject.blocks:
        block.out = Conv1D(block.out)
    made = deepspeed.init_inference(subject, {"dtype": "fp32", "replace_with_kernel_inject": True})
    wanted = made.generate(IDS, MASK, max_new_tokens=6)
    made.double()
    assert torch.equal(made.generate(IDS, MASK, max_new_tokens=6), wanted)
    assert made._fused.steps.cache.keys[0].dtype == torch.float64


def test_without_injection_there_is_no_generate() -> None:
    with pytest.raises(AttributeError, match=r"Model has no generate.. and is no fused decoder.*replace_with_kernel"):
        deepspeed.init_inference(model(), dtype="fp32").generate(IDS)
    subject = engine()
    subject.generate(IDS, max_new_tokens=2)
    subject.destroy()
    assert subject.generate(IDS, max_new_tokens=2).shape == (2, 7)
