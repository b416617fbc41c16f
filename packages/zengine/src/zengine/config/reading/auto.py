"""Values for `"auto"` in configs that Hugging Face's integrations would complete.

The Trainer and Accelerate replace "auto" by their own arguments.  In a run without them, each "auto" becomes the
default of the Trainer's argument or follows from the rest of the file, and the plan shows the origin "auto".  A value
that depends on the data set or the model, for which a guess would change the training, is an error that names the
argument of the Trainer.

The replacement precedes the table of keys, so no kind of value handles "auto".  Keys whose own values include it
(bf16.enabled, which is measured) are not replaced.

Rejected: silently dropping the key, as DeepSpeed's sections do (the learning rate is lost without a notice).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from zengine.config.grammar.errors import Problem, shown
from zengine.config.grammar.scan import Document, Path, dotted

__all__ = ["AUTO", "Auto", "FilledDocument", "fill_autos"]


@attrs.frozen
class Auto:
    """Replacement of one "auto"."""

    by: str  # source of the value in Hugging Face's integrations: an argument of the Trainer, ...
    here: str = "derived from the other keys"  # source of the value here; "" = it cannot be guessed
    value: object = None  # None: the key is left out; its default or the other keys apply
    instead: str = ""  # suggestion if it cannot be guessed

    @property
    def how(self) -> str:
        """Return a short description of the value's origin."""
        return f"default of {self.by}" if self.is_a_default else f"{self.here}; the Trainer: {self.by}"

    @property
    def is_a_default(self) -> bool:
        """True if the value is the default of a Trainer argument, which the user may have set otherwise."""
        return self.here == _DEFAULT


_DEFAULT = "the default of that argument"


def _same(argument: str, value: object) -> Auto:
    """Return a replacement by the default of a Trainer argument."""
    return Auto(argument, _DEFAULT, value)


_FROM_SIZE = "derived from the model's size"
AUTO: Mapping[str, Auto] = {
    "train_batch_size": Auto("world size x --per_device_train_batch_size x --gradient_accumulation_steps"),
    "train_micro_batch_size_per_gpu": Auto("--per_device_train_batch_size"),
    "gradient_accumulation_steps": Auto("--gradient_accumulation_steps"),
    "gradient_clipping": _same("--max_grad_norm", 1.0),
    "optimizer.params.lr": _same("--learning_rate", 5e-5),
    "optimizer.params.betas": _same("--adam_beta1 and --adam_beta2", [0.9, 0.999]),
    "optimizer.params.eps": _same("--adam_epsilon", 1e-8),
    "optimizer.params.weight_decay": _same("--weight_decay", 0.0),
    "scheduler.params.warmup_min_lr": Auto("0", "0", 0),
    "scheduler.params.warmup_max_lr": Auto("--learning_rate", "the learning rate of the optimizer"),
    "scheduler.params.warmup_num_steps": _same("--warmup_steps", 0),
    "scheduler.params.total_num_steps": Auto(
        "--max_steps, or epochs x steps of an epoch",
        here="",
        instead="Write the number of optimizer steps of the whole run.",
    ),
    "fp16.enabled": _same("--fp16", False),
    "amp.enabled": _same("--fp16 with --fp16_backend apex", False),
    "amp.opt_level": Auto("--fp16_opt_level", "left out"),
    "zero_optimization.stage": Auto("Accelerate's --zero_stage", _DEFAULT, 2),
    "zero_optimization.reduce_bucket_size": Auto("hidden size squared", _FROM_SIZE),
    "zero_optimization.allgather_bucket_size": Auto("left to the user", _FROM_SIZE),
    "zero_optimization.stage3_prefetch_bucket_size": Auto("0.9 x hidden size squared", "the default of this key"),
    "zero_optimization.stage3_param_persistence_threshold": Auto("10 x hidden size", "the default of this key"),
    "zero_optimization.sub_group_size": Auto("left to the user", "the default of this key"),
    "zero_optimization.overlap_comm": Auto("left to the user", "the default of this key"),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": Auto(
        "Accelerate's --zero3_save_16bit_model", "left out: saving never needs it"
    ),
    "zero_optimization.offload_optimizer.device": Auto("Accelerate's --offload_optimizer_device", _DEFAULT, "none"),
    "zero_optimization.offload_param.device": Auto("Accelerate's --offload_param_device", _DEFAULT, "none"),
    "zero_optimization.offload_optimizer.nvme_path": Auto("Accelerate's --offload_optimizer_nvme_path", "left out"),
    "zero_optimization.offload_param.nvme_path": Auto("Accelerate's --offload_param_nvme_path", "left out"),
    "checkpoint.use_node_local_storage": _same("--save_on_each_node", False),
    "communication_data_type": Auto("left to the user", "the dtype of the model"),
    "steps_per_print": Auto("left to the user", "never"),
}

