"""While a run trains, full collections of garbage do not scan what lives as long as the run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from drivetrain import Settings
from drivetrain.kernel.events import StepEnded
from drivetrain.trainer.fit import fit

from .problems import recipe


@pytest.fixture(autouse=True)
def nothing_frozen() -> Iterator[None]:
    """Begin with nothing frozen, and without collections that nobody asked for. A worker of the
    test run has frozen what it imported, and does so again."""
    was_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()
    if was_frozen:
        gc.freeze()


def frozen_at_steps() -> list[int]:
    """Train with a full collection after each step but the first; return how many objects were
    frozen after it."""
    counts = []

    def collects(event: Any) -> None:
        if isinstance(event, StepEnded):
            if event.step > 1:
                gc.collect()
            counts.append(gc.get_freeze_count())

    settings = Settings(steps=3, global_batch=8, micro_batch=4)
    fit(recipe(24), settings, backend="cpu", observers=[collects])
    return counts


def test_survivors_of_a_full_collection_are_frozen_until_the_run_ends() -> None:
    began, then, later = frozen_at_steps()
    assert began == 0
    assert then >= later > max(10_000, 0.9 * then)
    assert gc.get_freeze_count() == 0


def test_what_was_frozen_before_stays_so() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    assert max(frozen_at_steps()) <= frozen
    assert gc.get_freeze_count() > 0
