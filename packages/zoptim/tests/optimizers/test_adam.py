"""Adam and AdamW beyond the contract table in conftest.py."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

import zoptim

PAIRS = [(zoptim.Adam, torch.optim.Adam), (zoptim.AdamW, torch.optim.AdamW)]


def make_param(numel: int = 8) -> Tensor:
    return torch.linspace(-1, 1, numel).requires_grad_()


def step_once(optimizer: Any, param: Tensor) -> Tensor:
    param.grad = torch.cos(param.detach() * 7)
    optimizer.step()
    return param.detach()


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_arguments_have_the_names_order_and_defaults_of_torch(ours: Any, theirs: Any) -> None:
    mine, torchs = (inspect.signature(cls).parameters for cls in (ours, theirs))
    for name in set(mine) & set(torchs):
        assert (mine[name].default, mine[name].kind) == (torchs[name].default, torchs[name].kind), name
    assert set(mine) - set(torchs) == {"bias_correction", "state_dtype", "split_master"}
    assert set(torchs) - set(mine) == {"capturable", "differentiable"}


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_defaults_train_as_torchs_do(ours: Any, theirs: Any) -> None:
    a, b = make_param(), make_param()
    assert torch.equal(step_once(ours([a]), a), step_once(theirs([b], fused=True), b))


def test_the_state_has_torchs_keys_dtypes_and_shapes() -> None:
    param = make_param()
    optimizer = zoptim.AdamW([param], amsgrad=True)
    step_once(optimizer, param)
    state = optimizer.state[param]
    assert list(state) == ["step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
    assert (state["step"].shape, state["step"].dtype, state["step"].item()) == ((), torch.float32, 1.0)
    assert all(state[key].shape == param.shape and not state[key].requires_grad for key in list(state)[1:])


def test_a_group_has_what_torch_reads_in_it() -> None:
    (group,) = zoptim.AdamW([make_param()]).param_groups
    (torchs,) = torch.optim.AdamW([make_param()]).param_groups
    assert set(torchs) - set(group) == {"capturable", "differentiable"}
    assert {key: torchs[key] for key in torchs if key in group and key != "params"} == {
        key: group[key] for key in torchs if key in group and key != "params"
    }


def test_betas_may_be_a_list() -> None:
    optimizer = zoptim.AdamW([make_param()], betas=[0.5, 0.6])  # type: ignore[arg-type]
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.6)


def test_without_bias_correction_the_step_count_still_counts() -> None:
    for foreach in (None, True):
        param = make_param()
        optimizer = zoptim.AdamW([param], bias_correction=False, foreach=foreach)
        for _ in range(3):
            step_once(optimizer, param)
        assert optimizer.state[param]["step"].item() == 3.0


def test_an_old_state_with_a_number_for_a_step_loads() -> None:
    param, other = make_param(), make_param()
    optimizer = zoptim.AdamW([param])
    step_once(optimizer, param)
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["step"] = 1
    restored = zoptim.AdamW([other])
    restored.load_state_dict(state)
    assert restored.state[other]["step"].dtype is torch.float32
    with torch.no_grad():
        other.copy_(param)
    assert torch.equal(step_once(restored, other), step_once(optimizer, param))


def test_state_without_a_moment_raises_with_its_name() -> None:
    param = make_param()
    optimizer = zoptim.AdamW([param])
    step_once(optimizer, param)
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["amsgrad"] = True
    with pytest.raises(ValueError, match="parameter 0 of group 0 lacks max_exp_avg_sq; it has step, exp_avg"):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["amsgrad"] is False


def test_state_in_another_layout_is_converted_to_the_parameters() -> None:
    param = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last).requires_grad_()
    optimizer = zoptim.AdamW([param])
    step_once(optimizer, param)
    state = copy.deepcopy(optimizer.state_dict())
    for key in ("exp_avg", "exp_avg_sq"):
        state["state"][0][key] = state["state"][0][key].contiguous()
    expected = optimizer.state[param]["exp_avg"].clone()
    optimizer.load_state_dict(state)
    loaded = optimizer.state[param]["exp_avg"]
    assert loaded.stride() == param.stride()
    assert torch.equal(loaded, expected)


def test_adamw_stays_decoupled_when_it_loads_the_state_of_adam() -> None:
    adam, adamw = torch.optim.Adam([make_param()]), zoptim.AdamW([make_param()])
    adamw.load_state_dict(adam.state_dict())
    assert adamw.param_groups[0]["decoupled_weight_decay"] is True


def test_threads_do_not_change_a_bit_of_a_large_tensor_or_of_its_shards() -> None:
    results = []
    for threads, num_shards in ((1, 1), (2, 1), (2, 4)):
        torch.set_num_threads(threads)
        shards = [s.clone().requires_grad_() for s in torch.linspace(-1, 1, 64 * 1024).chunk(num_shards)]
        optimizers = [zoptim.AdamW([shard]) for shard in shards]
        results.append(torch.cat([step_once(o, s) for o, s in zip(optimizers, shards)]))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_torchs_fused_path_misreads_other_layouts_and_ours_does_not() -> None:
    """The gradient of a transposed weight may have other strides."""
    param = torch.zeros(3, 2).t().requires_grad_()
    param.grad = torch.tensor([[1.0, -1.0, 1.0], [-1.0, 1.0, 1.0]])
    zoptim.AdamW([param], lr=0.1).step()
    assert torch.equal(param.detach().sign(), -param.grad.sign())
