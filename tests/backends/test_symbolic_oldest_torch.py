"""Steps without memory with the oldest torch, which lacks some operations without elements."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from environments import python_of_all


@pytest.mark.slow
@pytest.mark.usefixtures("environment_of_all")
def test_all_of_it_holds_with_the_oldest_torch() -> None:
    tests = Path(__file__).parents[1]
    command = [python_of_all(), "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    files = [str(tests / "symbolic" / name) for name in ("test_step_bytes.py", "test_work.py")]
    done = subprocess.run(
        [*command, "-m", "slow or not slow", *files],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(tests)},
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
