"""Resuming from files that were written on other devices."""

from __future__ import annotations

import dataclasses
import logging
import random
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from side_by_side import both, losses

from drivetrain.checkpoint import read_manifest

HF = {"checkpoint_format": "hf", "save_strategy": "steps", "save_steps": 2, "max_steps": 4}


def as_if_from_a_gpu(path: Path) -> None:
    """Rewrite a file of torch.save, so that its tensors seem to come from a GPU."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    here, there = (b"X" + len(name).to_bytes(4, "little") + name for name in (b"cpu", b"cuda:0"))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, content in records.items():
            archive.writestr(name, content.replace(here, there) if "data.pkl" in name else content)


@pytest.mark.row(
    "K36",
    status="differs",
    note="read on the host always, and from there each state goes to its parameter's device",
)
def test_an_optimizer_that_lay_on_a_gpu(tmp_path: Path) -> None:
    ours, _ = both(tmp_path)
    writer = ours.trainer(**HF)
    writer.train()
    folder = ours.folder / "checkpoint-2"
    as_if_from_a_gpu(folder / "optimizer.pt")
    with pytest.raises(RuntimeError, match="CUDA"):
        torch.load(folder / "optimizer.pt", weights_only=True)
    trainer = ours.trainer(**{**HF, "save_strategy": "no"})
    trainer.train(resume_from_checkpoint=str(folder))
    assert losses(trainer) == losses(writer)
    for parameter, state in trainer.optimizer.state.items():
        assert state["exp_avg"].device == parameter.device


@pytest.mark.row("R9")
@pytest.mark.parametrize("error", [RuntimeError("wrong size"), AssertionError("no CUDA here")])
def test_a_device_s_random_state_that_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, error: Exception
) -> None:
    trainer = both(tmp_path)[0].trainer()
    stored = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.get_rng_state(),
        "cuda": torch.zeros(3, dtype=torch.uint8),
    }
    torch.save(stored, tmp_path / "rng_state.pth")

    def refuse(state: Any) -> None:
        raise error

    random.seed(7)
    torch.manual_seed(7)
    with monkeypatch.context() as patched:
        found = torch.device("cuda")
        patched.setattr(torch.accelerator, "current_accelerator", lambda **_: found)
        patched.setattr(torch.cuda, "set_rng_state", refuse)
        trainer._load_rng_state(str(tmp_path))
    assert "the random state of cuda could not be restored" in caplog.text
    assert str(error) in caplog.text
    assert torch.equal(torch.get_rng_state(), stored["cpu"])
    assert random.getstate() == stored["python"]


@pytest.mark.row("R9", "K18")
def test_a_random_state_of_another_number_of_ranks(tmp_path: Path, caplog: Any) -> None:
    ours, _ = both(tmp_path)
    ours.trainer(**{**HF, "checkpoint_format": "drivetrain"}).train()
    folder = ours.folder / "checkpoint-2"
    of_two = dataclasses.replace(read_manifest(folder), world_size=2)
    (folder / "manifest.json").write_bytes(of_two.to_bytes())
    trainer = ours.trainer(**{**HF, "save_strategy": "no"})
    with caplog.at_level(logging.INFO, logger="drivetrain.compat"):
        trainer.train(resume_from_checkpoint=str(folder))
    assert "holds no random state for this rank" in caplog.text
    assert trainer.state.global_step == 4
