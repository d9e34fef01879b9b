"""Keeps the account of a run's memory, by part: after the first step, and when it runs out."""

from __future__ import annotations

import json
import multiprocessing
import re
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..checkpoint import storage_of
from ..data.nested import num_bytes, tensors_of
from ..data.private_names import private_name
from ..kernel.batches import Group, Groups, Microbatch, Position
from ..kernel.contract import Driver, Session
from ..kernel.errors import DrivetrainError, OutputError
from ..kernel.events import Event
from ..kernel.optional import EstimatesLayout
from ..kernel.paths import Place
from ..kernel.plan import Layout, Plan
from .activation_watch import ActivationWatch, storage_of_tensor
from .memory_parts import ON_HOST, describe, remedies
from .settings import Settings
from .step_clock import COMPUTE

__all__ = ["CountedOptimizer", "MemoryAccount", "MemoryCounted"]

_MOST_MODULES = 20


@dataclass(frozen=True)
class MemoryCounted(Event):
    """The account of the rank with the most memory, after a run's first step; an event.

    All ranks take part in it, and receive the same figures.
    """

    step: int
    rank: int
    parts: Mapping[str, int]
    """Bytes by part (see `memory_parts.PARTS`)."""
    estimated: tuple[str, ...] = ()
    """Parts that were not counted, but follow from the plan."""
    modules: Mapping[str, int] = field(default_factory=dict)
    """Bytes of activations by module, the largest first, when most were kept. Layers that repeat
    are joined: `blocks.*.mlp`."""
    remedies: Mapping[str, str] = field(default_factory=dict)
    """Settings that shrink a part, by part."""
    device_peak_bytes: int | None = None
    """The most that the allocator of the rank's device has handed out so far."""


