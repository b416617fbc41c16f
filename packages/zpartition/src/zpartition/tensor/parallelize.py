"""`parallelize`: from a model and a plan to a model of which each rank has a part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

import zcomm
from zpartition.admission import refuse_hollow, refuse_owned
from zpartition.cells import Cell
from zpartition.deferred import noting, share_random_numbers, tapes_of, wire_device
from zpartition.hidden import show
from zpartition.tensor import regions
from zpartition.tensor.draws import agree_on_random_numbers
from zpartition.tensor.entrance import Entrance
from zpartition.tensor.heads import localize
from zpartition.tensor.layers import Place
from zpartition.tensor.placing import Cut, kind_of
from zpartition.tensor.plan import TensorPlan, resolve
from zpartition.tensor.styles import Column, Gather, Row, Scatter, Summed, Vocabulary
from zpartition.tensor.vocabulary import embedding_in_parts
from zpartition.whole import part_of

__all__ = ["parallelize", "part_of", "split"]


def parallelize(model: nn.Module, plan: TensorPlan, group: ProcessGroup | None = None) -> list[Cut]:
    """Split `model` over the ranks of `group` as `plan` says, in place; what was done to each module.

    Every rank of the group calls it with a whole model; rank 0's weights count.  Afterwards ranks that are given the
    same inputs compute the same outputs together, forward and backward; parameters keep their names and identities,
    and `zpartition.shard` and its checkpoints know where each lies in the whole.  Gradients that were there are gone.
    Every rank goes on with rank 0's random numbers: dropout of whole activations is the same on all ranks, and
    between column and row layers each rank draws its own (draws.py).  A model that was built inside `Init` is split
    before it has values, which `shard` makes.

    Raises:
        ValueError: the plan does not fit the model (see `resolve`), before anything is sent or changed; or the model
            is partitioned, split or being built.
    """
    show(model.parameters())
    for name, param in model.named_parameters():
        refuse_owned(name, param)
        refuse_hollow(name, param)
    cell = Cell.of(group)
    cuts = resolve(plan, model, cell.size, cell.rank)
    _agree(model, group)
    for tape in tapes_of(model):
        share_random_numbers(tape, group)
    agree_on_random_numbers(cell, _device(model, group))
    with noting(model):
        split(model, cuts, Entrance(cell, plan.sequence_dim))
    return cuts


def split(model: nn.Module, cuts: Sequence[Cut], entrance: Entrance) -> None:
    """Make `cuts` true, without a message; `entrance` leads to the ranks with the other parts."""
    modules = dict(model.named_modules())
    done: set[int] = set()
    for cut in cuts:
        _take_parts(modules[cut.module], cut, done)
        _become(modules[cut.module], cut, entrance)
    _localize(modules, cuts)
    homes = _homes(cuts) if entrance.sequence_dim < 0 else [""]
    for name in homes if entrance.cell.size > 1 else ():
        entrance.draws.close_with(modules[name])


def _homes(cuts: Sequence[Cut]) -> list[str]:
    """Modules in which activations come apart and together: the nearest around each column layer with a row layer.

    The model itself is one, for columns that no row layer follows and tokens that nobody joins.
    """
    rows = [cut.module for cut in cuts if isinstance(cut.style, Row)]
    found = {""}
    for cut in cuts:
        home = cut.module
        while home and isinstance(cut.style, Column) and not any(row.startswith(f"{home}.") for row in rows):
            home = home.rpartition(".")[0]
        found.add(home if isinstance(cut.style, Column) else "")
    return sorted(found)


def _device(model: nn.Module, group: ProcessGroup | None) -> torch.device:
    return next((param.device for param in model.parameters() if not param.is_meta), wire_device(group))


def _agree(model: nn.Module, group: ProcessGroup | None) -> None:
    """All ranks start from the weights and buffers of rank 0."""
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if not tensor.is_meta:
                tensor.data = tensor.data.contiguous()
                zcomm.broadcast(tensor.data, group, source=0, label=name)


def _take_parts(module: nn.Module, cut: Cut, done: set[int]) -> None:
    for key, address in cut.addresses.items():
        param = getattr(module, key)
        if id(param) not in done:  # tied weights come by twice
            done.add(id(param))
            param.grad = None
            param.data = part_of(param.data, address)


def _become(module: nn.Module, cut: Cut, entrance: Entrance) -> None:
    """The module's new class, and the numbers that it keeps."""
    style, layer = cut.style, _numbers(module)
    if isinstance(style, Summed):
        regions.sum_gradients(module, entrance, style.gathers)
    elif isinstance(style, Scatter):
        regions.scatter_behind(module, entrance)
    elif isinstance(style, Gather):
        regions.gather_behind(module, entrance)
    elif isinstance(style, Vocabulary):
        kind_in_parts = embedding_in_parts(module)
        assert kind_in_parts is not None
        _place(module, kind_in_parts, Place(entrance, cut.addresses, cut.sizes, style.scatters))
        layer.num_embeddings = layer.weight.shape[0]
    elif isinstance(style, Column | Row):
        kind = kind_of(module)
        assert kind is not None
        is_column = isinstance(style, Column)
        is_joined = style.gathers if isinstance(style, Column) else style.takes_part
        place = Place(entrance, cut.addresses, cut.sizes, is_joined)
        _place(module, kind.column if is_column else kind.row, place)
        setattr(layer, kind.names[0 if is_column else 1], kind.shape(module)[0 if is_column else 1])


def _place(module: nn.Module, kind: type[nn.Module], place: Place) -> None:
    module.__class__ = kind
    _numbers(module).place = place


def _numbers(module: nn.Module) -> Any:
    """The module, whose plain attributes are set."""
    return module


def _localize(modules: dict[str, nn.Module], cuts: Sequence[Cut]) -> None:
    """Numbers of heads are this rank's in modules that hold columns whose outputs stay apart."""
    split: dict[str, list[Cut]] = {}
    for cut in cuts:
        if isinstance(cut.style, Column) and not cut.style.gathers:
            split.setdefault(cut.module.rpartition(".")[0], []).append(cut)
    for parent, columns in split.items():
        widths = [size for cut in columns for size in (sum(cut.sizes), *getattr(cut.style, "blocks", ()))]
        localize(modules[parent], columns[0].num_units, columns[0].own_units, widths)
