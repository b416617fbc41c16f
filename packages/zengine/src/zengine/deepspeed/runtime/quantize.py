"""`deepspeed.runtime.quantize`: rounding of weights by hand, for loops without an engine.

    for weight in weights:
        weight.start_bits, weight.target_bits, weight.q_period = 8, 4, 100
    quantizer = Quantizer(q_type="symmetric", q_rounding="nearest")
    quantizer.quantize([weights], overflow=False, eigenvalue_enabled=False)  # after each update

The law is that of `quantize_training` (features/moq.py), which rounds in an engine, at every stage and in bf16 too.
There the share of full precision is one for each weight; here it is one for all, as in DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from zengine.features.moq import BitSchedule
from zprecision.quant import round_to_bits

__all__ = ["TWO_D_PARAMS", "Quantizer"]

TWO_D_PARAMS = 6  # matrices of a layer of BERT, by which DeepSpeed looks ahead
_KINDS, _ROUNDINGS = ("symmetric", "asymmetric"), ("nearest", "nearest_neighbor", "stochastic")


class Quantizer:
    """Rounds parameters that have `start_bits`, `target_bits` and `q_period`, in place."""

    def __init__(
        self,
        q_groups: int = 1,
        q_mixed_fp16: bool = False,
        q_change_ratio: float = 0.01,
        q_type: str | int = 0,
        q_rounding: str | int = 0,
        q_verbose: bool = False,
        q_eigenvalue: bool = False,
        use_quantizer_kernel: bool = False,
        layer_num: int = 0,
    ) -> None:
        """Keep the settings.

        q_groups: parts of a weight with a scale each.
        q_mixed_fp16: weights are r w + (1 - r) rounded(w); r falls by `q_change_ratio` a step, from 1 after each lost
            bit.
        q_type: "symmetric" or "asymmetric"; 0 and 1 are the same.
        q_rounding: "nearest" or "stochastic"; 0 and 1 are the same.
        q_verbose, q_eigenvalue, use_quantizer_kernel, layer_num: kept as attributes; one implementation serves all
            devices, and blocks come with `quantize`.
        Raises ValueError for another type or rounding.
        """
        self.q_groups, self.q_mixed_fp16, self.q_change_ratio = q_groups, q_mixed_fp16, q_change_ratio
        self.q_type = _word("q_type", q_type, _KINDS)
        self.q_rounding = _word("q_rounding", q_rounding, ("nearest", "stochastic"), _ROUNDINGS)
        self.q_verbose, self.q_eigenvalue = q_verbose, q_eigenvalue
        self.use_quantizer_kernel, self.layer_num = use_quantizer_kernel, layer_num
        self.qsteps = 0
        self.quantize_real_ratio = 1.0
        self._seen: list[Tensor] = []  # parameters of the last call, for `any_precision_switch`

    def any_precision_switch(self) -> bool:
        """Return whether a weight may lose a bit in `TWO_D_PARAMS * layer_num` steps; True before any call."""
        reach = self.qsteps + TWO_D_PARAMS * max(1, self.layer_num)
        return not self._seen or any(
            each.start_bits > each.target_bits and reach >= each.q_period  # type: ignore[attr-defined]
            for each in self._seen
        )

    @torch.no_grad()
    def quantize(
        self,
        parameter_group: Iterable[Iterable[Tensor]],
        overflow: bool,
        eigenvalue_enabled: bool,
        block_eigenvalue: Mapping[int, tuple[float, int]] | None = None,
    ) -> None:
        """Count a step, and round every parameter of two or more dimensions that has `start_bits`.

        overflow: nothing happens, unless `eigenvalue_enabled`.
        block_eigenvalue: id of a parameter -> (eigenvalue in [0, 1], layer); its period grows 1 + floor(4 value)
            times as fast.
        """
        if overflow and not eigenvalue_enabled:
            return
        self.step()
        self.update_fp16_ratio()
        values = block_eigenvalue or {}
        found = [each for group in parameter_group for each in group]
        self._seen = [each for each in found if each.dim() > 1 and getattr(each, "start_bits", None)]
        for param in self._seen:
            value, layer = values.get(id(param), (None, 0))
            rounded = self.compute_quantization(param, layer, 1 if value is None else 1 + int(4 * value))
            param.copy_(rounded)

    def step(self) -> None:
        """Count a step."""
        self.qsteps += 1

    def compute_quantization(self, input: Tensor, index: int = 0, factor: int = 1) -> Tensor:
        """Return a weight, rounded; advance its `start_bits` and `q_period`.  index: its layer, without effect."""
        weight: Any = input
        schedule = BitSchedule(weight.start_bits, weight.target_bits, weight.q_period)
        if schedule.target > schedule.bits:
            raise ValueError(
                f"start_bits = {schedule.bits} is below target_bits = {schedule.target}: bits only fall; lower "
                "target_bits"
            )
        if schedule.advance(self.qsteps, factor):
            self.quantize_real_ratio = 1.0
            weight.start_bits, weight.q_period = schedule.bits, schedule.period
        data = input.detach()
        if schedule.bits >= 3:
            rounded = self.quantize_highbit(data, schedule.bits)
        else:
            rounded = self.quantize_tenary(data) if schedule.bits == 2 else self.quantize_binary(data)
        return self.mixed_fp16_quantize(data, rounded, index)

    def quantize_highbit(self, inputs: Tensor, num_bits: int) -> Tensor:
        """Return `inputs` rounded to `num_bits` >= 3 bits."""
        return round_to_bits(
            inputs,
            num_bits,
            groups=self.q_groups,
            kind="asymmetric" if self.q_type == "asymmetric" else "symmetric",
            rounding="stochastic" if self.q_rounding == "stochastic" else "nearest",
        )

    def quantize_tenary(self, inputs: Tensor) -> Tensor:
        """Return `inputs` rounded to -a, 0 and a.  Raises ValueError if the type is asymmetric."""
        return round_to_bits(inputs, 2, groups=self.q_groups, kind=self._symmetric("ternary"))

    def quantize_binary(self, inputs: Tensor) -> Tensor:
        """Return `inputs` rounded to -a and a.  Raises ValueError if the type is asymmetric."""
        return round_to_bits(inputs, 1, groups=self.q_groups, kind=self._symmetric("binary"))

    def mixed_fp16_quantize(self, input: Tensor, input_q: Tensor, index: int) -> Tensor:
        """Return the mixture of a weight and its rounded form; the latter unless `q_mixed_fp16`."""
        if not self.q_mixed_fp16:
            return input_q
        return self.quantize_real_ratio * input + (1 - self.quantize_real_ratio) * input_q

    def update_fp16_ratio(self) -> None:
        """Lower the share of full precision."""
        if self.q_mixed_fp16:
            self.quantize_real_ratio = max(0.0, self.quantize_real_ratio - self.q_change_ratio)

    def _symmetric(self, form: str) -> Any:
        if self.q_type != "symmetric":
            raise ValueError(
                f"{form} weights are symmetric, and q_type is {self.q_type!r}; pass at least 3 target_bits, or "
                'q_type="symmetric"'
            )
        return "symmetric"


def _word(name: str, given: str | int, words: tuple[str, ...], allowed: tuple[str, ...] = ()) -> str:
    """Return a setting as a word: itself, or the word of that number."""
    if isinstance(given, int) and given in range(len(words)):
        return words[given]
    if given not in (allowed or words):
        raise ValueError(f"{name} = {given!r}; pass one of {', '.join(map(repr, allowed or words))}")
    return "nearest" if given == "nearest_neighbor" else str(given)
