"""An engine's members that read and write runs and weights; the work is done in `checkpointing`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from torch import nn

import zpartition
from zengine import checkpointing
from zengine.consensus import GroupPeers, on_every_rank
from zengine.weight_loading import load_weights

if TYPE_CHECKING:
    from zengine.engine import Engine
    from zengine.parts import Parts


class EnginePersistence:
    """Checkpoints and state dicts; mixed into `Engine`."""

    if TYPE_CHECKING:
        module: nn.Module
        parts: Parts

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> str:
        """Save the whole run; every rank must call it. See `checkpointing.save`.

        exclude_frozen_parameters: weights that require no gradient are not written (a base model under adapters,
            say); a load keeps those that the module has.
        """
        frozen = {name for name, param in self.module.named_parameters() if not param.requires_grad}
        left_out = frozenset(frozen if exclude_frozen_parameters else ())
        return checkpointing.save(
            _engine(self), save_dir, tag, client_state or {}, latest=save_latest, left_out=left_out
        )

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str, dict[str, Any]]:
        """Restore a run saved by `save_checkpoint`, at any world size and stage. See `checkpointing.load`.

        Raises:
            ValueError: `custom_load_fn` is given, DeepSpeed's function that copies a whole state dict into the
                module: no rank has one here.
        """
        if custom_load_fn is not None:
            raise ValueError(
                "load_checkpoint(custom_load_fn=...) is not offered: no rank holds a whole state dict while it "
                "loads. Read it with zckpt.load(), change it, and give it to engine.load_state_dict()."
            )
        what = checkpointing.What.choose(load_module_only, load_optimizer_states, load_lr_scheduler_states)
        return checkpointing.load(_engine(self), load_dir, tag, what, strict=load_module_strict)

    def load_weights(
        self, path: str | os.PathLike[str], *, strict: bool = True, like: nn.Module | None = None
    ) -> None:
        """Fill weights and masters from a `.safetensors`, a `.pt`, or a Hugging Face folder; every rank must call it.

        Each rank reads its own parts alone, however the model is split.  Names are the module's, or those that
        Transformers' folders of such a model have: experts one by one, say, where the module has them stacked.

        strict: without it what is missing stays as it is, and what the module does not have is left alone.
        like: a Transformers model whose folder it is, by the names that the module has (one on the meta device will
            do): for the stages of a pipeline, which are none themselves.

        Raises, on every rank and with nothing loaded:
            ValueError: names or shapes do not fit the module.
            CheckpointError: some rank cannot read the files, a checksum that they have differs, or Transformers
                converts them in a way that cannot be carried out part by part.
        """
        load_weights(_engine(self), path, strict=strict, like=like)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The module's, with its own names: the engine stands in for the module.

        Where it is split over ranks, that of the whole, on every rank; all ranks call, without arguments.

        Raises:
            TypeError: there are arguments, and the module is split: they are for one rank's part.
        """
        if not zpartition.Joining.of(self.module).is_idle:
            if args or kwargs:
                raise TypeError(
                    "engine.state_dict() of a model that is split over ranks makes the whole one and takes no "
                    "arguments; rename or filter what it returns, or call engine.module.state_dict() for this "
                    "rank's part"
                )
            return zpartition.whole_state_dict(self.module)
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Copy weights (also with `assign`), and masters with all the digits that are given.

        All ranks call; rank 0's values count.  Where the module is split, each rank takes its parts of the whole.
        """
        engine, partition = _engine(self), self.parts.partition
        state_dict = zpartition.own_parts(self.module, state_dict)
        with engine.clock.loading(
            "engine.load_state_dict()", is_whole=strict
        ):  # torch copies what fits before it refuses the rest
            result = on_every_rank(
                lambda: self.module.load_state_dict(state_dict, strict=strict, assign=False), GroupPeers.of(engine)
            )
            partition.synchronise()
            partition.refine(state_dict)
        return result


def _engine(mixin: EnginePersistence) -> Engine:
    return cast("Engine", mixin)