class CountedOptimizer(Protocol):
    """An optimizer whose state is counted."""

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer; None until it is built."""

    def estimated_state_bytes(self) -> int:
        """Estimate the state that a first step will make on this rank."""


class MemoryAccount(AbstractContextManager[None]):
    """Counts the memory of one rank. `out`: the run folder, for snapshots of the allocator.

    Within its `with`, the activations of the first step are counted, unless `account_memory` is
    false or the model is compiled.
    """

    def __init__(
        self,
        driver: Driver,
        plan: Plan,
        session: Session,
        settings: Settings,
        optimizer: CountedOptimizer,
        micro_batch: int,
        out: Place | None,
    ) -> None:
        self.driver, self.plan, self.session, self.settings = driver, plan, session, settings
        self.optimizer, self.out = optimizer, out
        able = driver.capabilities(plan)
        self.remedies = remedies(settings, micro_batch, able.saves_memory)
        if session.world.size == 1:
            del self.remedies["communication"]
        # a graph that is compiled depends on hooks
        compiles = settings.compile or able.static_shapes
        self._counts_activations = settings.account_memory and not compiles
        self.watch: ActivationWatch | None = None
        self._model: Callable[[], nn.Module | None] = lambda: None
        self._layout: Layout | None = None
        self._gradients = _Count()
        self._batch_bytes = self._ready = 0
        self._stepped = self._trains_on_host = False

    # --- what the run passes on ---------------------------------------------------------------

    def noting_model(self, build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        """Wrap a recipe's `model`: what it builds is counted, and its layout estimated."""

        def built() -> nn.Module:
            model = build()
            if isinstance(model, nn.Module):
                self._model = weakref.ref(model)
                if isinstance(self.driver, EstimatesLayout):
                    size = self.session.world.size
                    with suppress(DrivetrainError, RuntimeError, AttributeError):
                        self._layout = self.driver.layout(self.plan, model, _NoState(), size)
            return model

        return built

    def noting_batch(self, data: Groups) -> Groups:
        """Wrap a run's data: the size of the first batch is noted."""
        workers = self.settings.data.workers
        self._ready = max(1, workers * getattr(data, "prefetch", 2))
        return _FirstBatch(data, self._note_batch)

    def _note_batch(self, batch: Any) -> None:
        tensors = [*tensors_of(batch)]
        self._batch_bytes = num_bytes(batch)
        device = self.session.world.device.type
        self._trains_on_host = any(tensor.device.type == device for tensor in tensors)

    def marking(self, mark: Callable[[str], object]) -> Callable[[str], object]:
        """Wrap the loop's `mark`: activations are counted in forward and backward alone."""
        if not self._counts_activations:
            return mark

        def marked(part: str) -> None:
            mark(part)
            if self.watch is not None:
                (self.watch.resume if part == COMPUTE else self.watch.pause)()

        return marked

    def __enter__(self) -> None:
        model = self._model()
        if model is not None and self._counts_activations:
            self.watch = ActivationWatch(model)
            self._watched = self.watch

    def __exit__(self, *error: Any) -> None:
        self._stop_watching()

    def _stop_watching(self) -> None:
        if self.watch is not None:
            self.watch.pause()
            self.watch = None

    _watched: ActivationWatch | None = None

    # --- counting -----------------------------------------------------------------------------

    def before_first_update(self) -> None:
        """Count the gradients; call it right before the first update."""
        self._stop_watching()
        self._gradients = self._count(_gradients(self._model()))

    def after_first_step(self, step: int) -> MemoryCounted | None:
        """Count everything. All ranks call this. None if the settings say so."""
        self._stepped = True
        if not self.settings.account_memory:
            return None
        world = self.session.world
        if world.rank == 0:
            self.save_snapshot(f"memory-step-{step}.json")
        parts, estimated = self._parts()
        own: list[Any] = [parts, sorted(estimated), self._activations(), _device_peak(world.device)]
        ranks = self.session.exchange(own) if world.size > 1 else [own]
        rank = max(range(len(ranks)), key=lambda i: sum(ranks[i][0].values()))
        parts, estimated_parts, modules, peak = ranks[rank]
        return MemoryCounted(
            step, rank, parts, tuple(estimated_parts), modules, self.remedies, peak
        )

    def _parts(self) -> tuple[dict[str, int], frozenset[str]]:
        """Return the bytes that this rank has now, by part, and the names of estimated parts."""
        model, found, on_host = self._model(), dict[str, int](), 0
        optimizer = self.optimizer.optimizer
        if model is not None:
            weights = [*model.parameters()]
            trained = self._count(p for p in weights if p.requires_grad)
            frozen = self._count((p for p in weights if not p.requires_grad), trained)
            buffers = self._count(model.buffers(), frozen)
            gradients = self._count(_gradients(model), buffers)
            gradients = max(gradients, self._gradients, key=lambda count: count.total)
            state = self._count(_state(optimizer), buffers)
            counts = trained, frozen, buffers, gradients, state
            names = "weights", "frozen", "buffers", "gradients", "optimizer"
            found = {name: count.here for name, count in zip(names, counts, strict=True)}
            on_host = sum(count.elsewhere for count in counts)
        found["activations"] = sum(self._activations().values())
        found["loader"] = self._batch_bytes * self._ready
        found["workers"] = _of_workers() if self.settings.data.workers else 0
        found["host"] = on_host
        planned = self._planned(found, on_host)
        found = {**planned, **{part: size for part, size in found.items() if size}}
        return found, frozenset(planned)

    def _planned(self, found: Mapping[str, int], on_host: int) -> dict[str, int]:
        """Return the bytes that the plan gives to parts in which nothing is found yet."""
        layout, planned = self._layout, dict[str, int]()
        if layout is not None:
            planned["communication"] = layout.transient_bytes
            if not on_host:
                planned["gradients"] = layout.gradient_bytes
                if not found.get("frozen"):
                    planned["weights"] = layout.parameter_bytes
        if not self._stepped and not on_host:
            planned["optimizer"] = self.optimizer.estimated_state_bytes()
        return {part: size for part, size in planned.items() if size and not found.get(part)}

    def _count(self, tensors: Iterable[Tensor], seen: _Count | None = None) -> _Count:
        return _Count.of(tensors, self.session.world.device.type, seen)

    def _activations(self) -> dict[str, int]:
        watched = self._watched
        return {} if watched is None else _largest(watched.peak())

    # --- out of memory ------------------------------------------------------------------------

    def sentence(self) -> str:
        """Return a sentence on the largest parts of this rank's memory; empty if none is known."""
        parts, estimated = self._parts()
        if not self._trains_on_host:
            parts = {part: size for part, size in parts.items() if part not in ON_HOST}
        return describe(parts, estimated, self._activations(), self.remedies)

    def save_snapshot(self, name: str) -> None:
        """Write the snapshot of the device's allocator to the run folder, as JSON, if the device
        has one."""
        if self.out is None:
            return
        with suppress(OSError, OutputError, RuntimeError):
            device = self.session.world.device
            snapshot = private_name(f"torch.{device.type}.memory", "_snapshot", None)
            if snapshot is not None:
                storage = storage_of(self.out)
                storage.make_folder(self.out)
                storage.replace(self.out / name, json.dumps(snapshot(), default=str).encode())


