"""What belongs to DeepSpeed's interface and is not here: one list, and classes that say so when they are used.

Importing such a name works, so that scripts which only mention it (an isinstance test, an optional branch) run.
Making one, calling it or subclassing it raises `NotAvailable`, with what to do instead.
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn

__all__ = ["ABSENT", "NotAvailable", "absent", "refusing"]


class NotAvailable(RuntimeError):
    """A part of DeepSpeed's interface that zengine does not have."""


# Names that are left out for good: qualified name -> why.
ABSENT: dict[str, str] = {
    "DeepSpeedTransformerLayer": "a fused BERT layer of 2020 kernels. Use torch.nn.TransformerEncoderLayer.",
    "DeepSpeedTransformerConfig": "a fused BERT layer of 2020 kernels. Use torch.nn.TransformerEncoderLayer.",
    "zero.TiledLinear": "stage 3 gathers one module at a time. Use torch.nn.Linear, or several smaller ones.",
    "runtime.data_pipeline.data_sampling.data_analyzer.DataAnalyzer": (
        "its functions take collated batches. Use zengine.data.DataAnalyzer, with a function of one sample; the "
        "files that DeepSpeed's wrote are read as they are."
    ),
    "zero.MiCS_Init": "it was removed from DeepSpeed. Use zero.Init, and zero_optimization.shard_group_size.",
}


def refusing(name: str) -> NoReturn:
    """Raise for `name`, an entry of ABSENT."""
    raise NotAvailable(f"deepspeed.{name}: {ABSENT[name]}")


class _Absent(type):
    """Of classes that are not there: making one, subclassing one or asking one for a method's work refuses."""

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        refusing(cls.qualified)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return functools.partial(_refuse, cls.qualified)

    qualified: str  # its entry in ABSENT


def _refuse(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    refusing(name)


def absent(name: str) -> Any:
    """A class that can be imported and tested against, and that refuses to be made, subclassed or used."""
    text = ABSENT[name]

    def refuse(cls: type, *args: Any, **kwargs: Any) -> NoReturn:
        refusing(name)

    members = {
        "__init_subclass__": classmethod(refuse),
        "__doc__": f"Not available: {text}",
        "__module__": __name__,
        "qualified": name,
    }
    return _Absent(name.rpartition(".")[2], (), members)
