"""Random training programs, executed by plain torch in one process and by engines on ranks.

A `Program` is sampled from a seed: dtype, optimizer and its groups, the steps and ranks that use each block, frozen
blocks, accumulation, clipping, ZeRO stage, style of the loop, and a checkpoint in the middle that another stage
loads.  `torch_weights` is the oracle and knows neither stages nor ranks; `engine_weights` runs on each rank.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from torch import Tensor, nn

import zcomm
import zengine

WIDTH, ROWS = 6, 3

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {  # by name: (class of torch.optim, options)
    "sgd": ("SGD", {"lr": 0.05}),
    "momentum": ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "adam": ("Adam", {"lr": 0.02, "weight_decay": 0.05}),
    "adamw": ("AdamW", {"lr": 0.02, "betas": (0.8, 0.95), "weight_decay": 0.1}),
    "amsgrad": ("AdamW", {"lr": 0.02, "amsgrad": True}),
    "adagrad": ("Adagrad", {"lr": 0.05, "initial_accumulator_value": 0.1}),
    "rmsprop": ("RMSprop", {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "adamax": ("Adamax", {"lr": 0.02}),
    "nadam": ("NAdam", {"lr": 0.02}),
    "radam": ("RAdam", {"lr": 0.02}),
    "adadelta": ("Adadelta", {"lr": 0.5}),
}
FROM_CONFIG = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW", "adagrad": "Adagrad"}  # zoptim's options for the name
STYLES = ("engine", "every", "last", "closure", "scaled", "plain")


@attrs.frozen(kw_only=True)
class Program:
    """One sampled program; equal on all ranks."""

    seed: int
    world_size: int
    dtype: torch.dtype
    optimizer: str
    made_by: str  # "torch" | "callable" | "config"
    stage: int
    later_stage: int  # stage that loads the checkpoint in the middle; -1: none
    style: str
    accumulation: int
    clip_norm: float
    num_steps: int
    num_blocks: int
    usage: tuple[str, ...]  # of each block: "always" | "late" | "sometimes" | "one rank" | "never" | "frozen"
    is_tied: bool
    num_losses: int
    has_groups: bool
    evaluates: bool

    @classmethod
    def draw(cls, seed: int, world_size: int) -> Program:
        rng = random.Random(seed)
        optimizer = rng.choice(list(OPTIMIZERS))
        style = rng.choice(STYLES)
        makers = ["torch", "callable"] + ["config"] * (optimizer in FROM_CONFIG)
        num_blocks = rng.randint(1, 4)
        usage = ["always", "late", "sometimes", "one rank", "never", "frozen"]
        return cls(
            seed=seed,
            world_size=world_size,
            dtype=rng.choice([torch.float32, torch.float64]),
            optimizer=optimizer,
            made_by=rng.choice(makers),
            stage=rng.randint(0, 3),
            later_stage=rng.choice([-1, -1, 0, 1, 2, 3]),
            style=style,
            accumulation=1 if style == "plain" else rng.randint(1, 3),
            clip_norm=rng.choice([0.0, 0.3]),
            num_steps=rng.randint(3, 8),
            num_blocks=num_blocks,
            usage=tuple(rng.choice(usage) for _ in range(num_blocks)),
            is_tied=rng.random() < 0.3,
            num_losses=1 if style in ("plain", "scaled") else rng.randint(1, 2),
            has_groups=rng.random() < 0.5,
            evaluates=rng.random() < 0.3,
        )

    def uses(self, block: int, step: int, micro: int, rank: int) -> bool:
        """True if a micro-batch passes through a block."""
        how = self.usage[block]
        if how == "late":
            return step >= 2
        if how == "sometimes":
            return random.Random((self.seed, block, step).__hash__()).random() < 0.5
        if how == "one rank":
            return rank == block % self.world_size
        return how != "never"

    def batch(self, step: int, micro: int, rank: int) -> Tensor:
        """Return a batch (ROWS, WIDTH) of `dtype`."""
        generator = torch.Generator().manual_seed(((self.seed * 31 + step) * 31 + micro) * 31 + rank)
        return torch.randn(ROWS, WIDTH, generator=generator, dtype=self.dtype)


class Blocks(nn.Module):
    """Blocks, some of them skipped, between two layers that may share their weight."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        torch.manual_seed(program.seed)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH + index), nn.Tanh(), nn.Linear(WIDTH + index, WIDTH))
            for index in range(program.num_blocks)
        )
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        if program.is_tied:
            self.last.weight = self.first.weight
        for block, how in zip(self.blocks, program.usage):
            block.requires_grad_(how != "frozen")
        self.to(program.dtype)

    def forward(self, x: Tensor, used: tuple[bool, ...]) -> Tensor:
        hidden = self.first(x)
        for block, is_used in zip(self.blocks, used):
            hidden = hidden + block(hidden) if is_used else hidden
        return self.last(torch.tanh(hidden)).square().mean()


