"""Runs on a cluster of Ray: each worker of Ray Train starts one rank and waits for it.

A rank is a process of its own, so that signals reach its main thread. It ends with its worker;
Ray then restarts all workers, and `--resume auto` resumes from the newest checkpoint.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from ...kernel.errors import EXIT_PREEMPTED, UsageError

__all__ = ["train"]


def train(
    arguments: Sequence[str], *, name: str, workers: int, gpus: int = 0, max_restarts: int = 3
) -> None:
    """Train with `drivetrain train ARGUMENTS` on as many workers, each with one GPU where there are
    `gpus`. Raises `UsageError` where Ray is not installed, and what Ray raises when workers have
    failed more often than `max_restarts`."""
    try:
        from ray.train import BackendConfig, FailureConfig, RunConfig, ScalingConfig
        from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
    except ImportError as error:
        raise UsageError(f"this needs Ray ({error}): pip install 'ray[train]'") from error
    run_id = f"{name}-{time.time_ns()}"
    settings = {"arguments": list(arguments), "folder": os.getcwd(), "run_id": run_id}
    trainer: Any = DataParallelTrainer(
        _rank,
        train_loop_config=settings,
        backend_config=BackendConfig(),
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=gpus > 0),
        run_config=RunConfig(name=run_id, failure_config=FailureConfig(max_failures=max_restarts)),
    )
    trainer.fit()


def _rank(settings: dict[str, Any]) -> None:
    """Start the rank of this worker, and wait for it. Raises `RuntimeError`, which Ray counts."""
    from ray.train import get_context
    from ray.train.collective import broadcast_from_rank_zero

    context: Any = get_context()
    first = context.get_world_rank() == 0
    store = _store() if first else None
    address, port = broadcast_from_rank_zero((_own_address(), store.port) if store else ("", 0))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    alone = visible != [""] and len(visible) == 1  # Ray shows a worker no device but its own
    environment = {
        "RANK": context.get_world_rank(),
        "WORLD_SIZE": context.get_world_size(),
        "LOCAL_RANK": 0 if alone else context.get_local_rank(),
        "LOCAL_WORLD_SIZE": 1 if alone else context.get_local_world_size(),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        # as under torchrun: the rank ends with what started it, and takes over this run's lock,
        "TORCHELASTIC_RUN_ID": settings["run_id"],
        # and its store is there before it is
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RESTART_COUNT": 0,
    }
    code = subprocess.run(
        [sys.executable, "-m", "drivetrain.cli", "train", *settings["arguments"]],
        cwd=settings["folder"] if os.path.isdir(settings["folder"]) else None,
        env={**os.environ, **{key: str(value) for key, value in environment.items()}},
        check=False,
    ).returncode
    if code:
        why = "saved and stopped" if code == EXIT_PREEMPTED else "failed"
        raise RuntimeError(f"rank {context.get_world_rank()} {why}: exit code {code}")


def _store() -> Any:
    """Open the store at which ranks meet, at a port that the system chooses. A port that was only
    looked up could be taken before rank 0 listens there.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)


def _own_address() -> str:
    """Return the address by which the cluster knows this machine."""
    import ray

    cluster: Any = ray.util
    return str(cluster.get_node_ip_address())
