"""Runs of unmodified Transformers and Accelerate on two ranks, with zengine as their `deepspeed`.

    python -m zengine.as_deepspeed hugging_face.py FOLDER        (by test_hugging_face.py, once for each rank)

Each run writes its results to an entry of FOLDER/rank<N>.json, which the test file checks.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.update({"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_PROGRESS_BARS": "1"})

import deepspeed
import safetensors.torch
import torch
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedSequenceParallelConfig, DummyOptim, DummyScheduler, ParallelismConfig
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from hugging_face_trainer import (
    SAVED_AT,
    STEPS,
    arguments_of,
    fresh,
    losses,
    norms,
    sentences,
    settings,
    tiny,
    trainer_of,
)
from transformers import (
    AutoModelForCausalLM,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForSequenceClassification,
    MixtralConfig,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    set_seed,
)
from transformers.integrations.deepspeed import (
    HfDeepSpeedConfig,
    deepspeed_sp_compute_loss,
    is_deepspeed_zero3_enabled,
    unset_hf_deepspeed_config,
)
from two_ranks import report


def without_deepspeed(folder: Path) -> dict[str, Any]:
    trainer = trainer_of(folder, fresh, None)
    trainer.train()
    trainer.save_model(str(folder / "final"))
    return {"losses": losses(trainer), "norms": norms(trainer), "type": type(trainer.model_wrapped).__name__}


def with_deepspeed(folder: Path, stage: int) -> dict[str, Any]:
    """Train, save, evaluate, export; then resume from the middle."""
    path = folder / "ds.json"
    folder.mkdir(exist_ok=True)
    path.write_text(json.dumps(settings(stage)))
    trainer = trainer_of(folder, fresh, str(path))
    trainer.train()
    trainer.save_model(str(folder / "final"))
    evaluated = trainer.evaluate(sentences()[:4])["eval_loss"]
    engine = trainer.model_wrapped
    resumed = trainer_of(folder, fresh, str(path))
    resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{SAVED_AT}"))
    found = {
        "losses": losses(trainer),
        "norms": norms(trainer),
        "resumed": losses(resumed)[SAVED_AT:],
        "evaluated": evaluated,
        "type": type(engine).__name__,
        "stage": engine.zero_optimization_stage(),
        "zero3": is_deepspeed_zero3_enabled(),
        "parts": sum(part.numel() for part in engine.optimizer.param_groups[0]["params"]),
    }
    for each in (trainer, resumed):
        each.model_wrapped.destroy()
    return found


def from_pretrained(folder: Path) -> dict[str, Any]:
    """Build models inside zero.Init and fill them inside zero.GatheredParameters, as Transformers does at stage 3."""
    path, source = (str(folder.parent / "trainer-3" / name) for name in ("ds.json", "final"))
    saved = safetensors.torch.load_file(Path(source) / "model.safetensors")
    seen: dict[str, Any] = {}

    def loaded() -> Any:
        model = AutoModelForCausalLM.from_pretrained(source)
        seen["nbytes"] = model.transformer.wte.weight.untyped_storage().nbytes()
        with deepspeed.zero.GatheredParameters(model.parameters()):
            seen["same"] = all(torch.equal(param, saved[name]) for name, param in model.named_parameters())
        return model

    def copied() -> Any:
        model = fresh()
        model.load_state_dict(saved, strict=False)
        return model

    def drawn() -> Any:
        """Return a Llama, which has buffers that only its constructor fills."""
        set_seed(11)
        size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=32, max_position_embeddings=8, **size))
        seen["llama"] = model.model.embed_tokens.weight.untyped_storage().nbytes()
        return model

    def resized() -> Any:
        model = AutoModelForCausalLM.from_pretrained(source)
        model.resize_token_embeddings(40)
        with deepspeed.zero.GatheredParameters(model.transformer.wte.weight):
            seen["kept"] = torch.equal(model.transformer.wte.weight[:32], saved["transformer.wte.weight"])
        return model

    for name, model in (("loaded", loaded), ("copied", copied), ("drawn", drawn), ("resized", resized)):
        trainer = trainer_of(folder / name, model, path)
        trainer.train()
        seen[name] = losses(trainer)
        trainer.model_wrapped.destroy()
    return seen


def across_stages(folder: Path) -> dict[str, Any]:
    """Resume a run of stage 1 at stage 3."""
    checkpoint = folder.parent / "trainer-1" / f"checkpoint-{SAVED_AT}"
    trainer = trainer_of(folder, fresh, str(folder.parent / "trainer-3" / "ds.json"))
    trainer.train(resume_from_checkpoint=str(checkpoint))
    found = {"losses": losses(trainer)[SAVED_AT:], "stage": trainer.model_wrapped.zero_optimization_stage()}
    trainer.model_wrapped.destroy()
    return found


def exported(folder: Path) -> dict[str, Any]:
    """Compare save_model's file with the masters of the last checkpoint."""
    whole = safetensors.torch.load_file(folder / "final" / "model.safetensors")
    masters = get_fp32_state_dict_from_zero_checkpoint(folder / f"checkpoint-{STEPS}")
    plain = safetensors.torch.load_file(folder.parent / "plain" / "final" / "model.safetensors")
    return {
        "names": sorted(whole) == sorted(plain),
        "masters": all(torch.equal(whole[name], masters[name]) for name in whole),
        "apart": max((whole[name] - plain[name]).abs().max().item() for name in plain),
    }


