"""State of modules that is neither a parameter nor a persistent buffer, during a run: refused where
no checkpoint can hold it, and reported where a resume changes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..checkpoint import CheckpointReader
from ..checkpoint.extra_state import encode, extra_state, stored_keys
from ..kernel.contract import Engine, Session

__all__ = ["ModuleState"]

_MOST_NAMED = 10


class ModuleState:
    """The state of an engine's modules, in a run that saves checkpoints. All ranks call each
    method."""

    def __init__(self, engine: Engine, session: Session, warn: Callable[[str], None]) -> None:
        self._engine, self._session, self._warn = engine, session, warn
        self._num_steps = 0
        self._before: dict[str, tuple[Tensor, int]] = {}
        self._watches = False

    def begin(self) -> None:
        """Raise `RecipeError`, naming it, for extra state that no checkpoint can hold. From now on
        watch the buffers that are not persistent."""
        with self._engine.full_params(()) as module:
            for key, value in extra_state(module).items():
                encode(key, value)
            self._before = _not_persistent(module)
        self._watches = any(self._session.exchange(bool(self._before)))

    def after_step(self) -> None:
        """Warn once, after update 1, 2, 4, 8 and so on, about buffers that are not persistent and
        that a forward has written."""
        self._num_steps += 1
        if not self._watches or self._num_steps & (self._num_steps - 1):
            return
        with self._engine.full_params(()) as module:
            now = _not_persistent(module)
        here = [
            name
            for name, (buffer, version) in now.items()
            if name not in self._before or not _is_as_before(self._before[name], buffer, version)
        ]
        found = sorted({name for names in self._session.exchange(here) for name in names})
        if found:
            self._watches = False
            self._warn(
                f"a forward has written to {_some(found)}, which no checkpoint holds: the buffer "
                "is not persistent. A run that is resumed begins with the values of recipe.model. "
                "Register it with persistent=True, unless each forward computes it again"
            )

    def notes(self, reader: CheckpointReader, driver: str) -> tuple[str, ...]:
        """Describe the extra state that only the checkpoint or only the model has, and values of
        ranks that are not restored. `driver`: of this run."""
        with self._engine.full_params(()) as module:
            present = extra_state(module).keys()
        stored, manifest = stored_keys(reader.names("state")), reader.manifest
        notes = []
        if more := sorted(stored.keys() - present):
            notes.append(
                f"extra state that only the checkpoint has: {_some(more)}; it is left out unless a "
                "hook of load_state_dict accepts it"
            )
        if less := sorted(present - stored.keys()):
            notes.append(f"extra state that only the model has: {_some(less)}; it stays as it is")
        there = manifest.world_size, manifest.driver
        apart = sorted(key for key, ranks in stored.items() if ranks - {0})
        if apart and there != (self._session.world.size, driver):
            notes.append(
                f"extra state that differed between {manifest.world_size} ranks: {_some(apart)}; "
                "where this run has another number of ranks, all take the value of rank 0"
            )
        return tuple(notes)


def _not_persistent(module: nn.Module) -> dict[str, tuple[Tensor, int]]:
    persistent = module.state_dict(keep_vars=True)
    return {
        name: (buffer, _version(buffer))
        for name, buffer in module.named_buffers()
        if name not in persistent
    }


def _version(tensor: Any) -> int:
    """Return how often a tensor was written to; 0 for one that was made in inference mode, which
    does not count."""
    return 0 if tensor.is_inference() else tensor._version


def _is_as_before(before: tuple[Tensor, int], buffer: Tensor, version: int) -> bool:
    return before[0] is buffer and before[1] == version


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
