"""A run that can be started in a process of its own, killed, and started again."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from drivetrain import CheckpointSettings, DataSettings, EvaluateSettings, Recipe, Settings
from drivetrain.checkpoint import CheckpointReader
from drivetrain.conformance.ports import free_port
from drivetrain.kernel.events import Logged, Resumed
from drivetrain.kernel.paths import Place
from drivetrain.kernel.shards import Kind
from drivetrain.trainer.fit import fit

from .dying import Death, interposed

FORKSERVER = multiprocessing.get_context("forkserver")
# torch imports its compiler when the first optimizer is made: once here, not in each process
FORKSERVER.set_forkserver_preload(
    [
        __name__,
        "drivetrain.backends.ddp",
        "drivetrain.backends.fsdp.driver",
        "torch._dynamo",
        "deepspeed",
    ]
)

SETTINGS = Settings(
    steps=24,
    global_batch=8,
    micro_batch=3,
    log_every=3,
    data=DataSettings(drop_last=False),
    evaluate=EvaluateSettings(every=13, sanity_check=False),
    checkpoint=CheckpointSettings(every=1, keep_last=2),
    timeout_seconds=20,
)
JOURNAL = "journal.jsonl"


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Dropout(0.2), nn.Linear(64, 1))


def loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (module(batch[0]) - batch[1]).square().sum()


def build_half_frozen() -> nn.Module:
    model = build()
    model[0].requires_grad_(False)  # type: ignore[index, operator]
    return model


def recipe(build: Callable[[], nn.Module] = build) -> Recipe:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(101, 8, generator=generator)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    return Recipe(model=build, loss=loss, train_data=data, eval_data={"same": data})


@dataclass(frozen=True)
class Run:
    """Driver, number of ranks and settings of a run, and how it ends."""

    backend: str = "cpu"
    num_ranks: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    background: bool = False
    link_frozen: bool = False
    """True if the first layer is frozen, and checkpoints share the files of its weights."""
    deaths: Mapping[int, Death] = field(default_factory=dict)
    """The calls in which ranks are killed, by rank."""

    def __str__(self) -> str:
        options = "".join(f" {key}={value}" for key, value in self.options.items())
        options += " background" * self.background + " linked" * self.link_frozen
        return f"{self.backend} x{self.num_ranks}{options}"


def train(run: Run, out: Path, environment: dict[str, str]) -> None:
    """Train on one rank, like the same command with `--resume auto`."""
    os.environ.update(environment)
    saving = replace(SETTINGS.checkpoint, background=run.background, link_frozen=run.link_frozen)
    settings = replace(SETTINGS, checkpoint=saving)
    rank = int(environment.get("RANK", "0"))
    with dying(run, rank, out / "checkpoints"):
        fit(
            recipe(build_half_frozen if run.link_frozen else build),
            settings,
            backend=run.backend,
            backend_options=run.options,
            out=out,
            resume="auto",
            observers=[Journal(out / JOURNAL)] if rank == 0 else (),
        )


def dying(run: Run, rank: int, folder: Path) -> AbstractContextManager[None]:
    """Return a context in which the run ends as `run.deaths` says."""
    death = run.deaths.get(rank)
    return interposed(folder, (lambda name, do: None) if death is None else death.act())


class Journal:
    """An observer that writes each event to a file at once, so that a kill loses none."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path

    def __call__(self, event: Any) -> None:
        if isinstance(event, Resumed):
            self.write({"resumed": event.step, "notes": event.notes})
        if isinstance(event, Logged):
            self.write({"step": event.step, "loss": event.loss, "grad_norm": event.grad_norm})

    def write(self, line: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def journal(out: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of all processes that ran in the folder."""
    path = out / JOURNAL
    for line in path.read_text().splitlines() if path.is_file() else ():
        yield json.loads(line)


def curve(out: Path) -> dict[int, tuple[float, float]]:
    """Return loss and gradient norm by step. A step that is logged again after a resume must have
    the same values.
    """
    found: dict[int, tuple[float, float]] = {}
    for line in journal(out):
        if "step" in line:
            figures = line["loss"], line["grad_norm"]
            assert found.setdefault(line["step"], figures) == figures
    return found


def start(
    what: Any, out: Path, num_ranks: int = 1, train: Callable[..., None] = train
) -> list[BaseProcess]:
    """Start `train(what, out, environment)` on all ranks."""
    port = free_port()
    ranks = []
    for rank in range(num_ranks):
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        process = FORKSERVER.Process(
            target=train, args=(what, out, environment if num_ranks > 1 else {})
        )
        process.start()
        ranks.append(process)
    return ranks


def everything(
    checkpoint: Place, kinds: Sequence[Kind] = ("weights", "optimizer", "state")
) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint, random state included, or those of some `kinds`."""
    reader = CheckpointReader(checkpoint)
    return {
        f"{kind}/{name}": reader.read(kind, name) for kind in kinds for name in reader.names(kind)
    }
