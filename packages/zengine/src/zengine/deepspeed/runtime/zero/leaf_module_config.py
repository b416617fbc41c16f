"""`deepspeed.runtime.zero.leaf_module_config`: the section `leaf_module`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, final

from zengine.config.grammar.table import section_of
from zengine.config.keys.zero import LeafModule
from zengine.deepspeed.section_model import SectionModel

__all__ = [
    "DEFAULT_LEAF_MODULE_CLASSES",
    "DEFAULT_LEAF_MODULE_NAMES",
    "DEFAULT_LEAF_MODULE_NAME_SUFFIXES",
    "DeepSpeedZeroLeafModuleConfig",
]

# DeepSpeed makes leaf modules of these; here stage 3 needs no leaf modules for them.
DEFAULT_LEAF_MODULE_CLASSES = [
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
]
DEFAULT_LEAF_MODULE_NAMES: list[str] = []
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: list[str] = []


@final
class DeepSpeedZeroLeafModuleConfig(SectionModel):
    """Section `zero_optimization.leaf_module`: lists without duplicates; a single name may be text."""

    rows = section_of(LeafModule)
    defaults: ClassVar[Mapping[str, Any]] = {
        "classes": DEFAULT_LEAF_MODULE_CLASSES,
        "names": DEFAULT_LEAF_MODULE_NAMES,
        "name_suffixes": DEFAULT_LEAF_MODULE_NAME_SUFFIXES,
    }
    title = "leaf_module"
    classes: list[str]
    names: list[str]
    name_suffixes: list[str]

    def __init__(self, strict: bool = False, **data: Any) -> None:
        super().__init__(
            strict, **{name: [value] if isinstance(value, str) else value for name, value in data.items()}
        )
        for name in self.defaults:
            vars(self)[name] = list(dict.fromkeys(vars(self)[name]))
