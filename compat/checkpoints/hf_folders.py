"""Checkpoints in HF Trainer's layout: read on any driver, and written for other tools.

Their `.pt` and `.pth` files are read by torch's weights-only unpickler, which runs no code. Files
that it refuses, such as an old `optimizer.bin` with objects, are refused.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...checkpoint.manifest import FILE_NAME
from ...checkpoint.optimizer_entries import flat
from ...kernel.batches import Position
from ...kernel.errors import CheckpointDamaged, CheckpointMismatch
from ...kernel.progress import Progress
from ..names import OPTIMIZER_NAME, OPTIMIZER_NAME_BIN, SCALER_NAME, SCHEDULER_NAME
from .unpickling import read_pickled

__all__ = [
    "is_kernels",
    "load_random_state",
    "optimizer_tensors",
    "progress_at",
    "read_scaler",
    "read_schedule",
    "save_optimizer",
    "save_random_state",
    "save_scaler",
    "saved_optimizer",
]

_LOG = logging.getLogger(__name__)
_DEVICES = ("cuda", "xpu", "mps")


def is_kernels(folder: Path) -> bool:
    """True if the folder holds the kernel's part of a checkpoint; its manifest may not be written
    yet."""
    return any(FILE_NAME.fullmatch(path.name) for path in folder.iterdir())


# --- optimizer and schedule -------------------------------------------------------------------


def saved_optimizer(folder: Path) -> dict[str, Any] | None:
    """Return the optimizer's state; None unless the files of optimizer and schedule both exist."""
    for name in (OPTIMIZER_NAME, OPTIMIZER_NAME_BIN):
        if (folder / name).is_file() and (folder / SCHEDULER_NAME).is_file():
            return _sound_optimizer(folder / name)
    return None


def _sound_optimizer(path: Path) -> dict[str, Any]:
    match read_pickled(path):
        case {"state": dict(states), "param_groups": list(groups)} as saved if all(
            isinstance(state, dict) for state in states.values()
        ) and all(isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups):
            return dict(saved)
    raise CheckpointDamaged(f"{path}: holds no optimizer's state")


def read_schedule(folder: Path) -> dict[str, Any]:
    """Return the state of the learning rate schedule."""
    state = read_pickled(folder / SCHEDULER_NAME)
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise CheckpointDamaged(f"{folder / SCHEDULER_NAME}: holds no schedule's state")
    return state


def optimizer_tensors(
    state: Mapping[str, Any],
    order: Sequence[Sequence[str | None]],
    dtypes: Mapping[str, torch.dtype],
) -> dict[str, Tensor]:
    """Return a saved optimizer's state by `<fqn>/<state>`, the names of the kernel's readers.
    `dtypes`: of this run's weights.

    `order`: the names of the parameters in each group of this run; the file numbers parameters in
    this order. Raises `CheckpointMismatch` if the groups differ.
    """
    here = [list(group) for group in order]
    there = [group["params"] for group in state["param_groups"]]
    if [len(group) for group in here] != [len(group) for group in there]:
        raise CheckpointMismatch(
            f"the saved optimizer has groups of {[len(g) for g in there]} parameters, this one of "
            f"{[len(g) for g in here]}: resume with the model and the optimizer that wrote it, or "
            "delete its optimizer.pt to start the optimizer over"
        )
    numbers = list(chain(*there))
    of_nobody = [key for key in state["state"] if isinstance(key, int) and key not in numbers]
    if of_nobody or len({*map(repr, numbers)}) < len(numbers):
        raise CheckpointDamaged(
            f"{OPTIMIZER_NAME}: its groups hold the parameters {numbers!r:.80}, and its state is "
            f"that of {list(state['state'])!r:.80}"
        )
    tensors: dict[str, Tensor] = {}
    for number, name in zip(numbers, chain(*here), strict=True):
        for key, value in state["state"].get(number, {}).items():
            if name is None:
                raise CheckpointMismatch(
                    "the optimizer has parameters that are none of the model's, so their state "
                    "cannot be taken over on this driver: resume on one that keeps whole weights"
                )
            if value is not None:  # an entry of SGD without momentum
                entries = flat(key, value, dtypes.get(name))
                tensors |= {f"{name}/{stored}": tensor for stored, tensor in entries}
    return tensors


