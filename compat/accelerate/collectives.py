"""The collective calls of accelerate's `Accelerator`: gather, pad, reduce and split."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ...data.nested import leaves, map_tensors
from ...kernel.batches import split_evenly
from ...kernel.contract import Outcome, Session
from ...kernel.loop import TrainLoop
from ...kernel.recipe import Microstep
from ..arguments.accelerator_config import AcceleratorConfig
from ..arguments.driver_session import DriverSession
from ..arguments.processes import Processes
from ..callbacks.state import TrainerState
from ..data.sharding import RankLoader

__all__ = ["Collectives", "ViewedTrainer", "exchange_objects"]


class ViewedTrainer(Protocol):
    """The attributes of the Trainer that its accelerator reads."""

    args: Any
    model: Any
    driver_session: DriverSession
    state: TrainerState
    _training: TrainLoop | None
    _microstep: Microstep | None
    _last_outcome: Outcome | None

    def _backward(self, loss: Tensor, weight: float = 1.0) -> Tensor: ...

    def _write_kernel_checkpoint(self, folder: Path, step: int) -> None: ...

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None: ...

    def _load_rng_state(self, checkpoint: str | None) -> None: ...


class GradientState:
    """The position of the loop: its loader, and the microbatch within an update."""

    def __init__(self, trainer: ViewedTrainer) -> None:
        self._trainer = trainer
        self.active: list[RankLoader] = []
        config = AcceleratorConfig.of(getattr(trainer.args, "accelerator_config", None))
        self.plugin_kwargs = {**(config.gradient_accumulation_kwargs or {}), "num_steps": 1}
        """The settings of accelerate's own accumulation, which is off: the Trainer accumulates."""
        self._said_to_sync = True

    @property
    def active_dataloader(self) -> RankLoader | None:
        """The innermost loader that is being iterated over."""
        return self.active[-1] if self.active else None

    @property
    def in_dataloader(self) -> bool:
        """True if a loader is being iterated over."""
        return bool(self.active)

    @property
    def end_of_dataloader(self) -> bool:
        """True if the current batch of the active loader is its last."""
        return bool(self.active) and self.active[-1].end_of_dataloader

    @property
    def remainder(self) -> int:
        """Number of real samples in the last global batch; 0: all; -1: unknown."""
        return self.active[-1].remainder if self.active else -1

    @property
    def sync_gradients(self) -> bool:
        """True if an update follows this microbatch."""
        microstep = self._trainer._microstep
        return self._said_to_sync if microstep is None else bool(microstep.last)

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        """Set the flag; called by subclasses' own training loops."""
        self._said_to_sync = sync_gradients

    @property
    def num_steps(self) -> int:
        """Batches that accelerate accumulates: one, since the Trainer does."""
        return 1

    @property
    def adjust_scheduler(self) -> bool:
        """The setting as it was given; the Trainer's schedules count updates in any case."""
        return bool(self.plugin_kwargs.get("adjust_scheduler", False))

    @property
    def sync_with_dataloader(self) -> bool:
        """True if the last batches of an epoch make an update."""
        return True


