"""`zengine explain`: what is printed, and that published configs tell a reader something new."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from zengine.cli import main

PUBLISHED = Path(__file__).parent / "published"


def explained(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["explain", *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "news"),
    [
        (
            "zero2_fp16.json",
            [
                "train_batch_size 1024 (zero2_fp16.json:2) = micro 4 (zero2_fp16.json:3) x accumulation 4 (derived)",
                "The first 2 updates run at a learning rate of 0: 2,048 samples change nothing.",
                'optimizer.type "Adam" is AdamW',
                "The loss scale starts at 32,768",
            ],
        ),
        (
            "zero3_offload.json",
            [
                "pinned masters",
                "on a host with 8 ranks, 0.13 GiB of it page-locked",
                "gradient_clipping is not given and is 1.0; before DeepSpeed 0.19.3 gradients were not clipped",
                "stage3_max_live_parameters 1,000,000,000 keeps up to",
            ],
        ),
        (
            "huggingface_auto.json",
            [
                "train_batch_size 512 (auto) = micro 8 (auto) x accumulation 1 (auto) x replicas 64 (derived)",
                "auto: default of --learning_rate",
                '"auto" is replaced by the defaults of the Trainer\'s arguments',
                "train_micro_batch_size_per_gpu = 8 (--per_device_train_batch_size)",
            ],
        ),
    ],
)
def test_published_configs_tell_something_new(name: str, news: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    out = " ".join(
        explained([str(PUBLISHED / name), "--world", "64", "--device", "cuda", "--params", "1e8"], capsys).split()
    )
    for sentence in news:
        assert sentence in out, out


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text('{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}')
    return "config.json"


@pytest.mark.usefixtures("config")
def test_every_value_is_shown_with_its_origin(capsys: pytest.CaptureFixture[str]) -> None:
    Path("plain.json").write_text('{"train_batch_size": 64,\n "train_micro_batch_size_per_gpu": 4}')
    rows = [
        line.split() for line in explained(["plain.json", "--world", "4", "--params", "1e7"], capsys).splitlines()
    ]
    assert ["train_batch_size", "64", "plain.json:1"] in rows
    assert ["gradient_accumulation_steps", "4", "derived"] in rows


@pytest.mark.usefixtures("config")
def test_auto_bf16_is_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zprecision.measure_bf16_speedup", lambda device: 1.5)
    Path("auto.json").write_text('{"train_batch_size": 8, "bf16": {"enabled": "auto"}}')
    out = explained(["auto.json", "--world", "1", "--params", "1e7"], capsys)
    assert ["bf16.enabled", "true", "auto"] in [line.split() for line in out.splitlines()]


def test_open_values_can_be_filled_in(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = explained([config, "--world", "2", "--params", "1e7", "--auto", "train_batch_size=64"], capsys)
    assert "train_batch_size 64 (auto) = micro 32" in out


def test_the_model_may_be_the_users(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("my_model_file.py").write_text("from torch import nn\ndef make():\n    return nn.Linear(1000, 1000)\n")
    out = explained([config, "--world", "2", "--model", "my_model_file:make"], capsys)
    assert "one rank holds, for my_model_file:make (1.0M parameters), without activations" in out


def test_programs_get_json(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(explained([config, "--world", "2", "--hidden", "64", "--layers", "2", "--json"], capsys))
    assert data["world_size"] == 2
    assert data["model"].startswith("a transformer of 2 layers of width 64")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nothing"], '--model "nothing" is not of the form module:factory'),
        (["--auto", "train_batch_size"], '"train_batch_size" is not KEY=VALUE. Write train_batch_size=64.'),
        (["--auto", "train_batch_size=7"], "Nearest valid train_batch_size: 6 or 8."),
    ],
)
def test_what_is_wrong_is_said_with_status_1(
    config: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", config, "--world", "2", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_the_example_model_is_described_without_torchs_compiler(config: str) -> None:
    script = (
        "import sys; from zengine.cli import main; "
        f"assert main(['explain', {config!r}, '--world', '8', '--params', '1e8']) == 0; "
        "assert not [name for name in sys.modules if name.startswith('torch._dynamo.')]"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
