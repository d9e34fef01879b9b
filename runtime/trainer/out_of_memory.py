"""Out of memory: how the run reports it, and how it continues.

Microbatches of half the size, and twice as many of them, make the same step (law 1), so a run
continues with these. A run of one process continues in this process. A run of several ranks
continues in its next start, since the other ranks wait in a call that this rank will never make.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from ..checkpoint import read_small, storage_of
from ..data.prebatched import Batches
from ..kernel.contract import Engine, Session, World
from ..kernel.errors import CheckpointDamaged, OutOfMemory, OutputError, ran_out
from ..kernel.events import Event, Warned
from ..kernel.paths import Place
from ..kernel.recipe import Recipe
from .memory_account import MemoryAccount
from .setting_values import flatten, override
from .settings import Settings

__all__ = ["MEMORY", "OutOfMemoryPolicy", "with_remembered"]

MEMORY = "memory.json"
"""File in a run folder: the settings that memory has forced on the run, by name."""

_MAX_BYTES = 1 << 20


class OutOfMemoryPolicy:
    """Handles out-of-memory errors on one rank.

    `saves_memory`: the driver's advice (`Capabilities`).
    """

    def __init__(
        self,
        settings: Settings,
        world: World,
        out: Place | None,
        saves_memory: str,
        announce: Callable[[Event], None],
        account: MemoryAccount,
    ) -> None:
        self.settings, self.world, self.out = settings, world, out
        self.saves_memory, self.announce, self.account = saves_memory, announce, account

    def prepare(self, session: Session, recipe: Recipe) -> Engine:
        """Prepare the engine. Raises `OutOfMemory`, with advice, if memory runs out."""
        try:
            return session.prepare(recipe)
        except Exception as error:
            if ran_out(error):
                raise OutOfMemory(f"no memory for the model: {error}; {self.advice()}") from error
            raise

    def less(self, doing: str, key: str, size: int, cause: str, data: Any) -> int:
        """Return the size of microbatches to continue with in this process; announce and remember
        it.

        Called outside of the `except` block, so that no frame keeps the failed step's tensors
        alive. Raises `OutOfMemory` where this process cannot continue: other ranks may wait in a
        call of the step that failed here, `data` comes as ready batches, or a single sample does
        not fit.
        """
        own = isinstance(data, Batches)
        less = -(-size // 2) if size > 1 and not own else None
        where = f"{doing} on rank {self.world.rank}" if self.world.size > 1 else doing
        found = f"out of memory in {where} with {key}={size} ({cause})"
        if less is None or self.settings.out_of_memory == "stop":
            to_do = "let your loader make smaller batches. Or " if own else ""
            if less is not None:
                to_do = f"set {key}={less}, the global batch stays as it is. Or "
            raise OutOfMemory(f"{found}: {to_do}{self.advice()}")
        remembered = self._remember(key, less)
        if self.world.size > 1:
            next_start = "continues with" if remembered else "should set"
            raise OutOfMemory(
                f"{found}: start again with --resume auto, which {next_start} {key}={less}; the "
                f"global batch stays as it is. Or {self.advice()}"
            )
        self.announce(
            Warned(
                f"{found}: continuing with {key}={less}; the global batch stays as it is"
                f"{self._largest_parts()}"
            )
        )
        gc.collect()
        return less

    def advice(self) -> str:
        """Advice on what else needs less memory."""
        advice = []
        if not self.settings.activation_checkpointing:
            advice.append("recompute activations (activation_checkpointing)")
        if self.settings.precision == "fp32":
            advice.append("compute in 16 bits (precision=bf16)")
        if self.saves_memory:
            advice.append(self.saves_memory)
        more = "; ".join(advice) or "use a smaller model, or a machine with more memory"
        return more + self._largest_parts()

    def _largest_parts(self) -> str:
        sentence = ""
        with suppress(Exception):  # the error itself is what counts
            sentence = self.account.sentence()
        return f". {sentence}" if sentence else ""

    def _remember(self, key: str, value: int) -> bool:
        """Record that later starts of this run may set `key` to at most this value. Return False if
        it cannot be recorded."""
        if self.out is None:
            return False
        storage = storage_of(self.out)
        try:
            storage.make_folder(self.out)
            known = {**_remembered(self.out), key: value}
            storage.replace(self.out / MEMORY, (json.dumps(known, indent=1) + "\n").encode())
        except (OSError, OutputError):
            return False
        return True


def with_remembered(settings: Settings, out: Place | None) -> Settings:
    """Return the settings with the limits that memory has forced so far. Raises `OutputError`."""
    if out is None or settings.out_of_memory == "stop":
        return settings
    now = flatten(settings)
    smaller = {
        key: value
        for key, value in _remembered(out).items()
        if now[key] is None or now[key] > value
    }
    return override(settings, smaller)


def _remembered(out: Place) -> Mapping[str, int]:
    path = out / MEMORY
    if not storage_of(path).exists(path):
        return {}
    try:
        value = json.loads(read_small(path, _MAX_BYTES))
    except (OSError, ValueError, RecursionError, CheckpointDamaged) as error:
        raise OutputError(f"{path} cannot be read: {error}; delete it to forget it") from error
    keys = {"micro_batch", "evaluate.micro_batch"}
    if not (
        isinstance(value, dict)
        and value.keys() <= keys
        and all(type(size) is int and size >= 1 for size in value.values())
    ):
        raise OutputError(f"{path} holds {value!r:.200}; delete it to forget it")
    return value
