"""FLOPs profiler as a standalone tool, with DeepSpeed's names.

    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(batch)
    profiler.stop_profile()
    profiler.print_model_profile()
    profiler.end_profile()

    flops, macs, params = get_model_profile(model, args=(tokens,), as_string=False)
    flops, macs, params = get_model_profile(huge, args=(tokens,), meta=True)     # shapes only: nothing is computed

Under an engine pass the engine (`FlopsProfiler(engine)`): at ZeRO stage 3 a rank holds a part of each parameter, and
the partition knows the full shapes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import attrs
import torch
from torch import nn

from zengine.flops.meter import FlopsMeter
from zengine.flops.profile import FlopsProfile, ModuleCost, format_amount, format_profile

__all__ = ["FlopsProfiler", "get_model_profile"]

Shapes = Mapping[str, Sequence[int]]  # full shapes of parameters by name, where a rank holds a part


@final
class FlopsProfiler:
    """Counts the FLOPs of forwards between `start_profile` and `stop_profile`.

    Forwards add up; `start_profile` resets.  recompute_fwd_factor: forwards repeated by a backward (1 with full
    activation checkpointing), for the FLOPs of a step by the formula.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        engine: Any = ds_engine if ds_engine is not None else model
        self._model: nn.Module = engine.module if hasattr(engine, "parts") else model
        self._shapes: Shapes = engine.parts.partition.shapes() if hasattr(engine, "parts") else {}
        self._recompute = recompute_fwd_factor
        self._device = next((param.device for param in self._model.parameters()), torch.device("cpu"))
        self._meter = FlopsMeter(self._model)
        # Of the last profile; they outlive `end_profile`.
        self.flops = self.macs = self.params = 0

    def disable_timing(self) -> None:
        """Disable timing, for a model on the meta device."""
        self._device = torch.device("meta")

    def start_profile(self, ignore_list: Sequence[type[nn.Module]] | None = None) -> None:
        """Start counting, without the modules of the classes in `ignore_list`."""
        self._meter.stop()
        self._meter = FlopsMeter(self._model, tuple(ignore_list or ()), *_timing(self._device))
        self._meter.start()

    def resume_profile(self) -> None:
        """Continue counting after `stop_profile`."""
        self._meter.start()

    def stop_profile(self) -> None:
        """Stop counting; the results stay."""
        self._meter.stop()

    def end_profile(self) -> None:
        """Discard the results."""
        self._meter.stop()
        self._meter = FlopsMeter(self._model)

    def profile(self, backward_flops: int = 0) -> FlopsProfile:
        """Return the counts so far as a value."""
        params = count_params(self._model, self._shapes)
        costs = [
            ModuleCost(
                path=path,
                kind=type(module).__name__,
                params=params[path],
                flops=reading.flops,
                ms=reading.seconds * 1e3,
                calls=reading.calls,
            )
            for path, module in self._model.named_modules()
            if (reading := self._meter.readings.get(path)) is not None
        ]
        model = ModuleCost(path="", kind=type(self._model).__name__, params=params[""])
        found = FlopsProfile(
            modules=fill_containers(costs or [model]),
            operations=dict(self._meter.operations),
            backward_flops=backward_flops,
            recompute_factor=self._recompute,
        )
        self.flops, self.macs, self.params = found.total.flops, found.total.macs, found.total.params
        return found

    def get_total_flops(self, as_string: bool = False) -> int | str:
        """Return the FLOPs of the forwards."""
        flops = self.profile().total.flops
        return format_amount(flops, "FLOPs") if as_string else flops

    def get_total_macs(self, as_string: bool = False) -> int | str:
        """Return the multiply-adds of the forwards."""
        macs = self.profile().total.macs
        return format_amount(macs, "MACs") if as_string else macs

    def get_total_duration(self, as_string: bool = False) -> float | str:
        """Return the seconds of the forwards, as a string in milliseconds; counting slows them."""
        ms = self.profile().total.ms
        return f"{ms:.2f} ms" if as_string else ms / 1e3

    def get_total_params(self, as_string: bool = False) -> int | str:
        """Return the number of elements of all parameters."""
        params = self.profile().total.params
        return format_amount(params) if as_string else params

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Print the profile, or write it to `output_file`; see `format_profile`."""
        text = format_profile(
            self.profile(), step=profile_step, module_depth=module_depth, top_modules=top_modules, detailed=detailed
        )
        publish(text, output_file or "")

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print the totals and the most expensive classes at each depth."""
        self.print_model_profile(module_depth=module_depth, top_modules=top_modules, detailed=False)