@dataclass(frozen=True)
class _Count:
    """Bytes of unique storages: those on the rank's device, and all others."""

    here: int = 0
    elsewhere: int = 0
    keys: frozenset[Any] = frozenset()

    @property
    def total(self) -> int:
        return self.here + self.elsewhere

    @classmethod
    def of(cls, tensors: Iterable[Tensor], device_type: str, seen: _Count | None) -> _Count:
        """Count storages that `seen` does not have. Tensors without elements have no memory."""
        known = set() if seen is None else set(seen.keys)
        here = elsewhere = 0
        for tensor in tensors:
            if tensor.device.type == "meta":
                continue
            key, num_bytes = storage_of_tensor(tensor)
            if key in known:
                continue
            known.add(key)
            if tensor.device.type == device_type:
                here += num_bytes
            else:
                elsewhere += num_bytes
        return cls(here, elsewhere, frozenset(known))


class _FirstBatch:
    """Data whose first batch is passed to `note`."""

    def __init__(self, data: Groups, note: Callable[[Any], None]) -> None:
        self._data, self._note = data, note
        self._noted = False

    def groups(self, start: Position, num_steps: int) -> Generator[Group, None, None]:
        """See `Groups`."""
        found: Any = self._data.groups(start, num_steps)
        with closing(found):
            if not self._noted:
                self._noted = True
                for group in found:
                    yield group._replace(microbatches=self._noting(group.microbatches))
                    break
            yield from found

    def _noting(self, microbatches: Iterator[Microbatch]) -> Iterator[Microbatch]:
        for index, part in enumerate(microbatches):
            if not index:
                self._note(part.batch)
            yield part


class _NoState(dict[str, int]):
    """No optimizer state, of any parameter."""

    def __missing__(self, name: str) -> int:
        return 0


def _gradients(model: nn.Module | None) -> list[Tensor]:
    weights = [] if model is None else model.parameters()
    return [weight.grad for weight in weights if weight.grad is not None]


def _state(optimizer: torch.optim.Optimizer | None) -> Iterator[Tensor]:
    """Yield the tensors of the optimizer's state, and the parameters that it updates: copies of
    the weights, on some drivers."""
    if optimizer is not None and hasattr(optimizer, "param_groups"):
        yield from (p for group in optimizer.param_groups for p in group["params"])
        yield from tensors_of([*getattr(optimizer, "state", {}).values()])


def _largest(modules: Mapping[str, int]) -> dict[str, int]:
    """Join the layers that repeat, if there are many modules, and return the largest."""
    joined = Counter(modules)
    if len(joined) > _MOST_MODULES:
        joined = Counter()
        for name, num_bytes in modules.items():
            joined[re.sub(r"\b\d+\b", "*", name)] += num_bytes
    return dict(joined.most_common(_MOST_MODULES))


def _device_peak(device: torch.device) -> int | None:
    with suppress(RuntimeError):  # a device without a module of its own
        peak = getattr(torch.get_device_module(device), "max_memory_allocated", None)
        return None if peak is None else int(peak(device))
    return None


def _of_workers() -> int:
    """Return the bytes of the processes that this one has started: shared pages in parts."""
    total = 0
    for worker in multiprocessing.active_children():
        with suppress(OSError):  # only Linux has it; and the worker may have ended
            text = Path(f"/proc/{worker.pid}/smaps_rollup").read_text()
            if found := re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE):
                total += int(found[1]) * 1024
    return total
