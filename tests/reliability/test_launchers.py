"""kill -9 of the process that started the ranks: no rank and no data worker continues."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PROCESS = """
import os, time, torch
def noted(what):
    open(f"pid-{os.getpid()}-{what}", "w").close()
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        noted("worker")
        return {"x": torch.zeros(2), "labels": torch.zeros(1)}
class Model(torch.nn.Linear):
    def __init__(self):
        super().__init__(2, 1)
    def forward(self, x, labels=None):
        noted("rank")
        time.sleep(600)
"""
FIT = f"""{PROCESS}
from drivetrain import DataSettings, Recipe, Settings
from drivetrain.ranks.fit import fit
recipe = Recipe(Model, lambda module, batch: module(batch["x"]).sum(), train_data=Data())
settings = Settings(steps=4, global_batch=4, data=DataSettings(workers=1))
fit(recipe, settings, backend="ddp", out="run", NPROC)
"""
TRAINER = f"""{PROCESS}
from drivetrain.compat import Trainer, TrainingArguments
args = TrainingArguments(
    "run", max_steps=4, report_to="none", dataloader_num_workers=1, use_cpu=True, disable_tqdm=True
)
Trainer(Model(), args, train_dataset=Data()).train()
"""
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
LAUNCHERS: dict[str, tuple[list[str], str]] = {
    "fit(nproc=2)": ([], FIT.replace("NPROC", "nproc=2")),
    "torchrun": (TORCHRUN, FIT.replace("NPROC", "nproc=1")),
    "torchrun, compat": (TORCHRUN, TRAINER),
}


@pytest.mark.slow  # `drivetrain train` is killed so in each run: tests/cli/test_signals.py
@pytest.mark.parametrize("name", LAUNCHERS)
def test_ranks_and_workers_end_with_their_launcher(name: str, tmp_path: Path) -> None:
    """Kill the launcher while all its processes are in the user's code, which does not return."""
    words, text = LAUNCHERS[name]
    (tmp_path / "script.py").write_text(text)
    with (tmp_path / "reported").open("w") as reported:
        launcher = subprocess.Popen(
            [sys.executable, *words, "script.py"],
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=reported,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    try:
        await_for(lambda: len(noted(tmp_path, "rank")) == 2 and noted(tmp_path, "worker"), launcher)
    finally:
        launcher.kill()
        launcher.wait()
    pids = noted(tmp_path, "rank") + noted(tmp_path, "worker")
    await_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), seconds=10)
    assert "is gone: it ends, too" in (tmp_path / "reported").read_text()


def noted(folder: Path, what: str) -> list[int]:
    return [int(path.name.split("-")[1]) for path in folder.glob(f"pid-*-{what}")]


def await_for(
    done: Callable[[], Any], process: subprocess.Popen[bytes] | None = None, seconds: float = 120.0
) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, "waited in vain"
        assert process is None or process.poll() is None, "it ended by itself"
        time.sleep(0.1)
