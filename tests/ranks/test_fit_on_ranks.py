"""`fit(..., nproc=2)` from code that cannot be imported, such as the cells of a notebook."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import Recipe, fit
from drivetrain.kernel.errors import SettingError

CELLS = """
import json, os, signal, sys, torch
from torch import nn
from drivetrain import DrivetrainError, LossParts, Recipe, Settings, fit

torch.set_num_threads(2)
torch.randn(4_000_000).add(1).exp().sum()  # OpenMP has threads, which no fork has
width, points, figures = 5, torch.randn(64, 4), {}


class Points:
    def __len__(self):
        return len(points)

    def __getitem__(self, index):
        return points[index]


def recipe(loss=lambda module, batch: (module(batch) - 1).square().sum()):
    def model():
        torch.manual_seed(3)
        return nn.Linear(4, width)

    return Recipe(model, loss, train_data=Points())


def weight(module):
    return module.weight.detach().clone()


def failing(module, batch):
    raise KeyError("a cell's own error")


def ending(module, batch):
    os._exit(3)


def answer(act):
    try:
        act()
    except DrivetrainError as error:
        return [type(error).__name__, str(error)]


settings = Settings(steps=6, global_batch=8)
parts = LossParts(lambda module, batch: {
    "near": (module(batch) - 1).square().sum(), "small": module(batch).abs().sum()
})


def noted(name):
    def observe(event):
        if type(event).__name__ == "Logged":
            open(name, "w").write(json.dumps(event.losses))
    return observe


one = fit(recipe(parts), settings, backend="cpu", finish=weight, observers=[noted("one.json")])
before = dict(os.environ), signal.getsignal(signal.SIGINT)
two = fit(recipe(parts), settings, nproc=2, finish=weight, out="two", observers=[noted("two.json")])
figures["parts"] = [json.load(open(name)) for name in ("one.json", "two.json")]
figures["away"] = float((one.finish - two.finish).abs().max())
figures["losses"] = [one.loss, two.loss]
figures["step"] = two.step
figures["checkpoint"] = str(two.checkpoint)
figures["failing"] = answer(lambda: fit(recipe(failing), settings, nproc=2))
figures["ending"] = answer(lambda: fit(recipe(ending), settings, nproc=2))
figures["refused"] = answer(lambda: fit(recipe(), settings, nproc=2, resume="nowhere"))
figures["as it was"] = before == (dict(os.environ), signal.getsignal(signal.SIGINT))
print(json.dumps(figures))
"""


def test_cells_train_on_two_ranks(tmp_path: Path) -> None:
    code = f"exec(compile({CELLS!r}, '<cell>', 'exec'))"
    temporary = tmp_path / ("long" * 30)  # longer than the path of a socket may be
    temporary.mkdir()
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    assert not list(temporary.glob("torchelastic_*"))
    figures: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    assert figures["away"] < 1e-6
    one, two = figures["losses"]
    assert two == pytest.approx(one, rel=1e-6)
    alone, together = figures["parts"]
    assert set(alone) == {"near", "small"} and together == pytest.approx(alone, rel=1e-6)
    assert figures["step"] == 6
    manifest = json.loads((tmp_path / figures["checkpoint"] / "manifest.json").read_text())
    assert manifest["world_size"] == 2
    kind, message = figures["failing"]
    assert kind == "RecipeFailed" and 'KeyError: "a cell\'s own error"' in message
    assert message.startswith("rank ") and "in failing" in message
    assert figures["ending"][0] == "RecipeFailed" and "exit code 3" in figures["ending"][1]
    assert figures["refused"][0] == "CheckpointNotFound" and "nowhere" in figures["refused"][1]
    assert figures["as it was"]


COMPILED = """
import torch
from torch import nn
from drivetrain import Recipe, Settings, fit

