"""Files that a subclass adds to a checkpoint's folder, before and after it is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from side_by_side import both

STEPS: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
FORMATS: list[dict[str, Any]] = [{}, {"checkpoint_format": "hf"}, {"save_only_model": True}]


def putting(library_trainer: Any, note: str) -> Any:
    """Return a Trainer that saves a note, and another one in a folder, beside its model."""

    class Putting(library_trainer):  # type: ignore[misc]
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            folder = Path(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
            (folder / "inner").mkdir(parents=True, exist_ok=True)
            (folder / "note.txt").write_text(note)
            (folder / "inner" / f"{note}.txt").write_text(note)
            (folder / "trainer_state.json").write_text("older")
            super()._save_checkpoint(model, trial)
            (folder / "after.txt").write_text(note)

    return Putting


def texts(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob("*.txt"))}


@pytest.mark.row("K2", "K3")
@pytest.mark.parametrize("asked", FORMATS, ids=["own", "hf", "model"])
def test_what_a_subclass_puts_there_stays(tmp_path: Path, asked: dict[str, Any]) -> None:
    for side in both(tmp_path):
        given = {
            name: asked[name] for name in asked if side.folder.name == "ours" or name[0] == "s"
        }
        trainer = side.trainer(**STEPS, **given)
        trainer.__class__ = putting(side.trainer_type, "first")
        trainer.train()
        for step in (1, 2):
            folder = side.folder / f"checkpoint-{step}"
            assert texts(folder) == dict.fromkeys(
                ["after.txt", "inner/first.txt", "note.txt"], "first"
            )
            assert '"global_step"' in (folder / "trainer_state.json").read_text()
    ours, _ = both(tmp_path)
    if "save_only_model" not in asked:
        ours.trainer(**STEPS).train(resume_from_checkpoint=True)


def test_a_checkpoint_that_is_replaced_leaves_nothing_of_its_own(tmp_path: Path) -> None:
    ours, _ = both(tmp_path)
    trainer = ours.trainer(**STEPS, checkpoint_format="hf")
    trainer.train()
    trainer = ours.trainer(**STEPS)
    trainer.train()
    folder = ours.folder / "checkpoint-2"
    assert (folder / "manifest.json").is_file() and not list(folder.glob("*.p*"))
    (folder / "weights-00001-of-00002.safetensors").write_bytes(b"of two ranks")
    trainer = ours.trainer(**STEPS)
    trainer.__class__ = putting(ours.trainer_type, "second")
    trainer.train()
    assert texts(folder)["note.txt"] == "second"
    assert not (folder / "weights-00001-of-00002.safetensors").exists()
    ours.trainer(**STEPS).train(resume_from_checkpoint=str(folder))
