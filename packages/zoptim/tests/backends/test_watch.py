"""Watching tensors: every way to replace or move one is noticed, by the extension and by Python alike."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

import zoptim
from zoptim.backends import native
from zoptim.backends.native import Reader
from zoptim.backends.probe import find_places
from zoptim.backends.watch import Grads, GradTrace, Trace


@pytest.fixture(params=["words", "words without versions", "objects", "python"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The readers of tensor objects."""
    found = native.library()
    assert found is not None
    assert found.reader is Reader.WORDS
    if request.param == "objects":
        slower = attrs.evolve(found, reader=Reader.OBJECTS)
        monkeypatch.setattr(native, "library", lambda: slower)
    places = find_places()
    assert places is not None
    try:
        if request.param == "words without versions":  # as dicts of Python 3.13
            found.lib.zk_use_places(found.ffi.new("zk_places *", {**places, "version": 0}))
        with native.use_level("none" if request.param == "python" else found.level()):
            yield request.param
    finally:
        found.lib.zk_use_places(found.ffi.new("zk_places *", places))


def make_root() -> list[Any]:
    """Parameters of two groups, with state and the mirror of one."""
    params = [torch.ones(3, 4, requires_grad=True), torch.ones(5), torch.nn.Parameter(torch.ones(()))]
    state = {p: {"step": torch.zeros(()), "m": torch.zeros_like(p), "note": "not a tensor"} for p in params}
    return [[params[:2], params[2:]], state, {params[0]: torch.ones(3, 4, dtype=torch.bfloat16)}]


def state_of(root: list[Any]) -> dict[str, Any]:
    found: dict[str, Any] = root[1][root[0][0][0]]
    return found


def set_data(root: list[Any]) -> None:
    root[0][0][0].data = root[0][0][0].data.clone()


def set_storage(root: list[Any]) -> None:
    with torch.no_grad():
        root[0][0][1].set_(torch.ones(5))


def shift_in_the_storage(root: list[Any]) -> None:
    base = torch.ones(9)
    root[0][0][1].data = base[1:6]
    root[0][0][1].data = base[2:7]


def swap_two_tensors(root: list[Any]) -> None:
    torch.utils.swap_tensors(root[0][0][1], torch.ones(5))


def replace_a_parameter(root: list[Any]) -> None:
    root[0][1][0] = root[0][1][0].detach()


def drop_a_parameter(root: list[Any]) -> None:
    root[0][0].pop()


def move_a_parameter_to_another_group(root: list[Any]) -> None:
    root[0][1].append(root[0][0].pop())


def move_state(root: list[Any]) -> None:
    state_of(root)["m"].data = torch.zeros(3, 4)


def replace_state(root: list[Any]) -> None:
    state_of(root)["m"] = torch.zeros(3, 4)


def add_state(root: list[Any]) -> None:
    state_of(root)["v"] = torch.zeros(3, 4)


def drop_state(root: list[Any]) -> None:
    del root[1][root[0][0][0]]


def copy_a_state_dict(root: list[Any]) -> None:
    root[1][root[0][0][0]] = dict(state_of(root))


def move_a_mirror(root: list[Any]) -> None:
    root[2][root[0][0][0]].data = torch.ones(3, 4, dtype=torch.bfloat16)


def transpose_a_parameter(root: list[Any]) -> None:
    """Nothing but its shape and strides changes."""
    root[0][0][0].data = root[0][0][0].data.t()


def reshape_a_parameter(root: list[Any]) -> None:
    root[0][0][0].data = root[0][0][0].data.view(4, 3)


def shorten_a_parameter(root: list[Any]) -> None:
    root[0][0][1].data = root[0][0][1].data[:4]


def stretch_a_parameter(root: list[Any]) -> None:
    root[0][0][1].data = root[0][0][1].data[::2]


def read_a_parameter_as_another_dtype(root: list[Any]) -> None:
    root[0][0][1].data = root[0][0][1].data.view(torch.int32)


def transpose_state(root: list[Any]) -> None:
    state_of(root)["m"].data = state_of(root)["m"].data.t()


def transpose_a_tensor_of_many_dims(root: list[Any]) -> None:
    root[0][1][1].data = root[0][1][1].data.transpose(4, 5)


