"""`init_inference`: a model in one dtype, on the device, without gradients; with tensor or expert parallelism.

Tensor-parallel ranks pass the same inputs, make the same calls, and all get the whole outputs.  Expert-parallel ranks
may pass different inputs but must call equally often: each call exchanges tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zengine.build.tensor_parallel import VERIFIED_NUMEL
from zengine.deepspeed.accelerator import get_accelerator
from zengine.deepspeed.inference import splitting
from zengine.deepspeed.inference.config import DeepSpeedInferenceConfig, merge_config
from zengine.deepspeed.inference.files import check_ranks, load_quantized, save_quantized
from zengine.deepspeed.utils.timer import SynchronizedWallClockTimer
from zengine.inference.loading import weights
from zengine.inference.quantized import LayerError

__all__ = ["INFERENCE_MODEL_TIMER", "InferenceEngine", "init_inference"]

INFERENCE_MODEL_TIMER = "model-forward-inference"

log = logging.getLogger("zengine")


class _Watch:
    """Times of forward passes."""

    def __init__(self, use_events: bool) -> None:
        self._timer = SynchronizedWallClockTimer.Timer(INFERENCE_MODEL_TIMER)
        self._timer.use_host_timer |= not use_events

    def start(self) -> None:
        self._wait()
        self._timer.start()

    def stop(self) -> None:
        self._wait()
        self._timer.stop()

    def times(self) -> list[float]:
        """Return the milliseconds of each pass, and forget them."""
        self._timer.elapsed(reset=False)
        found = list(self._timer.elapsed_records or ())
        self._timer.reset()
        return found

    def _wait(self) -> None:
        if self._timer.use_host_timer:
            get_accelerator().synchronize()


class InferenceEngine(nn.Module):
    """Runs `module` without gradients; other attributes are the module's."""

    _watch: _Watch  # of `profile_model_time`

    def __init__(self, module: nn.Module, config: DeepSpeedInferenceConfig) -> None:
        super().__init__()
        self.module = _prepare(module, config).eval()
        self._config = config
        self._hooks: list[RemovableHandle] = []  # of `profile_model_time`

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module without gradients."""
        with torch.no_grad():
            return self.module(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's `generate`; prompts may have max_out_tokens tokens.

        Raises RuntimeError (DeepSpeed's) for a longer prompt, AttributeError if the module has no `generate`.
        """
        make = getattr(self.module, "generate", None)
        if make is None:
            raise AttributeError(f"{type(self.module).__name__} has no generate(); call the engine itself")
        prompt, limit = kwargs.get("input_ids", args[0] if args else None), self._config.max_out_tokens
        length = prompt.shape[-1] if isinstance(prompt, Tensor) else 0
        if length > limit:
            raise RuntimeError(
                f"Input with size {length} exceeds maximum length of {limit}: pass a larger max_out_tokens to "
                "init_inference()."
            )
        with torch.no_grad():
            return make(*args, **kwargs)

    def profile_model_time(self, use_cuda_events: bool = True) -> None:
        """Measure the module's forward passes from now on, those within `generate` as well.

        use_cuda_events: events of the GPU's stream, for which nothing waits; False, or without a GPU: the host's
            clock, with the device synchronized before and after a pass.
        """
        if not self._hooks:
            self._hooks = [
                self.module.register_forward_pre_hook(lambda *_: self._watch.start()),
                self.module.register_forward_hook(lambda *_: self._watch.stop(), always_call=True),
            ]
        self._watch = _Watch(use_cuda_events)

    def model_times(self) -> list[float]:
        """Return the milliseconds of each forward pass since the last call.

        Raises AssertionError (DeepSpeed's) before `profile_model_time`.
        """
        assert self._hooks, "model profiling is not enabled: call profile_model_time() first"
        return self._watch.times()

    def destroy(self) -> None:
        """Stop measuring, and return the device memory that is cached but unused.  The engine remains usable."""
        while self._hooks:
            self._hooks.pop().remove()
        get_accelerator().empty_cache()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)


