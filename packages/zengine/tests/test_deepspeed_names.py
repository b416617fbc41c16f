"""DeepSpeed's names that scripts use, frozen: each exists, or raises an error that names it."""

from __future__ import annotations

import importlib

import pytest

from zengine.deepspeed.absent import ABSENT, NotAvailable

# Module of DeepSpeed -> names that scripts import from it.  What they do is tested where they are defined.
NAMES = {
    "deepspeed": (
        "initialize init_inference default_inference_config init_distributed add_config_arguments tp_model_init "
        "zero comm ops utils moe pipe accelerator monitor runtime checkpoint checkpointing get_accelerator "
        "DeepSpeedEngine InferenceEngine DeepSpeedConfig DeepSpeedConfigError DeepSpeedInferenceConfig "
        "PipelineModule PipelineEngine OnDevice log_dist logger dist ADAM_OPTIMIZER LAMB_OPTIMIZER __version__ "
        "DeepSpeedTransformerLayer"
    ),
    "deepspeed.runtime.zero": (
        "Init GatheredParameters register_external_parameter unregister_external_parameter TiledLinear MiCS_Init "
        "ZeroParamStatus ZeroParamType"
    ),
    "deepspeed.runtime.zero.partition_parameters": "Init GatheredParameters ZeroParamStatus get_accelerator",
    "deepspeed.runtime.zero.stage3": (
        "estimate_zero3_model_states_mem_needs_all_live estimate_zero3_model_states_mem_needs_all_cold"
    ),
    "deepspeed.runtime.zero.stage_1_and_2": (
        "estimate_zero2_model_states_mem_needs_all_live estimate_zero2_model_states_mem_needs_all_cold"
    ),
    "deepspeed.runtime.lr_schedules": (
        "WarmupLR WarmupDecayLR WarmupCosineLR OneCycle LRRangeTest VALID_LR_SCHEDULES add_tuning_arguments"
    ),
    "deepspeed.runtime.config": "DeepSpeedConfig DeepSpeedConfigError ADAM_OPTIMIZER ADAMW_OPTIMIZER LAMB_OPTIMIZER",
    "deepspeed.runtime.engine": "DeepSpeedEngine",
    "deepspeed.runtime.dataloader": "RepeatingLoader",
    "deepspeed.runtime.utils": "move_to_device see_memory_usage",
    "deepspeed.utils": (
        "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_set_full_fp32_param "
        "safe_set_full_grad safe_set_full_optimizer_state safe_get_local_fp32_param safe_get_local_grad "
        "safe_get_local_optimizer_state safe_set_local_fp32_param safe_set_local_grad "
        "safe_set_local_optimizer_state safe_update_full_grad_vectorized set_z3_leaf_modules "
        "unset_z3_leaf_modules get_z3_leaf_modules set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix "
        "groups logger log_dist RepeatingLoader is_initialized OnDevice"
    ),
    "deepspeed.utils.zero_to_fp32": (
        "get_fp32_state_dict_from_zero_checkpoint convert_zero_checkpoint_to_fp32_state_dict "
        "load_state_dict_from_zero_checkpoint"
    ),
    "deepspeed.utils.groups": (
        "initialize _get_data_parallel_group _get_data_parallel_world_size _get_data_parallel_rank "
        "_get_sequence_parallel_group _get_sequence_parallel_world_size _get_sequence_parallel_rank "
        "_get_model_parallel_world_size _get_model_parallel_group get_tensor_model_parallel_src_rank "
        "_get_expert_parallel_group use"
    ),
    "deepspeed.comm": (
        "init_distributed is_initialized get_rank get_world_size get_local_rank new_group barrier "
        "monitored_barrier all_reduce all_reduce_coalesced inference_all_reduce reduce reduce_scatter "
        "reduce_scatter_tensor all_gather all_gather_into_tensor all_gather_coalesced all_gather_object broadcast "
        "broadcast_object_list gather scatter send recv isend irecv all_to_all all_to_all_single log_summary "
        "configure ReduceOp initialize_mesh_device get_world_group get_global_rank destroy_process_group"
    ),
    "deepspeed.profiling.flops_profiler": "FlopsProfiler get_model_profile",
    "deepspeed.ops.adam": "FusedAdam DeepSpeedCPUAdam",
    "deepspeed.ops.lamb": "FusedLamb",
    "deepspeed.ops.lion": "FusedLion DeepSpeedCPULion",
    "deepspeed.ops.adagrad": "DeepSpeedCPUAdagrad",
    "deepspeed.accelerator": "get_accelerator set_accelerator is_current_accelerator_supported DeepSpeedAccelerator",
    "deepspeed.accelerator.abstract_accelerator": "DeepSpeedAccelerator",
    "deepspeed.accelerator.real_accelerator": "get_accelerator set_accelerator is_current_accelerator_supported",
    "deepspeed.accelerator.cuda_accelerator": "CUDA_Accelerator",
    "deepspeed.accelerator.cpu_accelerator": "CPU_Accelerator",
    "deepspeed.comm.comm": "TorchBackend P2POp batch_isend_irecv timed_op all_reduce is_initialized configure",
    "deepspeed.comm.reduce_op": "ReduceOp",
    "deepspeed.comm.backend": "Backend",
    "deepspeed.comm.constants": "NCCL_BACKEND GLOO_BACKEND",
    "deepspeed.git_version_info": "version git_hash git_branch torch_info installed_ops compatible_ops",
    "deepspeed.env_report": "main cli_main op_report debug_report",
    "deepspeed.ops.adam.cpu_adam": "DeepSpeedCPUAdam",
    "deepspeed.ops.adam.fused_adam": "FusedAdam",
    "deepspeed.ops.adagrad.cpu_adagrad": "DeepSpeedCPUAdagrad",
    "deepspeed.ops.lion.cpu_lion": "DeepSpeedCPULion",
    "deepspeed.ops.lion.fused_lion": "FusedLion",
    "deepspeed.ops.lamb.fused_lamb": "FusedLamb",
    "deepspeed.ops.op_builder": "CPUAdamBuilder FusedAdamBuilder AsyncIOBuilder UtilsBuilder OpBuilder",
    "deepspeed.monitor.tensorboard": "TensorBoardMonitor",
    "deepspeed.monitor.wandb": "WandbMonitor",
    "deepspeed.monitor.csv_monitor": "csvMonitor",
    "deepspeed.monitor.comet": "CometMonitor",
    "deepspeed.monitor.config": "DeepSpeedMonitorConfig get_monitor_config TensorBoardConfig",
    "deepspeed.utils.init_on_device": "OnDevice",
    "deepspeed.utils.exceptions": "DeprecatedException",
    "deepspeed.monitor.monitor": "MonitorMaster",
    "deepspeed.checkpoint.utils": "clone_tensors_for_torch_save",
    "deepspeed.moe.layer": "MoE",
    "deepspeed.moe.utils": (
        "has_moe_layers is_moe_param split_params_into_different_moe_groups_for_optimizer configure_moe_param_groups"
    ),
    "deepspeed.pipe": "PipelineModule LayerSpec TiedLayerSpec",
    "deepspeed.runtime.pipe.engine": "PipelineEngine",
    "deepspeed.runtime.pipe.module": "PipelineModule LayerSpec TiedLayerSpec PipelineError",
    "deepspeed.runtime.pipe.topology": "ProcessTopology PipeDataParallelTopology PipeModelDataParallelTopology",
    "deepspeed.runtime.activation_checkpointing.checkpointing": (
        "checkpoint configure is_configured non_reentrant_checkpoint reset get_cuda_rng_tracker set_num_layers "
        "model_parallel_cuda_manual_seed model_parallel_reconfigure_tp_seed partition_activations_in_checkpoint"
    ),
    "deepspeed.runtime.sequence_parallel.ulysses_sp": (
        "UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter SequenceTiledCompute TiledMLP TiledFusedLogitsLoss "
        "sequence_tiled_compute"
    ),
    "deepspeed.runtime.sequence_parallel.parallel_state_sp": (
        "initialize_sequence_parallel get_sequence_parallel_group get_sequence_parallel_world_size "
        "get_sequence_parallel_rank get_sequence_data_parallel_group get_sequence_data_parallel_world_size "
        "get_sequence_data_parallel_rank"
    ),
    "deepspeed.sequence.layer": "DistributedAttention",
    "deepspeed.sequence.cross_entropy": "vocab_sequence_parallel_cross_entropy",
    "deepspeed.launcher.runner": "DEEPSPEED_ENVIRONMENT_NAME",
    "deepspeed.elasticity.elastic_agent": "DSElasticAgent",
    "deepspeed.ops.sparse_attention.bert_sparse_self_attention": "BertSparseSelfAttention",
    "deepspeed.ops.sparse_attention.sparse_attention_utils": "SparseAttentionUtils",
}


@pytest.mark.parametrize("module", NAMES)
def test_every_name_of_the_interface_is_there(module: str):
    found = importlib.import_module(f"zengine.{module}")
    assert not [name for name in NAMES[module].split() if not hasattr(found, name)]


@pytest.mark.parametrize("name", [name for name in ABSENT if name.replace(".", "").replace("_", "").isalnum()])
def test_every_class_that_is_not_there_refuses_to_be_made(name: str):
    place, _, last = f"zengine.deepspeed.{name}".replace(".zero.", ".runtime.zero.").rpartition(".")
    cls = getattr(importlib.import_module(place), last)
    with pytest.raises(NotAvailable, match=rf"deepspeed\.{name}: "):
        cls()


def test_without_expert_layers_no_parameter_is_an_experts():
    import torch

    from zengine.deepspeed.moe import utils

    weight = torch.nn.Parameter(torch.ones(1))
    group = {"params": [weight], "lr": 0.1}
    assert utils.has_moe_layers(torch.nn.Linear(1, 1)) == (False, 0)
    assert not utils.is_moe_param(weight)
    assert utils.configure_moe_param_groups([group]) == [group]
    assert utils.split_params_into_different_moe_groups_for_optimizer(group) == [group]
