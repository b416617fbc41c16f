"""What is asked of a rollout, and its result as tensors: DeepSpeed's names and fields, and a few of ours.

They are mutable dataclasses, since code written for DeepSpeed copies and edits them.
"""

from __future__ import annotations

import dataclasses
import logging

from torch import Tensor

from zengine.inference.sampling import Sampling

__all__ = ["RolloutBatch", "RolloutConfig", "RolloutRequest", "SamplingConfig"]


log = logging.getLogger("zengine")


@dataclasses.dataclass
class RolloutConfig:
    """How rollouts are computed.

    Raises:
        ValueError: an unknown engine or format, or no slots.
    """

    engine: str = "hybrid_engine"
    use_graph_capture: bool = False  # DeepSpeed's; without effect: decoding is one call of C, or plain kernels
    # ours
    exact: bool = False  # log-probabilities are the trainer's, bit for bit
    quantize: str = ""  # generate with a quantized copy, such as "int8" or "int4"; "": with the weights themselves
    num_slots: int = 16  # sequences that are decoded at once
    offload_states: bool = False  # optimizer states and masters rest on the host meanwhile
    compare: int = 1  # samples of each rank that are compared with the trainer's log-probabilities (rollout/kl)

    def __post_init__(self) -> None:
        if self.engine != "hybrid_engine":
            raise ValueError(f"RolloutConfig.engine is {self.engine!r}; there is 'hybrid_engine'")
        if self.num_slots < 1 or self.compare < 0:
            raise ValueError(
                f"RolloutConfig: num_slots = {self.num_slots} must be at least 1, compare = {self.compare} at least 0"
            )
        if self.exact and self.quantize:
            raise ValueError(
                f"RolloutConfig: quantize={self.quantize!r} rounds the weights, so exact=True cannot hold: drop one"
            )
        if self.use_graph_capture:
            log.info("RolloutConfig.use_graph_capture has no effect: rollouts launch their kernels themselves")
        if self.quantize:
            from zprecision.quant import format_named

            format_named(self.quantize)


@dataclasses.dataclass
class SamplingConfig:
    """How tokens are chosen.  `top_k` of 0 or less: all tokens."""

    max_new_tokens: int
    temperature: float = 1.0  # 0: the likeliest token
    top_p: float = 1.0
    top_k: int = -1
    n_samples_per_prompt: int = 1
    continuous_batch_size: int | None = None  # sequences that are decoded at once; None: the rollout's num_slots
    # ours
    repetition_penalty: float = 1.0
    stop_tokens: tuple[int, ...] = ()  # end a sample, of which they are the last token

    def rule(self) -> Sampling:
        """Return the rule of one sample.  Raises ValueError for values out of range."""
        return Sampling(
            max_new_tokens=self.max_new_tokens,
            temperature=max(self.temperature, 0.0),
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            repetition_penalty=self.repetition_penalty,
            stop_tokens=tuple(self.stop_tokens),
        )


@dataclasses.dataclass
class RolloutRequest:
    """Prompts as one tensor, padded on the left.

    Raises:
        ValueError: shapes that do not match.
    """

    prompt_ids: Tensor  # (batch, prompt time) int64
    prompt_attention_mask: Tensor  # (batch, prompt time): 1 for tokens, 0 for padding

    def __post_init__(self) -> None:
        if self.prompt_ids.dim() != 2:
            raise ValueError(f"prompt_ids must be 2-D (batch, time); its shape is {tuple(self.prompt_ids.shape)}")
        _check_shape("prompt_attention_mask", self.prompt_attention_mask, self.prompt_ids)

    def prompts(self) -> list[tuple[int, ...]]:
        """Return the tokens of each prompt, without padding."""
        rows = zip(self.prompt_ids, self.prompt_attention_mask)
        return [tuple(ids[mask.bool()].tolist()) for ids, mask in rows]


@dataclasses.dataclass
class RolloutBatch:
    """Prompts with their samples, padded on the left of the prompt and on the right of the sample.

    Raises:
        ValueError: shapes that do not match.
    """

    input_ids: Tensor  # (samples, time) int64
    attention_mask: Tensor  # (samples, time) int64: 1 for tokens
    response_start_idx: Tensor  # (samples,) int64: column of the first new token
    log_probs: Tensor | None = None  # ours: (samples, time) float32 of each new token, 0 elsewhere

    def __post_init__(self) -> None:
        if self.input_ids.dim() != 2:
            raise ValueError(f"input_ids must be 2-D (samples, time); its shape is {tuple(self.input_ids.shape)}")
        _check_shape("attention_mask", self.attention_mask, self.input_ids)
        if self.response_start_idx.shape != self.input_ids.shape[:1]:
            raise ValueError(
                f"response_start_idx must be ({self.batch_size},); its shape is "
                f"{tuple(self.response_start_idx.shape)}"
            )

    @property
    def batch_size(self) -> int:
        """Number of samples."""
        return int(self.input_ids.shape[0])

    @property
    def seq_len(self) -> int:
        """Columns: the longest prompt and the longest sample."""
        return int(self.input_ids.shape[1])


def _check_shape(name: str, tensor: Tensor, like: Tensor) -> None:
    if tensor.shape != like.shape:
        raise ValueError(f"{name} has the shape {tuple(tensor.shape)}, and the token ids {tuple(like.shape)}")
