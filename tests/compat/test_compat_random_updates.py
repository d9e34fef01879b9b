"""An optimizer that draws random numbers in compat's Trainer: replicas draw alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from side_by_side import arguments, classifier, samples
from subjects import subject

from drivetrain import compat
from drivetrain.conformance.bench import Bench
from drivetrain.conformance.optimizers import Noisy

pytestmark = pytest.mark.slow


def noisy(bench: Bench, *, folder: str) -> dict[str, Any]:
    """A job: train by noise alone, and return this rank's weights."""
    args = arguments(compat, Path(folder), max_steps=3, seed=5)
    model = classifier()
    optimizer = Noisy(model.parameters(), lr=0.05, pull=0.0)
    trainer = compat.Trainer(model, args, train_dataset=samples(), optimizers=(optimizer, None))
    trainer.train()
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def test_replicas_draw_as_one_process_does(tmp_path: Path) -> None:
    first, second = subject("ddp", 2).run(noisy, folder=str(tmp_path / "pair"))
    (alone,) = subject("cpu", 1).run(noisy, folder=str(tmp_path / "alone"))
    for name, weight in first.items():
        assert weight.equal(second[name]), name
        assert weight.equal(alone[name]), name
