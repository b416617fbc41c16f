"""`engine.generate`: Transformers' arguments and results, with the fused path as the loop.

Transformers prepares prompts, masks, logits processors and stopping criteria, and calls a decoding loop that it is
given (`custom_generate`).  The loop here computes logits by the fused path and chooses tokens as Transformers' own
does, so results are equal token by token, drawn ones too.  Padding is left out instead of masked.

Beams are searched by Transformers' loop over a cache of ours (decoder_cache.py).  What neither can do (assisted
decoding, hidden states, prompts as embeddings, ...) runs by the module's forward, whose layers are quantized as well;
the argument is logged once.

Tensor ranks choose one token: rank 0's scores and random state are those of all.  So do expert ranks, which decode
the same prompts (`same_on_all`), since each computes the terms of its own experts.

Rejected: Transformers' loop for all calls (it prepares masks and positions anew for every token).
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any, final

import attrs
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import zcomm
from zengine.inference.calls.path import FusedPath
from zengine.inference.decoder import DecoderPass
from zengine.inference.generation import Request, generate
from zengine.inference.sampling import Sampling
from zpartition import ModelParallelGroup
from zpartition.tensor import agree_on_random_numbers

__all__ = [
    *("SameOnAllRanks", "arguments_by_name", "fused_generate", "lengths_asked", "own_generate", "same_on_all"),
    *("share_random_state", "unfused_argument"),
]

_OWN = [
    "max_new_tokens",
    "max_length",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "repetition_penalty",
    "eos_token_id",
    "pad_token_id",
]
# Arguments that calls written for Transformers have, and the values that change nothing here.
_IDLE: dict[str, tuple[object, ...]] = {
    "num_beams": (1,),
    "use_cache": (True, False),
    "synced_gpus": (False,),
    "return_dict_in_generate": (False,),
}
# Arguments of Transformers' generate, and the values with which the fused loop computes the same.
_PLAIN: dict[str, tuple[object, ...]] = {
    "num_beams": (None, 1),
    "assistant_model": (None,),
    "assistant_early_exit": (None,),
    "prompt_lookup_num_tokens": (None,),
    "use_mtp": (None, False),
    "penalty_alpha": (None, 0, 0.0),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "token_healing": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "inputs_embeds": (None,),
    "past_key_values": (None,),
    "position_ids": (None,),
    "negative_prompt_ids": (None,),
    "guidance_scale": (None, 1, 1.0),
    "custom_generate": (None,),
    "synced_gpus": (None, False),
    "cache_implementation": (None, "dynamic", "dynamic_full", "static", "hybrid"),  # the cache here is static
}
_READ = ("input_ids", "attention_mask", "logits_to_keep")  # arguments of the module that the loop understands


def _parameters_of(module: nn.Module, make: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a module's `generate`: those of the model inside, where it hands all on (PEFT)."""
    found = inspect.signature(make).parameters
    if all(each.kind is not inspect.Parameter.VAR_POSITIONAL for each in found.values()):
        return found
    inner = (getattr(type(each), "generate", None) for each in module.modules() if each is not module)
    accepted = (list(inspect.signature(each).parameters.items())[1:] for each in inner if each is not None)
    return next((dict(each) for each in accepted if "custom_generate" in dict(each)), found)


