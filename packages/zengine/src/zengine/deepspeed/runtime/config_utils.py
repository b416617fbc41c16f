"""`deepspeed.runtime.config_utils`: base classes and helpers of config classes.

`DeepSpeedConfigModel` is for config classes of users: a pydantic model, made when it is first asked for, since
pydantic is not a dependency.  zengine's own config classes (section_model.py) need no library.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

from zengine.deepspeed.section_model import SectionModel
from zengine.deepspeed.utils.logging import logger

if TYPE_CHECKING:
    DeepSpeedConfigModel: type[Any]  # __getattr__ returns it

__all__ = [
    "DeepSpeedConfigModel",
    "DeepSpeedConfigObject",
    "ScientificNotationEncoder",
    "dict_raise_error_on_duplicate_keys",
    "get_config_default",
    "get_dict_param",
    "get_list_param",
    "get_scalar_param",
    "pp_int",
]


@functools.cache
def _config_model() -> type[Any]:
    """Make `DeepSpeedConfigModel`.  Raises ImportError without pydantic."""
    from pydantic import BaseModel, ConfigDict

    class DeepSpeedConfigModel(BaseModel):
        """Base class of config classes: unknown keys raise, assignments are validated, "auto" is left out.

        A field with json_schema_extra={"deprecated": True, "new_param": "other"} is an old name: a given value is
        logged and passed on to `other` (dotted for a field of a field), through "new_param_fn" if there is one.
        "deprecated_msg" is appended to the log; "set_new_param": False leaves the other field alone.
        """

        model_config = ConfigDict(
            validate_default=True,
            validate_assignment=True,
            use_enum_values=True,
            populate_by_name=True,
            extra="forbid",
            arbitrary_types_allowed=True,
            protected_namespaces=(),
        )

        def __init__(self, strict: bool = False, **data: Any) -> None:
            kept = {k: v for k, v in data.items() if strict or v != "auto" or k == "replace_method"}
            super().__init__(**kept)
            for name, field in type(self).model_fields.items():
                extra = field.json_schema_extra
                if isinstance(extra, dict) and extra.get("deprecated") and name in self.model_fields_set:
                    _pass_on(self, name, extra)

    DeepSpeedConfigModel.__module__, DeepSpeedConfigModel.__qualname__ = __name__, "DeepSpeedConfigModel"
    return DeepSpeedConfigModel


def _pass_on(model: Any, name: str, extra: Mapping[str, Any]) -> None:
    """Move the value of a deprecated field to its replacement.  Raises ValueError if both are given."""
    target = str(extra.get("new_param", ""))
    parts = (f"Config parameter {name} is deprecated", f" use {target} instead" * bool(target))
    logger.warning("%s", "".join(parts) + (f". {extra['deprecated_msg']}" if extra.get("deprecated_msg") else ""))
    if not target or not extra.get("set_new_param", True):
        return
    convert: Any = extra.get("new_param_fn", lambda value: value)
    value = convert(getattr(model, name))
    delattr(model, name)
    *path, last = target.split(".")
    owner = functools.reduce(getattr, path, model)
    if last in owner.model_fields_set:
        raise ValueError(f"Cannot provide deprecated parameter '{name}' and replacing parameter '{target}' together")
    setattr(owner, last, value)


def __getattr__(name: str) -> Any:
    if name == "DeepSpeedConfigModel":
        return _config_model()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def get_config_default(config: Any, field_name: str) -> Any:
    """Return the default of a field of a config class.  Raises AssertionError (DeepSpeed's) if it has none."""
    if isinstance(config, type) and issubclass(config, SectionModel):
        defaults = vars(config())
        assert field_name in defaults, f"'{field_name}' is not a field in {config}"
        return defaults[field_name]
    fields = config.model_fields
    assert field_name in fields, f"'{field_name}' is not a field in {config}"
    assert not fields[field_name].is_required(), f"'{field_name}' is a required field and has no default value"
    return fields[field_name].get_default()


@final
class pp_int(int):  # noqa: N801  # DeepSpeed's name
    """An integer that prints with commas, or as `custom_print_str`."""

    custom_print_str: str | None

    def __new__(cls, val: int, custom_print_str: str | None = None) -> pp_int:
        made = super().__new__(cls, val)
        made.custom_print_str = custom_print_str
        return made

    def __repr__(self) -> str:
        return self.custom_print_str or f"{self.real:,}"


@final
class ScientificNotationEncoder(json.JSONEncoder):
    """Encoder for `json.dumps(cls=...)` that writes numbers above 1000 as 1.000000e+03."""

    def iterencode(self, o: Any, _one_shot: bool = False, level: int = 0) -> Iterator[str]:
        """Return the text of `o`; members of a mapping on lines of their own."""
        return iter((self._text(o, level),))

    def _text(self, value: Any, level: int) -> str:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return f"{value:e}" if value > 1e3 else f"{value}"
        if isinstance(value, Mapping):
            step = " " * (4 if not isinstance(self.indent, int) else self.indent)
            rows = [f'\n{step * (level + 1)}"{key}": {self._text(each, level + 1)}' for key, each in value.items()]
            return "{" + ", ".join(rows) + f"\n{step * level}}}"
        if isinstance(value, Sequence) and not isinstance(value, str):
            return f"[{', '.join(self._text(each, level) for each in value)}]"
        return "".join(super().iterencode(value))


class DeepSpeedConfigObject:
    """A config object that prints as JSON."""

    def repr(self) -> dict[str, Any]:
        """Return the attributes."""
        return self.__dict__

    def __repr__(self) -> str:
        return json.dumps(self.__dict__, sort_keys=True, indent=4, cls=ScientificNotationEncoder)


def get_scalar_param(param_dict: Mapping[str, Any], param_name: str, param_default_value: Any) -> Any:
    """Return the value of a key, or the default."""
    return param_dict.get(param_name, param_default_value)


get_list_param = get_dict_param = get_scalar_param


def dict_raise_error_on_duplicate_keys(ordered_pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """`object_pairs_hook` of json.load: raises ValueError with the keys that occur twice."""
    twice = [key for key, count in Counter(key for key, _ in ordered_pairs).items() if count > 1]
    if twice:
        raise ValueError(f"Duplicate keys in DeepSpeed config: {twice}")
    return dict(ordered_pairs)
