"""Ways are looked at in several processes: in order, and with a message if one dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from drivetrain.kernel.errors import DrivetrainError
from drivetrain.planning import processes
from drivetrain.planning.processes import look_at_all

from .searching import RECIPE, SETTINGS, searching, ways


@pytest.mark.parametrize("cores", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_what_becomes_of_each_way_is_yielded_in_order(cores: int) -> None:
    search = searching(80e9, ("micro_batch", "activation_checkpointing"))
    several = ways(search, "ddp", replace(SETTINGS, micro_batch=4)) * 2
    with patch.object(processes, "num_cores", lambda: cores):
        found = [*look_at_all(search, several)]
    assert found == [search.look(way) for way in several]
    precisions = [each.choice.settings["precision"] for (each,) in found]
    assert precisions == ["fp32", "bf16"] * 2


def test_a_process_that_dies_is_named() -> None:
    parent = os.getpid()

    def dying() -> object:
        if os.getpid() != parent:
            os._exit(9)
        return RECIPE.model()

    search = searching(80e9, recipe=replace(RECIPE, model=dying))  # type: ignore[arg-type]
    with (
        patch.object(processes, "num_cores", lambda: 2),
        pytest.raises(DrivetrainError, match="has died"),
    ):
        [*look_at_all(search, ways(search, "ddp"))]


KILLED = """
import os, signal, time
from pathlib import Path
from unittest.mock import patch
from dataclasses import replace
from drivetrain.planning import processes
from planning.searching import RECIPE, searching, ways

parent, folder = os.getpid(), Path("{folder}")

def building():
    if os.getpid() != parent:
        (folder / str(os.getpid())).touch()
        while len(list(folder.iterdir())) < 2:
            time.sleep(0.01)
        os.kill(parent, signal.SIGKILL)
        time.sleep(600)
    return RECIPE.model()

search = searching(80e9, recipe=replace(RECIPE, model=building))
with patch.object(processes, "num_cores", lambda: 2):
    list(processes.look_at_all(search, ways(search, "ddp")))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_processes_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    program = [sys.executable, "-c", KILLED.replace("{folder}", str(tmp_path))]
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths}
    killed = subprocess.run(program, env=environment, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()[-3000:]
    workers = [Path(f"/proc/{each.name}/stat") for each in tmp_path.iterdir()]
    assert len(workers) == 2
    deadline = time.monotonic() + 60
    while alive := [worker for worker in workers if worker.exists()]:
        assert time.monotonic() < deadline, f"{alive} are still running"
        time.sleep(0.1)