def get_model_profile(
    model: nn.Module,
    input_shape: Sequence[int] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Sequence[type[nn.Module]] | None = None,
    mode: str = "forward",
    meta: bool = False,
) -> tuple[Any, Any, Any]:
    """Return (FLOPs, MACs, parameters) of one call of `model`, as numbers or as text.

    input_shape: call `model(x)` with x of ones in the parameters' dtype; otherwise args and kwargs are passed.
    warm_up: calls before the measured one.  mode: "forward", or "generate" for `model.generate(...)`.
    meta: use meta tensors for parameters, buffers and inputs, so that nothing is computed and a model of any size
        returns at once; a forward that reads values (`.item()`, data-dependent shapes) fails.

    Raises:
        ValueError: input_shape, args and kwargs are all missing, or `mode` is another word.
    """
    call = _call_of(model, input_shape, (tuple(args), dict(kwargs or {})), mode, meta)
    profiler = FlopsProfiler(model)
    if meta:
        profiler.disable_timing()
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for _ in range(0 if meta else warm_up):
                call()
            profiler.start_profile(ignore_modules)
            call()
    finally:
        profiler.stop_profile()
        model.train(was_training)
    if print_profile:
        profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    totals = profiler.get_total_flops(as_string), profiler.get_total_macs(as_string)
    return (*totals, profiler.get_total_params(as_string))


def _timing(device: torch.device) -> tuple[Callable[[], object], Callable[[], float]]:
    """Return (synchronize, clock) of a device; the clock of the meta device stands still."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device), time.perf_counter
    return lambda: None, (lambda: 0.0) if device.type == "meta" else time.perf_counter


def fill_containers(costs: Sequence[ModuleCost]) -> tuple[ModuleCost, ...]:
    """Return the costs, with the sum of the children for modules that are never called (a ModuleList)."""
    found: dict[str, ModuleCost] = {}
    sums: dict[str, tuple[int, float]] = {}  # FLOPs and ms of the children so far, by parent
    for cost in sorted(costs, key=lambda cost: -cost.depth):
        flops, ms = sums.get(cost.path, (0, 0.0))
        found[cost.path] = cost if cost.calls or not cost.path else attrs.evolve(cost, flops=flops, ms=ms)
        if cost.path:
            parent = cost.path.rpartition(".")[0]
            above = sums.get(parent, (0, 0.0))
            sums[parent] = (above[0] + found[cost.path].flops, above[1] + found[cost.path].ms)
    return tuple(found[cost.path] for cost in costs)


def count_params(model: nn.Module, shapes: Shapes) -> dict[str, int]:
    """Return the number of parameter elements that each module reaches, by path; each parameter once."""
    numels = {
        id(param): torch.Size(shapes[name]).numel() if name in shapes else param.numel()
        for name, param in model.named_parameters()
    }
    return {path: sum(numels[id(param)] for param in module.parameters()) for path, module in model.named_modules()}


def publish(text: str, output_file: str) -> None:
    """Write to a file, creating its folders, or to the standard output."""
    if not output_file:
        print(text, flush=True)
        return
    path = Path(output_file)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")


def _call_of(
    model: nn.Module,
    shape: Sequence[int] | None,
    given: tuple[tuple[Any, ...], dict[str, Any]],
    mode: str,
    meta: bool,
) -> Callable[[], Any]:
    """Return a function that calls the model once."""
    args, kwargs = given
    if shape is not None:
        first = next(model.parameters(), torch.empty(0))
        args = (torch.ones(tuple(shape), dtype=first.dtype, device=first.device),)
    if not args and not kwargs:
        raise ValueError(
            "get_model_profile has nothing to call the model with: pass input_shape=(2, 16) for a model of one "
            "floating tensor, else args=(...) or kwargs={...}"
        )
    if mode not in ("forward", "generate"):
        raise ValueError(f'get_model_profile(mode={mode!r}): use "forward" or "generate"')
    if not meta:
        target = model if mode == "forward" else model.generate
        return lambda: target(*args, **kwargs)  # type: ignore[operator]
    if mode == "generate":
        raise ValueError('get_model_profile(meta=True) cannot run generate, which reads values: use mode="forward"')
    state = to_meta(dict((*model.named_parameters(), *model.named_buffers())))
    return lambda: torch.func.functional_call(model, state, to_meta(args), to_meta(kwargs))


def to_meta(value: Any) -> Any:
    """Return meta tensors for the tensors in lists, tuples and dicts; other values are unchanged."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("meta")
    if isinstance(value, dict):
        return {key: to_meta(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(to_meta, value))
    return value
