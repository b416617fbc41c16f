"""Values for `"auto"`, which Hugging Face's integrations fill in and a plain run does not.

A config written for the Trainer or for Accelerate leaves values open that those take from their own arguments.  Read
by itself such a file still says what it wants, so each open value becomes what the Trainer's arguments are by
default, or what follows from the rest of the file, and is shown with the origin "auto".  A value that only a data set
or a model can tell, and for which a guess would train something else, is an error that says who fills it in.

The replacement happens before the table of keys reads the document: no kind of value has to know about "auto".  Keys
whose own values include it (bf16.enabled, which is measured) stay as they are.

Rejected: dropping the key without a word, as DeepSpeed's sections do (nobody learns that the learning rate was lost).
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

    by: str  # what fills it in elsewhere: an argument of the Trainer, "the model's hidden size"
    here: str = "derived from the other keys"  # what happens here; "" = it cannot be guessed
    value: object = None  # None: the key is left out, and its default or the other keys decide
    instead: str = ""  # what to write, where it cannot be guessed

    @property
    def how(self) -> str:
        """The origin of the value, in a few words."""
        return f"default of {self.by}" if self.is_a_default else f"{self.here}; the Trainer: {self.by}"

    @property
    def is_a_default(self) -> bool:
        """True if the value is the default of an argument, which a user may have set otherwise."""
        return self.here == _DEFAULT


_DEFAULT = "the default of that argument"


def _same(argument: str, value: object) -> Auto:
    """The default of an argument of the Trainer."""
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

MICRO_BATCH = 8  # where train and micro are both open


@attrs.frozen(kw_only=True)
class FilledDocument:
    """A document without open values."""

    document: Document
    autos: Mapping[str, str] = attrs.field(factory=dict)  # key -> how its value came about
    notices: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()


def fill_autos(document: Document, fill: Mapping[str, Any]) -> FilledDocument:
    """Replace every "auto" of the table; `fill` (key -> value) goes before it.  Pure."""
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
    """One walk over the open values of a document."""

    def __init__(self, document: Document, fill: Mapping[str, Any]) -> None:
        self.document = document
        self.fill = fill
        self.autos: dict[str, str] = {}
        self.guesses: list[str] = []  # "gradient_clipping = 1.0 (--max_grad_norm)": what somebody may want otherwise
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
        """Replacement of one value; None leaves its key out."""
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
        """Values that follow from others which were open, too."""
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
        """One line for all that took the default of an argument."""
        if not self.guesses:
            return ()
        source = self.document.place(()).origin()
        return (
            f'{source}: "auto" became what the arguments of the Trainer are by default: {"; ".join(self.guesses)}',
        )

    def problem(self, key: str, entry: Auto, path: Path) -> Problem:
        return Problem(
            place=self.document.place(path),
            key=key,
            given="auto",
            reason=f"Hugging Face's Trainer fills it in ({entry.by}), and nothing in this file tells it",
            suggestion=entry.instead,
        )


def _at(data: Any, *path: str) -> Any:
    """The value at a path of plain data; None when there is none."""
    for part in path:
        data = data.get(part) if isinstance(data, Mapping) else None
    return data