MICRO_BATCH = 8  # the Trainer's default, if train and micro are both "auto"


@attrs.frozen(kw_only=True)
class FilledDocument:
    """Document with every "auto" replaced."""

    document: Document
    autos: Mapping[str, str] = attrs.field(factory=dict)  # key -> origin of its value
    notices: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()


def fill_autos(document: Document, fill: Mapping[str, Any]) -> FilledDocument:
    """Replace every "auto" that `AUTO` lists; `fill` (key -> value) takes precedence.  Pure."""
    if not isinstance(document.data, Mapping):
        return FilledDocument(document=document)
    filling = _Filling(document, fill)
    data = filling.completed(filling.section(document.data, ()))
    return FilledDocument(
        document=attrs.evolve(document, data=data),
        autos=filling.autos,
        notices=filling.notices(),
        problems=tuple(filling.problems),
    )


class _Filling:
    """One walk over the "auto" values of a document."""

    def __init__(self, document: Document, fill: Mapping[str, Any]) -> None:
        self.document = document
        self.fill = fill
        self.autos: dict[str, str] = {}
        self.guesses: list[str] = []  # defaults to report: "gradient_clipping = 1.0 (--max_grad_norm)"
        self.problems: list[Problem] = []

    def section(self, data: Mapping[str, Any], path: Path) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in data.items():
            here = (*path, name)
            new = self.section(value, here) if isinstance(value, Mapping) else self.replacement(value, here)
            if new is not None or value is None:
                found[name] = new
        return found

    def replacement(self, value: object, path: Path) -> object:
        """Return the replacement of one value; None leaves its key out."""
        key = dotted(path)
        entry = AUTO.get(key)
        if value != "auto" or (entry is None and key not in self.fill):
            return value  # the table of keys knows whether "auto" is one of its values
        if key in self.fill:
            self.autos[key] = "filled in by the caller"
            return self.fill[key]
        assert entry is not None
        if not entry.here:
            self.problems.append(self.problem(key, entry, path))
            return None
        self.autos[key] = entry.how
        if entry.is_a_default:
            self.guesses.append(f"{key} = {shown(entry.value)} ({entry.by})")
        return entry.value

    def completed(self, found: dict[str, Any]) -> dict[str, Any]:
        """Add values that follow from other replaced ones."""
        micro, train = "train_micro_batch_size_per_gpu", "train_batch_size"
        if {micro, train} & set(self.autos) and not {micro, train} & set(found):
            self.autos[micro] = "default of --per_device_train_batch_size"
            self.guesses.append(f"{micro} = {MICRO_BATCH} (--per_device_train_batch_size)")
            found[micro] = MICRO_BATCH
        key = "scheduler.params.warmup_max_lr"
        if key in self.autos and "warmup_max_lr" not in found["scheduler"]["params"]:
            found["scheduler"]["params"]["warmup_max_lr"] = _at(found, "optimizer", "params", "lr")
        return found

    def notices(self) -> tuple[str, ...]:
        """Return one line for all values that are defaults of Trainer arguments."""
        if not self.guesses:
            return ()
        source = self.document.place(()).origin()
        return (
            f'{source}: "auto" is replaced by the defaults of the Trainer\'s arguments: {"; ".join(self.guesses)}',
        )

    def problem(self, key: str, entry: Auto, path: Path) -> Problem:
        return Problem(
            place=self.document.place(path),
            key=key,
            given="auto",
            reason=f"Hugging Face's Trainer fills it in ({entry.by}), and no other key of this file determines it",
            suggestion=entry.instead,
        )


def _at(data: Any, *path: str) -> Any:
    """Return the value at a path of plain data; None if there is none."""
    for part in path:
        data = data.get(part) if isinstance(data, Mapping) else None
    return data
