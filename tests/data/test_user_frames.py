"""The parts of an error that are shown: its last line, and the frames from the user's
first one on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import Recipe, Settings
from drivetrain.data.user_frames import last_line, user_frames
from drivetrain.kernel.errors import DataError
from drivetrain.trainer.fit import fit


def caught(loss: Any) -> BaseException:
    data = torch.utils.data.TensorDataset(torch.zeros(4, 2))
    with pytest.raises(BaseException) as found:  # noqa: PT011 - which one, the test says
        fit(Recipe(lambda: torch.nn.Linear(2, 1), loss, data), Settings(steps=1), backend="cpu")
    return found.value


def test_frames_begin_with_the_user_s_and_ours_are_left_out() -> None:
    error = caught(lambda module, batch: module(batch[0].double()))
    frames = user_frames(error).splitlines()
    assert frames[0] == "Traceback (most recent call last):"
    assert f'File "{__file__}"' in frames[1]
    assert any("linear.py" in line for line in frames)  # what the user's code called is shown
    assert "step.py" not in user_frames(error)
    assert not frames[-1].startswith("RuntimeError")


def test_what_led_to_an_error_is_shown_too() -> None:
    def loss(module: Any, batch: Any) -> Any:
        try:
            raise KeyError("first")
        except KeyError as error:
            raise ValueError("second") from error

    error = caught(loss)
    assert last_line(error) == "ValueError: second"
    assert user_frames(error).count(__file__) == 2 + 1  # `caught` calls `fit`
    assert "KeyError: 'first'" in user_frames(error)


def test_a_syntax_error_shows_its_line(tmp_path: Path) -> None:
    with pytest.raises(SyntaxError) as found:
        compile("x = (", str(tmp_path / "my.py"), "exec")
    assert "x = (" in user_frames(found.value)


def test_an_error_without_frames_shows_none() -> None:
    assert user_frames(DataError("of ours")) == ""
    assert last_line(KeyboardInterrupt()) == "KeyboardInterrupt"
