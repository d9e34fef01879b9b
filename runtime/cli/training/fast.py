"""`drivetrain train --fast`: tries every part of a run in seconds, in a temporary folder."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from ...kernel.errors import EXIT_PREEMPTED, OutputError
from ...run.quoted import say
from .next_command import NOT_KEPT

__all__ = ["fast"]

_STEPS = 2
"""Steps before the run is resumed, and as many after."""
_SHORT = [
    *("--track", "none"),
    *("--set", "log_every=1"),
    *("--set", "evaluate.at_end=true"),
    *("--set", "evaluate.max_batches=2"),
    *("--set", "checkpoint.at_end=true"),
]


def fast(words: Sequence[str]) -> int:
    """Run `drivetrain` with these words twice, each in a process of its own: a few steps, an
    evaluation and a save; then the same run, resumed. Returns the exit code of the first that
    fails.

    Raises `OutputError` if the words name a folder.
    """
    for option in ("--out", "--resume"):
        if any(word == option or word.startswith(f"{option}=") for word in words):
            raise OutputError(f"--fast writes to a temporary folder; leave {option} out")
    words, began = [word for word in words if word != "--fast"], time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="drivetrain-fast-") as folder:
        for doing, steps, more in (
            ("training, evaluating and saving", _STEPS, []),
            ("resuming", 2 * _STEPS, ["--resume", "auto"]),
        ):
            own = [*_SHORT, "--steps", str(steps), "--out", f"{folder}/run", *more]
            command = [sys.executable, "-m", "drivetrain.cli", *words, *own]
            environment = {**os.environ, NOT_KEPT: "1"}
            code = subprocess.run(command, env=environment, check=False).returncode
            if code:
                if code != EXIT_PREEMPTED:
                    say(f"--fast: {doing} failed, see above; nothing is kept")
                return code
    seconds = time.perf_counter() - began
    say(
        f"--fast: trained, evaluated, saved, and resumed in another process: all of it works, in "
        f"{seconds:.0f} s; nothing is kept"
    )
    return 0