def arguments_by_name(
    module: nn.Module, make: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call of `make`, the module's `generate` (Transformers'), by name."""
    return {**dict(zip(_parameters_of(module, make), args)), **kwargs}


def unfused_argument(module: nn.Module, given: Mapping[str, Any], make: Any = None) -> str:
    """Return the name of an argument that the fused loop cannot honour; "" if there is none.

    make: the module's `generate`, if an engine has put its own in that place.
    """
    make = module.generate if make is None else make
    accepted = _parameters_of(module, make)
    if "custom_generate" not in accepted:
        return "custom_generate (this version of Transformers lacks it)"
    if given.get("inputs", given.get("input_ids")) is None:
        return "inputs"
    sources = [given.get("generation_config"), getattr(module, "generation_config", None)]
    for name, plain in _PLAIN.items():
        values = [given[name]] if name in given else [getattr(each, name, None) for each in sources]
        if any(not any(value is each or value == each for each in plain) for value in values):
            return name
    known = {*accepted, *_READ, *vars(sources[1]), *_PLAIN, "stop_strings", "tokenizer"}
    return next((name for name, value in given.items() if name not in known and value is not None), "")


def lengths_asked(module: nn.Module, given: Mapping[str, Any]) -> tuple[int, int]:
    """Return the tokens of the longest prompt, without padding, and how many new ones the arguments ask for.

    Each is 0 for arguments that do not say it: prompts that are no tensor, a limit that is no number (`generate` says
    so, on its rank), no limit but Transformers' default.  As there, each limit comes from the call, its config or
    the module's, and max_new_tokens of any goes first.
    """
    prompt, mask = given.get("inputs", None), given.get("attention_mask")
    prompt = given.get("input_ids") if prompt is None else prompt
    if not isinstance(prompt, Tensor) or prompt.dim() != 2:
        return 0, 0
    width = prompt.shape[1]
    longest = width
    if isinstance(mask, Tensor) and mask.shape == prompt.shape and mask.numel():
        longest = int(mask.bool().sum(1).max())
    configs = (given.get("generation_config"), getattr(module, "generation_config", None))
    sources = (given, *map(_limits_of, configs))
    for name, ahead in (("max_new_tokens", 0), ("max_length", width)):
        limit = next((source[name] for source in sources if source.get(name) is not None), None)
        if limit is not None:
            return longest, max(int(limit) - ahead, 1) if isinstance(limit, Integral) else 0
    return longest, 0


def _limits_of(config: Any) -> dict[str, Any]:
    """Return the limits that a GenerationConfig sets; those of a new one are no choice of anybody."""
    if config is None:
        return {}
    usual = type(config)()
    names = ("max_new_tokens", "max_length")
    return {name: found for name in names if (found := getattr(config, name, None)) != getattr(usual, name, None)}


def fused_generate(path: FusedPath, module: nn.Module, given: Mapping[str, Any], make: Any = None) -> Any:
    """Call the module's `generate` (Transformers') with the fused loop; `given` are its arguments, by name.

    make: as for `unfused_argument`.
    """
    given = dict(given)
    strings, tokenizer = given.pop("stop_strings", None), given.pop("tokenizer", None)
    if strings is not None:
        from transformers import StopStringCriteria  # the module has it

        if tokenizer is None:
            raise ValueError("generate() got stop_strings without a tokenizer: pass tokenizer=.")
        given["stopping_criteria"] = [*(given.get("stopping_criteria") or ()), StopStringCriteria(tokenizer, strings)]

    def decode(
        model: nn.Module,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        loop = _Loop(logits_processor, stopping_criteria, generation_config, given.get("streamer"))
        return _decode(path, input_ids, model_kwargs.get("attention_mask"), loop)

    make = module.generate if make is None else make
    return make(**given, custom_generate=decode)


@attrs.frozen(eq=False)
class _Loop:
    """What Transformers has prepared."""

    process: Any  # (input_ids, scores) -> scores
    criteria: Any  # (input_ids, scores) -> (batch,) bool
    config: Any  # GenerationConfig
    streamer: Any


@torch.no_grad()
def _decode(path: FusedPath, input_ids: Tensor, mask: Tensor | None, loop: _Loop) -> Any:
    prompts = _without_padding(input_ids, mask)
    path.check_length(max(map(len, prompts)), loop.config.max_length - input_ids.shape[1])
    with path.empty_steps(len(prompts)) as steps:
        return _decode_rows(path, steps, input_ids, prompts, loop)


def _decode_rows(path: FusedPath, steps: DecoderPass, input_ids: Tensor, prompts: list[Tensor], loop: _Loop) -> Any:
    """Prefill all rows, then alternate: process logits, choose, stop, and one pass for each row that goes on."""
    logits = path.prefill(steps, prompts).to(input_ids.device)
    pad = _padding_token(loop.config)
    has_end = any(hasattr(each, "eos_token_id") for each in loop.criteria)
    going = torch.ones(len(prompts), dtype=torch.long, device=input_ids.device)
    kept: dict[str, list[Tensor]] = {"scores": [], "logits": []}
    while True:
        scores = loop.process(input_ids, logits.clone())
        _keep(kept, loop.config, scores, logits)
        tokens = _choose(scores, loop.config.do_sample)
        if has_end:
            tokens = tokens * going + pad * (1 - going)
        input_ids = torch.cat((input_ids, tokens[:, None]), dim=-1)
        if loop.streamer is not None:
            loop.streamer.put(tokens.cpu())
        going = going & ~loop.criteria(input_ids, tuple(kept["scores"]) or None)
        if not going.any():
            break
        rows = going.nonzero().flatten().tolist() if has_end else range(len(prompts))
        logits = path.step(steps, tokens, rows, logits)
    if loop.streamer is not None:
        loop.streamer.end()
    return _result(input_ids, kept, loop.config)


def _padding_token(config: Any) -> int:
    """Return the token behind the end of a sample: the config's, or the first of its end tokens, as Transformers."""
    ends = config.eos_token_id
    if config.pad_token_id is not None or ends is None:
        return int(config.pad_token_id or 0)
    return int(ends if isinstance(ends, int) else ends[0])


