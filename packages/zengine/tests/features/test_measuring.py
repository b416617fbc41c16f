"""Telemetry of a whole engine."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zengine
from zengine.features.measuring import epochs_of


class Model(nn.Module):
    """A language model with nothing in it."""

    def __init__(self, *, again: bool = False) -> None:
        super().__init__()
        self.config = {"n_layer": 1, "n_embd": 4}
        self.embedding = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10)
        self.again = again

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        scores = checkpoint(lambda x: self.head(x), x, use_reentrant=False) if self.again else self.head(x)
        return nn.functional.cross_entropy(scores.flatten(0, 1), tokens.flatten())


NUM_PARAMETERS = 10 * 4 + 4 * 10 + 10


def run(tmp_path, *, again=False, steps=4, **config):
    """Train; the lines of events.jsonl, and the engine."""
    data = [torch.arange(6) % 10 for _ in range(10)]
    engine, _, loader, _ = zengine.initialize(
        model=Model(again=again),
        training_data=data,
        config={
            "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.5}},
            "jsonl_monitor": {"enabled": True, "output_path": str(tmp_path)},
            **config,
        },
    )  # fmt: skip
    batches = zengine.data.forever(loader)
    while engine.global_steps < steps:
        engine.backward(engine(next(batches)))
        engine.step()
    engine.close()
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    return [json.loads(line)["values"] for line in lines], engine


def test_a_run_tells_speed_epochs_phases_and_owners(tmp_path):
    lines, _ = run(tmp_path, wall_clock_breakdown=True, timers={"throughput": {"peak_tflops": 1e-3}})
    assert [line["train/epoch"] for line in lines] == [0.4, 0.8, 1.2, 1.6]
    last = lines[-1]
    seconds = last["perf/step_time_ms"] / 1e3
    assert last["perf/tokens_per_second"] * seconds == torch.tensor(24.0)
    flops = 4 * (6 * NUM_PARAMETERS * 6 + 12 * 1 * 4 * 36)
    assert abs(last["perf/tflops"] * seconds * 1e12 / flops - 1) < 1e-6
    assert abs(last["perf/mfu"] / (last["perf/tflops"] / 1e-3) - 1) < 1e-6
    assert last["Train/Samples/elapsed_time_ms_data"] > 0
    assert last["memory/parameters_bytes"] >= NUM_PARAMETERS * 4 if "memory/parameters_bytes" in last else True
    assert lines[0]["memory/parameters_bytes"] >= NUM_PARAMETERS * 4
    assert lines[0]["memory/states_bytes"] >= 2 * NUM_PARAMETERS * 4
    assert "perf/step_time_ms" not in lines[1]


def test_passes_are_those_that_the_loader_counts_and_a_foreign_loader_has_none():
    assert epochs_of(SimpleNamespace(epochs_done=lambda: 3.5))() == (3.5,)
    assert epochs_of(None)() == ()


def test_the_record_holds_config_plan_and_environment(tmp_path):
    run(tmp_path, steps=1, comet={"enabled": False, "api_key": "secret-1"})
    text = (tmp_path / "run" / "run.json").read_text()
    record = json.loads(text)
    assert record["config"]["train_micro_batch_size_per_gpu"] == 2
    assert "secret-1" not in text
    assert ["zero_optimization.stage", 0, "default"] in record["plan"]
    assert ["optimizer.params.lr", 0.01, "dict"] in record["plan"]
    assert record["environment"]["world_size"] == 1
    hparams = record["hparams"]
    assert (hparams["lr"], hparams["weight_decay"], hparams["optimizer"]) == (0.01, 0.5, "AdamW")


def test_recomputation_is_seen_in_the_first_step_and_leaves_the_mfu_as_it_is(tmp_path):
    lines, engine = run(tmp_path / "again", again=True, timers={"throughput": {"peak_tflops": 1e-3}})
    assert engine.parts.telemetry.meter.coefficient == 4
    useful = lines[-1]["perf/mfu"] * 1e-3
    assert abs(lines[-1]["perf/tflops"] / useful - 4 / 3) < 1e-6
    _, told = run(tmp_path / "told", steps=1, timers={"throughput": {"recomputation": True}})
    assert told.parts.telemetry.meter.coefficient == 4
    _, denied = run(tmp_path / "denied", again=True, steps=1, timers={"throughput": {"recomputation": False}})
    assert denied.parts.telemetry.meter.coefficient == 3


class Deep(nn.Module):
    """An embedding that is larger than all layers, of which the first few are checkpointed."""

    def __init__(self, num_again: int) -> None:
        super().__init__()
        self.config = {"n_layer": 4, "n_embd": 8}
        self.embedding = nn.Embedding(1000, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4))
        self.num_again = num_again

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for index, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=False) if index < self.num_again else layer(x)
        return nn.functional.cross_entropy((x @ self.embedding.weight.T).flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize("style", ["engine.backward", "engine.scale", "plain"])
@pytest.mark.parametrize("num_again", [0, 2, 4])
def test_the_coefficient_follows_the_layers_however_large_the_embedding_is(tmp_path, num_again, style):
    model = Deep(num_again)
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}
    config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "jsonl_monitor": monitor}
    engine, *_ = zengine.initialize(model=model, config=config)
    for _ in range(3):
        loss = engine(torch.zeros(2, 6, dtype=torch.int64))
        if style == "engine.backward":
            engine.backward(loss)
        else:
            (engine.scale(loss) if style == "engine.scale" else loss).backward()
        engine.step()
    engine.close()
    last = json.loads((tmp_path / "run" / "events.jsonl").read_text().splitlines()[-1])["values"]
    per_sequence = 2 * sum(param.numel() for param in model.parameters()) * 6 + 4 * 4 * 8 * 6**2
    flops = last["perf/tflops"] * 1e12 * last["perf/step_time_ms"] / 1e3
    assert flops == pytest.approx(2 * (3 + num_again / 4) * per_sequence)


def test_a_save_is_a_phase_of_its_own_and_not_part_of_the_step(tmp_path):
    _, engine = run(tmp_path, steps=1, wall_clock_breakdown=True)
    engine, *_ = zengine.initialize(
        model=Model(), config={"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
                               "wall_clock_breakdown": True},
    )  # fmt: skip
    engine.save_checkpoint(str(tmp_path / "checkpoints"))
    with engine.span("data"):
        pass
    measured = engine.parts.telemetry.stopwatch.total_ms()
    assert measured["checkpoint"] > 0
    assert measured["data"] > 0
    engine.close()


def test_a_model_that_tells_no_layers_is_said_once_and_the_config_may_tell_them(tmp_path, caplog):
    model = nn.Embedding(10, 4)
    base = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "bench_steps": 100}
    for throughput, num_lines in (({}, 1), ({"num_layers": 2, "hidden_size": 4}, 0)):
        caplog.clear()
        engine, *_ = zengine.initialize(model=model, config={**base, "timers": {"throughput": throughput}})
        for _ in range(3):
            engine.backward(engine(torch.zeros(2, 6, dtype=torch.int64)).sum())
            engine.step()
        assert sum("excludes attention" in record.getMessage() for record in caplog.records) == num_lines
        engine.close()


def test_tokens_that_the_caller_reports_count_and_a_bench_ends(tmp_path, capsys):
    engine, *_ = zengine.initialize(
        model=Model(),
        config={
            "train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "bench_steps": 2,
            "timers": {"throughput": {"warmup_steps": 1}},
        },
    )  # fmt: skip
    seen = []
    for _ in range(4):
        engine.backward(engine(torch.zeros(2, 6, dtype=torch.int64)))
        engine.report_tokens(5)
        engine.step()
        seen.append(engine.monitor.bench_done)
    assert seen == [False, False, True, True]
    assert engine.parts.telemetry.throughput.total.tokens == 15
    printed = capsys.readouterr().out
    assert printed.count("bench: steps 2 to 3, 1 rank(s)") == 1
    engine.close()


def test_a_program_charts_numbers_of_its_own(tmp_path):
    config = {"train_batch_size": 2, "csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "a"}}
    engine, *_ = zengine.initialize(model=Model(), config=config)
    assert engine.monitor.enabled
    engine.monitor.write_events([("eval/loss", 1.5, engine.global_samples)])
    engine.close()
    assert (tmp_path / "a" / "eval_loss.csv").read_text().split() == ["step,loss", "0,1.5"]


def test_without_telemetry_there_is_no_feature():
    engine, *_ = zengine.initialize(model=Model(), config={"train_batch_size": 2})
    assert "Measuring" not in [type(feature).__name__ for feature in engine._features]
    assert not engine.monitor.bench_done
    engine.report_tokens(3)
