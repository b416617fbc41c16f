"""A small GPT over bytes: pre-norm blocks, causal attention, rotary positions, the output tied to the embedding.

It has the kinds of parameters of large models (matrices, vectors, an embedding used twice), so results about
sharding, precision and schedules carry over.  Positions are rotations of queries and keys (Su et al. 2021), so a head
can attend to the previous byte from the first steps on.  Rejected: learnt position vectors, which took a quarter of a
short run to learn this, and never learnt it for the last positions of the context.

`forward` takes a batch of windows and returns the loss, so the training loop does not depend on the model.
"""

from __future__ import annotations

import math
from typing import Protocol

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zpartition.experts import ExpertMLP, MoE

from .text import VOCABULARY

BALANCE_WEIGHT = 0.01  # of the experts' load-balancing loss


@attrs.frozen(kw_only=True)
class Shape:
    """Size of the model: determines the shapes of all parameters."""

    depth: int = 4  # blocks
    width: int = 128  # features of the residual stream
    heads: int = 2  # attention heads; must divide width
    context: int = 256  # longest window, in bytes
    experts: int = 0  # in each block, with top-2 routing; 0: a dense MLP

    def __attrs_post_init__(self) -> None:
        for field, value in attrs.asdict(self).items():
            if value < (field != "experts"):
                raise ValueError(f"{field} is {value}; it must be at least {int(field != 'experts')}")
        if self.width % (2 * self.heads):
            raise ValueError(f"width {self.width} is not an even multiple of heads {self.heads}")


def rotary_tables(time: int, size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of every position's angles, (time, size / 2) each; dtype and device of `like`.

    Computed in float32 for every forward, which is cheap: a table kept in bfloat16 would lose precision.
    """
    speeds = 10_000.0 ** -torch.arange(0, 1, 2 / size, device=like.device)
    angles = torch.outer(torch.arange(time, device=like.device), speeds)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (first half, second half) of features by its position's angle; x (..., time, size)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention; (batch, heads, time, size) each."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class SequencePart:
    """Part of each window that a rank trains on: the whole window, unless sequence parallelism cuts it."""

    def select(self, tokens: Tensor) -> Tensor:
        """Select this rank's part of (batch, time)."""
        return tokens

    def offset(self, time: int) -> int:
        """Return the position in the window at which a part of length `time` begins."""
        return 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Causal attention of the part's positions over the whole window."""
        return causal(query, key, value)

    def loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss over the window, () float32, from the part's scores (batch, time, 256)."""
        return F.cross_entropy(scores.float().flatten(0, 1), targets.flatten())


WHOLE_SEQUENCE = SequencePart()


class Scorer(Protocol):
    """Source of scores for the next byte: the model, or its pipeline stages."""

    @property
    def shape(self) -> Shape: ...
    @property
    def numel(self) -> int: ...  # elements of all parameters
    @property
    def input_device(self) -> torch.device: ...
    def logits(self, tokens: Tensor) -> Tensor: ...


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x)).  x is (batch, time, width)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.head_size = shape.heads, shape.width // shape.heads
        self.attention_norm = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.attention_out = nn.Linear(shape.width, shape.width)
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.moe: MoE | None = None
        if shape.experts:  # half the size each, so top-2 routing costs as much as the dense MLP
            expert = ExpertMLP(shape.width, 2 * shape.width, "gelu")
            self.moe = MoE(
                shape.width,
                expert,
                shape.experts,
                k=2,
                capacity_factor=1.25,
                eval_capacity_factor=2.0,
                top2_2nd_expert_sampling=False,
            )
        else:
            self.mlp_in = nn.Linear(shape.width, 4 * shape.width)
            self.mlp_out = nn.Linear(4 * shape.width, shape.width)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, aux_losses: list[Tensor], part: SequencePart = WHOLE_SEQUENCE
    ) -> Tensor:
        """Run the block; append the experts' load-balancing loss, if any, to `aux_losses`."""
        parts = self.qkv(self.attention_norm(x)).chunk(3, dim=-1)  # of this rank's heads under tensor parallelism
        query, key, value = (part.unflatten(-1, (self.heads, self.head_size)).transpose(1, 2) for part in parts)
        query, key = apply_rotary(query, cos, sin), apply_rotary(key, cos, sin)
        mixed = part.attend(query, key, value)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(2))
        if self.moe is not None:
            mixture, aux_loss, _ = self.moe(self.mlp_norm(x))
            aux_losses.append(aux_loss)
            mixed_in: Tensor = x + mixture
            return mixed_in
        hidden = F.gelu(self.mlp_in(self.mlp_norm(x)), approximate="tanh")
        output: Tensor = x + self.mlp_out(hidden)
        return output


