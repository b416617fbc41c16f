"""Muon (Jordan et al. 2024): matrices step along their orthogonalized momentum; other parameters use AdamW.

Newton-Schulz iterations replace a momentum matrix by approximately the nearest (semi-)orthogonal one, with matrix
products only.  Matrices of one shape are stacked, so equal layers of a model share one batched product.

`use_muon` decides which parameters are matrices.  The default: two or more dims, except embeddings and output heads
by name, whose rows are independent.  Each parameter group is split when it is added, so that options can be set for
each half; `group["use_muon"]` tells the halves apart.

Muon needs whole matrices.  `place_segments` gives their positions in flat shards; after `place_on_ranks` ranks
exchange matrices that are cut (shards/muon.py).  [Note: the host] the Muon half of a step reads found_inf on the
host; its AdamW half does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from zoptim.backends.signals import Signals, is_skipped
from zoptim.checks import flag, integer, number
from zoptim.optimizers.adam import Adam
from zoptim.optimizers.base import Params
from zoptim.rules.muon import COEFFICIENTS, muon_rule
from zoptim.shards.muon import BUFFER, STACK_NUMEL, MuonShards, Shard, matrix_shape
from zoptim.shards.ranks import Layout, Ranks, own_segments
from zoptim.shards.segments import Segment
from zoptim.states.spec import StateSpec
from zoptim.updates.fallback import count_update, next_step, unscale_gradient, write_back
from zoptim.updates.plan import Batch, Entry, UpdatePath, has_part_counts

__all__ = ["Muon", "is_matrix"]

# Parts of the names of embeddings and output heads: "embed_tokens", GPT-2's "wte" and "wpe", "lm_head".
_EMBEDDING_WORDS = ("embed", "wte", "wpe", "lm_head")


def is_matrix(name: str, param: Tensor) -> bool:
    """Return whether Muon takes a parameter by default: two or more dims, no embedding or output head by name."""
    return param.dim() >= 2 and not any(word in name.lower() for word in _EMBEDDING_WORDS)


class Muon(Adam):
    """Muon (Jordan et al. 2024) for matrices, AdamW for other parameters.

    lr >= 0, for both unless `muon_lr` or `adam_lr` is given; momentum in [0, 1); weight_decay >= 0, decoupled;
    `ns_steps` Newton-Schulz iterations by `ns_method` "standard" or "gram"; `adjust_lr` "original" or
    "match_rms_adamw"; betas and eps of the AdamW half.  `use_muon(name, parameter)` decides; names are "" unless the
    constructor receives named parameters (`model.named_parameters()`).  For `state_dtype` and `split_master` see
    FlatOptimizer; a group's `maximize` applies to both halves, its `fused` and `foreach` to AdamW.

    State of a matrix: `momentum_buffer`, and a `step` if rounding is stochastic; torch.optim.Muon can load it, and
    vice versa.  State of other parameters: Adam's.  Copies and pickles keep the groups, but not `use_muon`, which
    splits new groups, and not the segments.

    Raises ValueError or TypeError naming the argument that is out of range.

    >>> import torch, zoptim
    >>> model = torch.nn.Linear(8, 8)
    >>> optimizer = zoptim.Muon(model.named_parameters(), lr=0.02)
    >>> model(torch.ones(1, 8)).sum().backward()
    >>> optimizer.step()
    >>> sorted(optimizer.state[model.weight]), sorted(optimizer.state[model.bias])
    (['momentum_buffer'], ['exp_avg', 'exp_avg_sq', 'step'])
    """

    elementwise: ClassVar[bool] = False
    _absent_options: ClassVar[Mapping[str, Any]] = {**Adam._absent_options, "use_muon": False}

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        *,
        nesterov: bool = True,
        muon_lr: float | None = None,
        adam_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        ns_steps: int = 5,
        ns_method: str = "standard",
        adjust_lr: str = "original",
        use_muon: Callable[[str, Tensor], bool] = is_matrix,
        state_dtype: torch.dtype | str | None = None,
        split_master: bool = False,
    ) -> None:
        _check_callable(use_muon)
        self._is_matrix = use_muon
        self._rates = {True: muon_lr, False: adam_lr}
        self._muon_options = {
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "ns_method": ns_method,
            "adjust_lr": adjust_lr,
            "use_muon": False,
        }
        self._segments: dict[Tensor, tuple[Segment, ...]] = {}
        self._vectors: dict[Tensor, tuple[Segment, ...]] = {}  # segments in shards of AdamW
        self._shards: MuonShards | None = None
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            decoupled_weight_decay=True,
            state_dtype=state_dtype,
            split_master=split_master,
        )

    def place_segments(self, segments: Mapping[Tensor, Sequence[Segment]]) -> None:
        """Set the positions of whole matrices in flat shards, which are parameters of groups with `use_muon=True`.

        Elements outside of segments are padding and stay unchanged.

        Raises ValueError for segments that overlap, lie outside or have fewer than two dims, and for shards that are
        not parameters of this optimizer.
        """
        Segment.check_whole(segments)
        for shard, parts in segments.items():
            self._position_of(shard)
            Segment.check(parts, shard)
            for part in parts:
                if len(part.shape) < 2:
                    raise ValueError(f"{part} is no matrix; put it into a group with use_muon=False.")
        self._segments, self._vectors = {shard: tuple(parts) for shard, parts in segments.items()}, {}
        self.clear_plans()

    def place_on_ranks(self, segments: Layout, ranks: Ranks) -> None:
        """Set the cuts of tensors over `ranks`, see [Note: cut tensors] in ranks.py; `step` communicates afterwards.

        Shards of groups with `use_muon=False` need it if step counts differ.  Raises ValueError as `place_segments`
        does.
        """
        mine = {s: parts for s, parts in segments.items() if self.param_groups[self._position_of(s)[0]]["use_muon"]}
        self._shards = MuonShards.make(mine, ranks)
        others = {shard: by_rank for shard, by_rank in segments.items() if shard not in mine}
        self._vectors = own_segments(others, ranks)
        self.clear_plans()

    def check_cuts(self) -> None:
        """Raise ValueError if a group of matrices has other parameters.  Callers check before they cut tensors."""
        for index, group in enumerate(self.param_groups):
            for position, param in enumerate(group["params"]) if group["use_muon"] else ():
                if param.dim() < 2 and param.requires_grad:
                    raise ValueError(
                        f"{self._name(index, position)} has shape {tuple(param.shape)}, which is no matrix. Let "
                        "use_muon(name, parameter) return False for it, or put it into a group with use_muon=False."
                    )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; split it by the rule into matrices and others unless it has the key `use_muon`.

        Raises as Adam does.
        """
        for name, value in self._muon_options.items():
            self.defaults.setdefault(name, value)
        if not isinstance(param_group, dict) or "use_muon" in param_group:
            super().add_param_group(param_group)
            return
        given = param_group["params"]
        items = [given] if isinstance(given, Tensor) else list(given)
        pairs = [item if isinstance(item, tuple) else ("", item) for item in items]
        if isinstance(given, set) or not all(isinstance(param, Tensor) for _, param in pairs):
            super().add_param_group(param_group)  # torch raises
            return
        num_groups = len(self.param_groups)
        try:
            for wanted in (True, False):
                self._add_half({**param_group, "params": items}, pairs, wanted)
        except (TypeError, ValueError):
            del self.param_groups[num_groups:]
            raise

    def _add_half(self, param_group: dict[str, Any], pairs: list[tuple[str, Tensor]], wanted: bool) -> None:
        items = zip(param_group["params"], pairs)
        chosen = [item for item, (name, param) in items if bool(self._is_matrix(name, param)) is wanted]
        if chosen:
            rate = {} if (lr := self._rates[wanted]) is None else {"lr": lr}
            super().add_param_group({**rate, **param_group, "params": chosen, "use_muon": wanted})

    def _to_numbers(self, found: dict[str, Any]) -> dict[str, Any]:
        """Decode the state; groups of matrices also get the options of torch.optim.Muon, which may load them."""
        for group in found["param_groups"]:
            if group["use_muon"]:
                group.update(ns_coefficients=COEFFICIENTS, adjust_lr_fn=group["adjust_lr"])
        return super()._to_numbers(found)

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            self._translate_options(group, state.get("defaults", self.__dict__.get("defaults", {})))
        super().__setstate__(state)

    @staticmethod
    def _translate_options(group: dict[str, Any], defaults: Mapping[str, Any]) -> None:
        """Translate options of torch.optim.Muon into ours.  Raises ValueError for other coefficients."""
        given = group.pop("ns_coefficients", COEFFICIENTS)
        if tuple(given) != COEFFICIENTS:
            raise ValueError(
                f"the loaded group has ns_coefficients {given}; zoptim.Muon supports only {COEFFICIENTS}."
            )
        if "adjust_lr_fn" in group:
            adjust_lr = group.pop("adjust_lr_fn") or "original"
            if "use_muon" not in group:  # torch wrote it; its eps is that of the iteration
                ours = {name: defaults[name] for name in ("betas", "eps", "ns_method")}
                group.update(ours, adjust_lr=adjust_lr, use_muon=True, decoupled_weight_decay=True)

    def _set_up(self) -> None:
        super()._set_up()
        unset: dict[str, Any] = {
            "_is_matrix": is_matrix,
            "_rates": {True: None, False: None},
            "_muon_options": {},  # a copy has them in its groups
            "_segments": {},
            "_vectors": {},
            "_shards": None,
        }
        for name, value in unset.items():  # kept when state is loaded; a copy has none
            self.__dict__.setdefault(name, value)

    def _check_options(self, options: Mapping[str, Any]) -> None:
        super()._check_options(options)
        check_muon({**self._muon_options, **options})

    def _state_spec(self, group: Mapping[str, Any]) -> StateSpec:
        return (
            self._make_state_spec(group, (BUFFER,), counts=False) if group["use_muon"] else super()._state_spec(group)
        )

    def _path_of(self, index: int, entry: Entry) -> UpdatePath:
        return UpdatePath.TORCH if self.param_groups[index]["use_muon"] else super()._path_of(index, entry)

    def _rows(self, index: int, entry: Entry) -> Iterator[Entry]:
        if entry.param in self._vectors and has_part_counts(entry.state):
            yield from self._cut(index, entry, self._vectors[entry.param])
        elif entry.param not in self._segments:
            is_cut = self._shards is not None and entry.param in self._shards.matrices
            if not is_cut and self.param_groups[index]["use_muon"] and entry.param.dim() < 2:
                raise ValueError(
                    f"{self._name(index, entry.index)} has shape {tuple(entry.param.shape)}, which is no matrix. Put "
                    "it into a group with use_muon=False; if it is a flat shard, give the positions of its matrices "
                    "with place_segments."
                )
            yield from [entry] if is_cut else super()._rows(index, entry)
        else:
            yield from self._cut(index, entry, self._segments[entry.param], flat=False)

    def _update_all(self, work: Sequence[tuple[Mapping[str, Any], Batch]], signals: Signals) -> None:
        if self._shards is None:
            super()._update_all(work, signals)
            return
        cut: dict[Tensor, Shard] = {}
        others = []
        for group, batch in work:
            shards = [entry for entry in batch.entries if entry.param in self._shards.matrices]
            cut.update({entry.param: Shard(entry, group, self._state_spec(group)) for entry in shards})
            if shards:  # of a group of matrices, whose batches have no job
                batch = attrs.evolve(batch, entries=[entry for entry in batch.entries if entry.param not in cut])
            if batch.entries:
                others.append((group, batch))
        super()._update_all(others, signals)
        if not is_skipped(signals):
            self._shards.update(cut, signals)
            count_update([shard.entry for shard in cut.values()])

    def _update(self, group: Mapping[str, Any], batch: Batch, signals: Signals) -> None:
        if not group["use_muon"]:
            super()._update(group, batch, signals)
        elif not is_skipped(signals):
            for shape, entries in _stacks(batch.entries):
                self._update_stack(group, shape, entries, signals)
            count_update(batch.entries)

    def _update_stack(
        self, group: Mapping[str, Any], shape: tuple[int, int], entries: list[Entry], signals: Signals
    ) -> None:
        """Update matrices of one shape, stacked."""
        spec = self._state_spec(group)

        def stack(tensors: Iterable[Tensor]) -> Tensor:
            return torch.stack([tensor.reshape(shape) for tensor in tensors])

        weight = stack(spec.read_weight(entry.param, entry.state) for entry in entries)
        grad = stack(unscale_gradient(entry, weight.dtype, signals) for entry in entries)
        options = {name: group[name] for name in ("momentum", "weight_decay", "nesterov", "maximize")}
        options |= {name: group[name] for name in ("ns_steps", "ns_method", "adjust_lr")}
        buffer = stack(spec.read(entry.state, BUFFER) for entry in entries)
        new, buffer = muon_rule(weight, grad, buffer, lr=float(group["lr"]), **options)
        for entry, weight, moment in zip(entries, new, buffer):
            moments = {BUFFER: moment.view(entry.param.shape)}
            write_back(spec, entry, weight.view(entry.param.shape), moments, next_step(entry))


