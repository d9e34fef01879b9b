"""Deaths of ranks under `recover=in_place`: the time from the kill to the next update.

Each death has a run of its own: a rank is killed at a random moment of a step, an evaluation or a
save. The others continue, and the run must end with the loss and the weights of an undisturbed one.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # once here, not in each rank
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import drivetrain
from drivetrain import CheckpointSettings, EvaluateSettings, Recipe, Settings, lost_ranks
from drivetrain.checkpoint import CheckpointReader, checkpoints_of, newest
from drivetrain.kernel.events import StepEnded
from drivetrain.trainer.recovery import Reformed

from .harness import Benchmark, Column, Measured

__all__ = ["BENCHMARKS"]

DEATHS, STEPS = 10, 40
"""Deaths in a round, and steps of a run."""
RUNS: dict[str, tuple[str, int, dict[str, Any], int]] = {
    "4": ("ddp", 4, {}, 0),
    "2": ("ddp", 2, {}, 0),
    "2x2": ("fsdp", 4, {"shard_size": 2}, 0),
    "4 and a spare": ("ddp", 4, {}, 1),
    "2x2 and a spare": ("fsdp", 4, {"shard_size": 2}, 1),
}
"""Backend, ranks, options and spares of each candidate."""
SETTINGS = Settings(
    steps=STEPS,
    global_batch=16,
    log_every=1,
    evaluate=EvaluateSettings(every=5, sanity_check=False),
    checkpoint=CheckpointSettings(every=5),
    recover="in_place",
)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Linear(512, 1))


def loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (module(batch[0]) - batch[1]).square().sum()


def recipe() -> Recipe:
    inputs = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    return Recipe(model=model, loss=loss, train_data=data, eval_data={"same": data})


class Killer:
    """An observer that kills rank `victim` at most `delay` seconds after a step, and notes when it
    did so, and when the others had done their next step."""

    def __init__(self, folder: Path, victim: int, step: int, delay: float) -> None:
        self.killed, self.next_step = folder / "killed", folder / "next step"
        self.victim, self.step, self.delay = victim, step, delay
        self._launched = -1
        self._reformed = False

    def __call__(self, event: Any) -> None:
        if self._launched < 0:
            knows = lost_ranks.is_reported()
            self._launched = lost_ranks.own_number() if knows else int(os.environ["RANK"])
        if isinstance(event, Reformed):
            self._reformed = True
        elif isinstance(event, StepEnded) and self._reformed:
            self._reformed = False
            with self.next_step.open("a") as file:
                file.write(f"{time.monotonic()}\n")
        elif isinstance(event, StepEnded) and (event.step, self._launched) == (
            self.step,
            self.victim,
        ):
            threading.Timer(self.delay, self._die).start()

    def _die(self) -> None:
        self.killed.write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)


def train(out: Path, candidate: str, killer: Killer | None = None) -> dict[str, Tensor]:
    """Train a run; return the weights and moments of its last checkpoint."""
    backend, ranks, options, spares = RUNS[candidate]
    settings = replace(SETTINGS, spares=spares) if killer else replace(SETTINGS, recover="restart")
    observers = [killer] if killer else []
    drivetrain.fit(
        recipe(),
        settings,
        nproc=ranks,
        backend=backend,
        backend_options=options,
        out=out,
        observers=observers,
        progress=False,
    )
    last = newest(checkpoints_of(out))
    assert last is not None
    reader = CheckpointReader(last)
    return {
        f"{kind} {name}": reader.read(kind, name)
        for kind in ("weights", "optimizer")
        for name in reader.names(kind)
    }


def measure(candidate: str, quick: bool) -> Measured:
    """Seconds from each kill to the next update, and deaths after which the result was another."""
    ranks, dice = RUNS[candidate][1], random.Random(f"{candidate} {time.time()}")
    seconds, different, survived = [], 0, 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        whole = train(folder / "whole", candidate)
        for number in range(2 if quick else DEATHS):
            own = folder / str(number)
            own.mkdir()
            victim, step = dice.randrange(ranks), dice.randrange(2, STEPS - 4)
            killer = Killer(own, victim, step, dice.uniform(0, 0.02))
            found = train(own / "run", candidate, killer)
            survived += 1
            different += not all(
                torch.allclose(found[name], tensor, rtol=1e-4, atol=1e-6)
                for name, tensor in whole.items()
            )
            after = [float(line) for line in (own / "next step").read_text().split()]
            seconds.append(max(after) - float((own / "killed").read_text()))
    return {
        "deaths": len(seconds),
        "survived": survived,
        "different": different,
        "median": statistics.median(seconds),
        "most": max(seconds),
    }


BENCHMARKS = [
    Benchmark(
        "recover",
        "The death of a rank",
        "Ranks of backends ddp and fsdp on the CPU (gloo) with `recover=in_place`, a model of 0.3 "
        f"million parameters; {DEATHS} runs in a round, in each of which one rank is killed at a "
        "random moment of a step, an evaluation or a save; a spare, where there is one, takes its "
        "place. Seconds from the kill until the last of the ranks has done its next update; of "
        "each round the median and the longest. A result is another one if weights or moments "
        "differ from those of an undisturbed run by more than rounding.",
        {
            "4": "one of four ranks (ddp)",
            "2": "one of two ranks (ddp)",
            "2x2": "one of four ranks that hold two copies of two parts (fsdp)",
            "4 and a spare": "one of four ranks, with a spare (ddp)",
            "2x2 and a spare": "the same of fsdp, with a spare",
        },
        measure,
        (
            Column("seconds, median", "median", digits=2),
            Column("seconds, longest", "most", digits=2),
            Column("deaths in a round", "deaths", digits=0),
            Column("survived", "survived", digits=0),
            Column("another result", "different", digits=0),
        ),
        plotted="seconds, median",
    )
]
