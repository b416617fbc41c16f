"""`deepspeed.checkpoint.deepspeed_checkpoint`: the files of a checkpoint of DeepSpeed, by layer and by rank.

For tools that convert such folders, as Megatron-DeepSpeed's.  Files are read without unpickling.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zckpt.interchange import read_torch_file
from zengine.deepspeed.checkpoint.constants import LAYER_FILE_PREFIX, MODEL_FILE_PREFIX, PARAM_SHAPES
from zengine.deepspeed.checkpoint.reshape_3d_utils import model_3d_desc
from zengine.deepspeed.checkpoint.reshape_meg_2d import meg_2d_parallel_map, reshape_meg_2d_parallel
from zengine.deepspeed.checkpoint.reshape_utils import (
    basic_folder_validation,
    get_files,
    get_files_with_prefix,
    merge_state,
    partition_data,
    validate_files,
)
from zengine.deepspeed.checkpoint.zero_checkpoint import ZeROCheckpoint

__all__ = ["DeepSpeedCheckpoint"]

EMBEDDING_LAYER_INDEX = 0
FINAL_LAYER_NORM_INDEX = -1
ARGS_KEY = "args"
CHECKPOINT_INFO_KEY = "checkpoint_info"
ITERATION_KEY = "iteration"

# Megatron's layers: tensors that every tensor rank has whole, and those that are joined along dim 1
SEQUENTIAL_LAYERS = [
    *("input_layernorm.weight", "input_layernorm.bias", "self_attention.dense.bias"),
    *("post_attention_layernorm.weight", "post_attention_layernorm.bias", "mlp.dense_4h_to_h.bias"),
    "position_embeddings.weight",
]
LAYER_CONCAT_DIM = {"self_attention.dense.weight": 1, "mlp.dense_4h_to_h.weight": 1}


class DeepSpeedCheckpoint:
    """One checkpoint (`save_dir/tag`), seen with the same or smaller degrees of parallelism."""

    def __init__(
        self,
        dir: str,
        tp_degree: int | None = None,
        pp_degree: int | None = None,
        dp_degree: int | None = None,
        final_layer_norm_idx: int = FINAL_LAYER_NORM_INDEX,
    ) -> None:
        """Find the files.  None: a degree as saved.

        Raises AssertionError (no checkpoint, or degrees that do not divide), zckpt.CheckpointCorrupt.
        """
        basic_folder_validation(dir)
        self.dir = dir
        self.final_layer_norm_idx = final_layer_norm_idx
        self.file_list = get_files(dir)
        self.mp_rank_files = get_files_with_prefix(self.file_list, MODEL_FILE_PREFIX)
        assert self.mp_rank_files, f"{dir} is no checkpoint of DeepSpeed: it has no {MODEL_FILE_PREFIX}* files"
        is_layer = re.compile(rf"{LAYER_FILE_PREFIX}\d+-(model_\d+-)?model_states\.pt")
        self.layer_files = sorted(path for path in self.file_list if is_layer.fullmatch(os.path.basename(path)))
        self.zero_checkpoint = ZeROCheckpoint(dir)
        source = self.zero_checkpoint.src_3d
        self.layer_keys = sorted({os.path.basename(path).partition("-")[0] for path in self.layer_files}, key=_number)
        self.layer_count = len(self.layer_keys)
        self.tp_degree = source.tp_degree if tp_degree is None else tp_degree
        self.pp_degree = source.pp_degree if pp_degree is None else pp_degree
        self.dp_degree = source.dp_degree if dp_degree is None else dp_degree
        self.original_world_size = source.world_size()
        self.world_size = self.tp_degree * self.pp_degree * self.dp_degree
        self.old_2d_map = meg_2d_parallel_map(source.pp_degree, source.tp_degree)
        self.old_2d_map.simple_init()
        self.new_2d_map = reshape_meg_2d_parallel(source.pp_degree, source.tp_degree, self.pp_degree, self.tp_degree)
        self.zero_checkpoint.reshape(model_3d_desc(self.pp_degree, self.tp_degree, self.dp_degree))
        self.global_state: dict[str, Any] = {}
        self.pp_to_transformer_map = self._stage_layers()
        self.transformer_file_map = self._layer_files_by_rank()
        self.tp_to_embedding_map = self._files_by_tensor_rank(EMBEDDING_LAYER_INDEX)
        self.tp_to_final_norm_map = self._files_by_tensor_rank(final_layer_norm_idx)

    def is_change_tp_degree(self) -> bool:
        return self.tp_degree != self.zero_checkpoint.get_src_tp_degree()

    def is_change_pp_degree(self) -> bool:
        return self.pp_degree != self.zero_checkpoint.get_src_pp_degree()

    def is_change_dp_degree(self) -> bool:
        return self.dp_degree != self.zero_checkpoint.get_src_dp_degree()

    # -- tables, printed -------------------------------------------------------------------------

    def show_2d_mapping(self) -> None:
        print("reshaped 2d map ---- begin")
        for stage in range(self.pp_degree):
            for rank in range(self.tp_degree):
                print(f"[{stage}, {rank}] = {self.get_2d_parallel_files(tp_index=rank, pp_index=stage)}")
        print("reshaped 2d map ---- end")

    def show_tp_embedding_map(self) -> None:
        _show(self.tp_to_embedding_map, "tp_to_embedding_layers")

    def show_tp_final_norm_map(self) -> None:
        _show(self.tp_to_final_norm_map, "tp_to_final_norm_layers")

    def show_pp_transformer_map(self) -> None:
        _show(self.pp_to_transformer_map, "pp_to_transformer_layers")

    def show_transformer_file_map(self) -> None:
        _show(self.transformer_file_map, "rank_to_transformer_files")

    # -- content ---------------------------------------------------------------------------------

    def get_zero_checkpoint_state(
        self, pp_index: int, tp_index: int, dp_index: int, strip_tensor_paddings: bool = True
    ) -> dict[str, Any]:
        """Return the joined optimizer shards of a rank, see ZeROCheckpoint.get_state_for_rank."""
        found: dict[str, Any] = self.zero_checkpoint.get_state_for_rank(
            pp_index, tp_index, dp_index, [PARAM_SHAPES], strip_tensor_paddings
        )
        return found

    def get_zero_files(self, pp_index: int, tp_index: int, dp_index: int) -> list[str]:
        return self.zero_checkpoint.get_files_for_rank(pp_index, tp_index, dp_index)

    def get_embedding_layer_id(self) -> str:
        return self.layer_keys[EMBEDDING_LAYER_INDEX]

    def get_final_norm_layer_id(self) -> str:
        return self.layer_keys[self.final_layer_norm_idx]

    def get_iteration(self) -> Any:
        """Return Megatron's iteration, 0 if it is not saved."""
        return self._saved(ITERATION_KEY) or 0

    def get_args(self) -> Any:
        """Return Megatron's arguments, None if they are not saved."""
        return self._saved(ARGS_KEY)

    def get_checkpoint_info(self, info_key: str = CHECKPOINT_INFO_KEY) -> Any:
        """Return a value of the model states, None if it is not saved."""
        return self._saved(info_key)

    def get_embedding_files(self, tp_index: int) -> list[str]:
        return self._of(self.tp_to_embedding_map, tp_index)

    def get_embedding_state(self, tp_index: int) -> dict[str, Tensor]:
        """Return the first layer, joined from its tensor ranks."""
        return _join([read_torch_file(path) for path in self.get_embedding_files(tp_index)])

    def get_final_norm_files(self, tp_index: int) -> list[str]:
        return self._of(self.tp_to_final_norm_map, tp_index)

    def get_final_norm_state(self, tp_index: int) -> dict[str, Tensor]:
        """Return the final norm, which every tensor rank has whole."""
        found: dict[str, Tensor] = read_torch_file(self.get_final_norm_files(tp_index)[0])
        return found

    def get_2d_parallel_files(self, tp_index: int, pp_index: int) -> list[str]:
        """Return the model states of a (tensor, pipeline) rank."""
        return [self.mp_rank_files[index] for index in self.new_2d_map.get_data(pp_index, tp_index)]

    def get_2d_parallel_state(self, tp_index: int, pp_index: int) -> Any:
        """Return their content, joined."""
        merged: Any = None
        for path in self.get_2d_parallel_files(tp_index, pp_index):
            state = read_torch_file(path)
            merged = state if merged is None else merge_state(merged, state)
        return merged

    def get_transformer_state(self, tp_index: int, pp_index: int) -> list[dict[str, Tensor]]:
        """Return the transformer layers of a rank, each joined from its tensor ranks."""
        assert tp_index < self.tp_degree, f"tp_index {tp_index} of {self.tp_degree}"
        assert pp_index < self.pp_degree, f"pp_index {pp_index} of {self.pp_degree}"
        files = self.transformer_file_map.get((tp_index, pp_index), [])
        return [_join([read_torch_file(path) for path in paths]) for paths in files]

    def get_pp_transformer_map(self, pp_index: int) -> list[str]:
        """Return the names of a stage's transformer layers."""
        return self._of(self.pp_to_transformer_map, pp_index)

    def validate_files(self) -> None:
        """Print an error for each file that is gone."""
        validate_files(self.file_list)

    # -- tables ----------------------------------------------------------------------------------

    def _saved(self, key: str) -> Any:
        if key not in self.global_state:
            self.global_state[key] = read_torch_file(self.mp_rank_files[0]).get(key)
        return self.global_state[key]

    @staticmethod
    def _of(table: Mapping[int, list[str]], index: int) -> list[str]:
        assert index in table, f"index {index} is not one of {sorted(table)}"
        return table[index]

    def _files_by_tensor_rank(self, layer: int) -> dict[int, list[str]]:
        if not self.layer_files:
            return {}
        files = get_files_with_prefix(self.layer_files, f"{self.layer_keys[layer]}-")
        return dict(enumerate(partition_data(files, self.tp_degree)))

    def _middle(self) -> list[str]:
        """Names of the layers between the embedding and the final norm."""
        return self.layer_keys[1 : self.final_layer_norm_idx]

    def _stage_layers(self) -> dict[int, list[str]]:
        layers = self._middle()
        count = len(layers) // self.pp_degree
        return {stage: layers[stage * count : (stage + 1) * count] for stage in range(self.pp_degree)}

    def _layer_files_by_rank(self) -> dict[tuple[int, int], list[list[str]]]:
        table: dict[tuple[int, int], list[list[str]]] = {}
        layers = self._middle()
        count = max(1, len(layers) // self.pp_degree)
        for index, layer in enumerate(layers):
            files = get_files_with_prefix(self.layer_files, f"{layer}-")
            for rank, part in enumerate(partition_data(files, self.tp_degree)):
                table.setdefault((rank, index // count), []).append(part)
        return table


def _number(layer_key: str) -> int:
    return int(layer_key.removeprefix(LAYER_FILE_PREFIX))


def _show(table: Mapping[Any, Any], title: str) -> None:
    print(f"Dump mapping: {title}")
    for key, value in table.items():
        print(f"{key} = {value}")


def _join(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Join a Megatron layer from its tensor ranks."""
    return {
        key: value
        if key in SEQUENTIAL_LAYERS
        else torch.cat([state[key] for state in states], dim=LAYER_CONCAT_DIM.get(key, 0))
        for key, value in states[0].items()
    }
