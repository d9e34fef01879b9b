"""Former names of settings, which are still understood, with a warning."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

__all__ = ["accept_former_names", "present_names"]

C = TypeVar("C", bound=type)
_FORMER: dict[str, str] = {}
"""Present dotted key by the former one."""


def accept_former_names(group: str, **names: str) -> Callable[[C], C]:
    """Decorate a dataclass of settings so that its constructor also accepts former names of fields.

    `group`: the key of the dataclass in the settings. `names`: the present name of each former
    name.
    """
    _FORMER.update({f"{group}.{old}": f"{group}.{new}" for old, new in names.items()})

    def decorate(kind: C) -> C:
        made: Any = vars(kind)["__init__"]

        @functools.wraps(made)
        def init(self: Any, *values: Any, **fields: Any) -> None:
            for old, new in names.items():
                if old in fields:
                    _warn(f"{group}.{old}", f"{group}.{new}")
                    fields[new] = fields.pop(old)
            made(self, *values, **fields)

        kind.__init__ = init  # type: ignore[misc]
        return kind

    return decorate


def present_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with former dotted keys replaced by the present ones."""
    for key in values.keys() & _FORMER.keys():
        _warn(key, _FORMER[key])
    return {_FORMER.get(key, key): value for key, value in values.items()}


def _warn(old: str, new: str) -> None:
    warnings.warn(f"the setting {old} is called {new} now", FutureWarning, stacklevel=4)
