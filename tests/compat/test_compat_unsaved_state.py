"""Optimizers whose state is not, or not completely, in checkpoints."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from side_by_side import arguments, assert_same_weights, classifier, samples

from drivetrain import compat
from drivetrain.kernel.errors import CheckpointMismatch

pytestmark = pytest.mark.filterwarnings(
    "ignore:This implementation of AdamW is deprecated:FutureWarning"
)
GALORE = {"optim_target_modules": ["inner", "outer"], "optim_args": "rank=2"}


def trainer(folder: Path, optim: str, **changes: Any) -> Any:
    low_rank = GALORE if "galore" in optim else {}
    given = {"max_steps": 4, "optim": optim, "max_grad_norm": 0.0, **low_rank, **changes}
    args = arguments(compat, folder, save_strategy="steps", save_steps=2, **given)
    return compat.Trainer(classifier(), args, train_dataset=samples())


@pytest.mark.row(
    "N4", "N7", status="differs", note="resuming is refused: projections are not saved"
)
@pytest.mark.parametrize(
    ("optim", "form"),
    [
        ("galore_adamw", "drivetrain"),
        pytest.param("galore_adamw_layerwise", "drivetrain", marks=pytest.mark.slow),
        ("galore_adamw_layerwise", "hf"),
    ],
)
def test_a_part_of_an_optimizer_is_not_resumed_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, optim: str, form: str
) -> None:
    with caplog.at_level(logging.WARNING):
        trainer(tmp_path, optim, checkpoint_format=form).train()
    assert "cannot be resumed from" in caplog.text and "projector" in caplog.text
    again = trainer(tmp_path / "again", optim)
    with pytest.raises(CheckpointMismatch, match="start over"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_a_folder_without_an_optimizer_starts_it_over_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer(tmp_path, "galore_adamw", checkpoint_format="hf").train()
    again = trainer(tmp_path / "again", "galore_adamw")
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert "holds no optimizer: it starts over" in caplog.text


def test_lomo_has_nothing_to_lose(tmp_path: Path) -> None:
    whole = trainer(tmp_path, "lomo")
    whole.train()
    again = trainer(tmp_path / "again", "lomo")
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same_weights(again.model, whole.model)