def with_accelerate(folder: Path, stage: int) -> dict[str, Any]:
    """Accelerator(deepspeed_plugin=...): a custom loop, save_state, load_state, get_state_dict."""
    warmup = ("warmup_num_steps", "warmup_max_lr", "warmup_min_lr")
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": dict.fromkeys(warmup, "auto")},
    }
    AcceleratorState._reset_state(reset_partial_state=True)
    on_cpu = InitProcessGroupKwargs(backend="gloo")
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), kwargs_handlers=[on_cpu])
    model = fresh()
    optimizer = DummyOptim(model.parameters(), lr=1e-2, weight_decay=0.01)
    scheduler = DummyScheduler(optimizer, total_num_steps=8, warmup_num_steps=2)
    loader = torch.utils.data.DataLoader(sentences(), batch_size=2)
    engine, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    batches = [batch for _, batch in zip(range(8), loader)]

    def steps(first: int, last: int) -> list[float]:
        seen = []
        for batch in batches[first:last]:
            with accelerator.accumulate(engine):
                loss = engine(**batch).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(engine.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            seen.append(loss.item())
        return seen

    first = steps(0, 4)
    accelerator.save_state(str(folder / "state"))
    second = steps(4, 8)
    accelerator.load_state(str(folder / "state"))
    third = steps(4, 8)
    state = accelerator.get_state_dict(engine)
    report = engine.last_report
    found = {
        "losses": first + second,
        "again": third,
        "ranks": accelerator.num_processes,
        "type": str(accelerator.distributed_type),
        "skipped": optimizer.step_was_skipped,
        "samples": report.samples,
        "names": None if state is None else len(state),
        "unwrapped": type(accelerator.unwrap_model(engine)).__name__,
    }
    accelerator.end_training()
    engine.destroy()
    return found


def kept_in_float32(section: str, stage: int) -> dict[str, Any]:
    """Train a T5, which lists float32 layers, and a Llama, whose rotary frequencies are a non-persistent buffer."""
    size = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    set_seed(3)
    models = {
        "t5": T5ForConditionalGeneration(T5Config(vocab_size=32, **size)),
        "llama": AutoModelForCausalLM.from_config(
            LlamaConfig(
                vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
            )
        ),
    }
    found: dict[str, Any] = {}
    for name, model in models.items():
        frequencies = [buffer.clone() for key, buffer in model.named_buffers() if "inv_freq" in key]
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        half = {"enabled": True, **({"loss_scale": 8} if section == "fp16" else {})}
        config = {"train_batch_size": 4, "optimizer": {"type": "AdamW"}, section: half, "zero_optimization": zero}
        engine, *_ = deepspeed.initialize(model=model, config=config)
        losses = []
        for _ in range(3):
            tokens = torch.arange(2, 18).view(2, 8)
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            losses.append(engine.step().loss)
        wide = [key for key, param in model.named_parameters() if param.dtype == torch.float32]
        now = [buffer for key, buffer in model.named_buffers() if "inv_freq" in key]
        same = len(now) == len(frequencies) and all(map(torch.equal, now, frequencies))
        found[name] = {"wide": wide, "losses": losses, "frequencies": same}
        engine.destroy()
    return found


def constructed() -> dict[str, Any]:
    """Train a classifier made by its constructor, whose base model alone is built inside zero.Init."""
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    tokens, label = torch.arange(2, 10).view(1, 8), torch.tensor([1])
    shape = LlamaConfig(num_attention_heads=2, num_labels=3, pad_token_id=0, **sizes)
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    config = {"train_batch_size": 2, "optimizer": {"type": "AdamW"}, "zero_optimization": zero}
    keep = HfDeepSpeedConfig(config)
    model = LlamaForSequenceClassification(shape)
    is_sharded = hasattr(model.model.embed_tokens.weight, "ds_id")
    del keep
    unset_hf_deepspeed_config()
    engine, *_ = deepspeed.initialize(model=model, config=config)
    plain = LlamaForSequenceClassification(shape)
    plain.load_state_dict(engine.module_state_dict())
    expected = float(plain(input_ids=tokens, labels=label).loss)
    losses = []
    for _ in range(2):
        engine.backward(engine(input_ids=tokens, labels=label).loss)
        losses.append(engine.step().loss)
    engine.destroy()
    return {"losses": losses, "expected": expected, "sharded": is_sharded}


def with_sequences_shared() -> dict[str, Any]:
    """Compare Accelerator(parallelism_config=ParallelismConfig(sp_size=2)) with one process on every batch."""

    def llama() -> Any:
        set_seed(11)
        size = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "max_position_embeddings": 8}
        config = LlamaConfig(vocab_size=32, num_attention_heads=4, num_key_value_heads=2, **size)
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")

    rows = [{**row, "position_ids": torch.arange(8)} for row in sentences()[:16]]
    batches = torch.utils.data.DataLoader(rows, batch_size=2)
    AcceleratorState._reset_state(reset_partial_state=True)
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2}}
    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
        parallelism_config=ParallelismConfig(sp_backend="deepspeed", sp_size=2, sp_handler=handler),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )
    model = llama()
    engine, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), batches)
    found = []
    for piece in loader:
        total = deepspeed_sp_compute_loss(accelerator, engine, piece, False, accelerator.parallelism_config)
        accelerator.backward(total)
        optimizer.step()
        optimizer.zero_grad()
        found.append(total.item())
    UlyssesSPAttentionHF.unregister()
    engine.destroy()

    alone, plain = llama(), []
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    for batch in batches:
        loss = alone(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        plain.append(loss.item())
    return {"plain": plain, "losses": found}


def with_layers_split(folder: Path) -> dict[str, Any]:
    """Compare Trainer with two tensor ranks with two replicas of half the micro-batch."""

    def quiet() -> GPT2LMHeadModel:
        set_seed(11)
        config = tiny()
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
        return GPT2LMHeadModel(config)

    halves = Trainer(model=quiet(), args=arguments_of(folder / "plain", None, 1), train_dataset=sentences())
    halves.train()
    path = folder / "ds.json"
    path.write_text(json.dumps({**settings(1), "tensor_parallel": {"autotp_size": 2}}))
    trainer = trainer_of(folder, quiet, str(path))
    trainer.train()
    engine = trainer.model_wrapped
    trainer.save_model(str(folder / "final"))
    saved = safetensors.torch.load_file(folder / "final" / "model.safetensors") if engine.global_rank == 0 else {}
    plain = dict(halves.model.named_parameters())
    resumed = trainer_of(folder, quiet, str(path))
    resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{SAVED_AT}"))
    found = {
        "plain": losses(halves),
        "losses": losses(trainer),
        "norms": [norms(halves), norms(trainer)],
        "resumed": losses(resumed)[SAVED_AT:],
        "tensor": deepspeed.utils.groups.get_tensor_model_parallel_world_size(),
        "samples": engine.last_report.samples,
        "apart": max(((value - plain[name]).abs().max().item() for name, value in saved.items()), default=0.0),
    }
    for each in (trainer, resumed):
        each.model_wrapped.destroy()
    return found


def with_experts(folder: Path) -> dict[str, Any]:
    """Run Trainer at stage 3 with sharded experts, from random weights and from a folder."""
    size = {"hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes = MixtralConfig(vocab_size=32, num_key_value_heads=2, num_local_experts=4, **size)
    given = folder / "given"
    seen: dict[str, Any] = {}

    def drawn() -> Any:
        set_seed(11)
        return AutoModelForCausalLM.from_config(sizes)

    def loaded() -> Any:
        return AutoModelForCausalLM.from_pretrained(given)

    unset_hf_deepspeed_config()
    deepspeed.init_distributed()
    drawn().save_pretrained(given)  # on rank 0
    deepspeed.comm.barrier()
    path = folder / "ds.json"
    path.write_text(json.dumps({**settings(3), "expert_parallel": {"enabled": True, "autoep_size": 2}}))
    for name, model, config in (("plain", drawn, None), ("drawn", drawn, str(path)), ("loaded", loaded, str(path))):
        trainer = trainer_of(folder / name, model, config)
        trainer.train()
        seen[name] = losses(trainer)
        if config is not None:
            stack = trainer.model.model.layers[0].mlp.experts
            seen["experts"] = stack.num_experts, stack.num_global_experts
            trainer.save_model(str(folder / name))
            after = trainer.model_wrapped.module_state_dict()
            trainer.model_wrapped.destroy()
    unset_hf_deepspeed_config()
    kept = AutoModelForCausalLM.from_pretrained(folder / "loaded").state_dict()
    seen["kept"] = sorted(kept) == sorted(after) and all(torch.equal(kept[each], after[each]) for each in kept)
    names = [sorted(safetensors.torch.load_file(at / "model.safetensors")) for at in (given, folder / "loaded")]
    seen["names"] = names[0] == names[1]
    return seen


def main(folder: Path) -> None:
    checks: dict[str, Callable[[], dict[str, Any]]] = {
        "plain": lambda: without_deepspeed(folder / "plain"),
        **{f"trainer-{s}": lambda s=s: with_deepspeed(folder / f"trainer-{s}", s) for s in (1, 2, 3)},
        **{f"export-{s}": lambda s=s: exported(folder / f"trainer-{s}") for s in (1, 2, 3)},
        "across": lambda: across_stages(folder / "across"),
        "pretrained": lambda: from_pretrained(folder / "pretrained"),
        **{f"kept-{half}": lambda half=half: kept_in_float32(half, 3) for half in ("bf16", "fp16")},
        "constructed": constructed,
        **{f"accelerate-{s}": lambda s=s: with_accelerate(folder / f"accelerate-{s}", s) for s in (1, 2, 3)},
        "shared": with_sequences_shared,
        "experts": lambda: with_experts(folder / "experts"),
        "split": lambda: with_layers_split(folder / "split"),  # last, because Accelerate keeps its mesh
    }
    rank = os.environ["RANK"]
    report(checks, folder / f"rank{rank}.json", sys.argv[2:])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
