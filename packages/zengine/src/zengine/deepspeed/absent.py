"""Unavailable parts of DeepSpeed's interface: one table, and placeholder classes.

Importing such a name works, so that scripts which only mention it (an isinstance test, an optional branch) run.
Instantiating, calling or subclassing it raises `NotAvailable`, with the alternative.
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn

__all__ = ["ABSENT", "NotAvailable", "absent", "raise_not_available"]


class NotAvailable(RuntimeError):
    """Part of DeepSpeed's interface that zengine does not provide."""


# Names that will not be provided: qualified name -> reason and alternative.
ABSENT: dict[str, str] = {
    "DeepSpeedTransformerLayer": "a fused BERT layer of 2020 kernels. Use torch.nn.TransformerEncoderLayer.",
    "DeepSpeedTransformerConfig": "a fused BERT layer of 2020 kernels. Use torch.nn.TransformerEncoderLayer.",
    "runtime.data_pipeline.data_sampling.data_analyzer.DataAnalyzer": (
        "its functions take collated batches. Use zengine.data.DataAnalyzer, with a function of one sample; it "
        "reads the files of DeepSpeed's analyzer unchanged."
    ),
    "zero.MiCS_Init": "it was removed from DeepSpeed. Use zero.Init, and zero_optimization.shard_group_size.",
}


def raise_not_available(name: str) -> NoReturn:
    """Raise NotAvailable for `name`, an entry of ABSENT."""
    raise NotAvailable(f"deepspeed.{name}: {ABSENT[name]}")


class _Absent(type):
    """Metaclass of placeholder classes: instantiating one, subclassing one or calling its methods raises."""

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise_not_available(cls.qualified)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return functools.partial(_raise_not_available, cls.qualified)

    qualified: str  # the entry in ABSENT


def _raise_not_available(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise_not_available(name)


def absent(name: str) -> Any:
    """Return a placeholder class: it can be imported and tested against, but not instantiated, subclassed or used."""
    text = ABSENT[name]

    def reject(cls: type, *args: Any, **kwargs: Any) -> NoReturn:
        raise_not_available(name)

    members = {
        "__init_subclass__": classmethod(reject),
        "__doc__": f"Not available: {text}",
        "__module__": __name__,
        "qualified": name,
    }
    return _Absent(name.rpartition(".")[2], (), members)
