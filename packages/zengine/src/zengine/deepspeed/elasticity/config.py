"""`deepspeed.elasticity.config`: the section as an object, and its errors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from zengine.config import ConfigError
from zengine.config.plan.elastic import CHOSEN
from zengine.deepspeed.elasticity import constants

__all__ = [
    "ElasticityConfig",
    "ElasticityConfigError",
    "ElasticityError",
    "ElasticityIncompatibleWorldSize",
    "elastic_errors",
]


class ElasticityError(Exception):
    """Error of elasticity."""


class ElasticityConfigError(ElasticityError):
    """The section is wrong or absent."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """The world cannot train the elastic batch size."""


class _SectionProblems(ElasticityConfigError, ConfigError):
    """Problems of the section in a config."""


class _WorldProblem(ElasticityIncompatibleWorldSize, ConfigError):
    """The world of the run does not fit the section of its config."""


@contextmanager
def elastic_errors() -> Iterator[None]:
    """Within the block, raise a ConfigError that is about the section alone as DeepSpeed's error, too."""
    try:
        yield
    except ConfigError as error:
        keys = [problem.key for problem in error.problems]
        if not all(
            each.key.partition(".")[0] == constants.ELASTICITY or each.reason == CHOSEN for each in error.problems
        ):
            raise
        kind = _WorldProblem if keys == [constants.ELASTICITY] else _SectionProblems
        raise kind(error.source, error.problems) from None


class ElasticityConfig:
    """The section `elasticity`.

    Raises:
        ElasticityConfigError: a key is missing or has no legal value.
    """

    def __init__(self, param_dict: Mapping[str, Any]) -> None:
        get = param_dict.get
        self.enabled = get(constants.ENABLED, constants.ENABLED_DEFAULT)
        required = (constants.MAX_ACCEPTABLE_BATCH_SIZE, constants.MICRO_BATCHES) if self.enabled else ()
        for key in required:
            if key not in param_dict:
                raise ElasticityConfigError(f'elasticity.{key} is missing. Add "{key}" to the section.')
        self.max_acceptable_batch_size = get(
            constants.MAX_ACCEPTABLE_BATCH_SIZE, constants.MAX_ACCEPTABLE_BATCH_SIZE_DEFAULT
        )
        self.micro_batches = get(constants.MICRO_BATCHES, constants.MICRO_BATCHES_DEFAULT)
        self.min_gpus = get(constants.MIN_GPUS, constants.MIN_GPUS_DEFAULT)
        self.max_gpus = get(constants.MAX_GPUS, constants.MAX_GPUS_DEFAULT)
        self.model_parallel_size = get(constants.MODEL_PARALLEL_SIZE, constants.MODEL_PARALLEL_SIZE_DEFAULT)
        self.num_gpus_per_node = get(constants.NUM_GPUS_PER_NODE, constants.NUM_GPUS_PER_NODE_DEFAULT)
        self.min_time = get(constants.MIN_TIME, constants.MIN_TIME_DEFAULT)
        self.version = get(constants.VERSION, constants.VERSION_DEFAULT)
        self.prefer_larger_batch_size = get(constants.PREFER_LARGER_BATCH, constants.PREFER_LARGER_BATCH_DEFAULT)
        self.ignore_non_elastic_batch_info = get(
            constants.IGNORE_NON_ELASTIC_BATCH_INFO, constants.IGNORE_NON_ELASTIC_BATCH_INFO_DEFAULT
        )
        self._check()

    def _check(self) -> None:
        micro = self.micro_batches
        if not isinstance(micro, list) or not micro or not all(type(each) is int and each > 0 for each in micro):
            raise ElasticityConfigError(
                f"elasticity.micro_batch_sizes = {micro!r}: needs a list of whole numbers >= 1, such as [2, 4, 6]"
            )
        least_of = {"min_gpus": 1, "max_gpus": 1, "model_parallel_size": 1, "num_gpus_per_node": 1, "min_time": 0}
        numbers = {key: (getattr(self, key), least) for key, least in least_of.items()}
        numbers[constants.MAX_ACCEPTABLE_BATCH_SIZE] = (self.max_acceptable_batch_size, 1)
        for key, (value, least) in numbers.items():
            if not isinstance(value, (int, float)) or value < least:
                raise ElasticityConfigError(f"elasticity.{key} = {value!r}: needs at least {least}")
        if not isinstance(self.prefer_larger_batch_size, bool):
            raise ElasticityConfigError(
                f"elasticity.{constants.PREFER_LARGER_BATCH} = {self.prefer_larger_batch_size!r}: needs true or false"
            )
        if self.max_gpus < self.min_gpus:
            raise ElasticityConfigError(
                f"elasticity.min_gpus = {self.min_gpus} exceeds max_gpus = {self.max_gpus}: exchange the two"
            )

    def repr(self) -> dict[str, Any]:
        """Return the values by name."""
        return self.__dict__

    def __repr__(self) -> str:
        return json.dumps(self.__dict__, sort_keys=True, indent=4)
