"""Destinations of compat's messages, in scripts that set logging up and in scripts that do not."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import transformers
from side_by_side import both
from transformers.testing_utils import CaptureLogger

import drivetrain.compat
from drivetrain.compat import install, uninstall

SCRIPT = """
import logging, sys
import torch
from drivetrain.compat import Trainer, TrainingArguments

class Model(torch.nn.Linear):
    def forward(self, x):
        return {"loss": super().forward(x).sum()}

def train(stage, **options):
    print("##", stage, file=sys.stderr)
    args = TrainingArguments(sys.argv[1], use_cpu=True, max_steps=1, save_strategy="no",
        disable_tqdm=True, ddp_static_graph=True, **options)
    Trainer(Model(1, 1), args, train_dataset=[{"x": torch.ones(1)}]).train()

train("nothing is set up", log_level="info")
assert "transformers" not in sys.modules
import transformers
train("transformers prints", log_level="info")
train("and shows less", log_level="warning")
train("as it was asked to", log_level="passive")
logging.basicConfig(stream=sys.stderr)
train("logging is set up", log_level="info")
transformers.utils.logging.enable_propagation()
train("and theirs passes on what it says", log_level="info")
"""
PLAN, NOTE = "***** Running training *****", "ddp_static_graph has no effect"


@pytest.mark.row("G8")
def test_a_message_is_shown_once(tmp_path: Path) -> None:
    """Run in a script of its own: the tests' own logging would show the message."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    stages = [part.partition("\n") for part in done.stderr.split("## ")[1:]]
    found = {name: (text.count(PLAN), text.count(NOTE)) for name, _, text in stages}
    assert found == {
        "nothing is set up": (1, 1),
        "transformers prints": (1, 1),
        "and shows less": (0, 1),
        "as it was asked to": (0, 1),
        "logging is set up": (1, 1),
        "and theirs passes on what it says": (1, 1),
    }


@pytest.fixture(autouse=True)
def levels() -> Iterator[None]:
    """Restore the log levels, which a Trainer sets for the process."""
    mine, theirs = logging.getLogger("drivetrain.compat"), transformers.utils.logging
    before = mine.level, theirs.get_verbosity()
    yield
    mine.setLevel(before[0])
    theirs.set_verbosity(before[1])


@pytest.mark.row("G8", "G10")
@pytest.mark.parametrize("name", ["transformers", "transformers.trainer"])
@pytest.mark.parametrize("propagates", [False, True])
def test_messages_go_where_users_of_transformers_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, propagates: bool
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", propagates)
    for level, seen in (("info", True), ("error", False)):
        for side in both(tmp_path):
            with CaptureLogger(logging.getLogger(name)) as captured:
                side.trainer(log_level=level, max_steps=1).train()
            assert ("Running training" in captured.out) is seen


def test_who_has_kept_theirs_is_warned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    early: Any = ModuleType("early")
    early.Trainer, early.Arguments = transformers.Trainer, transformers.TrainingArguments
    early.Mine = type("Mine", (transformers.Trainer,), {})
    late: Any = ModuleType("late")
    monkeypatch.setitem(sys.modules, "early", early)
    monkeypatch.setitem(sys.modules, "late", late)
    for library in ("trl", "sentence_transformers", "setfit"):
        monkeypatch.delitem(sys.modules, library, raising=False)
    install()
    late.Trainer = transformers.Trainer
    uninstall()
    assert late.Trainer is drivetrain.compat.Trainer
    assert "early has Arguments, Mine, Trainer" in caplog.text and "late" not in caplog.text
