import shutil
from pathlib import Path

import pytest
import torch

from zckpt import CheckpointCorrupt, CheckpointInputError, CheckpointNotFound
from zckpt.containers.zipmap import ZipMap
from zckpt.interchange.deepspeed_files import VerifyShare, open_files
from zckpt.interchange.deepspeed_listing import choose_folder

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "deepspeed"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    shutil.copytree(FIXTURES / "zero3_fp32", tmp_path / "run")
    return tmp_path / "run"


def step(run: Path) -> Path:
    return run / "global_step3"


def test_the_folder_of_a_run_or_of_a_tag(run: Path) -> None:
    assert choose_folder(run, None) == step(run)
    assert choose_folder(run, "global_step3") == step(run)
    assert choose_folder(step(run), None) == step(run)


@pytest.mark.parametrize("latest", [b"../global_step3", b"..", b"", b"global_step3\n/etc", b"/etc", b"a\x00b"])
def test_latest_leads_nowhere_else(run: Path, latest: bytes) -> None:
    (run / "latest").write_bytes(latest)
    with pytest.raises((CheckpointInputError, CheckpointNotFound)):
        choose_folder(run, None)


def test_what_is_not_there_is_named(run: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="no checkpoint 'global_step9'; folders there: global_step3"):
        choose_folder(run, "global_step9")
    (run / "latest").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointCorrupt, match="is not text"):
        choose_folder(run, None)
    (run / "latest").unlink()
    with pytest.raises(CheckpointNotFound, match="neither model states"):
        choose_folder(run, None)
    with pytest.raises(CheckpointNotFound, match="not a folder"):
        choose_folder(run / "latest", None)


def test_the_stages_and_ranks_of_each_fixture() -> None:
    for case in ("zero0_fp32", "zero1_bf16", "zero1_fp32", "zero2_bf16", "zero3_bf16"):
        found = open_files(FIXTURES / case / "global_step3")
        (tp_rank,) = found.tp_ranks
        assert tp_rank.stage == int(case[4])
        assert len(tp_rank.shards) == (2 if tp_rank.stage else 0)
        assert len(tp_rank.models) == (2 if tp_rank.stage == 3 else 1)
        found.verify()
        found.close()


@pytest.mark.parametrize("lost", ["zero_pp_rank_0_mp_rank_00_optim", "zero_pp_rank_1_mp_rank_00_optim",
                                  "zero_pp_rank_0_mp_rank_00_model", "zero_pp_rank_1_mp_rank_00_model"])  # fmt: skip
def test_a_missing_file_is_an_error(run: Path, lost: str) -> None:
    (step(run) / f"{lost}_states.pt").unlink()
    with pytest.raises(CheckpointCorrupt, match="missing"):
        open_files(step(run))


def test_a_file_under_another_name_is_an_error(run: Path) -> None:
    model, optim = (step(run) / f"zero_pp_rank_0_mp_rank_00_{kind}_states.pt" for kind in ("model", "optim"))
    shutil.copy(model, optim)
    with pytest.raises(CheckpointCorrupt, match="contradicts its name: it has no 'optimizer_state_dict'"):
        open_files(step(run))


def test_files_of_two_saves_are_an_error(run: Path) -> None:
    path = step(run) / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    value = torch.load(path, weights_only=True)
    torch.save({**value, "global_steps": 4}, path)
    with pytest.raises(CheckpointCorrupt, match=r"of steps \['3', '4'\]: files of several saves"):
        open_files(step(run))


def test_what_is_not_read_is_refused_by_name(run: Path) -> None:
    (step(run) / "layer_00-model_00-expert_states.pt").touch()
    with pytest.raises(CheckpointInputError, match=r"layer_00-model_00-expert.*no file of a DeepSpeed checkpoint"):
        open_files(step(run))


def test_an_empty_folder_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="no model states"):
        open_files(tmp_path)


@pytest.mark.parametrize("case", ["zero0_fp32", "zero2_bf16", "zero3_fp32", "universal_zero3_fp32"])
def test_processes_of_one_host_verify_every_byte_once(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, verified = choose_folder(FIXTURES / case, None), list[str]()
    monkeypatch.setattr(ZipMap, "verify", lambda file: verified.append(str(file.path)))
    open_files(folder).close()
    alone = sorted(verified)
    shares = []
    for index in range(3):
        verified.clear()
        open_files(folder, VerifyShare(index, 3)).close()
        shares.append(list(verified))
    assert sorted(path for share in shares for path in share) == alone
    assert all(shares[:2]) or len(alone) == 1


def test_a_damaged_file_raises_in_the_process_that_verifies_it(run: Path) -> None:
    damaged = step(run) / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = bytearray(damaged.read_bytes())
    with ZipMap.open(damaged) as file:
        member = max(file.members.values(), key=lambda each: each.nbytes * each.name.startswith("data/"))
    content[member.start] ^= 1
    damaged.write_bytes(content)
    open_files(step(run), VerifyShare(1, 2)).close()
    with pytest.raises(CheckpointCorrupt, match=r"zero_pp_rank_1_mp_rank_00_optim_states.pt: member 'data/"):
        open_files(step(run), VerifyShare(0, 2))