rows = torch.ones(8, 4)
recipe = Recipe(lambda: nn.Linear(4, 1), lambda module, batch: module(batch).sum(), rows)
fit(recipe, Settings(steps=1, compile=True, compile_options={"backend": "eager"}), backend="cpu")
print("steps", fit(recipe, Settings(steps=2), nproc=2, progress=False).step)
"""


def test_ranks_train_after_compiled_steps_in_this_process() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", COMPILED], capture_output=True, text=True, check=False, timeout=300
    )
    assert "steps 2" in ran.stdout, ran.stderr[-3000:]


RECIPE = Recipe(lambda: nn.Linear(1, 1), lambda module, batch: module(batch).sum(), [1.0])


def test_what_cannot_be_started_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingError, match="nproc is 0"):
        fit(RECIPE, nproc=0)
    with monkeypatch.context() as used:
        used.setattr(torch.cuda, "is_initialized", lambda: True)
        with pytest.raises(SettingError, match=r"\(cuda\).*drivetrain train FILE --nproc 2"):
            fit(RECIPE, nproc=2)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SettingError, match="rank 1 of a launcher"):
        fit(RECIPE, nproc=2)


INTERRUPTED = """
import os, signal, time, torch
from torch import nn
from drivetrain import Recipe, Settings, fit
from drivetrain.kernel.events import StepEnded


def watch(event):
    if isinstance(event, StepEnded) and event.step == 3 and os.environ["RANK"] == "1":
        os.kill(os.getppid(), signal.SIGINT)
    time.sleep(0.01)


recipe = Recipe(lambda: nn.Linear(4, 1), lambda m, b: m(b).sum(), torch.randn(64, 4))
settings = Settings(steps=10**6, global_batch=8)
result = fit(recipe, settings, nproc=2, out="run", observers=[watch])
print(result.reason, result.step >= 3, result.checkpoint.is_dir())
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", ["SIGINT", "SIGUSR1"])
def test_an_interrupted_cell_leaves_a_checkpoint(tmp_path: Path, number: str) -> None:
    cell = INTERRUPTED.replace("SIGINT", number)
    ran = subprocess.run(
        [sys.executable, "-c", f"exec(compile({cell!r}, '<cell>', 'exec'))"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert (ran.stdout, ran.returncode) == ("preempted True True\n", 0), ran.stderr
    (saved,) = (tmp_path / "run" / "checkpoints").glob("checkpoint-*")
    assert (saved / "manifest.json").is_file()


TASK = """
import torch
from drivetrain import Recipe, Settings, fit

def loss(module, batch):
    return (module(batch) - 1).square().sum()

recipe = Recipe(lambda: torch.nn.Linear(4, 1), loss, torch.randn(64, 4))
result = fit(recipe, Settings(steps=2, global_batch=8), backend="ddp", out="run", progress=False)
print(result.step)
"""


@pytest.mark.slow
def test_a_task_of_srun_is_a_rank(tmp_path: Path) -> None:
    step = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": str(os.getpid())}
    tasks = [
        subprocess.Popen(
            [sys.executable, "-c", TASK],
            cwd=tmp_path,
            env=os.environ | step | {"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for task in range(2)
    ]
    assert [task.communicate(timeout=100)[0] for task in tasks] == ["2\n"] * 2
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["world_size"] == 2


GARBAGE = """
import gc, os, torch
from torch import nn
from drivetrain import Recipe, Settings, fit


class WithThreads:
    def __init__(self):
        self.itself = self

    def __del__(self):
        open(f"ended in {os.getpid()}", "w").close()


def loss(module, batch):
    gc.collect()
    return module(batch).sum()


gc.disable()
WithThreads()
recipe = Recipe(lambda: nn.Linear(4, 1), loss, torch.randn(8, 4))
fit(recipe, Settings(steps=2, global_batch=4), nproc=2)
print(os.getpid())
"""


def test_a_rank_does_not_collect_the_garbage_of_its_parent(tmp_path: Path) -> None:
    code = f"exec(compile({GARBAGE!r}, '<cell>', 'exec'))"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    parent = ran.stdout.split()[-1]
    assert [path.name for path in tmp_path.glob("ended in *")] in ([], [f"ended in {parent}"])
