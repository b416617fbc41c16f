"""The base class of optimizers with kernels: torch's contract, plus `grad_scale` and `found_inf`.

A training step unscales gradients, clips them and skips non-finite ones.  As separate passes these read all gradients
three more times.  Here the update itself reads two scalars: `grad_scale`, the divisor (loss scale over clip
coefficient), and `found_inf` (non-zero: the step changes nothing).  torch's fused optimizers have the same protocol,
and torch.amp.GradScaler uses it if `_step_supports_amp_scaling` is set.  `p.grad` is never written.

Most rules are elementwise: the update of an element depends on that element only, so whole tensors and flat shards
give the same result wherever shards are cut.  The class attribute `elementwise` declares it.

A step sorts the parameters into batches (`updates/plan.py`, once) and updates each batch by one kernel call, or by
the pure rule in torch if it has no kernel.  A subclass defines the legal options, the state of a parameter, and its
rule twice: for the kernel (`_rule`, `_flags`, `_hyper`) and in torch (`_evaluate`).
"""

from __future__ import annotations

import operator
import warnings
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from zoptim.backends.contract import BLOCK_NUMEL, Hyper, Streams
from zoptim.backends.memory import WrittenRanges, addresses, byte_sizes, is_dense, match_layout
from zoptim.backends.select import job_for, reason_without_kernels
from zoptim.backends.signals import NO_SCALE, Signals, is_skipped, read_signals, signals_on
from zoptim.backends.stats import GradStats, stats_of_params
from zoptim.backends.watch import Grads, GradTrace, Trace, gradients
from zoptim.optimizers.base import CheckedOptimizer, Params
from zoptim.shards.segments import Segment
from zoptim.states.formats import StateFormat
from zoptim.states.loading import adopt
from zoptim.states.spec import REMAINDER, STEP, Master, StateSpec
from zoptim.updates.fallback import update_in_torch
from zoptim.updates.plan import (
    Batch,
    Entry,
    Plan,
    UpdatePath,
    fallback_reason,
    has_part_counts,
    sort_entries,
)

__all__ = ["FlatOptimizer", "Params"]


