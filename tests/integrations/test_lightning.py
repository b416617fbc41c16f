"""Lightning's Trainer and Fabric, as released, train with zengine as their deepspeed.

Two CPU ranks, one launch for all checks (see lightning_ranks.py), then one rank that resumes; tiny models.
Losses are compared with those of Lightning's DDPStrategy, to 1e-6 if not said otherwise.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("lightning") is None, reason="not installed: lightning (requirements-dev.txt has it)"
    ),
]

SCRIPT = Path(__file__).with_name("lightning_ranks.py")
STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
Results = dict[str, Any]  # of one rank, by the name of the run


def start(rank: int, ranks: int, port: int, folder: Path) -> subprocess.Popen[str]:
    """Start a rank as torchrun does, without its start-up time."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "OMP_NUM_THREADS": 1}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment = {**os.environ, **{name: str(value) for name, value in {**place, **meeting}.items()}}
    command = [sys.executable, "-m", "zengine.as_deepspeed", str(SCRIPT), str(folder)]
    with open(folder / f"{ranks}-{rank}.log", "w") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, text=True)


def launch(ranks: int, folder: Path) -> list[Results]:
    """Return the results of each rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = [start(rank, ranks, port, folder) for rank in range(ranks)]
    try:
        codes = [rank.wait(timeout=600) for rank in started]
    finally:
        for rank in started:
            rank.kill()
    logs = "\n".join((folder / f"{ranks}-{rank}.log").read_text()[-3000:] for rank in range(ranks))
    assert codes == [0] * ranks, logs
    return [json.loads((folder / f"{ranks}-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lightning")


@pytest.fixture(scope="module")
def found(folder: Path) -> list[Results]:
    """Results of each of two ranks."""
    return launch(2, folder)


def of(found: list[Results], name: str) -> Any:
    """Return one run's result on rank 0; fail if it raised on a rank."""
    for rank, results in enumerate(found):
        result = results[name]
        assert not isinstance(result, dict) or "error" not in result, f"rank {rank}: {result['error']}"
    return found[0][name]


def close(values: Any, abs: float = 1e-6) -> Any:
    return pytest.approx(values, abs=abs)


# -- Trainer -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["1", "2", "3", "2_offload", "3_offload"])
def test_trainer_has_the_losses_and_rates_of_ddp(found: list[Results], stage: str):
    """Lightning takes the schedule off the engine (engine.lr_scheduler = None) and advances it itself."""
    plain, ours = of(found, "plain"), of(found, f"stage {stage}")
    assert (plain["type"], ours["type"]) == ("Module", "DeepSpeedEngine")
    assert ours["losses"] == close(plain["losses"])
    assert ours["rates"] == close(plain["rates"], abs=1e-12)
    assert len(set(ours["rates"])) == ours["steps"] == 6


def test_configure_model_builds_sharded_layers_at_stage_3(found: list[Results]):
    nbytes = {stage: of(found, f"stage {stage}")["nbytes"] for stage in (1, 2, 3)}
    assert nbytes == {1: 512, 2: 512, 3: 4}


@pytest.mark.parametrize(
    ("precision", "dtype", "scale"),
    [("bf16-mixed", "bfloat16", 1), ("16-mixed", "float16", 256), ("32-true", "float32", 1)],
)
def test_trainer_in_each_precision_has_nearly_the_losses_of_float32(
    found: list[Results], precision: str, dtype: str, scale: float
):
    ours = of(found, precision)
    assert (ours["dtype"], ours["scale"]) == (f"torch.{dtype}", scale)
    assert ours["losses"] == close(of(found, "plain")["losses"], abs={1: 5e-3, 256: 5e-4}[scale])


def test_accumulation_divides_the_gradients_twice(found: list[Results]):
    """Lightning divides the loss by its number of micro-batches, and DeepSpeed's engine divides it again.

    So SGD makes 1/N of DDP's update: it equals DDP with 1/N of the learning rate.  Adam's update does not depend on
    the scale of the gradients, but for its epsilon.
    """
    losses = of(found, "accumulated")
    assert losses["sgd ds"] == close(losses["sgd/2 ddp"])
    assert losses["sgd ds"][:2] == close(losses["sgd ddp"][:2])  # before the first update
    assert abs(losses["sgd ds"][2] - losses["sgd ddp"][2]) > 0.1
    assert losses["adam ds"] == close(losses["adam ddp"], abs=1e-3)