def init_inference(model: nn.Module, config: Any = None, **kwargs: Any) -> InferenceEngine:
    """Cast `model` (to fp16 unless `dtype` is given), move it to the device, and return its engine in eval mode.

    The weights change in place.  config and keywords are merged; a key in both must have the same value in both.
    tensor_parallel={"tp_size": n} splits the layers over n consecutive ranks, moe={"ep_size": n} shards the experts,
    in place; every rank passes the same model.  With checkpoint= each rank reads its own part, and the model may be
    on the meta device.

    Raises:
        ValueError: ConfigError with all unknown, rejected and invalid keys; numbers of ranks, heads or experts that
            do not match, and weights that do not fit, before any communication.
        RanksDisagree: ranks have different models.
    """
    if isinstance(model, InferenceEngine):
        raise ValueError("init_inference() got an InferenceEngine: pass engine.module and the new config.")
    if not isinstance(model, nn.Module):
        raise TypeError(f"init_inference() needs a torch.nn.Module, got {type(model).__name__}")
    settings = DeepSpeedInferenceConfig.of(merge_config(config, kwargs))
    for notice in settings.notices:
        log.warning("%s", notice)
    return InferenceEngine(model, settings)


def _prepare(module: nn.Module, config: DeepSpeedInferenceConfig) -> nn.Module:
    """Return `module` with its weights, or with this rank's part of them."""
    host = next((param.device for param in module.parameters() if not param.is_meta), torch.device("cpu"))
    device = host if config.keep_module_on_host else torch.device(get_accelerator().device_name(None))
    path, base_dir, is_on_meta = config.files.checkpoint, config.files.base_dir, weights.is_on_meta(module)
    if config.parallelism.is_single_rank and path is not None:
        dtype = config.compute_dtype(device)
        rows = load_quantized(module, config.files, config.quantization, dtype, device)
        if rows is not None:
            _log_layers(rows)
            return module.to(device)
    if path is not None:
        check_ranks(config.files)
        weights.check_fits(module, path, base_dir)
    elif is_on_meta:
        raise ValueError(
            f"{type(module).__name__} is on the meta device and has no weights: pass checkpoint=, a weight file "
            "or a Hugging Face folder."
        )
    if is_on_meta and _needs_run(module, config):
        assert path is not None
        weights.materialize(module, host)
        weights.load(module, path, base_dir)
        path = None
    split = splitting.plan_split(module, config.parallelism)
    split.agree(module)
    if not weights.is_on_meta(module):
        module = module.to(device)  # a group of GPUs cannot send host tensors
    split = split.verified(module)
    module = module.to(dtype=config.compute_dtype(device))
    split.apply(module)
    if path is not None:
        weights.materialize(module, device)
        weights.load(module, path, base_dir)
    module = module.to(device)
    if config.quantization is not None:
        _quantize(module, config)
        save_quantized(module, config.files)
    return module


def _quantize(module: nn.Module, config: DeepSpeedInferenceConfig) -> None:
    """Replace linear layers by quantized ones, and log how much they were rounded."""
    from zengine.inference.quantized_modules import quantize_linears

    assert config.quantization is not None
    _log_layers(quantize_linears(module, config.quantization.format_of))


def _log_layers(rows: Sequence[LayerError]) -> None:
    worst = max(rows, key=lambda row: row.error)
    log.info(
        "init_inference: %d linear layers quantized to %s, %s bytes; largest relative error %.3g (%s)",
        *(len(rows), ", ".join(sorted({row.format for row in rows})), f"{sum(row.nbytes for row in rows):,}"),
        *(worst.error, worst.name),
    )


def _needs_run(module: nn.Module, config: DeepSpeedInferenceConfig) -> bool:
    """Return True if the plan must be inferred by running the model, and the whole model fits into memory."""
    parallelism = config.parallelism
    is_small = sum(param.numel() for param in module.parameters()) <= VERIFIED_NUMEL
    return not parallelism.is_single_rank and is_small and splitting.written_plan(module, parallelism) is None
