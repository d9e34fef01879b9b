"""A checkpoint that the Trainer of an earlier version wrote resumes.

`old_checkpoint/` holds one of 0.1.0.dev0 of November 2026, with the later logs and weights of the
run that wrote it.
"""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from side_by_side import Classifier, ours

OLD = Path(__file__).with_name("old_checkpoint")


@pytest.mark.parametrize("backend", ["cpu", "fsdp"])
def test_an_old_checkpoint_resumes(tmp_path: Path, backend: str) -> None:
    saved = json.loads((OLD / "expected.json").read_text())
    source = shutil.copytree(OLD / "checkpoint-4", tmp_path / "checkpoint-4")
    made = functools.partial(Classifier, 0.5)  # dropout: the random numbers are resumed, too
    trainer = ours(tmp_path).trainer(made, max_steps=8, backend=backend)
    trainer.train(resume_from_checkpoint=str(source))
    logged = [entry for entry in trainer.state.log_history if entry["step"] > 4 and "loss" in entry]
    assert [entry["step"] for entry in logged] == [5, 6, 7, 8]
    for seen, expected in zip(logged, saved["logged"], strict=True):
        assert seen == pytest.approx(expected, rel=1e-6)
    trainer.save_model(tmp_path / "trained")
    trainer.end()
    trained = load_file(tmp_path / "trained" / "model.safetensors")
    expected = {name: torch.tensor(values) for name, values in saved["weights"].items()}
    torch.testing.assert_close(trained, expected)