CHANGES = [
    set_data, set_storage, shift_in_the_storage, swap_two_tensors, replace_a_parameter, drop_a_parameter,
    move_a_parameter_to_another_group, move_state, replace_state, add_state, drop_state, copy_a_state_dict,
    move_a_mirror, transpose_a_parameter, reshape_a_parameter, shorten_a_parameter, stretch_a_parameter,
    read_a_parameter_as_another_dtype, transpose_state, transpose_a_tensor_of_many_dims,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_every_change_is_noticed(change: Callable[[list[Any]], None], reader: str) -> None:
    root = make_root()
    if change is transpose_a_tensor_of_many_dims:  # which no words can show
        root[0][1].append(torch.ones(1, 2, 1, 2, 2, 3))
    kept = [tensor.data for params in root[0] for tensor in params]  # new memory lies elsewhere
    trace = Trace.of(root)
    assert trace.fits(root)
    assert trace.fits(root)
    change(root)
    assert not trace.fits(root)
    assert Trace.of(root).fits(root)
    assert kept


def test_values_and_what_is_no_tensor_may_change(reader: str) -> None:
    root = make_root()
    trace = Trace.of(root)
    with torch.no_grad():
        root[0][0][0].mul_(2)
        state_of(root)["m"].add_(1)
    state_of(root)["note"] = "another"
    root[0] = [[*params] for params in root[0]]
    assert trace.fits(root)


def test_what_one_reader_has_recorded_is_no_record_for_another() -> None:
    root = make_root()
    trace = Trace.of(root)
    with native.use_level("none"):
        assert not trace.fits(root)
        assert Trace.of(root).fits(root)
    assert trace.fits(root)


def make_grads() -> tuple[list[Tensor], list[Tensor]]:
    """Parameters with gradients, without one, and with that of a mirror."""
    params = [torch.ones(3, 4, requires_grad=True), torch.ones(5, requires_grad=True), torch.ones(2), torch.ones(())]
    weights = [*params[:2], torch.ones(2, dtype=torch.bfloat16), params[3]]
    params[0].grad = torch.ones(3, 4)
    weights[2].grad = torch.ones(2, dtype=torch.bfloat16)
    params[3].grad = torch.ones(())
    return params, weights


def test_addresses_are_those_of_the_gradients_and_of_mirrors(reader: str) -> None:
    params, weights = make_grads()
    trace = GradTrace.of(params, weights)
    expected = [params[0].grad, None, weights[2].grad, params[3].grad]
    assert trace.addresses.tolist() == [0 if grad is None else grad.data_ptr() for grad in expected]
    assert trace.read(params, weights) is Grads.SAME


@pytest.mark.parametrize(
    ("grad", "found"),
    [
        (torch.ones(3, 4), Grads.MOVED),
        (torch.ones(6, 4)[3:], Grads.MOVED),
        (None, Grads.OTHER),
        (torch.ones(4, 3).t(), Grads.OTHER),
        (torch.ones(3, 8)[:, ::2], Grads.OTHER),
        (torch.ones(1, 4).expand(3, 4), Grads.OTHER),
        (torch.ones(3, 4).to_sparse(), Grads.OTHER),
    ],
    ids=["new", "view", "none", "transposed", "strided", "expanded", "sparse"],
)
def test_a_gradient_of_another_kind_is_told_from_one_that_moved(
    grad: Tensor | None, found: Grads, reader: str
) -> None:
    params, weights = make_grads()
    kept = params[0].grad
    trace = GradTrace.of(params, weights)
    assert [trace.read(params, weights) for _ in range(2)] == [Grads.SAME, Grads.SAME]
    params[0].grad = grad
    assert trace.read(params, weights) is found
    if found is Grads.MOVED:
        assert grad is not None
        assert trace.addresses[0] == grad.data_ptr()
        assert trace.read(params, weights) is Grads.SAME
        params[0].grad = kept
        assert trace.read(params, weights) is Grads.MOVED


def test_a_gradient_that_appears_moves_or_changes_its_dtype_is_noticed(reader: str) -> None:
    params, weights = make_grads()
    trace = GradTrace.of(params, weights)
    assert trace.read(params, weights) is Grads.SAME
    kept = params[0].grad
    assert kept is not None
    kept.data = kept.data.clone()
    assert trace.read(params, weights) is Grads.MOVED
    params[1].grad = torch.ones(5)
    assert trace.read(params, weights) is Grads.OTHER
    params[1].grad = None
    trace = GradTrace.of(params, weights)
    weights[2].data = torch.ones(2)
    weights[2].grad = torch.ones(2)
    assert trace.read(params, weights) is Grads.OTHER


def test_a_gradient_of_another_layout_in_the_memory_of_the_last_one_is_another(reader: str) -> None:
    """Its object may lie where the last one was, too."""
    param, memory = torch.ones(4, 6, requires_grad=True), torch.ones(24)
    for _ in range(20):
        param.grad = memory.view(4, 6)
        trace = GradTrace.of([param], [param])
        assert trace.read([param], [param]) is Grads.SAME
        param.grad = None
        param.grad = memory.view(6, 4).t()
        assert trace.read([param], [param]) is Grads.OTHER


def test_what_is_watched_stays_equal_while_values_change() -> None:
    """So that a step over the same gradients does not ask every tensor."""
    found = native.library()
    assert found is not None
    root = make_root()
    params, weights = make_grads()
    trace, grads = Trace.of(root), GradTrace.of(params, weights)
    assert (trace.fits(root), grads.read(params, weights)) == (True, Grads.SAME)
    with torch.no_grad():
        state_of(root)["m"].add_(1)
        root[0][0][0].mul_(2)
        params[0].grad.add_(1)  # type: ignore[union-attr]
    is_watched = found.reader is Reader.WORDS
    assert (trace.watch is not None and bool(trace.watch.holds()), grads.rows is not None) == (is_watched, is_watched)
    params[0].grad = torch.ones(3, 4)
    rows = grads.rows
    assert grads.read(params, weights) is Grads.MOVED
    assert grads.rows is rows


def test_a_step_keeps_no_gradient_alive() -> None:
    params = [torch.ones(4, 4, requires_grad=True), torch.ones(3, requires_grad=True)]
    optimizer = zoptim.AdamW(params)
    for _ in range(3):
        grads = []
        for param in params:
            param.grad = torch.ones_like(param)
            grads.append(weakref.ref(param.grad))
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        assert [grad() for grad in grads] == [None, None]


def test_a_low_precision_weight_that_moves_is_written_where_it_is() -> None:
    master, weight = torch.ones(4, requires_grad=True), torch.ones(4, dtype=torch.bfloat16)
    optimizer = zoptim.AdamW([master], lr=0.5)
    optimizer.mirror(master, weight)
    for _ in range(2):
        before, kept = weight.data, weight.data.clone()
        weight.data = weight.data.clone()
        weight.grad = torch.ones(4, dtype=torch.bfloat16)
        optimizer.step()
        assert torch.equal(before, kept)
        assert torch.equal(weight.data, master.detach().bfloat16())


def replace_data(tensor: Tensor) -> None:
    tensor.data = tensor.data.clone()


def transpose_data(tensor: Tensor) -> None:
    tensor.data = tensor.data.t()


def use_other_memory(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.set_(torch.full((3, 4), 3.0))


def grow_storage(tensor: Tensor) -> None:
    tensor.untyped_storage().resize_(2**20)


@pytest.mark.parametrize("move", [replace_data, transpose_data, use_other_memory, grow_storage])
def test_a_watched_tensor_that_moves_or_is_transposed_is_noticed(reader: str, move: Callable[[Tensor], None]) -> None:
    tensors: list[Tensor] = [torch.nn.Parameter(torch.ones(3, 4)), torch.ones(5), torch.ones(0)]
    are_in_place = zoptim.watch_tensors(tensors)
    with torch.no_grad():
        tensors[0].mul_(2)
    tensors[0].grad = torch.ones(3, 4)
    assert are_in_place() == reader.startswith("words")  # the others cannot tell
    move(tensors[0])
    assert not are_in_place()


def test_what_is_watched_stays_alive() -> None:
    tensors = [torch.ones(3), torch.ones(4)]
    ref = weakref.ref(tensors[1])
    are_in_place = zoptim.watch_tensors(tensors)
    del tensors
    gc.collect()
    assert ref() is not None
    assert are_in_place()


@pytest.mark.parametrize("change", ["add", "replace", "remove", "move"])
def test_watched_dicts_notice_other_values(reader: str, change: str) -> None:
    module = torch.nn.Linear(2, 3)
    tables = [module._parameters, module._modules]
    are_in_place = zoptim.watch_tensors(tables)
    module.weight.grad = torch.ones(3, 2)
    assert are_in_place() == reader.startswith("words")
    if change == "add":
        module.added = torch.nn.Linear(1, 1)
    elif change == "replace":
        module.bias = torch.nn.Parameter(torch.ones(3))
    elif change == "remove":
        del module.bias
        gc.collect()
    else:
        module.weight.data = module.weight.data.clone()
    assert not are_in_place()
