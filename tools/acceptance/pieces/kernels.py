"""The GPU kernels of zoptim: bits against the C kernels and the rules, bandwidth, races.

Bits.  Every optimizer in every format of weights and states takes the same steps on the CPU and on the device: with
a gradient scale, then skipped, then again.  The C kernels give the same bits.  Without them (cffi is missing) only
the rules remain: one step in float32 is within 6 ulp of the largest term of the rule in float64, as
`packages/zoptim/tests/rules/test_elementwise_kernels.py` derives.  Muon and Adafactor have no kernels; they are
compared with their rules.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import repo
import torch
from torch import Tensor

import zoptim
from acceptance.bench import Bench, NotRunHere, differing
from acceptance.verdict import Figure

__all__ = ["bits", "predicted_us", "racecheck", "speed"]

NUMELS = (1, 255, 256, 1027, 3 * 8192 + 515)
DECAY: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.02}
OPTIMIZERS: Mapping[str, Callable[..., zoptim.FlatOptimizer]] = {
    "AdamW": lambda params, **more: zoptim.AdamW(params, **DECAY, **more),
    "Adam amsgrad": lambda params, **more: zoptim.Adam(params, amsgrad=True, **DECAY, **more),
    "SGD": lambda params, **more: zoptim.SGD(params, **DECAY, **more),
    "SGD nesterov": lambda params, **more: zoptim.SGD(params, momentum=0.9, nesterov=True, **DECAY, **more),
    "Adagrad": lambda params, **more: zoptim.Adagrad(params, **DECAY, **more),
    "Lion": lambda params, **more: zoptim.Lion(params, **DECAY, **more),
    "LAMB": lambda params, **more: zoptim.LAMB(params, **DECAY, **more),
}
STATES = ("fp32", "bf16", "fp16", "8bit")
WEIGHTS = ("fp32", "bf16", "fp16", "split", "mirrored")  # the last: fp32 masters, bf16 gradients and copies
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "split": torch.bfloat16}
ON_SIMULATED = (("AdamW", "fp32", "fp32"), ("AdamW", "split", "8bit"), ("LAMB", "mirrored", "bf16"))
GOAL = 0.9  # of the bandwidth of a copy
MODEL_ERROR = 0.15  # of a predicted time
KERNELS = {  # of the cases of zoptim's bench, by the names of its cost model; LAMB's step has two
    "adamw": "adam: f32 f32 f32",
    "offload": "adam: f32 bf16 f32 bf16",
    "split": "adam: split bf16 f32",
    "bf16": "adam: f32 f32 bf16",
    "8bit": "adam: f32 f32 q8",
    "lion": "lion: f32 f32 f32",
    "adagrad": "adagrad: f32 f32 f32",
    "sgd": "sgd: f32 f32 f32",
}
TERM_ULP = 6.0


@attrs.frozen
class Format:
    """An optimizer with the formats of its memory."""

    optimizer: str
    weights: str
    states: str

    def __str__(self) -> str:
        return f"{self.optimizer}, {self.weights} weights, {self.states} states"


def formats() -> Iterator[Format]:
    """Yield every combination; plain SGD has no states."""
    for optimizer, weights, states in itertools.product(OPTIMIZERS, WEIGHTS, STATES):
        if optimizer != "SGD" or states == "fp32":
            yield Format(optimizer, weights, states)


def bits(bench: Bench) -> None:
    """Compare bits of all formats, norms, and the optimizers without kernels."""
    if (reason := zoptim.kernels().gpu) and not zoptim.has_kernels(bench.device):
        raise NotRunHere(reason)
    chosen = bench.choose(list(formats()), [Format(*each) for each in ON_SIMULATED])
    if zoptim.has_kernels("cpu"):
        found = {str(each): differing(updated(each, bench.device), updated(each, "cpu")) for each in chosen}
        faults = [f"{name}: {'; '.join(some)}" for name, some in found.items() if some]
        bench.check(f"{len(chosen)} optimizers and formats have the bits of the C kernels", faults)
    else:
        bench.skip("bits against the C kernels", zoptim.kernels().cpu)
    exact = [name for name in OPTIMIZERS if not bench.is_simulated or name in ("AdamW", "SGD nesterov")]
    faults = [f"{name}: {off:.2f} ulp" for name in exact if not (off := ulp_off(name, bench.device)) <= TERM_ULP]
    bench.check(f"{len(exact)} optimizers in fp32 are within {TERM_ULP:g} ulp of their rules in float64", faults)
    bench.check("norms equal a float64 sum, and see inf and NaN", norm_faults(bench.device))
    bench.check("Muon and Adafactor follow their rules", matrix_faults(bench.device))


def updated(form: Format, device: torch.device | str) -> list[Tensor]:
    """Return weights, copies and states after three steps, the second of which is skipped."""
    generator = torch.Generator().manual_seed(1)

    def draw(size: float, dtype: torch.dtype) -> list[Tensor]:
        return [(torch.randn(n, generator=generator) * size).to(dtype).to(device) for n in NUMELS]

    mirrored = form.weights == "mirrored"
    dtype = torch.float32 if mirrored else DTYPES[form.weights]
    params = [torch.nn.Parameter(value) for value in draw(1.0, dtype)]
    more = {"split_master": True} if form.weights == "split" else {}
    optimizer = OPTIMIZERS[form.optimizer](params, state_dtype=form.states, **more)
    leaves = params
    if mirrored:
        leaves = [torch.nn.Parameter(param.detach().bfloat16()) for param in params]
        for param, leaf in zip(params, leaves):
            optimizer.mirror(param, leaf)
    for is_skipped in (0.0, 1.0, 0.0):
        for leaf, grad in zip(leaves, draw(3.0, leaves[0].dtype)):
            leaf.grad = grad
        optimizer.grad_scale = torch.tensor(4.0, device=device)
        optimizer.found_inf = torch.tensor(is_skipped, device=device)
        optimizer.step()
    states = [value for param in params for _, value in sorted(optimizer.state[param].items())]
    tensors = [*params, *(leaves if mirrored else ()), *(each for each in states if isinstance(each, Tensor))]
    return [tensor.detach().cpu() for tensor in tensors]


def ulp_off(name: str, device: torch.device) -> float:
    """Return the error of one step in float32, in ulp of the largest of weight, new weight and step."""
    generator = torch.Generator().manual_seed(2)
    start, grad = (torch.randn(1 << 14, generator=generator) for _ in range(2))
    after = []
    for values, gradient in ((start.to(device), grad.to(device)), (start.double(), grad.double())):
        param = torch.nn.Parameter(values.clone())
        param.grad = gradient
        OPTIMIZERS[name]([param], foreach=True if values.dtype == torch.float64 else None).step()
        after.append(param.detach().cpu())
    ours, exact = after
    largest = torch.stack([start.abs().double(), exact.abs(), (exact - start).abs()]).amax(0).float()
    unit = torch.nextafter(largest, torch.tensor(float("inf"))) - largest
    return float(((ours.double() - exact).abs() / unit).max())


def norm_faults(device: torch.device) -> list[str]:
    """Return faults of the sum of squares and of the flag."""
    generator = torch.Generator().manual_seed(3)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    grads = [torch.randn(n, generator=generator).to(dtype) for n in (5, 70_001) for dtype in dtypes]
    exact = sum(float(grad.double().square().sum()) for grad in grads)
    there = [grad.to(device) for grad in grads]
    found = float(zoptim.sum_of_squares(there))
    faults = [] if abs(found / exact - 1) < 1e-12 else [f"the sum of squares is {found}, not {exact}"]
    if zoptim.grad_stats(there).found_inf.item() != 0.0:
        faults.append("finite gradients are called not finite")
    for bad in (float("inf"), float("nan")):
        there[-1][-1] = bad
        faults += [] if zoptim.grad_stats(there).found_inf.item() == 1.0 else [f"{bad} is not seen"]
    return faults


def matrix_faults(device: torch.device) -> list[str]:
    """Return faults of Adafactor (against float64) and Muon (against its own float32, whose products are exact)."""
    generator = torch.Generator().manual_seed(4)
    start, grad = (torch.randn(64, 48, generator=generator) for _ in range(2))
    steps: dict[str, list[Tensor]] = {"Adafactor": [], "Muon": []}
    for name, dtype in (("Adafactor", torch.float64), ("Muon", torch.float32)):
        for values, gradient in ((start.to(device), grad.to(device)), (start.to(dtype), grad.to(dtype))):
            param = torch.nn.Parameter(values.clone())
            param.grad = gradient.clone()
            getattr(zoptim, name)([param], lr=0.01).step()
            steps[name].append((param.detach().cpu().double() - start.double()).flatten())
    ours, exact = steps["Adafactor"]
    error = float((ours - exact).norm() / exact.norm())
    faults = [] if error < 1e-4 else [f"Adafactor's step is off by {error:.2g} of its norm"]
    likeness = float(torch.nn.functional.cosine_similarity(*(torch.stack(steps["Muon"])[:, None])))
    return faults + ([] if likeness > 0.99 else [f"Muon's step has cosine {likeness:.4f} with that in float32"])


def speed(bench: Bench) -> None:
    """Time the steps of zoptim's bench against copies of as many bytes, and against torch's fused step."""
    if not zoptim.has_kernels(bench.device):
        raise NotRunHere(zoptim.kernels().gpu)
    sys.path.insert(0, str(repo.package_folder("zoptim") / "bench"))
    arena, cases, contenders, floors, timing = (
        importlib.import_module(name) for name in ("arena", "cases", "contenders", "floors", "timing")
    )
    total = bench.choose(100_000_000, 5000)
    sampling = timing.Sampling(rounds=bench.choose(15, 1), seconds=bench.choose(2.0, 0.0))
    for case in cases.CASES if not bench.is_simulated else cases.CASES[:1]:
        memory = arena.Arena((total,), bench.device)
        steps = {"copy": floors.copy_floor(int(case.bytes_per_param * total), bench.device)}
        for contender in case.contenders:
            if contender.name in ("ours", "torch fused") and bench.device.type in contender.devices:
                with contextlib.suppress(contenders.Unavailable):
                    steps[contender.name] = contender.prepare(memory)
        taken = {name: samples.median for name, samples in timing.run_rounds(steps, sampling, bench.device).items()}
        us = taken["ours"] * 1e6
        title = f"{case.title}: share of a copy's bandwidth"
        bench.figure(Figure(name=title, unit="of a copy", measured=taken["copy"] / taken["ours"], at_least=GOAL))
        guess = predicted_us(case.name, total, torch.cuda.get_device_name(bench.device))
        if guess is not None:
            name, low, high = f"{case.title}: a step by the cost model", 1 - MODEL_ERROR, 1 + MODEL_ERROR
            bench.figure(Figure(name=name, unit="us", measured=us, predicted=guess, at_least=low, at_most=high))
        rate = case.bytes_per_param * total / taken["ours"] / 1e9
        bench.figure(Figure(name=f"{case.title}: bandwidth", unit="GB/s", measured=rate))
        if "torch fused" in taken:
            name = f"{case.title}: step beside torch fused"
            bench.figure(Figure(name=name, unit="us", measured=us, peer=taken["torch fused"] * 1e6))


def predicted_us(case: str, numel: int, device: str) -> float | None:
    """Return the time of a case's kernel by the cost model of zoptim's bench; None where that predicts nothing."""
    try:
        model = importlib.import_module("predicted")
        return float(model.predicted(KERNELS[case], numel, model.device_of(device)).us)
    except (ModuleNotFoundError, FileNotFoundError, KeyError):
        return None


def racecheck(bench: Bench) -> None:
    """Run a step of every rule below compute-sanitizer."""
    tool = shutil.which("compute-sanitizer")
    if bench.is_simulated:
        raise NotRunHere("compute-sanitizer reads NVIDIA's hardware")
    if tool is None:
        raise NotRunHere("compute-sanitizer is not on PATH")
    command = [tool, "--tool", "racecheck", "--error-exitcode", "9", sys.executable, "-m", __name__]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    output = (done.stdout + done.stderr).strip()
    if "not supported" in output.lower():
        raise NotRunHere(f"compute-sanitizer: {output.splitlines()[0]}")
    faults = [] if done.returncode == 0 and "ERROR SUMMARY" not in output.replace("SUMMARY: 0", "") else [output]
    bench.check("racecheck finds no hazard in the kernels of all rules", [each[-1500:] for each in faults])


if __name__ == "__main__":  # below compute-sanitizer
    for optimizer in OPTIMIZERS:
        updated(Format(optimizer, "mirrored", "8bit" if optimizer != "SGD" else "fp32"), "cuda")
    norm_faults(torch.device("cuda"))
