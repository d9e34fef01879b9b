"""The states of observers that have any, in a checkpoint."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..kernel.errors import CheckpointDamaged, RecipeError
from ..kernel.events import Observer, StatefulObserver

__all__ = ["ObserverStates"]


class ObserverStates:
    """The states of those `observers` that are stateful, by the name of their class; a second one
    of a class is called `NAME 2`, and so on."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.stateful: dict[str, StatefulObserver] = {}
        numbers: Counter[str] = Counter()
        for observer in observers:
            if isinstance(observer, StatefulObserver):
                name = type(observer).__name__
                numbers[name] += 1
                more = f" {numbers[name]}" if numbers[name] > 1 else ""
                self.stateful[name + more] = observer

    def to_json(self) -> dict[str, Any]:
        """Return every state. Raises `RecipeError` for a state that JSON cannot hold."""
        states = {}
        for name, observer in self.stateful.items():
            state = observer.state_dict()
            try:
                states[name] = json.loads(json.dumps(state, allow_nan=False))
            except (TypeError, ValueError) as error:
                raise RecipeError(
                    f"state_dict() of the observer {name} cannot be saved as JSON: {error}. Return "
                    "a dict of finite numbers, texts, lists and dicts"
                ) from error
        return states

    def restore(self, states: Any, where: str) -> None:
        """Restore each observer's state from the checkpoint `where`; observers without a state in
        it start over. Raises `CheckpointDamaged` for a state that its observer cannot load."""
        for name, observer in self.stateful.items():
            state = states.get(name) if isinstance(states, Mapping) else None
            if state is None:
                continue
            try:
                observer.load_state_dict(state)
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                raise CheckpointDamaged(
                    f"{where}: the observer {name} cannot take its state: {error}"
                ) from error