class Collectives(Processes):
    """The collective calls, by accelerate's names."""

    def __init__(self, trainer: ViewedTrainer) -> None:
        super().__init__(trainer.args)
        self._trainer = trainer
        self.gradient_state = GradientState(trainer)
        self._triggered = False

    @property
    def _session(self) -> Session:
        return self._trainer.driver_session.session

    def gather(self, tensor: Any) -> Any:
        """Gather the tensors of all processes along dimension 0 on every process.

        Accepts any structure of tensors; 0-d tensors become elements of a vector. A single process
        gets its argument back. Raises TypeError for anything but tensors.
        """
        if not has_only_tensors(tensor):
            raise TypeError(
                f"gather takes tensors and structures of them, not {type(tensor).__name__}; use "
                "gather_for_metrics(..., use_gather_object=True)"
            )
        if self.num_processes == 1:
            return tensor
        return gather_tensors(self._session, tensor, self._has_whole_samples)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather without the samples that fill up the last round of a loader.

        Objects other than tensors are gathered as one list of the items of all processes.
        """
        if use_gather_object or not has_only_tensors(input_data):
            data = self._gather_objects(input_data)
            trim: Callable[[Any], Any] = lambda items: items[: self._real_samples()]  # noqa: E731
            return trim(data) if isinstance(data, list) else data
        real = self._real_samples()
        return map_tensors(lambda t: t[:real] if t.dim() else t, self.gather(input_data))

    def _gather_objects(self, data: Any) -> Any:
        if self.num_processes == 1:
            return data
        return exchange_objects(self._session, data, self._has_whole_samples)

    @property
    def _has_whole_samples(self) -> bool:
        """False in a training step: ranks that partition sequences then have parts of samples."""
        return self._trainer._microstep is None

    def _real_samples(self) -> int | None:
        """Return the number of real samples among those just gathered; None: all of them."""
        state = self.gradient_state
        return state.remainder if state.end_of_dataloader and state.remainder > 0 else None

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False
    ) -> Any:
        """Pad tensors in dimension `dim` to the longest of all processes with `pad_index`, at the
        end or, with `pad_first`, at the start.
        """
        if self.num_processes == 1:
            return tensor
        return pad_to_the_longest(self._session, tensor, dim, pad_index, pad_first)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the sum or mean over processes, times `scale`; a single process gets a copy."""
        if reduction not in ("sum", "mean", "none"):
            raise ValueError(f"reduction is {reduction!r}; allowed: sum, mean, none")
        if self.num_processes == 1 or reduction == "none":
            return map_tensors(Tensor.clone, tensor)
        session, world = self._session, self._session.world
        alike = world.feeders_per_reader if self._has_whole_samples else 1
        factor = scale / (world.num_feeders if reduction == "mean" else alike)
        return map_tensors(lambda t: session.reduce(t) * factor, tensor)

    def wait_for_everyone(self) -> None:
        """Wait until all processes have called this."""
        if self.num_processes > 1:
            self._session.exchange(None)

    def set_trigger(self) -> None:
        """Send a signal, such as a request to stop, to all processes; see `check_trigger`."""
        self._triggered = True

    def check_trigger(self) -> bool:
        """True if any process has called `set_trigger` since the last check. All processes call
        it."""
        mine, self._triggered = self._triggered, False
        return mine if self.num_processes == 1 else any(self._session.exchange(mine))

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Run the block in the first process before the others."""
        with self.args.main_process_first(local=False):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Run the block in the first process of each machine before the others of that machine."""
        with self.args.main_process_first(local=True):
            yield

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Yield this process's part of a list, a tensor or a dict of them, split as evenly as
        possible. With padding the last element is repeated until all parts have the same length.
        """
        if isinstance(inputs, dict):
            yield {key: self._part(value, apply_padding) for key, value in inputs.items()}
        else:
            yield self._part(inputs, apply_padding)

    def _part(self, items: Any, pad: bool) -> Any:
        size, index = self.num_processes, self.process_index
        start, length = split_evenly(len(items), size, index)
        part = items[start : start + length]
        if pad and length * size < len(items):
            last = items[-1:]
            part = torch.cat([part, last]) if isinstance(items, Tensor) else [*part, *last]
        return part


def has_only_tensors(data: Any) -> bool:
    """True if nested mappings, lists and tuples hold nothing but tensors."""
    return all(isinstance(leaf, Tensor) for leaf in leaves(data))


def gather_tensors(session: Session, data: Any, once: bool = True) -> Any:
    """Return the same structure, in which each tensor is concatenated over all feeders, on its
    device; with `once`, over one feeder of each reader."""
    left_out = once and not session.world.is_first_of_reader

    def gather(tensor: Tensor) -> Tensor:
        whole = tensor if tensor.dim() else tensor[None]
        own = whole[:0] if left_out else whole
        return session.gather(own.detach().contiguous()).to(tensor.device)

    return map_tensors(gather, data)


def pad_to_the_longest(session: Session, data: Any, dim: int, fill: float, in_front: bool) -> Any:
    """Return the same structure, each tensor padded in `dim` to the longest of all ranks.

    Tensors without that dimension are left alone.
    """

    def pad(tensor: Tensor) -> Tensor:
        if not -tensor.dim() <= dim < tensor.dim():
            return tensor
        missing = max(session.exchange(tensor.shape[dim])) - tensor.shape[dim]
        later = tensor.dim() - 1 - dim % tensor.dim()  # the last dimension comes first in `pad`
        widths = [0, 0] * later + ([missing, 0] if in_front else [0, missing])
        return functional.pad(tensor, widths, value=fill) if missing else tensor

    return map_tensors(pad, data)


def exchange_objects(session: Session, data: Any, once: bool = True) -> Any:
    """Concatenate each feeder's lists, or with `once` each reader's. An object that is not a list
    becomes one item.

    Items are plain values, tensors, arrays, and lists, tuples and dicts of them. Raises TypeError
    for anything else: nothing is pickled.
    """
    world = session.world
    ranks_of_one = world.size // (world.num_readers if once else world.num_feeders)
    found = [_unpacked(packed) for packed in session.exchange(_packed(data))[::ranks_of_one]]
    return [item for part in found for item in (part if isinstance(part, list) else [part])]


def _packed(value: Any) -> Any:
    """Convert a value to JSON types."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        bits = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        dtype = str(value.dtype).partition(".")[2]
        return {"tensor": base64.b64encode(bits).decode(), "of": dtype, "shape": [*value.shape]}
    if isinstance(value, np.ndarray | np.generic):
        return {"array": _packed(torch.as_tensor(value))}
    if isinstance(value, Mapping):
        return {"items": [[_packed(key), _packed(inner)] for key, inner in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [_packed(inner) for inner in value]}
    if isinstance(value, list):
        return [_packed(inner) for inner in value]
    raise TypeError(
        f"a {type(value).__name__} cannot be sent to other processes: give numbers, texts, "
        "tensors, arrays, or lists, tuples and dicts of them"
    )


def _unpacked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpacked(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        dtype = getattr(torch, value["of"])
        bits = bytearray(base64.b64decode(value["tensor"]))
        flat = torch.frombuffer(bits, dtype=dtype) if bits else torch.empty(0, dtype=dtype)
        return flat.view(value["shape"])
    if "array" in value:
        return _unpacked(value["array"]).numpy()
    if "tuple" in value:
        return tuple(_unpacked(inner) for inner in value["tuple"])
    return {_unpacked(key): _unpacked(inner) for key, inner in value["items"]}
