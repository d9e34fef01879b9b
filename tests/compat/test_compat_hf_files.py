"""HF's own files, written by a driver that shards the optimizer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import hf_files_ranks
import pytest
import transformers
from side_by_side import losses, ours
from subjects import subject

from drivetrain import compat
from drivetrain.compat.checkpoints.groups import aligned, aligned_schedule
from drivetrain.kernel.errors import SaveFailed


@pytest.mark.slow
@pytest.mark.row("K2", "K11", "X14")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT calls it
def test_deepspeed_writes_hf_s_files(tmp_path: Path) -> None:
    """Write at stage 3, also with adapters, which leave one of the optimizer's two groups empty.
    Both libraries resume from the files, in one process, too.
    """
    pair = subject("deepspeed", 2, timeout_seconds=400)
    ranks = pair.run(hf_files_ranks.write, out=str(tmp_path))
    assert ranks[0] == ranks[1]
    alone = {"per_device_train_batch_size": 4, "save_strategy": "no"}
    for name, (_, model) in hf_files_ranks.CASES.items():
        whole = ranks[0][name]
        assert len(whole) == 4 and ranks[0][f"{name} resumed"] == pytest.approx(whole, abs=1e-6)
        folder = tmp_path / name / "checkpoint-2"
        assert (folder / "optimizer.pt").is_file() and (folder / "scheduler.pt").is_file()
        for library in (compat, transformers):
            trainer = hf_files_ranks.trainer(library, model, tmp_path / "alone", **alone)
            trainer.train(resume_from_checkpoint=str(folder))
            assert losses(trainer)[2:] == pytest.approx(whole[2:], abs=1e-6)


def test_lists_of_one_entry_a_group_are_aligned() -> None:
    """Align lists with one entry for each group, where one side leaves empty groups out. Lists of
    other lengths stay.
    """
    order = [[], ["a", "b"], ["c"]]
    assert aligned([1, 2, 3], order, 2) == [2, 3]
    assert aligned([2, 3], order, 3) == [2, 2, 3]
    assert aligned([1], order, 3) == [1] and aligned([2, 3], [["a"], ["c"]], 3) == [2, 3]
    state = {"base_lrs": [0.1, 0.2, 0.3], "milestones": [1, 2, 3], "last_epoch": 4}
    found = aligned_schedule(state, order, 2)
    assert found == {"base_lrs": [0.2, 0.3], "milestones": [1, 2, 3], "last_epoch": 4}


def test_a_run_whose_every_save_failed_is_an_error(tmp_path: Path, caplog: Any) -> None:
    """Require the error at the end of the run: the trained model is in memory, and can be saved
    elsewhere.
    """
    asked: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    trainer = ours(tmp_path).trainer(**asked)
    ended: list[int] = []

    class Ends(compat.TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            ended.append(state.global_step)

    def failing(output_dir: str | None = None, state_dict: Any = None) -> None:
        raise OSError("no space left on device")

    trainer.add_callback(Ends)
    trainer._save = failing
    with pytest.raises(SaveFailed, match=r"at step 4, and none .*checkpoint-4 .*no space left"):
        trainer.train()
    assert ended == [4] and caplog.text.count("Training continues") >= 2
    del trainer._save
    trainer.train()


SCRIPT = """
from drivetrain.compat import Trainer, TrainingArguments
from side_by_side import ARGUMENTS, classifier, samples

zero = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"}
args = TrainingArguments(output_dir="out", max_steps=1, deepspeed=zero, **ARGUMENTS)
trainer = Trainer(classifier(), args, train_dataset=samples())
trainer.train()
"""


@pytest.mark.slow
def test_a_script_on_deepspeed_that_does_not_call_end_ends_without_a_traceback(
    tmp_path: Path,
) -> None:
    """Require that the engine is closed before the process group."""
    pytest.importorskip("deepspeed")
    here = {"PYTHONPATH": str(Path(__file__).parent)}
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=tmp_path,
        env={**os.environ, **here},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert ended.returncode == 0 and "Traceback" not in ended.stderr, ended.stderr