class GPT(nn.Module):
    """The language model.  Weights depend on `shape` and `seed` only, not on the global random state."""

    def __init__(self, shape: Shape, *, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.part = WHOLE_SEQUENCE  # in training; every rank evaluates whole windows
        self.token_embedding = nn.Embedding(VOCABULARY, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.depth))
        self.final_norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        self.head.weight = self.token_embedding.weight
        self.numel = sum(
            parameter.numel() for parameter in self.parameters()
        )  # of the whole model; a rank may hold a part
        self._initialise(torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator) -> None:
        """Initialize as GPT-2: normal(0, 0.02), biases 0, residual outputs smaller by 1/sqrt(2 depth)."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() == 1:  # the gains of the norms
                parameter.fill_(1.0)
            else:
                writes = name.endswith(("attention_out.weight", "mlp_out.weight", "down.weight"))
                parameter.normal_(0.0, 0.02 / math.sqrt(2 * self.shape.depth if writes else 1), generator=generator)

    @property
    def input_device(self) -> torch.device:
        """Device of the weights."""
        return self.token_embedding.weight.device

    def logits(
        self, tokens: Tensor, part: SequencePart = WHOLE_SEQUENCE, aux_losses: list[Tensor] | None = None
    ) -> Tensor:
        """Return scores of the next byte after each position: tokens (batch, time) int64 -> (batch, time, 256).

        aux_losses: receives the load-balancing loss of each block with experts, () float32.
        """
        aux_losses = [] if aux_losses is None else aux_losses
        begin = part.offset(tokens.shape[1])
        time = begin + tokens.shape[1]
        if time > self.shape.context:
            raise ValueError(f"a window of {time} bytes is longer than the model's context of {self.shape.context}")
        x = self.token_embedding(tokens)
        cos, sin = (table[begin:] for table in rotary_tables(time, self.shape.width // self.shape.heads, like=x))
        for block in self.blocks:
            x = block(x, cos, sin, aux_losses, part)
        scores: Tensor = self.head(self.final_norm(x))
        return scores

    def forward(self, windows: Tensor) -> Tensor:
        """Return the mean loss in nats per byte, () float32; windows (batch, time + 1) of any integer dtype."""
        tokens, part = windows.long(), self.part if torch.is_grad_enabled() else WHOLE_SEQUENCE
        aux_losses: list[Tensor] = []
        scores = self.logits(part.select(tokens[:, :-1]), part, aux_losses)
        loss = part.loss(scores, part.select(tokens[:, 1:]))
        return add_balance_loss(loss, aux_losses, self.shape.depth) if self.training else loss


def add_balance_loss(loss: Tensor, aux_losses: list[Tensor], depth: int) -> Tensor:
    """Add the load-balancing losses of `depth` blocks, () each or their sum, to the loss of training."""
    return loss + BALANCE_WEIGHT / depth * torch.stack(aux_losses).sum() if aux_losses else loss


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Return two parameter groups: weight decay for matrices, none for vectors (biases and gains)."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


@torch.no_grad()
def generate(model: Scorer, prompt: bytes, *, num_bytes: int, temperature: float = 0.7, seed: int = 0) -> bytes:
    """Continue `prompt` by `num_bytes` sampled bytes; temperature 0 takes the most likely byte.

    Uses a generator of its own, so training's random state does not change.
    """
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(num_bytes):
        tokens = torch.tensor([text[-model.shape.context :]], device=model.input_device)
        scores = model.logits(tokens)[0, -1].float().cpu()
        if temperature == 0:
            text.append(int(scores.argmax()))
        else:
            text.append(int(torch.multinomial((scores / temperature).softmax(0), 1, generator=generator)))
    return bytes(text)
