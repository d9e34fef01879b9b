"""A run that can be started in a process of its own, killed, and started again."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from drivetrain.kernel import (
    CheckpointSettings,
    DataSettings,
    EvaluateSettings,
    Recipe,
    Settings,
    fit,
)
from drivetrain.kernel.checkpoint import CheckpointReader

FORKSERVER = multiprocessing.get_context("forkserver")
# torch imports its compiler when the first optimizer is made: once here, not in each process
FORKSERVER.set_forkserver_preload([__name__, "drivetrain.backends.ddp", "torch._dynamo"])

SETTINGS = Settings(
    steps=60,
    global_batch=8,
    micro_batch=3,
    log_every=7,
    data=DataSettings(drop_last=False),
    evaluate=EvaluateSettings(every=13),
    checkpoint=CheckpointSettings(every=1, keep_last=2),
    timeout_seconds=20,
)


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Dropout(0.2), nn.Linear(64, 1))


def loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (module(batch[0]) - batch[1]).square().sum()


def recipe() -> Recipe:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(101, 8, generator=generator)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    return Recipe(model=build, loss=loss, train_data=data, eval_data={"same": data})


def train(backend: str, out: Path, environment: dict[str, str]) -> None:
    """What the same command with `--resume auto` does."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    fit(recipe(), SETTINGS, backend=backend, out=out, resume="auto")


def train_behind(backend: str, out: Path, environment: dict[str, str]) -> None:
    """The same, saving behind training."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    settings = replace(SETTINGS, checkpoint=replace(SETTINGS.checkpoint, behind=True))
    fit(recipe(), settings, backend=backend, out=out, resume="auto")


def start(
    backend: str, out: Path, num_ranks: int = 1, train: Callable[..., None] = train
) -> list[BaseProcess]:
    """Start all ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
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
            target=train, args=(backend, out, environment if num_ranks > 1 else {})
        )
        process.start()
        ranks.append(process)
    return ranks


def everything(checkpoint: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, random state included."""
    reader = CheckpointReader(checkpoint)
    return {
        f"{kind}/{name}": reader.read(kind, name)
        for kind in ("weights", "optimizer", "state")
        for name in reader.names(kind)
    }
