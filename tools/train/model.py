"""A small GPT over bytes: pre-norm blocks, causal attention, rotary positions, the output tied to the embedding.

The smallest honest member of the family: what is learnt here about sharding, precision and schedules holds for
its large relatives, because the parameter kinds are theirs (matrices, vectors, an embedding used twice).
Positions are rotations of queries and keys (Su et al. 2021), so a head can look at "the byte before" from the
first steps on; learnt position vectors spent a quarter of a short run finding that out, and the last positions of
the context, which few bytes look back at, never learnt it.
forward takes a batch of windows and returns the loss, so the training loop needs no knowledge of the model.
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

BALANCE = 0.01  # weight of the loss that keeps experts evenly used


@attrs.frozen(kw_only=True)
class Shape:
    """The size of the model: everything that fixes the parameters' shapes."""

    depth: int = 4  # blocks
    width: int = 128  # features of the residual stream
    heads: int = 2  # attention heads; must divide width
    context: int = 256  # longest window, in bytes
    experts: int = 0  # of each block, two of which a byte goes to; 0: one MLP for all

    def __attrs_post_init__(self) -> None:
        for field, value in attrs.asdict(self).items():
            if value < (field != "experts"):
                raise ValueError(f"{field} is {value}; it must be at least {int(field != 'experts')}")
        if self.width % (2 * self.heads):
            raise ValueError(f"width {self.width} is not an even multiple of heads {self.heads}")


def rotations(time: int, size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine, each (time, size / 2), of every position's angles; dtype and device of `like`.

    Computed in float32 for every forward, which is cheap: a table kept in bfloat16 would blur the positions.
    """
    speeds = 10_000.0 ** -torch.arange(0, 1, 2 / size, device=like.device)
    angles = torch.outer(torch.arange(time, device=like.device), speeds)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair (first half, second half) of the features turned by its position's angle; x (..., time, size)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of each position to those up to it; (batch, heads, time, size) each."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Part:
    """Which part of each window a rank works on: here all of it."""

    def of(self, tokens: Tensor) -> Tensor:
        """That part of (batch, time)."""
        return tokens

    def begin(self, time: int) -> int:
        """Where in the window a part of `time` positions begins."""
        return 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """What positions of the part see of the window."""
        return causal(query, key, value)

    def loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Mean over the window, () float32, from scores (batch, time, 256) of the part."""
        return F.cross_entropy(scores.float().flatten(0, 1), targets.flatten())


ALL = Part()


class Scorer(Protocol):
    """What can be asked for the next byte: the model, or whoever asks its stages."""

    @property
    def shape(self) -> Shape: ...
    @property
    def numel(self) -> int: ...  # elements of all parameters
    @property
    def device(self) -> torch.device: ...
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
        if shape.experts:  # each of half the size, so that a byte costs what it costs without
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

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, uneven: list[Tensor], part: Part = ALL) -> Tensor:
        """`uneven` gets a term of the loss where bytes are shared out among experts."""
        parts = self.qkv(self.attention_norm(x)).chunk(3, dim=-1)  # of the heads that are here, when split over ranks
        query, key, value = (part.unflatten(-1, (self.heads, self.head_size)).transpose(1, 2) for part in parts)
        query, key = rotated(query, cos, sin), rotated(key, cos, sin)
        mixed = part.attend(query, key, value)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(2))
        if self.moe is not None:
            mixture, aux_loss, _ = self.moe(self.mlp_norm(x))
            uneven.append(aux_loss)
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
        self.part = ALL  # in training; what is only looked at, every rank does whole
        self.token_embedding = nn.Embedding(VOCABULARY, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.depth))
        self.final_norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        self.head.weight = self.token_embedding.weight
        self.numel = sum(parameter.numel() for parameter in self.parameters())  # of which a rank may get a part
        self._initialise(torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator) -> None:
        """GPT-2's rule: normal(0, 0.02), biases 0, and layers that write into the stream 1/sqrt(2 depth) smaller."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() == 1:  # the gains of the norms
                parameter.fill_(1.0)
            else:
                writes = name.endswith(("attention_out.weight", "mlp_out.weight", "down.weight"))
                parameter.normal_(0.0, 0.02 / math.sqrt(2 * self.shape.depth if writes else 1), generator=generator)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.token_embedding.weight.device

    def logits(self, tokens: Tensor, part: Part = ALL, uneven: list[Tensor] | None = None) -> Tensor:
        """Scores of the next byte after each position: tokens (batch, time) int64 -> (batch, time, 256).

        uneven: gets how unevenly each block's experts are used, () float32.
        """
        uneven = [] if uneven is None else uneven
        begin = part.begin(tokens.shape[1])
        time = begin + tokens.shape[1]
        if time > self.shape.context:
            raise ValueError(f"a window of {time} bytes is longer than the model's context of {self.shape.context}")
        x = self.token_embedding(tokens)
        cos, sin = (turn[begin:] for turn in rotations(time, self.shape.width // self.shape.heads, like=x))
        for block in self.blocks:
            x = block(x, cos, sin, uneven, part)
        scores: Tensor = self.head(self.final_norm(x))
        return scores

    def forward(self, windows: Tensor) -> Tensor:
        """Mean loss in nats per byte, () float32; windows (batch, time + 1) of any integer dtype."""
        tokens, part = windows.long(), self.part if torch.is_grad_enabled() else ALL
        uneven: list[Tensor] = []
        scores = self.logits(part.of(tokens[:, :-1]), part, uneven)
        loss = part.loss(scores, part.of(tokens[:, 1:]))
        return balanced(loss, uneven, self.shape.depth) if self.training else loss


def balanced(loss: Tensor, uneven: list[Tensor], depth: int) -> Tensor:
    """The loss of training; `uneven` is how unevenly the experts of `depth` blocks are used, () each or their sum."""
    return loss + BALANCE / depth * torch.stack(uneven).sum() if uneven else loss


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Matrices decay, vectors (biases and gains) do not: pulling those towards zero only costs fit."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


@torch.no_grad()
def generate(model: Scorer, prompt: bytes, *, num_bytes: int, temperature: float = 0.7, seed: int = 0) -> bytes:
    """Continue `prompt` by `num_bytes` sampled bytes; temperature 0 takes the likeliest each time.

    Draws from a generator of its own, so that writing a sample does not disturb the training's random state.
    """
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(num_bytes):
        tokens = torch.tensor([text[-model.shape.context :]], device=model.device)
        scores = model.logits(tokens)[0, -1].float().cpu()
        if temperature == 0:
            text.append(int(scores.argmax()))
        else:
            text.append(int(torch.multinomial((scores / temperature).softmax(0), 1, generator=generator)))
    return bytes(text)
