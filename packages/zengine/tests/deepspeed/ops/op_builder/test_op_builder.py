"""What is built in, asked as DeepSpeed's scripts ask; and the report of it."""

from __future__ import annotations

import pytest
import torch

import zengine.deepspeed as deepspeed
from zengine.deepspeed import env_report, git_version_info
from zengine.deepspeed.ops import op_builder
from zengine.deepspeed.ops.op_builder.all_ops import ALL_OPS


def test_built_in_ops_are_compatible_and_load():
    for name in ("CPUAdam", "FusedAdam", "CPUAdagrad", "CPULion", "FusedLion", "FusedLamb"):
        builder = getattr(op_builder, f"{name}Builder")()
        assert deepspeed.ops.__compatible_ops__[builder.NAME] is ALL_OPS[builder.NAME].is_compatible() is True
        kind = name.replace("CPU", "DeepSpeedCPU")
        assert getattr(builder.load(), kind).__name__ == kind
        assert builder.absolute_name() == builder.load().__name__


def test_other_ops_say_so():
    assert op_builder.TransformerBuilder is op_builder.NotImplementedBuilder
    assert deepspeed.ops.__compatible_ops__["deepspeed_not_implemented"] is False
    with pytest.raises(ValueError, match="NotImplementedBuilder: zengine has no such op"):
        op_builder.QuantizerBuilder().load()


def test_flat_tensors_are_views_of_one():
    ops = op_builder.UtilsBuilder().load()
    parts = [torch.arange(6.0).view(2, 3), torch.ones(4)]
    flat = ops.flatten(parts)
    again = ops.unflatten(flat, parts)
    assert all(map(torch.equal, again, parts))
    assert again[0].data_ptr() == flat.data_ptr()
    for typed in (parts[0], torch.tensor(2.5, dtype=torch.bfloat16)):
        (raw,) = ops.cast_to_byte_tensor([typed])
        assert (raw.dtype, raw.numel(), raw.data_ptr()) == (torch.uint8, typed.nbytes, typed.data_ptr())
        assert torch.equal(ops.cast_to_byte_tensor(typed), raw)


def test_a_report_names_ops_and_versions(capsys: pytest.CaptureFixture[str]):
    env_report.cli_main(["--hide_errors_and_warnings"])
    printed = capsys.readouterr().out
    assert "cpu_adam" in printed
    assert f"deepspeed info {'.' * 19} 0.19.8, by zengine" in printed
    assert torch.__version__ in printed
    env_report.cli_main(["--hide_operator_status"])
    assert "cpu_adam" not in capsys.readouterr().out
    assert [env_report.human_readable_size(size) for size in (5, 1536, 2**41)] == ["5.00 B", "1.50 KB", "2.00 TB"]
    assert git_version_info.version == deepspeed.__version__
    assert git_version_info.torch_info["version"] in torch.__version__
    assert git_version_info.compatible_ops["cpu_adam"]
