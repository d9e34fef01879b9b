"""The parts of the time in the logs, and what is remarkable about them."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from side_by_side import Classifier, arguments, samples

from drivetrain import compat
from drivetrain.compat.trainer.hf_terms import in_hf_terms
from drivetrain.trainer.step_clock import PARTS
from drivetrain.trainer.time_verdicts import Spent, verdicts

PAUSE_SECONDS = 0.02
STEPS = 12


def slow_collator(rows: list[dict[str, Any]]) -> dict[str, Any]:
    time.sleep(PAUSE_SECONDS)
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


class SlowCallback(compat.TrainerCallback):
    """A callback that keeps the training waiting."""

    def on_step_end(self, *_: Any, **__: Any) -> None:
        time.sleep(PAUSE_SECONDS)


def trained(folder: Path, **given: Any) -> compat.Trainer:
    steps = {"max_steps": STEPS, "eval_strategy": "steps", "eval_steps": 4}
    made = compat.Trainer(
        Classifier(),
        arguments(compat, folder, **steps, **given),
        train_dataset=samples(),
        eval_dataset=samples(4),
        data_collator=slow_collator,
        callbacks=[SlowCallback()],
    )
    made.train()
    return made


def test_logs_have_the_seconds_of_each_part(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start = time.perf_counter()
    with caplog.at_level(logging.WARNING):
        made = trained(tmp_path, time_parts=True)
    wall = time.perf_counter() - start
    logs = [each for each in made.state.log_history if "learning_rate" in each]
    found: dict[str, float] = {}
    for log in logs:
        for name, seconds in log.items():
            if name.startswith("time_"):
                found[name] = found.get(name, 0.0) + seconds
    assert set(found) <= {f"time_{part}" for part in PARTS}
    assert sum(found.values()) <= wall
    assert found["time_data"] >= STEPS * PAUSE_SECONDS
    assert found["time_observers"] >= (STEPS - 1) * PAUSE_SECONDS
    assert found["time_evaluation"] >= 2 * PAUSE_SECONDS
    assert "training waits for data" in caplog.text
    assert "`dataloader_num_workers=" in caplog.text
    assert "observers: mostly `SlowCallback`" in caplog.text
    assert made.callback_handler.clock is None
    evaluated = made.evaluate()
    assert not [name for name in evaluated if name.startswith("time_")]


def test_logs_are_those_of_hf_unless_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = trained(tmp_path)
    assert not [name for log in made.state.log_history for name in log if name[:5] == "time_"]
    assert "time: " not in caplog.text


def test_sentences_name_arguments_of_hf() -> None:
    seconds = dict.fromkeys(PARTS, 10.0)
    for workers in (0, 2):
        spent = Spent(100, seconds, workers=workers, samples=50, evaluations=2, saves=2)
        found = [in_hf_terms(verdict.text) for verdict in verdicts(spent)]
        assert len(found) == 5
        text = "\n".join(found)
        for name in ("dataloader_num_workers=", "`eval_steps`", "`eval_dataset`", "`save_steps`"):
            assert name in text
        for name in ("data.workers", "evaluate.", "checkpoint."):
            assert name not in text


def test_lines_that_wait_for_the_device_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Waits(compat.Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            assert loss.item() > 0
            return loss

    def run(folder: Path, **given: Any) -> compat.Trainer:
        made = Waits(
            Classifier(), arguments(compat, folder, max_steps=8, **given), train_dataset=samples()
        )
        with caplog.at_level(logging.WARNING):
            made.train()
        return made

    run(tmp_path / "without", time_parts=True)
    assert "waits for the device" not in caplog.text
    made = run(tmp_path / "with", find_synchronisations=True)
    line = Waits.compute_loss.__code__.co_firstlineno + 2
    named = f"{Path(__file__).name}:{line} waits for the device, once a step"
    assert len([text for text in caplog.messages if named in text]) == 1
    assert not [name for log in made.state.log_history for name in log if "time_" in name]