class FlatOptimizer(CheckedOptimizer):
    """A torch optimizer with kernels, state formats, and the grad_scale / found_inf protocol.

    Options of every subclass: `state_dtype` (None, "fp32", "bf16", "8bit": the format of moments), `split_master`
    (bf16 parameters with float32 precision), `maximize`, `foreach=True` (force the torch path), `fused=True` (require
    a kernel; None uses one wherever there is one).
    """

    # The update divides gradients by it.  One element, any device; None or 1 divides nothing.
    grad_scale: Tensor | None = NO_SCALE
    # One element, any device.  Non-zero: weights, state and step counts stay unchanged, bit for bit.
    found_inf: Tensor | None = None
    # torch.amp.GradScaler passes the two scalars on instead of unscaling by itself.
    _step_supports_amp_scaling = True
    # The update of an element reads that element only: shards may be cut anywhere.
    elementwise: ClassVar[bool] = True
    counts_on_device: ClassVar[bool] = True  # `step` is on the parameter's device
    keeps_gradients: ClassVar[bool] = True  # a step only reads `p.grad`: a speculative step need not copy it
    _rule: ClassVar[str]  # the name of the kernel text, csrc/rules/<name>.h

    def __init__(self, params: Params, defaults: dict[str, Any]) -> None:
        self._set_up()
        super().__init__(params, defaults)

    @property
    def block_numel(self) -> int:
        """Elements that share a scale; tensors of a flat shard must begin at multiples of it."""
        formats = (StateFormat.parse(group["state_dtype"]) for group in self.param_groups)
        return BLOCK_NUMEL if StateFormat.INT8 in formats else 1

    def mirror(self, master: Tensor, weight: Tensor) -> None:
        """Tie a low-precision `weight` to its `master`, a float32 parameter of this optimizer with the same shape.

        Each step writes the new master, rounded to nearest, into `weight` (bf16 or fp16) in the same pass.  If
        `master.grad` is None, the step reads `weight.grad`.

        Raises ValueError for another shape, device or layout, TypeError for dtypes that do not fit.
        """
        if master.dtype is not torch.float32 or weight.dtype not in (torch.bfloat16, torch.float16):
            raise TypeError(
                f"mirror was given a {master.dtype} master and a {weight.dtype} weight; it needs a torch.float32 "
                "master and a torch.bfloat16 or torch.float16 weight."
            )
        here, there = (master.shape, master.device, master.stride()), (weight.shape, weight.device, weight.stride())
        if here != there:
            raise ValueError(
                f"the master has shape, device and strides {here}, the weight {there}; they must be equal."
            )
        self._mirrors[master] = weight
        self.clear_plans()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return the closure's loss, or None.

        Phases: evaluate the closure, read the signals, plan all groups (every check precedes the first write), update
        batch by batch.

        Raises UnsupportedTensorError for sparse gradients, ValueError for tensors that do not fit or overlap.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            signals = read_signals(self.grad_scale, self.found_inf)
            plans = self._current_plans()
            work = [(group, batch) for group, plan in zip(self.param_groups, plans) for batch in plan.batches]
            self._update_all(work, signals)
        return loss

    def grad_stats(self) -> GradStats:
        """Measure norm and finiteness of the gradients that `step` reads; as `zoptim.grad_stats`, in less time.

        Raises TypeError or ValueError with the index of a gradient that does not fit.
        """
        return stats_of_params([(group["params"], self._weights_of(group)) for group in self.param_groups])

    # For subclasses; further _check_options and _state_spec of CheckedOptimizer ---------------------------------

    def _flags(self, group: Mapping[str, Any]) -> int:
        """Return the flags of the kernel for this group, see contract.Flag."""
        raise NotImplementedError

    def _hyper(self, group: Mapping[str, Any]) -> Hyper:
        """Return the hyperparameters of the kernel for this group."""
        raise NotImplementedError

    def _evaluate(
        self, group: Mapping[str, Any], param: Tensor, grad: Tensor, moments: dict[str, Tensor], step: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Evaluate the pure rule: new weight and moments of one tensor after update number `step` (from 1)."""
        raise NotImplementedError

    def _update_all(self, work: Sequence[tuple[Mapping[str, Any], Batch]], signals: Signals) -> None:
        """Apply the rule in place to the batches of all groups."""
        for group, batch in work:
            self._update(group, batch, signals_on(signals, batch.entries[0].param.device))

    def _update(self, group: Mapping[str, Any], batch: Batch, signals: Signals) -> None:
        """Apply the rule in place to a batch."""
        if batch.path is UpdatePath.KERNEL:
            assert batch.job is not None
            batch.job.step(self._hyper(group), signals)
        elif not is_skipped(signals):
            self._update_in_torch(group, batch.entries, signals)

    def _update_in_torch(self, group: Mapping[str, Any], entries: list[Entry], signals: Signals) -> None:
        """Apply the rule in place without a kernel.  Not called for skipped steps."""
        update_in_torch(self, group, entries, signals)

    def _rows(self, index: int, entry: Entry) -> Iterator[Entry]:
        """Yield the entries of a kernel call; LAMB and Muon split flat shards into segments here."""
        if has_part_counts(entry.state):
            raise ValueError(
                f"the parts of {self._name(index, entry.index)}, a flat shard, have different step counts, and "
                f"{type(self).__name__} does not know their positions. Step through the partition that made it."
            )
        yield entry

    def _cut(self, index: int, entry: Entry, segments: Sequence[Segment], *, flat: bool = True) -> Iterator[Entry]:
        """Yield an entry for each segment of a shard, flat or in its shape.

        Raises ValueError for segments that share a block of 8-bit codes, and for a wrong number of step counts.
        """
        name = self._name(index, entry.index)
        if has_part_counts(entry.state) and len(entry.state[STEP]) != len(segments):
            raise ValueError(f"{name} has {len(entry.state[STEP])} step counts for {len(segments)} segments.")
        for position, part in enumerate(segments):
            if part.start % BLOCK_NUMEL and any(key.endswith("_scale") for key in entry.state):
                raise ValueError(
                    f"{name} has a segment that starts at {part.start} and 8-bit states with one scale per "
                    f"{BLOCK_NUMEL} elements. Align segments to {BLOCK_NUMEL}, or use bf16 states."
                )
            yield entry.at(part.row, part.index, (-1,) if flat else part.shape, position)

    # Planning -------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles contain: torch's three attributes, and the mirrors."""
        return {**super().__getstate__(), "_mirrors": self._mirrors}

    def _set_up(self) -> None:
        # master -> its low-precision weight; kept when state is loaded
        self._mirrors: dict[Tensor, Tensor] = getattr(self, "_mirrors", {})
        self._warned: set[str] = set()  # reasons for the torch path that have been warned about
        self.clear_plans()

    def clear_plans(self) -> None:
        """Release the tensors of the last step; the next step makes new plans.

        For callers that put views into `param_groups` for one step.
        """
        self._plans: dict[int, Plan] = {}
        self._trace = Trace.of([])  # the tensors that the plans were made from

    def _make_state_spec(self, group: Mapping[str, Any], names: tuple[str, ...], **more: Any) -> StateSpec:
        """The state spec of a group with these moments; `more` are further fields of StateSpec."""
        master = Master.SPLIT if group["split_master"] else Master.WEIGHT
        state_format = StateFormat.parse(group["state_dtype"])
        return StateSpec(names=names, format=state_format, master=master, **{"squares": frozenset(), **more})

    def _current_plans(self) -> list[Plan]:
        """Return a plan for each group: the last one, unless a tensor, an option or a gradient's kind changed."""
        groups = self.param_groups
        watched = [[group["params"] for group in groups], self.state, self._mirrors]
        if not self._trace.fits(watched):
            self.clear_plans()  # with the trace, to which new plans do not belong if a check raises
        plans, is_new = list[Plan](), False
        for index, group in enumerate(groups):
            plan = self._plans.pop(index, None)  # if a check raises, the next step makes a new one
            if plan is None or not self._fits(group, plan) or not self._use_grads(index, plan):
                plan, is_new = self._make_plan(index), True
            self._plans[index] = plan
            plans.append(plan)
        if is_new:
            self._trace = Trace.of(watched)
        return plans

    def _fits(self, group: Mapping[str, Any], plan: Plan) -> bool:
        """Return whether the options of a group are those of its plan; most steps find the same objects."""
        options = _options(group)
        if len(options) != len(plan.options) or not all(map(operator.is_, options, plan.options)):
            plan.options = options
            return plan.is_reusable and plan.key == self._plan_key(group)
        return plan.is_reusable

    def _plan_key(self, group: Mapping[str, Any]) -> Any:
        return group["foreach"], group["fused"], self._flags(group), self._state_spec(group)

    def _use_grads(self, index: int, plan: Plan) -> bool:
        """Use the gradients of this step.  Return False if they are of another kind and a new plan is needed."""
        params = self.param_groups[index]["params"]
        found = plan.grads.read(params, plan.weights)
        for batch in plan.batches if found is not Grads.OTHER else ():
            if batch.path is UpdatePath.TORCH:  # it holds tensors: one at the same address may be another
                batch.assign_grads(gradients(params, plan.weights))
            elif found is Grads.MOVED:
                self._bind_grads(index, batch, batch.grad_addresses(plan.grads.addresses))
        return found is not Grads.OTHER

    def _bind_grads(self, index: int, batch: Batch, grads: array[int]) -> None:
        self._check_read_overlap(index, batch, grads)
        assert batch.job is not None
        batch.job.bind_grads(grads)

    def _make_plan(self, index: int) -> Plan:
        """Phases: check gradients, create missing state, sort, prepare the kernel calls."""
        group = self.param_groups[index]
        params, weights = group["params"], self._weights_of(group)
        grads = gradients(params, weights)
        self._check_gradients(index, grads)
        whole = list(self._entries(index, grads))
        entries = [row for entry in whole for row in self._rows(index, entry)]
        batches = [
            self._make_batch(index, path, members)
            for path, members in sort_entries(entries, lambda entry: self._path_of(index, entry))
        ]
        is_reusable = all(entry.grad is grads[entry.index] for entry in whole)  # else copies in another layout
        for batch in batches if is_reusable else ():
            if batch.path is UpdatePath.KERNEL:
                batch.release_grads()
        key = self._plan_key(group)
        return Plan(key, _options(group), batches, weights, GradTrace.of(params, weights), is_reusable)

    def _weights_of(self, group: Mapping[str, Any]) -> list[Tensor]:
        """Return for each parameter the tensor whose gradient is read if it has none."""
        params: list[Tensor] = group["params"]
        return [self._mirrors.get(param, param) for param in params] if self._mirrors else params

    def _entries(self, index: int, grads: list[Tensor | None]) -> Iterator[Entry]:
        """Yield an entry for each parameter of the group that has a gradient."""
        for position, (param, grad) in enumerate(zip(self.param_groups[index]["params"], grads)):
            if grad is not None:
                state = self._ready_state(index, position)
                yield Entry(param, match_layout(grad, param), state, position, self._mirrors.get(param))

    def _ready_state(self, index: int, position: int) -> dict[str, Any]:
        """Return the state of a parameter, created or converted if a kernel could not read it."""
        group = self.param_groups[index]
        param, spec = group["params"][position], self._state_spec(group)
        state: dict[str, Any] = self.state[param]
        if not all(key in state for key in spec.first_keys_for(param)):
            made = spec.make(param)
            state.update({key: state.get(key, made[key]) for key in spec.first_keys_for(param)})
        if is_dense(param) and not spec.is_readable(param, state):
            state.update(adopt(state, param, spec, self._name(index, position)))
        return state

    def _path_of(self, index: int, entry: Entry) -> UpdatePath:
        group = self.param_groups[index]
        is_first = any(name not in entry.state for name in self._state_spec(group).lazy)
        if group["foreach"] or is_first:
            return UpdatePath.TORCH
        reason = fallback_reason(entry, reason_without_kernels)
        if reason is None:
            return UpdatePath.KERNEL
        name = self._name(index, entry.index)
        if group["fused"]:
            raise ValueError(f"fused=True, but {name} has no kernel: {reason}. Leave fused=None.")
        if reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(
                f"{type(self).__name__} updates {name} with plain torch operations, which are slower: {reason}. "
                "Pass foreach=True to choose them without this warning.",
                stacklevel=2,
            )
        return UpdatePath.TORCH

    def _make_batch(self, index: int, path: UpdatePath, entries: list[Entry]) -> Batch:
        group = self.param_groups[index]
        batch = Batch(path, entries)
        if path is UpdatePath.TORCH:
            return batch
        streams = self._streams(group, entries)
        self._set_written_ranges(index, batch, streams)
        self._check_read_overlap(index, batch, array("Q", addresses(streams.grads)))
        batch.job = job_for(entries[0].param.device)(self._rule, self._flags(group), streams)
        return batch

    def _streams(self, group: Mapping[str, Any], entries: list[Entry]) -> Streams:
        spec = self._state_spec(group)
        kept = [spec.streams(entry.state) for entry in entries]
        return Streams(
            weights=[entry.param for entry in entries],
            grads=[entry.grad for entry in entries],
            states=tuple(list(column) for column in zip(*(states for states, _ in kept))),
            scales=tuple(list(column) for column in zip(*(scales for _, scales in kept))),
            remainders=[entry.state[REMAINDER] for entry in entries if spec.master is Master.SPLIT],
            copies=[entry.copy for entry in entries if entry.copy is not None],
            steps=[entry.state[STEP] for entry in entries if STEP in entry.state],
        )

    def _set_written_ranges(self, index: int, batch: Batch, streams: Streams) -> None:
        ranges = WrittenRanges.make(streams.written(), streams.steps)
        if isinstance(ranges, tuple):
            name = self._name(index, batch.entries[ranges[1]].index)
            raise ValueError(
                f"the memory of {name} or of its state overlaps another tensor that the same step writes. "
                "Give each parameter its own memory, and list each tensor once, in one group."
            )
        batch.ranges, batch.grad_bytes = ranges, byte_sizes(streams.grads)

    def _check_read_overlap(self, index: int, batch: Batch, grads: array[int]) -> None:
        found = batch.find_overlap(grads)
        if found is not None:
            name = self._name(index, batch.entries[found].index)
            raise ValueError(
                f"the gradient of {name} overlaps a weight or a state that the step writes. "
                "Give the gradient its own memory."
            )


_RATES = frozenset({"params", "lr"})


def _options(group: Mapping[str, Any]) -> list[Any]:
    """Return the values of a group that decide how it is updated, and more."""
    return [value for name, value in group.items() if name not in _RATES]
