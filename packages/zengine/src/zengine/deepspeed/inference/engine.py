"""`init_inference`: a model in one dtype, on the device, without gradients; with tensor or expert parallelism.

Tensor-parallel ranks pass the same inputs, make the same calls, and all get the whole outputs.  Expert-parallel ranks
may pass different inputs but must call equally often: each call exchanges tokens.  A fused decoder over them
generates if all ask for the same; else the module's own forward does.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

import zpartition
from zengine.build.tensor_parallel import VERIFIED_NUMEL
from zengine.deepspeed.accelerator import get_accelerator
from zengine.deepspeed.inference import memory, offloading, splitting
from zengine.deepspeed.inference.config import DeepSpeedInferenceConfig, merge_config
from zengine.deepspeed.inference.files import (
    check_expert_ranks,
    check_is_plain,
    check_packed,
    load_part,
    load_quantized,
    open_model,
    save_quantized,
)
from zengine.deepspeed.inference.graphs import GraphedModule
from zengine.deepspeed.inference.offloading import WeightOffload
from zengine.deepspeed.inference.watch import INFERENCE_MODEL_TIMER, Watch
from zengine.inference.calls import transformers_style as generation
from zengine.inference.calls.decoder_cache import ModuleForward, decoder_cache, is_decoder_cache, search
from zengine.inference.calls.module_generate import ModuleGenerate, own_generate_of
from zengine.inference.calls.path import FusedPath, has_quantized_layers, recognized, reject_prompt
from zengine.inference.experts.separate import separate_chosen, stacks_in
from zengine.inference.loading import weights
from zengine.inference.loading.sources import Given
from zengine.inference.offload import WeightStream
from zengine.inference.quantized import LayerError
from zengine.inference.quantized_modules import linear_weights, quantize_linears, scales_of, unquantized
from zengine.inference.structure import Decoder
from zpartition import ModelParallelGroup

__all__ = ["INFERENCE_MODEL_TIMER", "InferenceEngine", "init_inference"]

log = logging.getLogger("zengine")


class InferenceEngine(nn.Module):
    """Runs `module` without gradients; other attributes are the module's."""

    _watch: Watch  # of `profile_model_time`

    def __init__(self, module: nn.Module, config: DeepSpeedInferenceConfig) -> None:
        super().__init__()
        prepared = _prepare(module, config)
        self.module = prepared.module
        self._config = config
        self._fused = prepared.fused  # FusedPath; None: the module's own forward runs
        self._expert_ranks = prepared.expert_ranks  # ModelParallelGroup; None: experts are whole
        self._stream = prepared.stream  # blocks that rest elsewhere; None: all weights are on the device
        self._graphed = (
            GraphedModule(self.module) if config.enable_cuda_graph else None
        )  # runs in place of the module
        self._hooks: list[RemovableHandle] = []  # of `profile_model_time`
        self._told: set[str] = set()  # arguments of `generate` that were logged
        self._is_compiled = False
        self._attach()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copied or pickled engine, whose module leads to it again."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._attach()

    def _attach(self) -> None:
        """Let `generate` of a fused model of Transformers be this engine's, for code that has the module alone."""
        if self._fused is not None and hasattr(self.module, "generation_config"):
            ModuleGenerate.attach(self, self.module)
            ModuleForward.attach(self.module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module without gradients."""
        with torch.no_grad():
            return (self._graphed or self.module)(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate with the arguments and results of the module's `generate`, by the fused path if there is one.

        A prompt may have max_out_tokens tokens; on the fused path, prompt and answer together.  A fused decoder
        without a `generate` accepts the arguments of generation.py's `own_generate`.

        Raises RuntimeError (DeepSpeed's) for a longer prompt, AttributeError if the module has no `generate` and is
        not fused.
        """
        self._renew_path()
        make = own_generate_of(self.module)
        if make is None and self._fused is None:
            raise AttributeError(
                f"{type(self.module).__name__} has no generate() and is no fused decoder: call the engine itself, or "
                "pass replace_with_kernel_inject=True to init_inference()."
            )
        prompt = kwargs.get("input_ids", args[0] if args else kwargs.get("inputs"))
        if isinstance(prompt, Tensor):
            reject_prompt(prompt.shape[-1], self._config.max_out_tokens)
        with torch.no_grad():
            if make is None:
                assert self._fused is not None
                if self._fused_over_experts and not self._asks_the_same({"args": args, **kwargs}):
                    raise RuntimeError(
                        "generate() got inputs that differ between expert ranks: pass the same on all."
                    )
                self._agree_on_random_numbers()
                return generation.own_generate(self._fused, *args, **kwargs)
            return self._generate(make, args, kwargs)

    def _generate(self, make: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module's `generate`, with the fused loop where that computes the same."""
        if not hasattr(self.module, "generation_config"):  # not that of Transformers
            self._agree_on_random_numbers()
            return make(*args, **kwargs)
        given = generation.arguments_by_name(self.module, make, args, kwargs)
        is_continued = is_decoder_cache(given.get("past_key_values"))  # Transformers' loop, and fused forwards
        other = "" if is_continued else self._reason_not_fused(given, make)
        loop: Callable[..., Any] = generation.fused_generate
        if other == "num_beams":
            other, loop = self._reason_not_fused({**given, "num_beams": 1}, make), search
        if other:
            self._tell(other)
        if self._is_split or (self._fused_over_experts and not other):
            self._agree_on_random_numbers()
            same = generation.SameOnAllRanks(self._deciding_group)
            given["logits_processor"] = [*(given.get("logits_processor") or ()), same]
        if self._stream is not None and self._stream.is_shared:
            given.setdefault("synced_gpus", True)  # a rank that is done runs on, for the others' weights
        if self._fused is None or other or is_continued:
            return make(**given)
        return loop(self._fused, self.module, given, make)

    def static_cache(self, batch_size: int) -> Any:
        """Return an empty `transformers.Cache` of `batch_size` rows, with which `module(...)` runs the fused decoder.

        For loops that call the model themselves; it holds max_out_tokens tokens a row, in memory of its own.

        Raises RuntimeError if the engine is not fused.
        """
        self._renew_path()
        if self._fused is None or not isinstance(vars(self.module).get("forward"), ModuleForward):
            raise RuntimeError(
                "static_cache() needs a fused model of Transformers: init_inference(replace_with_kernel_inject=True)"
            )
        return decoder_cache(self._fused, batch_size)

    def _reason_not_fused(self, given: Mapping[str, Any], make: Callable[..., Any]) -> str:
        """Return what the fused path cannot do; "" if it can, or if there is none.  Collective over expert ranks."""
        if self._fused is None:
            return ""
        # first, as only some ranks may have other reasons
        if self._fused_over_experts and not self._asks_the_same(given):
            return "inputs that differ between expert ranks"
        return generation.unfused_argument(self.module, given, make)

    def _asks_the_same(self, given: Mapping[str, Any]) -> bool:
        """Compare arguments, and what the module's own config says about others.  Collective over expert ranks."""
        own = getattr(self.module, "generation_config", None)
        return generation.same_on_all({**given, "module.generation_config": own}, self._deciding_group)

    def _renew_path(self) -> None:
        """Recognize the decoder again if the module's weights were replaced, moved or cast since."""
        if self._fused is None or self._fused.is_current:
            return
        timed, self._fused = self._fused.timed, None  # frees its cache
        self._fused = _with_path(self.module, _recognize(self.module, self._config), self._config).fused
        if self._fused is not None:
            self._fused.timed = timed

    def _tell(self, argument: str) -> None:
        if argument not in self._told:
            self._told.add(argument)
            log.warning("generate(%s): the fused path cannot do this; the module's own forward runs", argument)

    def _agree_on_random_numbers(self) -> None:
        if self._is_split or self._fused_over_experts:
            generation.share_random_state(self._deciding_group, next(self.module.parameters()).device)

    def profile_model_time(self, use_cuda_events: bool = True) -> None:
        """Measure forward passes from now on: the module's, and within `generate` those of a fused decoder.

        use_cuda_events: events of the GPU's stream, for which nothing waits; False, or without a GPU: the host's
            clock, with the device synchronized before and after a pass.
        """
        if not self._hooks:
            self._hooks = [
                self.module.register_forward_pre_hook(lambda *_: self._watch.start()),
                self.module.register_forward_hook(lambda *_: self._watch.stop(), always_call=True),
            ]
        self._watch = Watch(use_cuda_events)
        if self._fused is not None:
            self._fused.timed = self._watch.timed

    def model_times(self) -> list[float]:
        """Return the milliseconds of each forward pass since the last call.

        Raises AssertionError (DeepSpeed's) before `profile_model_time`.
        """
        assert self._hooks, "model profiling is not enabled: call profile_model_time() first"
        return self._watch.times()

    def compile(self, backend: str | None = None, compile_kwargs: Mapping[str, Any] | None = None) -> None:
        """Compile the module's forward by torch.compile; the fused path stays as it is.

        backend: of torch.compile; the accelerator's by default.  Raises ValueError with CUDA graphs.
        """
        if self._config.enable_cuda_graph:
            raise ValueError("compile() and enable_cuda_graph exclude each other: use mode='reduce-overhead'.")
        self.module.compile(backend=backend or get_accelerator().get_compile_backend(), **dict(compile_kwargs or {}))
        self._is_compiled = True

    @property
    def is_compiled(self) -> bool:
        """Whether `compile` was called."""
        return self._is_compiled

    @property
    def _is_split(self) -> bool:
        return zpartition.model_parallel_group_of(self.module).size > 1

    @property
    def _fused_over_experts(self) -> bool:
        """Whether ranks decode together since each computes its own experts."""
        return self._fused is not None and self._expert_ranks is not None

    @property
    def _deciding_group(self) -> ProcessGroup | None:
        """Ranks that choose one token: of the layers, of the experts, or of both."""
        layers, experts = zpartition.model_parallel_group_of(self.module), self._expert_ranks
        return layers.group if experts is None or layers.size > experts.size else experts.group

    @property
    def mp_group(self) -> ProcessGroup | None:
        """The tensor ranks of this engine's module; None if it is not split."""
        return zpartition.model_parallel_group_of(self.module).group

    @property
    def ep_group(self) -> dict[int, ProcessGroup | None] | None:
        """The expert ranks, by the number of experts of a layer; None if experts are not split."""
        group = zpartition.expert_ranks_of(self.module)
        if group.size == 1:
            return None
        from zpartition import experts

        counts = {experts.num_experts_of(stack) for stack in experts.find_experts(self.module).values()}
        return dict.fromkeys(sorted(counts), group.group)

    @property
    def expert_mp_group(self) -> dict[int, ProcessGroup | None] | None:
        """The tensor ranks that split an expert, by the number of experts: none, experts are whole."""
        return None if (found := self.ep_group) is None else dict.fromkeys(found)

    @property
    def quantization_scales(self) -> dict[str, Tensor] | None:
        """Scales of each quantized weight of this rank, by the layer's name; None if there is none."""
        scales = scales_of(self.module)
        return scales or None

    def load_model_with_checkpoint(self, r_module: nn.Module) -> None:
        """Load the config's checkpoint into `r_module`: a module with the checkpoint's names, whole or split.

        Raises ValueError if the config has no checkpoint, or if it does not fit.
        """
        files = self._config.files
        if files.checkpoint is None:
            raise ValueError(
                "load_model_with_checkpoint() needs init_inference(checkpoint=...), which was not given."
            )
        weights.load(r_module, files.checkpoint, files.base_dir)

    def destroy(self) -> None:
        """Stop measuring, and free caches, graphs and unused device memory.  The engine remains usable.

        The module's `generate` is its own again.
        """
        if ModuleGenerate.detach(self, self.module):
            ModuleForward.detach(self.module)
        while self._hooks:
            self._hooks.pop().remove()
        if self._fused is not None:
            self._fused.steps, self._fused.timed = None, nullcontext
        if self._graphed is not None:
            self._graphed.graphs.clear()
        get_accelerator().empty_cache()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)


def init_inference(model: nn.Module | str | os.PathLike[str], config: Any = None, **kwargs: Any) -> InferenceEngine:
    """Cast `model` (to fp16 unless `dtype` is given), move it to the device, and return its engine in eval mode.

    The weights change in place.  config and keywords are merged; a key in both must have the same value in both.
    tensor_parallel={"tp_size": n} splits the layers over n consecutive ranks, moe={"ep_size": n} shards the experts,
    in place; every rank passes the same model.  With checkpoint= each rank reads its own part, and the model may be
    on the meta device.

    model: or the path of a Hugging Face folder or a GGUF file, with Transformers' model of its config; quantized
        layers (GPTQ, AWQ, compressed-tensors) keep their codes.

    Raises:
        ValueError: ConfigError with all unknown, rejected and invalid keys; numbers of ranks, heads or experts that
            do not match, and weights that do not fit, before any communication.
        RanksDisagree: ranks have different models.
    """
    if isinstance(model, InferenceEngine):
        raise ValueError("init_inference() got an InferenceEngine: pass engine.module and the new config.")
    given = merge_config(config, kwargs)
    if isinstance(model, (str, os.PathLike)):
        model, given = open_model(os.fspath(model), given)
    if not isinstance(model, nn.Module):
        raise TypeError(f"init_inference() needs a torch.nn.Module, or a path, got {type(model).__name__}")
    check_is_plain(model)
    settings = DeepSpeedInferenceConfig.of(given)
    for notice in settings.notices:
        log.warning("%s", notice)
    if settings.enable_cuda_graph and get_accelerator().create_graph() is None:
        log.warning("init_inference.enable_cuda_graph has no effect here: it needs a GPU with CUDA")
    return InferenceEngine(model, settings)


@attrs.frozen(eq=False)
class _Prepared:
    module: nn.Module  # with its weights, or with this rank's part of them
    fused: FusedPath | None = None
    stream: WeightStream | None = None  # of blocks that rest elsewhere
    expert_ranks: ModelParallelGroup | None = None  # that hold other experts; None: experts are whole


def _prepare(module: nn.Module, config: DeepSpeedInferenceConfig) -> _Prepared:
    """Choose the device and the dtype, and the way to the weights."""
    host = next((param.device for param in module.parameters() if not param.is_meta), torch.device("cpu"))
    device = host if config.keep_module_on_host else torch.device(get_accelerator().device_name(None))
    if config.offload is not None:
        sharing = splitting.num_ranks() if config.parallelism.is_single_rank else 1
        if reason := config.offload.idle_reason(device, sharing):
            log.warning("init_inference.zero has no effect here: %s", reason)
            return _prepare(module, config.without_offload())
    dtype = _compute_dtype(module, config, device)
    _check_memory(module, config, dtype, device)
    if config.quantization is not None:
        stacked = (f"{name}.{each}" for name, _, stack in stacks_in(module) for each in stack.names)
        for notice in config.quantization.notices([*(name for name, *_ in linear_weights(module)), *stacked]):
            log.warning("%s", notice)
    if config.files.checkpoint is not None and config.parallelism.is_single_rank and config.offload is None:
        rows = load_quantized(module, config.files, config.quantization, dtype, device)
        if rows is not None:
            _warn_of_packed(rows, config)
            _log_layers(rows, module)
            module = module.to(device).eval()
            return _with_path(module, _recognize(module, config), config)
    if _keeps_codes(config):
        rows = load_quantized(module, config.files, None, dtype, host)
        if rows:  # each rank keeps its part of the codes
            _log_layers(rows, module)
            return _prepare_split(module, config, host, device, dtype, is_filled=True)
    _check_weights(module, config)
    if config.offload is not None:
        return _prepare_streamed(module, config, config.offload, host, device, dtype)
    return _prepare_split(module, config, host, device, dtype, is_filled=config.files.checkpoint is None)


def _keeps_codes(config: DeepSpeedInferenceConfig) -> bool:
    """Return whether tensor ranks split the codes of files that are quantized by others, if they are."""
    files, is_alone = config.files, config.parallelism.experts.size <= 1 and config.offload is None
    return is_alone and files.checkpoint is not None and files.packed is None and config.quantization is None


def _check_weights(module: nn.Module, config: DeepSpeedInferenceConfig) -> None:
    """Raise ValueError if there are no weights, or files that do not fit."""
    files = config.files
    # of a given group, of the config, or those that training has put the experts over
    check_expert_ranks(files, max(splitting.degrees(config.parallelism)[1], zpartition.expert_ranks_of(module).size))
    if files.checkpoint is None:
        if weights.is_on_meta(module):
            raise ValueError(
                f"{type(module).__name__} is on the meta device and has no weights: pass checkpoint=, a weight file "
                "or a Hugging Face folder."
            )
    elif files.packed is None:
        if weights.check_fits(module, files.checkpoint, files.base_dir) and config.quantization is None:
            log.warning(
                "init_inference: %s has quantized layers, which are decoded for expert ranks and streams: pass "
                "dtype='int8' or quant={'weight': {'num_bits': 4}} to quantize them again",
                files.checkpoint,
            )
    else:
        check_packed(files.packed, config.parallelism, is_streamed=config.offload is not None)


def _prepare_split(
    module: nn.Module,
    config: DeepSpeedInferenceConfig,
    host: torch.device,
    device: torch.device,
    dtype: torch.dtype,
    *,
    is_filled: bool,
) -> _Prepared:
    """Place, cast, split, load unless `is_filled`, recognize and quantize."""
    packed = config.files.packed
    is_quantized = config.quantization is not None or packed is not None
    is_moved_late = is_quantized and config.parallelism.is_single_rank and not config.replace_with_kernel_inject
    module, path = _split(module, config, host, device, dtype, is_moved=not is_moved_late)
    path = None if is_filled else path
    is_streamed = path is not None and _quantizes_over_experts(module, config)
    if packed is not None:
        rows = load_part(module, packed, device)
        _warn_of_packed(rows, config)
        _log_layers(rows, module)
    elif is_streamed:
        _log_layers(load_quantized(module, config.files, config.quantization, dtype, device) or (), module)
    elif path is not None:
        weights.materialize(module, host if is_moved_late else device)
        weights.load(module, path, config.files.base_dir)
    module = (module if is_moved_late else module.to(device)).eval()
    decoder = _recognize(module, config)
    if config.quantization is not None and packed is None and not is_streamed:
        _quantize(module, config)
        save_quantized(module, config.files)
    made, ranks = _with_path(module.to(device), decoder, config), zpartition.expert_ranks_of(module)
    return attrs.evolve(made, expert_ranks=ranks if ranks.size > 1 else None)


def _quantizes_over_experts(module: nn.Module, config: DeepSpeedInferenceConfig) -> bool:
    """Return whether layers are quantized while files are read: they are whole, and experts are over ranks."""
    is_whole = zpartition.model_parallel_group_of(module).size == 1
    return config.quantization is not None and is_whole and zpartition.expert_ranks_of(module).size > 1


def _split(
    module: nn.Module,
    config: DeepSpeedInferenceConfig,
    host: torch.device,
    device: torch.device,
    dtype: torch.dtype,
    *,
    is_moved: bool,
) -> tuple[nn.Module, Given | None]:
    """Cast and split; return the module, perhaps on the meta device, and the files that are still to be read.

    is_moved: to `device`, if it has memory; a group of GPUs cannot send host tensors.
    """
    path, packed = config.files.checkpoint, config.files.packed
    if weights.is_on_meta(module) and _needs_run(module, config):
        assert path is not None
        weights.materialize(module, host)
        if packed is None:
            weights.load(module, path, config.files.base_dir)
            path = None
        else:
            _fill_alike(module)
    split = splitting.plan_split(module, config.parallelism)
    split.agree(module)
    if not weights.is_on_meta(module) and (is_moved or split.is_split):
        module = module.to(device)
    split = split.verified(module)
    if config.quantization is not None or packed is not None or has_quantized_layers(module):
        split = split.by_outputs()
    module = module.to(dtype=dtype)
    split.apply(module)
    return module, path


def _fill_alike(module: nn.Module) -> None:
    """Give all ranks the same small weights: a run shows how layers are to be split."""
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(0.02 * torch.randn(param.shape, generator=random))


def _with_path(module: nn.Module, decoder: Decoder | None, config: DeepSpeedInferenceConfig) -> _Prepared:
    return _Prepared(module, None if decoder is None else FusedPath.of(decoder, module, config.max_out_tokens))


def _prepare_streamed(
    module: nn.Module,
    config: DeepSpeedInferenceConfig,
    offload: WeightOffload,
    host: torch.device,
    device: torch.device,
    dtype: torch.dtype,
) -> _Prepared:
    """Fill, cast and quantize the blocks one by one, and let them rest at their place."""
    if config.replace_with_kernel_inject:
        log.warning("replace_with_kernel_inject: weights that are streamed are not fused; the module's forward runs")
    path: Given | None = config.files.checkpoint
    sharing = None
    if not config.parallelism.is_single_rank:
        module, path = _split(module, config, host, device, dtype, is_moved=False)
    elif splitting.num_ranks() > 1:
        sharing = offloading.share(module, device, is_filled=path is None)
    quantization = config.quantization

    def finish(part: nn.Module, name: str) -> None:
        part.to(dtype=dtype)
        prefix = f"{name}." if name else ""
        if quantization is None:
            return
        separate_chosen(part, lambda layer: quantization.format_of(f"{prefix}{layer}"))
        names = [layer for layer, *_ in linear_weights(part) if layer]
        formats = {layer: quantization.format_of(f"{prefix}{layer}") for layer in names}
        if any(format is not None for format in formats.values()):
            quantize_linears(part, formats.get)

    with weights.opened(module, path, config.files.base_dir) as tensors, offloading.voted(sharing):
        loader = functools.partial(weights.load_part, tensors=tensors)
        stream = offloading.fill_and_park(module, offload, device, loader, finish, sharing)
    return _Prepared(module.eval(), stream=stream)


def _compute_dtype(module: nn.Module, config: DeepSpeedInferenceConfig, device: torch.device) -> torch.dtype:
    """Return the dtype of the weights on `device`, and log if it is not the config's."""
    stored = next((param.dtype for param in module.parameters() if param.is_floating_point()), torch.float32)
    dtype = config.compute_dtype(device, stored)
    if config.dtype not in (dtype, torch.int8):
        level = logging.WARNING if "dtype" in config.model_fields_set else logging.INFO
        log.log(
            level, "init_inference: %s is slow on %s; weights and activations are %s", config.dtype, device, dtype
        )
    return dtype


def _check_memory(
    module: nn.Module, config: DeepSpeedInferenceConfig, dtype: torch.dtype, device: torch.device
) -> None:
    if config.offload is not None:
        return  # two blocks at a time
    tensor_ranks, expert_ranks = splitting.degrees(config.parallelism)
    needed = memory.estimate(module, dtype, config.quantization, tensor_ranks, expert_ranks)
    available = get_accelerator().available_memory()
    memory.check_min_tokens(needed, module, device, config.min_out_tokens, available)


def _recognize(module: nn.Module, config: DeepSpeedInferenceConfig) -> Decoder | None:
    """Return the fused decoder that the config asks for; None, with the reason logged, if there is none."""
    if not config.replace_with_kernel_inject:
        return None
    return recognized(module)


def _quantize(module: nn.Module, config: DeepSpeedInferenceConfig) -> None:
    """Replace linear layers by quantized ones, and log how much they were rounded, and what was left."""
    assert config.quantization is not None
    separate_chosen(module, config.quantization.format_of)
    _log_layers(quantize_linears(module, config.quantization.format_of), module)


def _warn_of_packed(rows: Sequence[LayerError], config: DeepSpeedInferenceConfig) -> None:
    """Log that a packed model has other formats than the config asks for."""
    wanted, packed = config.quantization, config.files.packed
    if packed is None or wanted is None:
        return
    if others := [row for row in rows if wanted.name_of(row.name) not in ("", row.format)]:
        log.warning(
            "init_inference: the packed model %s has %s in %d layers (%s, ...), and the config asks for %s: they "
            "stay as they are; quantize the plain model to change them",
            *(packed.path, others[0].format, len(others), others[0].name, wanted.name_of(others[0].name)),
        )


def _log_layers(rows: Sequence[LayerError], module: nn.Module) -> None:
    if not rows:
        log.warning("init_inference: the codes of the files have no exact format here, and are decoded")
        return
    worst, left = max(rows, key=lambda row: row.error), unquantized(module)
    log.info(
        "init_inference: %d linear layers quantized to %s, %s bytes; largest relative error %.3g (%s); not quantized:"
        " %s; products round activations to 8 bits, or 16 for -a16",
        *(len(rows), ", ".join(sorted({row.format for row in rows})), f"{sum(row.nbytes for row in rows):,}"),
        *(worst.error, worst.name, ", ".join(left) or "nothing"),
    )


def _needs_run(module: nn.Module, config: DeepSpeedInferenceConfig) -> bool:
    """Return True if the plan must be inferred by running the model, and the whole model fits into memory."""
    parallelism = config.parallelism
    is_small = sum(param.numel() for param in module.parameters()) <= VERIFIED_NUMEL
    return not parallelism.is_single_rank and is_small and splitting.written_plan(module, parallelism) is None