def save_optimizer(folder: Path, optimizer: dict[str, Any] | None, schedule: Any) -> None:
    """Write the states of optimizer and schedule as transformers does; None is not written."""
    for state, name in ((optimizer, OPTIMIZER_NAME), (schedule, SCHEDULER_NAME)):
        if state is not None:
            torch.save(state, folder / name)


_SCALER = {"scale": "loss_scale", "_growth_tracker": "loss_scale_good_steps"}
"""The entries of a loss scaler's state in transformers' file, and the drivers' names."""


def read_scaler(folder: Path) -> dict[str, Tensor]:
    """Return the loss scaler's state by the drivers' names; empty if there is none."""
    path = folder / SCALER_NAME
    saved = read_pickled(path) if path.is_file() else {}
    if saved == {}:
        return {}
    if not isinstance(saved, dict) or any(
        not isinstance(saved.get(name), int | float) for name in _SCALER
    ):
        raise CheckpointDamaged(f"{path}: holds no loss scaler's state")
    return {ours: torch.tensor(saved[theirs]) for theirs, ours in _SCALER.items()}


def save_scaler(folder: Path, state: Mapping[str, Tensor]) -> None:
    """Write a driver's loss scaler, if it has one, as transformers does."""
    values = {theirs: state[ours].item() for theirs, ours in _SCALER.items() if ours in state}
    if values:
        factors = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
        torch.save({**factors, **values}, folder / SCALER_NAME)


def progress_at(step: int, epochs: Any) -> Progress:
    """Return the progress of a run after `step` updates of these `Epochs`."""
    epoch, done = divmod(step, epochs.updates_per_epoch)
    samples = done * epochs.accumulation * epochs.global_batch
    batches = epoch * epochs.batches_per_epoch + done * epochs.accumulation
    return Progress(
        step=step,
        applied=step,
        samples=batches * epochs.global_batch,
        position=Position(epoch, samples),
    )


# --- random state -----------------------------------------------------------------------------


def save_random_state(folder: Path, rank: int, world_size: int) -> None:
    """Write the state of this rank's generators as transformers does."""
    import numpy as np

    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.get_rng_state(),
    }
    for device in _available_devices():
        module = torch.get_device_module(device)
        states[device] = module.get_rng_state_all() if world_size > 1 else module.get_rng_state()
    torch.save(states, folder / _random_file(rank, world_size))


def load_random_state(folder: Path, rank: int, world_size: int) -> bool:
    """Restore this rank's random state. Return False and log a warning if the folder has none: the
    run continues with its present state.
    """
    path = folder / _random_file(rank, world_size)
    if not path.is_file():
        _LOG.info(
            "%s is not there, as after a run on another number of ranks: random numbers will not "
            "continue where they were",
            path,
        )
        return False
    states = read_pickled(path, _numpy_globals())
    try:
        random.setstate(states["python"])
        if "numpy" in sys.modules:
            import numpy as np

            np.random.set_state(states["numpy"])
        torch.set_rng_state(states["cpu"])
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise CheckpointDamaged(f"{path}: holds no state of generators: {error!r:.200}") from error
    for device in _available_devices():
        if device in states:
            _set_device_state(device, states[device])
    return True


def _set_device_state(device: str, state: Any) -> None:
    module = torch.get_device_module(device)
    try:
        if isinstance(state, list | tuple):
            module.set_rng_state_all(state)
        else:
            module.set_rng_state(state)
    except Exception as error:  # any error: the run continues with other random numbers
        _LOG.error(
            "the random state of %s could not be restored, so its random numbers will not "
            "continue where they were: %s",
            device,
            error,
        )


def _available_devices() -> list[str]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return [accelerator.type] if accelerator and accelerator.type in _DEVICES else []


def _random_file(rank: int, world_size: int) -> str:
    return "rng_state.pth" if world_size <= 1 else f"rng_state_{rank}.pth"


# --- reading ----------------------------------------------------------------------------------


def _numpy_globals() -> list[Any]:
    """Return the classes that pickled NumPy arrays need."""
    import numpy as np

    rebuild: Any = np.zeros(0).__reduce__()[0]
    names = [(rebuild, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]
    dtypes = [type(np.dtype(kind)) for kind in (np.uint32, np.int64, np.float64)]
    return [*names, np.ndarray, np.dtype, *dtypes]
