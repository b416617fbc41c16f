"""Accelerate's own test scripts about DeepSpeed, unchanged, on two CPU ranks, for clients.py.

They load a BERT and GLUE from the hub, a metric from `evaluate`, and find no ranks without a GPU.  So a tiny model, a
small data set and a metric take these places, and Accelerator gets the backend gloo; the scripts' text is run as it
is.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import json
import os
import runpy
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import datasets
import torch
from accelerate.state import AcceleratorState, GradientState
from clients_trl import forget_deepspeed, wait_for
from datasets import Dataset, DatasetDict
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast, set_seed

SCRIPTS = "accelerate.test_utils.scripts.external_deps"
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu")


class Accelerator(accelerate.Accelerator):
    """Accelerate's, which finds CPU ranks."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(kwargs_handlers=[accelerate.InitProcessGroupKwargs(backend="gloo")], **kwargs)


class Accuracy:
    """Metric of the package `evaluate`; it keeps the values that it has returned."""

    computed: list[float] = []  # noqa: RUF012 - of the script that runs

    def __init__(self, *_: Any) -> None:
        self.right = self.count = 0

    def add_batch(self, predictions: torch.Tensor, references: torch.Tensor) -> None:
        self.right += int((predictions == references).sum())
        self.count += len(references)

    def compute(self) -> dict[str, float]:
        found = self.right / self.count
        self.computed.append(found)
        self.right = self.count = 0
        return {"accuracy": found}


class Improving(Accuracy):
    """A metric that rises: a script expects it of a trained BERT, at a learning rate of 2e-5."""

    def compute(self) -> dict[str, float]:
        super().compute()
        return {"accuracy": len(self.computed) / 100}


def glue(*_: Any, **__: Any) -> DatasetDict:
    """Return pairs of sentences; the label is 1 if their words are from the second half of the vocabulary."""

    def rows(count: int, seed: int) -> Dataset:
        generator = torch.Generator().manual_seed(seed)
        labels = torch.randint(0, 2, (count,), generator=generator).tolist()
        words = torch.randint(0, 15, (count, 6), generator=generator).tolist()
        text = [" ".join(f"w{word + 15 * label}" for word in row) for row, label in zip(words, labels, strict=True)]
        return Dataset.from_dict({"idx": range(count), "sentence1": text, "sentence2": text, "label": labels})

    return DatasetDict({"train": rows(64, 1), "validation": rows(20, 2)})


def prepare(folder: Path) -> None:
    """Write the model and Accelerate's files, and put the offline parts in their places."""
    if os.environ["RANK"] == "0":
        set_seed(3)
        size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        quiet = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
        BertForSequenceClassification(BertConfig(vocab_size=32, **size, **quiet)).save_pretrained(folder / "bert")
        words = {word: at for at, word in enumerate(["[PAD]", "[UNK]", *(f"w{number}" for number in range(30))])}
        made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
        made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokens = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]")
        tokens.save_pretrained(folder / "bert")
        copy_scripts(folder)
        (folder / "done").touch()
    wait_for(folder / "done")
    evaluate: Any = types.ModuleType("evaluate")
    evaluate.__spec__, evaluate.load = importlib.machinery.ModuleSpec("evaluate", None), Accuracy
    sys.modules["evaluate"] = evaluate
    datasets.load_dataset, accelerate.Accelerator = glue, Accelerator


def copy_scripts(folder: Path) -> None:
    """Copy the scripts into a checkout of Accelerate, where one of them looks for configs."""
    spec = importlib.util.find_spec(SCRIPTS)
    assert spec is not None
    assert spec.origin is not None
    shutil.copytree(Path(spec.origin).parent, folder / "src" / "accelerate" / "test_utils" / "scripts" / "external")
    configs = folder / "tests" / "deepspeed"
    configs.mkdir(parents=True)
    for stage in (2, 3):
        model_only = {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto" if stage == 2 else 1,
            "gradient_clipping": "auto",
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage},
        }
        (configs / f"ds_config_zero{stage}_model_only.json").write_text(json.dumps(model_only))
        (folder / f"full{stage}.json").write_text(json.dumps(full(stage)))


def full(stage: int) -> dict[str, Any]:
    """Return a config with an optimizer and a schedule, as Accelerate's tests have it."""
    schedule = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
    sizes = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    options = {"lr": "auto", "weight_decay": "auto", "torch_adam": True, "adam_w_mode": True}
    whole = {"stage3_gather_16bit_weights_on_model_save": True} if stage == 3 else {}
    return {
        **dict.fromkeys((*BATCH, "gradient_clipping"), "auto"),
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": options},
        "scheduler": {"type": "WarmupDecayLR", "params": dict.fromkeys(schedule, "auto")},
        "zero_optimization": {"stage": stage, **dict.fromkeys(sizes, "auto"), **whole},
        "steps_per_print": 1000,
        "wall_clock_breakdown": False,
    }


def run(folder: Path, script: str, *arguments: str, **environment: str) -> list[float]:
    """Run a script as `accelerate launch --use_deepspeed` starts it; return the accuracies that it has computed."""
    forget_deepspeed()
    AcceleratorState._reset_state(not torch.distributed.is_initialized())  # the last script may have ended the world
    GradientState._reset_state()
    os.environ.update({"ACCELERATE_USE_DEEPSPEED": "true", **environment})
    path = folder / "src" / "accelerate" / "test_utils" / "scripts" / "external" / f"{script}.py"
    before, sys.argv = sys.argv, [str(path), "--model_name_or_path", str(folder / "bert"), *arguments]
    Accuracy.computed = []
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        sys.argv = before
    return Accuracy.computed


def scripts(folder: Path, stage: int) -> dict[str, Any]:
    """Train and save; train, save and resume; once by the launcher's options, once by a config file."""
    by_option = {
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(stage),
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
        "ACCELERATE_GRADIENT_CLIPPING": "1.0",
        "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
    }
    by_file = {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(folder / f"full{stage}.json")}
    found: dict[str, Any] = {}
    for name, environment in (("option", by_option), ("file", by_file)):
        out = folder / f"out-{stage}-{name}"
        out.mkdir(exist_ok=True)
        where = ("--output_dir", str(out), "--num_epochs", "2")
        saved = run(folder, "test_checkpointing", *where, "--partial_train_epoch", "1", **environment)
        again = run(
            folder, "test_checkpointing", *where, "--resume_from_checkpoint", str(out / "epoch_0"), **environment
        )
        trained = run(folder, "test_performance", *where, **environment)
        files = sorted(path.name for path in out.glob("*.safetensors"))
        found[name] = {"saved": saved, "resumed": again, "trained": trained, "files": files}
    return found


def several_models(folder: Path) -> dict[str, Any]:
    """Train with two plugins: a model beside one that is evaluated, then two models, at stages 2 and 3."""
    evaluate: Any = sys.modules["evaluate"]
    evaluate.load = Improving
    return {"accuracies": run(folder, "test_ds_multiple_model", "--num_epochs", "2")}


def checks(folder: Path) -> dict[str, Callable[[], dict[str, Any]]]:
    prepare(folder)
    stages = {f"accelerate-scripts-{s}": functools.partial(scripts, folder, s) for s in (2, 3)}
    return {**stages, "accelerate-several": functools.partial(several_models, folder)}