@pytest.mark.parametrize("run", ["clipped", "by_hand", "evaluated"])
def test_trainer_clips_optimizes_manually_and_evaluates_as_ddp_does(found: list[Results], run: str):
    assert of(found, f"{run} deepspeed_stage_3") == close(of(found, f"{run} ddp"), abs=1e-5)


@STAGES
def test_trainer_resumes_tests_and_converts_its_checkpoints(found: list[Results], stage: int):
    """With ModelCheckpoint, LearningRateMonitor, a summary, and a callback whose state has tensors."""
    ours = of(found, f"saved {stage}")
    assert len(ours["resumed"]) == 6
    assert ours["resumed"] == ours["losses"][6:]
    assert ours["restored"] == ours["tested"]
    assert [ours[name] for name in ("rates", "averages", "best")] == [True, True, True]
    assert ours["converted"] == [True, True, True]


def test_a_run_of_stage_1_is_resumed_at_stage_3(found: list[Results]):
    assert of(found, "across stages") == close(of(found, "saved 1")["losses"][6:])


def test_a_run_of_two_ranks_is_resumed_on_one(found: list[Results], folder: Path):
    """One rank has the samples of both in its micro-batches, so its losses are their means."""
    both = zip(of(found, "saved 3")["losses"][6:], found[1]["saved 3"]["losses"][6:], strict=True)
    assert of(launch(1, folder), "on one rank") == close([(first + second) / 2 for first, second in both], abs=1e-5)


def test_whole_weights_of_a_ddp_run_are_loaded_at_stage_3(found: list[Results]):
    ours = of(found, "from whole weights")
    assert ours["loaded"] == close(ours["plain"])


def test_lightnings_own_weight_averaging_equals_that_of_ddp(found: list[Results]):
    assert of(found, "averaged deepspeed_stage_2") == close(of(found, "averaged ddp"))


# -- Fabric --------------------------------------------------------------------------------------


@STAGES
def test_fabric_has_the_losses_of_ddp(found: list[Results], stage: int):
    """Clipped to DeepSpeed's default norm, 1.0, since Fabric's config does not say another."""
    plain, ours = of(found, "fabric 0"), of(found, f"fabric {stage}")
    assert ours["losses"] == close(plain["losses"])
    assert ours["rate"] == plain["rate"] == close(1e-3, abs=1e-12)
    assert ours["sharded"] is (stage == 3)
    assert "set the `gradient_clipping` value" in ours["clip"]


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", "bfloat16"), ("16-mixed", "float16")])
def test_fabric_in_each_precision_has_nearly_the_losses_of_float32(found: list[Results], precision: str, dtype: str):
    ours = of(found, f"fabric {precision}")
    assert ours["dtype"] == f"torch.{dtype}"
    assert ours["losses"] == close(of(found, "fabric 0")["losses"], abs=5e-3)


@pytest.mark.parametrize("stage", [2, 3])
def test_fabric_accumulates_over_several_backwards(found: list[Results], stage: int):
    """no_backward_sync has no effect with DeepSpeedStrategy; gradients add up until optimizer.step()."""
    assert of(found, f"fabric local {stage}") == close(of(found, "fabric local 0"))


@STAGES
def test_fabric_saves_and_loads_a_run_with_the_callers_state(found: list[Results], stage: int):
    ours = of(found, f"fabric saved {stage}")
    assert ours["loaded"] == ours["continued"]
    assert ours["continued"] == close(of(found, "fabric 0")["losses"][3:])
    assert ours["seen"]
    assert ours["rest"] == {"note": "a"}


def test_fabric_loads_whole_weights_at_stage_3(found: list[Results]):
    plain, raw, wrapped = of(found, "fabric from files")
    assert (raw, wrapped) == (close(plain), close(plain))


def test_fabric_sets_up_a_model_without_an_optimizer_at_stage_3(found: list[Results]):
    ours, plain = of(found, "fabric without optimizer")
    assert ours == close(plain)


def test_deepspeed_was_ours(found: list[Results]):
    assert [results["deepspeed"] for results in found] == ["zengine.deepspeed", "zengine.deepspeed"]