def _without_padding(input_ids: Tensor, mask: Tensor | None) -> list[Tensor]:
    rows = list(input_ids) if mask is None else [row[seen.bool()] for row, seen in zip(input_ids, mask)]
    if empty := [index for index, row in enumerate(rows) if not len(row)]:
        raise ValueError(f"prompt {empty[0]} has no tokens: its attention mask is all zeros")
    return rows


def _choose(scores: Tensor, is_drawn: bool) -> Tensor:
    """Return (batch,) tokens, drawn as Transformers does."""
    if is_drawn:
        return torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1).squeeze(1)
    return scores.argmax(dim=-1)


def _keep(kept: dict[str, list[Tensor]], config: Any, scores: Tensor, logits: Tensor) -> None:
    if config.return_dict_in_generate:
        if config.output_scores:
            kept["scores"].append(scores)
        if config.output_logits:
            kept["logits"].append(logits)


def _result(sequences: Tensor, kept: Mapping[str, list[Tensor]], config: Any) -> Any:
    if not config.return_dict_in_generate:
        return sequences
    import transformers.generation

    scores, logits = (tuple(kept[name]) or None for name in ("scores", "logits"))
    output: Any = transformers.generation
    return output.GenerateDecoderOnlyOutput(sequences=sequences, scores=scores, logits=logits)


# -- modules without Transformers' generate -------------------------------------------------------


def own_generate(
    path: FusedPath,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    *,
    inputs: Tensor | None = None,
    num_return_sequences: int | None = None,
    seeds: Sequence[int] | None = None,
    **given: Any,
) -> Tensor:
    """Generate for a module that has no `generate`; returns (batch * num_return_sequences, time) int64 token ids.

    input_ids, or inputs: (batch, time) integers.  attention_mask: of the same shape; 0 is padding.
    given: max_new_tokens (20 by default) or max_length (with the prompt), do_sample, temperature, top_k, top_p,
        repetition_penalty, eos_token_id (one or several), pad_token_id (the first end token by default, else 0), as
        in Transformers; None counts as not given.
    seeds: one for each sample of a prompt; by default drawn from torch's generator.

    Raises TypeError for other arguments, ValueError for prompts of another shape and as many seeds as there are not
    samples, RuntimeError for prompts that do not fit into the cache.
    """
    given = {name: value for name, value in given.items() if value is not None and value not in _IDLE.get(name, ())}
    if unknown := sorted(set(given) - set(_OWN)):
        raise TypeError(f"generate() got {', '.join(unknown)}, but accepts {', '.join(sorted(_OWN))}")
    ids = _checked_ids(input_ids if input_ids is not None else inputs, attention_mask)
    prompts = _without_padding(ids, attention_mask)
    rule = _rule(given, ids.shape[1])
    path.check_length(max(map(len, prompts)), rule.max_new_tokens)
    drawn = torch.randint(2**62, (len(prompts), _num_samples(num_return_sequences, seeds))).tolist()
    requests = [
        Request(prompt=tuple(prompt.tolist()), sampling=rule, seeds=tuple(drawn[index] if seeds is None else seeds))
        for index, prompt in enumerate(prompts)
    ]
    with path.empty_steps(min(16, len(prompts) * len(requests[0].seeds))) as steps:
        samples = generate(steps, requests)
    return _joined(ids, samples, given.get("pad_token_id", next(iter(rule.stop_tokens), 0)))