def _check_callable(use_muon: object) -> None:
    if not callable(use_muon):
        raise TypeError(f"use_muon is {use_muon!r}; it must be a function (name, parameter) -> bool.")


def _stacks(entries: Sequence[Entry]) -> Iterator[tuple[tuple[int, int], list[Entry]]]:
    """Group entries by matrix shape, in stacks of bounded size: an update needs several copies of its stack."""
    alike: dict[tuple[int, int], list[Entry]] = {}
    for entry in entries:
        alike.setdefault(matrix_shape(entry.param.shape), []).append(entry)
    for shape, members in alike.items():
        most = max(1, STACK_NUMEL // max(1, shape[0] * shape[1]))
        for start in range(0, len(members), most):
            yield shape, members[start : start + most]


def check_muon(options: Mapping[str, Any]) -> None:
    """Check the options that Muon has beside Adam's (one merged parameter group)."""
    number("momentum", options["momentum"], 0, 1)
    integer("ns_steps", options["ns_steps"], 1)
    for name in ("nesterov", "use_muon"):
        flag(name, options[name])
    for name, allowed in (("ns_method", ("standard", "gram")), ("adjust_lr", ("original", "match_rms_adamw"))):
        if options[name] not in allowed:
            raise ValueError(f"{name} is {options[name]!r}; it must be one of {', '.join(map(repr, allowed))}.")
