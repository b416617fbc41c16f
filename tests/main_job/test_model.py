"""The model: causality, initialization, seeds, experts."""

from __future__ import annotations

import math

import attrs
import pytest
import torch

from train.model import GPT, Shape, apply_rotary, generate, parameter_groups, rotary_tables

SMALL = Shape(depth=2, width=32, heads=2, context=16)


def some_windows(count: int = 64, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, SMALL.context + 1), dtype=torch.uint8, generator=generator)


@torch.no_grad()
@pytest.mark.parametrize("changed", [1, 7, 15])
def test_a_future_byte_changes_no_past_score(changed):
    model = GPT(SMALL)
    tokens = some_windows(2)[:, :-1].long()
    other = tokens.clone()
    other[:, changed] = (other[:, changed] + 1) % 256
    before, after = model.logits(tokens), model.logits(other)
    assert torch.equal(before[:, :changed], after[:, :changed])
    assert not torch.equal(before[:, changed], after[:, changed])


def test_attention_scores_depend_on_the_distance_only():
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 8, dtype=torch.float64, generator=generator).expand(2, 12, 8)
    cos, sin = rotary_tables(12, 8, like=query)
    scores = apply_rotary(query, cos, sin) @ apply_rotary(key, cos, sin).T
    for distance in range(12):
        same = scores.diagonal(-distance)
        torch.testing.assert_close(same, same[:1].expand_as(same), rtol=0, atol=1e-5)
    assert not torch.isclose(scores[5, 4], scores[5, 3])


def test_an_untrained_model_predicts_evenly():
    loss = GPT(SMALL)(some_windows())
    assert loss.shape == ()
    assert loss.item() == pytest.approx(math.log(256), rel=0.02)


def test_the_loss_is_the_mean_over_all_targets():
    model, windows = GPT(SMALL), some_windows(3)
    scores = model.logits(windows[:, :-1].long()).log_softmax(-1)
    by_hand = [-scores[i, t, windows[i, t + 1].long()].item() for i in range(3) for t in range(SMALL.context)]
    assert model(windows).item() == pytest.approx(sum(by_hand) / len(by_hand), rel=1e-5)


def test_weights_depend_on_the_seed_and_not_on_the_global_random_state():
    torch.manual_seed(1)
    first = GPT(SMALL, seed=3).state_dict()
    torch.manual_seed(2)
    second, other = GPT(SMALL, seed=3).state_dict(), GPT(SMALL, seed=4).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["token_embedding.weight"], other["token_embedding.weight"])


def test_residual_outputs_start_smaller():
    model = GPT(Shape(depth=8, width=64, heads=2, context=16))
    block = model.blocks[0]
    assert block.mlp_in.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert block.mlp_out.weight.std().item() == pytest.approx(0.02 / 4, rel=0.1)


def test_every_parameter_is_in_one_group_and_vectors_do_not_decay():
    model = GPT(SMALL)
    matrices, vectors = parameter_groups(model, 0.1)
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert all(p.dim() == 1 for p in vectors["params"])
    assert all(p.dim() == 2 for p in matrices["params"])
    grouped = [id(p) for group in (matrices, vectors) for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())


def test_the_model_can_learn():
    model = GPT(SMALL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    windows = some_windows(4)
    for _ in range(60):
        optimizer.zero_grad()
        model(windows).backward()
        optimizer.step()
    assert model(windows).item() < 0.5


def test_generating_repeats_for_a_seed_and_leaves_the_global_random_state_alone():
    model, state = GPT(SMALL), torch.random.get_rng_state()
    first = generate(model, b"def ", num_bytes=40, seed=1)
    assert first.startswith(b"def ")
    assert len(first) == 44
    assert first == generate(model, b"def ", num_bytes=40, seed=1) != generate(model, b"def ", num_bytes=40, seed=2)
    assert torch.equal(state, torch.random.get_rng_state())


def test_the_likeliest_byte_is_taken_at_temperature_zero():
    model = GPT(SMALL)
    text = generate(model, b"def ", num_bytes=1, temperature=0)
    scores = model.logits(torch.tensor([list(b"def ")]))[0, -1]
    assert text[-1] == scores.argmax().item()


def test_experts_cost_as_much_as_one_mlp_and_are_balanced_in_training_only():
    shape = attrs.evolve(SMALL, experts=4)
    model, plain = GPT(shape, seed=3), GPT(SMALL, seed=3)
    torch.manual_seed(9)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), GPT(shape, seed=3).parameters()))
    sizes = {name: parameter.shape for name, parameter in model.named_parameters() if "stacked" in name}
    assert set(sizes.values()) == {(4, 64, 32), (4, 32, 64)}
    dense = plain.blocks[0].mlp_in.weight.numel()
    assert 2 * sizes["blocks.0.moe.experts.stacked.up.weight"][1:].numel() == dense  # two experts a byte
    windows = some_windows(4)
    added = model(windows).item() - model.eval()(windows).item()
    assert added > 0.005  # 0.01 x the load-balancing loss, at least 1; capacity differs in evaluation


@pytest.mark.parametrize(
    ("sizes", "message"),
    [({"width": 30, "heads": 4}, "width 30 is not an even multiple of heads 4"), ({"depth": 0}, "depth is 0")],
)
def test_impossible_shapes_are_rejected(sizes, message):
    with pytest.raises(ValueError, match=message):
        Shape(**sizes)


def test_a_window_longer_than_the_context_is_rejected():
    with pytest.raises(ValueError, match="17 bytes is longer than the model's context of 16"):
        GPT(SMALL).logits(torch.zeros(1, 17, dtype=torch.long))