def _checked_ids(ids: Tensor | None, mask: Tensor | None) -> Tensor:
    """Return the prompts.  Raises TypeError without them, ValueError for another shape or dtype."""
    if ids is None:
        raise TypeError("generate() needs input_ids: token ids, (batch, time)")
    is_whole = isinstance(ids, Tensor) and not ids.is_floating_point() and not ids.is_complex()
    if not is_whole or ids.dim() != 2 or not ids.numel():
        found = f"{ids.dtype} of {tuple(ids.shape)}" if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
        raise ValueError(f"input_ids must be a tensor of whole numbers, (batch, time), not empty; it is {found}")
    if mask is not None and mask.shape != ids.shape:
        raise ValueError(f"attention_mask has the shape {tuple(mask.shape)}, and input_ids {tuple(ids.shape)}")
    return ids


def _num_samples(count: int | None, seeds: Sequence[int] | None) -> int:
    """Return the samples of a prompt.  Raises ValueError if the seeds are others."""
    if seeds is not None and count not in (None, len(seeds)):
        raise ValueError(
            f"{len(seeds)} seeds for num_return_sequences = {count}: pass one for each sample of a prompt"
        )
    return len(seeds) if seeds is not None else 1 if count is None else count


def _rule(given: Mapping[str, Any], prompt_length: int) -> Sampling:
    ends = given.get("eos_token_id", [])
    is_drawn = given.get("do_sample", False)
    by_length = given["max_length"] - prompt_length if "max_length" in given else 20
    return Sampling(
        max_new_tokens=given.get("max_new_tokens", by_length),
        temperature=given.get("temperature", 1.0) if is_drawn else 0.0,
        top_k=given.get("top_k", 0),
        top_p=given.get("top_p", 1.0),
        repetition_penalty=given.get("repetition_penalty", 1.0),
        stop_tokens=tuple(torch.as_tensor(ends, dtype=torch.long).flatten().tolist()),
    )


def _joined(input_ids: Tensor, samples: Sequence[Sequence[Any]], pad: int) -> Tensor:
    """Return prompts with their samples, padded on the right to the longest."""
    longest = max(len(sample.tokens) for each in samples for sample in each)
    rows = []
    for prompt, each in zip(input_ids, samples):
        for sample in each:
            tokens = [*sample.tokens, *(pad for _ in range(longest - len(sample.tokens)))]
            rows.append(torch.cat((prompt, torch.tensor(tokens, dtype=prompt.dtype, device=prompt.device))))
    return torch.stack(rows)


# -- tensor ranks ---------------------------------------------------------------------------------


@final
@attrs.frozen(eq=False)
class SameOnAllRanks:
    """A logits processor that gives all ranks of a group the scores of the first."""

    group: ProcessGroup | None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return rank 0's scores, (batch, vocabulary)."""
        scores = scores.contiguous().clone()
        zcomm.broadcast(scores, self.group, source=0, label="scores")
        return scores


def same_on_all(given: Mapping[str, Any], group: ProcessGroup | None) -> bool:
    """Return whether the ranks of a group have the same prompts, masks, numbers and flags.  Collective."""
    lines = [f"{name}: {_digest(value)}" for name, value in sorted(given.items())]
    found = zcomm.all_gather_object(lines, group)
    return all(each == found[0] for each in found)


def _digest(value: object) -> str:
    """Return a text that is the same for equal values of generate's arguments, and for equal kinds of objects."""
    if isinstance(value, Tensor):
        content = value.detach().to("cpu").contiguous().view(-1)
        return hashlib.sha256(repr((tuple(value.shape), content.tolist())).encode()).hexdigest()
    if hasattr(value, "to_dict"):  # a GenerationConfig
        return _digest(value.to_dict())
    if isinstance(value, Mapping):
        return repr([(str(name), _digest(each)) for name, each in value.items()])
    if isinstance(value, (list, tuple)):
        return repr([_digest(each) for each in value])
    is_plain = value is None or isinstance(value, (bool, int, float, str))
    return repr(value) if is_plain else type(value).__name__


def share_random_state(group: ProcessGroup | None, device: torch.device) -> None:
    """Set the random states of all ranks to rank 0's: of the CPU, and of `device`."""
    agree_on_random_numbers(ModelParallelGroup.of(group), device)
