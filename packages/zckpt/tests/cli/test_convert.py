from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from zckpt import CheckpointInputError, find, save, whole
from zckpt.cli import main
from zckpt.cli.convert import pattern_of, size_of
from zckpt.cli.output import OK, USAGE

DEEPSPEED = Path(__file__).parents[1] / "fixtures" / "deepspeed"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    shards = [whole("model.w", torch.arange(6.0).view(2, 3)), whole("optimizer.exp_avg.w", torch.ones(2, 3))]
    save(tmp_path / "run", "s1", shards=shards, objects={"lr": 0.1}, step=1)
    return tmp_path / "run"


def test_weights_go_out_as_safetensors_and_come_back(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, back = run.parent / "hf", run.parent / "back"
    assert main(["export", str(run), str(out), "--dtype", "bfloat16", "--shard-size", "1KiB"]) == OK
    assert f"{run.resolve()}/s1 exported to {out}" in capsys.readouterr().out
    tensors = {name: tensor for path in out.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {"w": torch.bfloat16}
    assert main(["import", str(out), str(back), "--step", "7", "--tag", "start"]) == OK
    assert "(huggingface) imported as " in capsys.readouterr().out
    found = find(back)
    assert (found.tag, found.step, found.names()) == ("start", 7, ("model.w",))
    assert torch.equal(found.tensor("model.w").float(), torch.arange(6.0).view(2, 3))


def test_everything_goes_out_to_dcp_and_comes_back(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, back = run.parent / "dcp", run.parent / "back"
    assert main(["export", str(run / "s1"), str(out), "--to", "dcp"]) == OK
    assert main(["import", str(out), str(back), "--from", "dcp"]) == OK
    assert find(back).tag == "imported"
    assert main(["diff", str(run), str(back), "--tensors-only"]) == OK
    assert "2 tensors equal bit for bit" in capsys.readouterr().out


def test_a_deepspeed_folder_comes_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = next(path.parent for path in sorted(DEEPSPEED.rglob("latest")) if "tp" not in str(path))
    assert main(["import", str(source), str(tmp_path)]) == OK, capsys.readouterr().err
    assert "(deepspeed) imported as " in capsys.readouterr().out
    assert main(["verify", str(tmp_path)]) == OK
    assert any(name.startswith("optimizer.") for name in find(tmp_path).names())


def test_a_deepspeed_folder_goes_back_as_a_universal_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for case, options in {"pipe_zero0_fp32": ["--tied-layer", "embed=0"], "moe_zero1_fp32": []}.items():
        ours, back = tmp_path / case, tmp_path / f"{case}_universal"
        assert main(["import", str(DEEPSPEED / case), str(ours), *options]) == OK, capsys.readouterr().err
        assert main(["export", str(ours), str(back / "step3"), "--to", "deepspeed"]) == OK, capsys.readouterr().err
        assert main(["import", str(back), str(tmp_path / f"{case}_again"), "--tag", "step3"]) == OK
        assert main(["diff", str(ours), str(tmp_path / f"{case}_again"), "--tensors-only"]) == OK
    assert (tmp_path / "pipe_zero0_fp32_universal/step3/zero/tied_modules.embed.word.weight/fp32.pt").is_file()
    assert main(["import", str(DEEPSPEED / "zero1_fp32"), str(tmp_path / "x"), "--tied-layer", "embed"]) == USAGE
    assert "write KEY=LAYER" in capsys.readouterr().err


def test_what_is_not_recognised_or_in_the_way_is_status_two(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run.parent / "odd").mkdir()
    assert main(["import", str(run.parent / "odd"), str(run)]) == USAGE
    assert main(["export", str(run), str(run), "--to", "hf"]) == USAGE
    assert main(["export", str(run), str(run.parent / "x"), "--shard-size", "big"]) == USAGE
    assert main(["import", str(run), str(run), "--from", "deepspeed", "--tensor-parallel", "w"]) == USAGE
    err = capsys.readouterr().err
    assert "'big' is not a size" in err
    assert "write PATTERN=DIM" in err


def test_sizes_and_patterns() -> None:
    sizes = ["5GB", "5 GiB", "100", "1.5kb", "64MiB", "2T"]
    assert [size_of(text) for text in sizes] == [5 * 10**9, 5 << 30, 100, 1500, 64 << 20, 2 * 10**12]
    for text in ("", "0", "5XB", "-1GB", "9" * 400):
        with pytest.raises(CheckpointInputError, match="is not a size"):
            size_of(text)
    assert pattern_of("*.q=1") == ("*.q", 1)
    assert pattern_of("a=b=0") == ("a=b", 0)
