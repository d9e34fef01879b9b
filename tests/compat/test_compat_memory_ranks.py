"""Errors on all ranks after one rank alone runs out of memory, or fails."""

from __future__ import annotations

from pathlib import Path

import memory_ranks
import pytest
from subjects import subject

from drivetrain.conformance.harness import WorkerFailure

pytestmark = pytest.mark.slow
"""Tests of this file start processes of their own, since the end of one rank ends all."""
PAIR = subject("ddp", 2, timeout_seconds=100)
STEP = "rank 1 ran out of memory in step 3 with batches of 2 (CUDA out of memory. 2 samples are"
SMALLER = "per_device_train_batch_size=1 and gradient_accumulation_steps=2"


def ends(folder: Path, *, evaluates: bool = False, finds: bool = False, **more: bool) -> list[str]:
    """Return the text that each rank left at its end."""
    asked = {"folder": str(folder), "evaluates": evaluates, "auto_find_batch_size": finds}
    asked |= {"fails": False, **more}
    with pytest.raises(WorkerFailure):
        PAIR.run(memory_ranks.alone, alone=True, **asked)
    return [(folder / rank).read_text() for rank in "01"]


@pytest.mark.row(
    "L17", status="differs", note="continues, with as many samples an update; theirs starts over"
)
def test_all_ranks_report_who_ran_out_of_memory_and_what_to_do(tmp_path: Path) -> None:
    first, second = ends(tmp_path, finds=True)
    assert first.startswith("CollectiveFailed: rank 0 on ")
    assert second.startswith("OutOfMemory: rank 1 ran out of memory")
    for reported in (first, second):
        assert STEP.lower() in reported.lower()
        assert SMALLER in reported and "gradient_checkpointing=True" in reported


def test_without_a_search_for_batches_the_error_is_as_it_was(tmp_path: Path) -> None:
    first, second = ends(tmp_path)
    assert second.startswith("OutOfMemoryError: CUDA out of memory.")
    assert first.startswith("CollectiveFailed") and STEP.lower() in first.lower()
    assert SMALLER in first and "auto_find_batch_size=True" in first


@pytest.mark.parametrize("finds", [False, True])
def test_an_evaluation_names_the_batches_that_are_too_large(tmp_path: Path, finds: bool) -> None:
    first, second = ends(tmp_path, evaluates=True, finds=finds)
    assert "memory" in second and first.startswith("CollectiveFailed")
    found = "rank 1 ran out of memory in the evaluation after step 2: reduce "
    assert f"{found}per_device_eval_batch_size (2)" in first.replace("Rank", "rank")


def test_all_ranks_report_why_one_ended(tmp_path: Path) -> None:
    first, second = ends(tmp_path, fails=True)
    assert second == "ValueError: a bad sample"
    assert first.startswith("CollectiveFailed: rank 0 on ")
    assert "Rank 1 ended by ValueError: a bad sample" in first
