"""`deepspeed.runtime.data_pipeline.data_routing.basic_layer`: a wrapper that lets one layer skip tokens.

An engine needs no wrapper: it hooks the layers that the config names (`zengine.features.RandomLtd`).  This one is for
custom loops that drive a RandomLTDScheduler themselves; the layer's parameters get the prefix `random_ltd_layer.`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zengine.deepspeed.runtime.data_pipeline.data_routing.scheduler import RandomLTDScheduler

__all__ = ["RandomLayerTokenDrop"]


class RandomLayerTokenDrop(nn.Module):
    """In training, a layer that processes `random_ltd_scheduler.get_current_seq()` random tokens of each sample.

    The layers of a schedule draw their tokens together when layer 0 runs.  Other tokens pass unchanged.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.random_ltd_layer = layer
        self.random_ltd_scheduler: RandomLTDScheduler | None = None
        self.reserved_length = self.curr_seq = -1
        self.max_length: int | None = None
        self.batch_first = False

    def init_config(self, config: Mapping[str, Any], scheduler: RandomLTDScheduler, random_ltd_layer_id: int) -> None:
        """Set schedule and index among the random-LTD layers; `config` is the section "random_ltd".

        Raises ValueError for an unknown model_type or hidden_state_order, or an encoder without a mask.
        """
        orders = {"batch_seq_dim": True, "seq_batch_dim": False}
        if config["hidden_state_order"] not in orders or config["model_type"] not in ("encoder", "decoder"):
            raise ValueError(
                f"hidden_state_order must be one of {', '.join(orders)} and model_type encoder or decoder, got "
                f"{config['hidden_state_order']!r} and {config['model_type']!r}"
            )
        self.random_ltd_scheduler, self.random_ltd_layer_id = scheduler, random_ltd_layer_id
        self.max_length = scheduler.state["max_value"]
        self.mask_name, self.model_type = config["model_mask_name"], config["model_type"]
        self.micro_bs = config["micro_batch_size"]
        self.random_ltd_num_layer = scheduler.random_ltd_layer_num
        self.batch_first = orders[config["hidden_state_order"]]
        if self.model_type == "encoder" and not self.mask_name:
            raise ValueError("model_type is encoder, whose masks depend on the tokens: set model_mask_name")

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        """Return the layer's output, for all tokens; of a tuple the first member is completed."""
        scheduler = self.random_ltd_scheduler
        if scheduler is None:
            return self.random_ltd_layer(hidden_states, **kwargs)
        self.reserved_length = scheduler.get_current_seq()
        self.curr_seq = hidden_states.shape[1 if self.batch_first else 0]
        if not self.training or self.reserved_length >= self.curr_seq:
            return self.random_ltd_layer(hidden_states, **kwargs)
        x = hidden_states if self.batch_first else hidden_states.transpose(0, 1)
        chosen = self._tokens(scheduler, x)
        if self.mask_name:
            kwargs[self.mask_name] = self._mask(kwargs[self.mask_name], chosen)
        where = chosen[..., None].expand(-1, -1, x.shape[-1])
        part = x.gather(1, where)
        out = self.random_ltd_layer(part if self.batch_first else part.transpose(0, 1).contiguous(), **kwargs)
        first = out[0] if isinstance(out, tuple) else out
        whole = x.scatter(1, where, first if self.batch_first else first.transpose(0, 1))
        whole = whole if self.batch_first else whole.transpose(0, 1).contiguous()
        return (whole, *out[1:]) if isinstance(out, tuple) else whole

    def _tokens(self, scheduler: RandomLTDScheduler, x: Tensor) -> Tensor:
        """(batch, kept tokens) int64, ascending; drawn for all layers by layer 0."""
        if self.random_ltd_layer_id == 0:
            weights = torch.ones(self.random_ltd_num_layer * x.shape[0], self.curr_seq, device=x.device)
            drawn = weights.multinomial(self.reserved_length).sort(dim=1).values
            scheduler.state["sample_idx"] = drawn.view(self.random_ltd_num_layer, x.shape[0], self.reserved_length)
        chosen: Tensor = scheduler.state["sample_idx"][self.random_ltd_layer_id]
        return chosen

    def _mask(self, mask: Tensor | None, chosen: Tensor) -> Tensor | None:
        """Return the mask of the kept tokens: (batch or 1, heads or 1, tokens, tokens)."""
        if mask is None:
            return None
        if self.model_type == "decoder":  # causal: the first rows and columns are the mask of any ascending tokens
            return mask[:, :, : self.reserved_length, : self.reserved_length]
        rows = mask.expand(chosen.shape[0], *mask.shape[1:])
        count, keep = rows.shape[1], self.reserved_length
        picked = rows.gather(2, chosen[:, None, :, None].expand(-1, count, -1, rows.shape[3]))
        return picked.gather(3, chosen[:, None, None, :].expand(-1, count, keep, -1))
