import collections

import numpy as np
import pytest
import torch
from torch import Tensor

from zengine.inference.sampling import Sampling, choose, uniform

LOGITS = torch.tensor([2.0, -1.0, 0.5, 3.0, 0.0, 2.5])


def frequencies(rule: Sampling, seen: tuple[int, ...] = (), count: int = 4000) -> Tensor:
    """Frequencies of the tokens for `count` evenly spaced numbers."""
    drawn = collections.Counter(choose(LOGITS, rule, seen, (i + 0.5) / count)[0] for i in range(count))
    return torch.tensor([drawn[token] / count for token in range(len(LOGITS))])


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_tokens_have_the_probabilities_of_the_softmax(temperature: float) -> None:
    wanted = torch.softmax(LOGITS / temperature, 0)
    assert torch.allclose(frequencies(Sampling(temperature=temperature)), wanted, atol=1e-3)


def test_top_k_and_top_p_leave_out_the_unlikely() -> None:
    kept = torch.tensor([0, 3, 5])
    wanted = torch.zeros(6).index_copy(0, kept, torch.softmax(LOGITS[kept], 0))
    assert torch.allclose(frequencies(Sampling(top_k=3)), wanted, atol=1e-3)
    share = torch.softmax(LOGITS, 0).sort(descending=True).values.cumsum(0)
    for top_p in (share[2].item() - 1e-3, share[1].item() + 1e-3):  # just within the third
        assert torch.allclose(frequencies(Sampling(top_p=top_p)), wanted, atol=1e-3)
    assert frequencies(Sampling(top_p=1e-9)).argmax() == 3
    assert frequencies(Sampling(top_p=1e-9)).max() == 1


def test_greedy_takes_the_likeliest_and_ignores_the_number() -> None:
    for rule in (Sampling(temperature=0), Sampling(top_k=1)):
        assert rule.is_greedy
        assert {choose(LOGITS, rule, (), number)[0] for number in (0.0, 0.3, 0.999)} == {3}


def test_the_penalty_makes_seen_tokens_less_likely() -> None:
    changed = LOGITS.clone()
    changed[3], changed[1] = 3.0 / 2, -1.0 * 2
    wanted = torch.softmax(changed, 0)
    assert torch.allclose(frequencies(Sampling(repetition_penalty=2.0), seen=(3, 1, 3)), wanted, atol=1e-3)


def test_the_log_probability_is_that_of_the_model() -> None:
    rule = Sampling(temperature=0.1, top_k=2, repetition_penalty=3.0)
    token, log_prob = choose(LOGITS, rule, (3,), 0.5)
    assert log_prob == torch.log_softmax(LOGITS, -1)[token].item(), "bit for bit"
    assert choose(LOGITS.double(), rule, (3,), 0.5)[1] == torch.log_softmax(LOGITS.double(), -1)[token].item()


def test_numbers_depend_on_seed_and_index_only() -> None:
    first = [[uniform(seed, index) for index in range(200)] for seed in (0, 1, -1, 1 << 70)]
    assert first == [[uniform(seed, index) for index in range(200)] for seed in (0, 1, -1, 1 << 70)]
    assert len(set(np.ravel(first))) == 800
    assert 0.45 < np.mean(first) < 0.55
    assert 0 <= np.min(first) <= np.max(first) < 1


def test_an_extreme_number_still_gives_a_token() -> None:
    assert choose(LOGITS, Sampling(), (), np.nextafter(1.0, 0.0))[0] == 1
    assert choose(LOGITS, Sampling(), (), 0.0)[0] == 3
    assert choose(torch.tensor([0.0, -torch.inf]), Sampling(), (), np.nextafter(1.0, 0.0))[0] == 0


def test_logits_that_are_not_numbers_raise() -> None:
    for bad in ([0.0, torch.nan, 1.0], [0.0, torch.inf], [-torch.inf] * 3):
        with pytest.raises(ValueError, match="contain NaN or infinity"):
            choose(torch.tensor(bad), Sampling(), (), 0.5)


def test_a_tiny_temperature_takes_the_likeliest() -> None:
    assert choose(LOGITS, Sampling(temperature=1e-310), (), 0.9)[0] == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": -1.0}, r"temperature is -1.0; it must be 0 \(greedy\) or more"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0; it must be above 0, at most 1"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"stop_strings": ("a", "")}, "stop_strings"),
    ],
)
def test_rules_that_cannot_be_are_rejected(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**given)  # type: ignore[arg-type]
