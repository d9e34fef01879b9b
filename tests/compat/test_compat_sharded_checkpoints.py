"""Resuming sharded checkpoints of HF's Trainer: those of FSDP, and those of DeepSpeed."""

from __future__ import annotations

import os
import pickle  # house: pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import hf_files_ranks
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from side_by_side import losses
from subjects import subject
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from drivetrain import compat
from drivetrain.compat.checkpoints.shards import read_shards
from drivetrain.compat.checkpoints.zero_files import read_zero
from drivetrain.kernel.errors import CheckpointDamaged, CheckpointMismatch

ALONE: dict[str, Any] = {"per_device_train_batch_size": 4, "save_strategy": "no"}


def in_parts(folder: Path) -> list[float]:
    """Train a run of transformers' Trainer; write its second checkpoint as accelerate writes
    FSDP's.
    """

    class Parts(transformers.Trainer):
        def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
            state = get_optimizer_state_dict(self.model, self.optimizer.optimizer)
            for name, content in (
                ("pytorch_model_fsdp_0", {"model": self.model.state_dict()}),
                ("optimizer_0", {"optimizer": state}),
            ):
                dcp.save(content, checkpoint_id=Path(output_dir, name), no_dist=True)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, "scheduler.pt"))

    args = transformers.TrainingArguments(
        output_dir=str(folder),
        **{**hf_files_ranks.ASKED, "per_device_train_batch_size": 4},
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
    )
    data = hf_files_ranks.sentences(16)
    trainer = Parts(hf_files_ranks.llama(), args, train_dataset=data)
    trainer.train()
    (folder / "checkpoint-2" / "model.safetensors").unlink()
    return losses(trainer)


@pytest.mark.row("K11", "K10")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_fsdp_s_parts_are_resumed(tmp_path: Path) -> None:
    """Resume weights, moments, groups and schedule. A file that is not an index is refused, and no
    code in it runs.
    """
    whole = in_parts(tmp_path)
    folder = tmp_path / "checkpoint-2"
    trainer = hf_files_ranks.trainer(compat, "whole", tmp_path / "again", **ALONE)
    trainer.train(resume_from_checkpoint=str(folder))
    assert losses(trainer) == pytest.approx(whole, abs=1e-6)
    other = hf_files_ranks.trainer(compat, "whole", tmp_path / "again", **ALONE, optim="sgd")
    other.optimizer_cls_and_kwargs = torch.optim.SGD, {"lr": 0.1}
    for parameter in other.model.model.norm.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(CheckpointMismatch, match=r"'model\.norm\.weight'.* are not in both"):
        other.train(resume_from_checkpoint=str(folder))
    index = folder / "optimizer_0" / ".metadata"
    index.write_bytes(pickle.dumps(Runs(str(tmp_path / "ran"))))
    with pytest.raises(CheckpointDamaged, match="is no index"):
        read_shards(folder)
    index.write_bytes(index.read_bytes()[:20])
    with pytest.raises(CheckpointDamaged, match="none of it was run"):
        read_shards(folder)
    assert not (tmp_path / "ran").exists()


class Runs:
    """A pickle that makes a folder when it is loaded."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_kinds_of_deepspeed_s_files_that_are_not_read_are_named(tmp_path: Path) -> None:
    place = tmp_path / "global_step2"
    place.mkdir()
    (tmp_path / "latest").write_text("global_step2")
    torch.save({"optimizer_state_dict": {}}, place / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    torch.save({}, place / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointDamaged, match="is no checkpoint of ZeRO"):
        read_zero(tmp_path)
    torch.save({}, place / "mp_rank_01_model_states.pt")
    with pytest.raises(
        CheckpointMismatch, match=r"mp_rank_01_model_states\.pt: .* model parallelism"
    ):
        read_zero(tmp_path)


@pytest.mark.slow
@pytest.mark.row("K11", "X14")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT calls it
@pytest.mark.parametrize("model", ["whole", "adapters"])
@pytest.mark.parametrize("kind", ["zero2", "zero3", "fsdp"])
def test_parts_of_two_ranks_are_resumed(kind: str, model: str, tmp_path: Path) -> None:
    """Resume files of transformers' Trainer on one process, and on two that hold other parts."""
    if kind != "fsdp":
        pytest.importorskip("deepspeed")
    here = Path(__file__).parent
    command = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    script = [str(here / "sharded_checkpoints.py"), kind, model, str(tmp_path)]
    subprocess.run([sys.executable, *command, *script], check=True, timeout=300)
    whole = [float(line) for line in (tmp_path / "losses.txt").read_text().split()]
    folder = tmp_path / "checkpoint-2"
    assert not (folder / "optimizer.pt").exists()
    trainer = hf_files_ranks.trainer(compat, model, tmp_path / "again", **ALONE)
    trainer.train(resume_from_checkpoint=str(folder))
    assert len(whole) == 4 and losses(trainer) == pytest.approx(whole, abs=1e-6)
    pair = subject("fsdp", 2, timeout_seconds=300)
    ranks = pair.run(hf_files_ranks.resume, model=model, checkpoint=str(folder), out=str(tmp_path))
    assert ranks[0] == pytest.approx(whole, abs=1e-6)