def groups_of(program: Program, model: nn.Module) -> list[dict[str, Any]]:
    """Return the parameter groups: one, or matrices and the rest with a smaller learning rate."""
    trained = [param for param in model.parameters() if param.requires_grad]
    if not program.has_groups:
        return [{"params": trained}]
    lr = OPTIMIZERS[program.optimizer][1]["lr"]
    small = [param for param in trained if param.dim() < 2]
    return [{"params": [p for p in trained if p.dim() > 1]}, {"params": small, "lr": lr / 4, "weight_decay": 0.0}]


def torch_optimizer(program: Program, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    kind, options = OPTIMIZERS[program.optimizer]
    made: torch.optim.Optimizer = getattr(torch.optim, kind)(groups, **options)
    return made


def micro_batches(program: Program, step: int, rank: int) -> Iterator[tuple[Tensor, tuple[bool, ...]]]:
    for micro in range(program.accumulation):
        used = tuple(program.uses(block, step, micro, rank) for block in range(program.num_blocks))
        yield program.batch(step, micro, rank), used


def torch_weights(program: Program) -> dict[str, Tensor]:
    """Return the weights after a loop in one process over the micro-batches of all ranks."""
    model = Blocks(program)
    optimizer = torch_optimizer(program, groups_of(program, model))
    count = program.accumulation * program.world_size
    for step in range(program.num_steps):
        for rank in range(program.world_size):
            for batch, used in micro_batches(program, step, rank):
                (model(batch, used) / count).backward()
        if program.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), program.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def make_engine(program: Program, stage: int) -> Any:
    """Make (engine, optimizer) of this rank."""
    model = Blocks(program)
    groups = groups_of(program, model)
    options = OPTIMIZERS[program.optimizer][1]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": program.accumulation,
        "gradient_clipping": program.clip_norm,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    given: dict[str, Any] = {"model_parameters": groups}
    if program.made_by == "config":
        coupled = {"adam_w_mode": False} if program.optimizer == "adam" else {}  # "Adam" in a config decays as AdamW
        config["optimizer"] = {"type": FROM_CONFIG[program.optimizer], "params": {**options, **coupled}}
    elif program.made_by == "callable":
        given["optimizer"] = lambda params: torch_optimizer(program, params)
    else:
        given = {"optimizer": torch_optimizer(program, groups)}
    engine, optimizer, _, _ = zengine.initialize(model=model, config=config, **given)
    return engine, optimizer


def run_step(program: Program, engine: Any, optimizer: Any, step: int) -> None:
    """Run one step of this rank in the program's style."""
    batches = list(micro_batches(program, step, zcomm.group_rank()))
    for index, (batch, used) in enumerate(batches):
        if program.evaluates:
            with torch.no_grad():
                engine(batch, used)

        def losses(batch: Tensor = batch, used: tuple[bool, ...] = used) -> Iterator[tuple[Tensor, bool]]:
            loss = engine(batch, used)
            for part in range(program.num_losses):
                yield loss / program.num_losses, part + 1 < program.num_losses

        def backward(losses: Callable[..., Iterator[tuple[Tensor, bool]]] = losses) -> Tensor:
            for loss, again in losses():
                engine.backward(loss, retain_graph=again)
            return loss

        if program.style == "closure":
            optimizer.step(backward)
            continue
        if program.style == "scaled":
            engine.scale(engine(batch, used)).backward()
        elif program.style == "plain":
            engine(batch, used).backward()
        else:
            backward()
        if program.style == "engine":
            engine.step()
        elif program.style != "last" or index + 1 == len(batches):
            optimizer.step()
            optimizer.zero_grad()


def engine_weights(program: Program) -> dict[str, Tensor]:
    """Return the whole weights after the program, on this rank."""
    engine, optimizer = make_engine(program, program.stage)
    half = program.num_steps // 2 if program.later_stage >= 0 else -1
    with tempfile.TemporaryDirectory() as own:
        folder = zcomm.all_gather_object(own)[0]
        for step in range(program.num_steps):
            if step == half:
                engine.save_checkpoint(folder)
                engine.close()
                engine, optimizer = make_engine(program, program.later_stage)
                engine.load_checkpoint(folder)
            run_step(program, engine, optimizer, step)
        zcomm.barrier()
    assert engine.global_steps == program.num_steps
    found = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
    engine.close()
    return found


def difference(program: Program, found: dict[str, Tensor], wanted: dict[str, Tensor]) -> str:
    """Describe weights that differ beyond rounding; "" if none does."""
    relative = {torch.float32: 2e-4, torch.float64: 1e-9}[program.dtype]
    if set(found) != set(wanted):
        return f"other names: {sorted(set(found) ^ set(wanted))}"
    for name, tensor in wanted.items():
        if found[name].dtype != tensor.dtype:
            return f"{name} is {found[name].dtype} instead of {tensor.dtype}"
        distance = (found[name] - tensor).abs().max().item()
        if not distance <= relative * tensor.abs().max().item():
            return f"{name} differs by {distance:g}"
    return ""


def run_programs(programs: list[Program]) -> list[str]:
    """Return the difference or error of each program; stop at the first that raises."""
    told: list[str] = []
    for program in programs:
        try:
            told.append(difference(program, engine_weights(program), torch_weights(program)))
        except Exception as error:  # the error text belongs to this program
            told.append(f"{type(error).__name__}: {error}")
            break
    return told
