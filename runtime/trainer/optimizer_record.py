"""A run's record of its optimizer: to refuse one that cannot be saved, and to report what has
changed when another run resumes."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ..checkpoint import CheckpointReader, WithoutOptimizer
from ..checkpoint.optimizer_entries import settings_of, unsaved, unstorable
from ..kernel.errors import CheckpointMismatch, RecipeError

__all__ = ["OptimizerRecord"]

_LOG = logging.getLogger(__name__)

_Build = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


class OptimizerRecord:
    """A recipe's `optimizer` that remembers what it built. `of_recipe`: it is the recipe's own,
    whose settings are recorded nowhere else. `saved`: the run saves checkpoints."""

    def __init__(self, build: _Build, of_recipe: bool, saved: bool) -> None:
        self._build, self._of_recipe, self._saved = build, of_recipe, saved
        self._bases: set[str] = set()
        self._unstorable: list[dict[str, Any]] = []
        self._attributes: dict[str, float] = {}
        self._warned = False
        self.optimizer: torch.optim.Optimizer | None = None
        self.noted: dict[str, Any] = {}
        """Its name, the settings of its groups, and what it does not train; JSON types."""
        self.not_learning: frozenset[str] = frozenset()
        """FQNs of parameters that it was not given, or that required no gradient then."""

    def __call__(self, named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """Build the recipe's optimizer; the first step refuses it if it cannot be saved."""
        pairs = list(named)
        self.optimizer = optimizer = self._build(pairs)
        if not hasattr(optimizer, "param_groups"):
            return optimizer  # the driver says what is wrong with it
        self._unstorable = [unstorable(group) for group in optimizer.param_groups]
        self._attributes = _attributes(optimizer)
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        kinds = getattr(optimizer, "optimizers", {"": optimizer}).values()
        self._bases = {base.__qualname__ for base in type(optimizer).__mro__}
        self.noted = {
            "name": " and ".join(type(kind).__qualname__ for kind in kinds),
            "groups": [_settings(group) for group in optimizer.param_groups],
            "frozen": sorted(name for name, parameter in pairs if id(parameter) not in trained),
        }
        without_gradient = {name for name, parameter in pairs if not parameter.requires_grad}
        self.not_learning = frozenset(self.noted["frozen"]) | without_gradient

        def after_first_step(*_: Any) -> None:
            handle.remove()
            self.refuse_unsaved()

        handle = optimizer.register_step_post_hook(after_first_step)
        return optimizer

    def refuse_unsaved(self) -> None:
        """Raises `RecipeError`, naming it, for state that no checkpoint of this run can hold.
        Warns, once, of what the optimizer counts where nobody looks."""
        if not self._saved or self.optimizer is None:
            return
        if names := unsaved(self.optimizer, self._unstorable):
            raise RecipeError(
                f"the optimizer {type(self.optimizer).__name__} keeps {', '.join(names)}, which no "
                "checkpoint can hold: it would not go on as it was. Tensors, numbers and None of a "
                "parameter can be saved, and lists and tuples of these. Take another optimizer, or "
                "train without a run folder (out)"
            )
        before, now = self._attributes, _attributes(self.optimizer)
        if not self._warned and (aside := [name for name in now if now[name] != before.get(name)]):
            self._warned = True
            _LOG.warning(
                "the optimizer %s counts in %s, attributes of its own, which no checkpoint holds: "
                "a run that is resumed begins with those of a new one. What it keeps in its state "
                "or its parameter groups is saved",
                type(self.optimizer).__name__,
                ", ".join(aside),
            )

    def is_another(self, stored: Any) -> bool:
        """Than the one that a checkpoint's run had, whose `noted` that is."""
        return bool(_mapping(stored)) and stored.get("name") != self.noted.get("name")

    def refuse_another(self, stored: Any) -> None:
        """Raises `CheckpointMismatch` for an optimizer of another name, where only the name
        shows the difference: drivers know the state of torch's own optimizers."""
        own = isinstance(self.optimizer, torch.optim.Optimizer) and (
            getattr(torch.optim, type(self.optimizer).__name__, None) is type(self.optimizer)
        )
        if self.is_another(stored) and not own and stored.get("name") not in self._bases:
            raise CheckpointMismatch(
                f"the checkpoint's optimizer is {stored.get('name')!r:.80}, this run's "
                f"{self.noted.get('name')!r}: take that one, or start this one anew with "
                "resume.optimizer=fresh"
            )

    def taken_from(
        self, reader: CheckpointReader, keep: bool
    ) -> tuple[CheckpointReader, tuple[str, ...]]:
        """Returns the reader of a checkpoint, without the optimizer's state unless that is to be
        kept (`keep`), and notes of what has changed. The optimizer is reset once: a run that is
        resumed again keeps its state. Raises `CheckpointMismatch`."""
        manifest = reader.manifest
        stored = manifest.state.get("optimizer")
        notes = tuple(self.differences(stored))
        began_so = manifest.settings.get("resume.optimizer") == "fresh"
        if keep or (began_so and not self.is_another(stored)):
            self.refuse_another(stored)
            return reader, notes
        note = "the optimizer starts anew (resume.optimizer=fresh)"
        return WithoutOptimizer(reader.folder), (*notes, note)

    def differences(self, stored: Any) -> list[str]:
        """Describes the changes since the run whose `noted` that is."""
        then, now = _mapping(stored), self.noted
        if not then or not now:
            return []
        told = []
        if self._of_recipe and then.get("name") != now["name"]:
            told.append(f"the optimizer was {then.get('name')!r:.80}, is {now['name']!r}")
        frozen = {str(name) for name in _listing(then.get("frozen"))}
        told += _named("frozen now", set(now["frozen"]) - frozen)
        told += _named("trained now", frozen - set(now["frozen"]))
        groups = [_mapping(group) for group in _listing(then.get("groups"))]
        if len(groups) != len(now["groups"]):
            return [*told, f"the optimizer had {len(groups)} groups, has {len(now['groups'])}"]
        for number, (before, after) in enumerate(zip(groups, now["groups"], strict=True)):
            told += [
                f"{key} of the optimizer's group {number} was {before.get(key)!r:.80}, is {value}"
                for key, value in after.items()
                if (self._of_recipe or key == "parameters") and before.get(key, value) != value
            ]
        return told


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """The numbers that it keeps in public attributes; torch has private ones."""
    numbers = {k: v for k, v in vars(optimizer).items() if type(v) in (int, float)}
    return {name: value for name, value in numbers.items() if not name.startswith("_")}


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's numbers and words, and how many parameters it has."""
    settings: dict[str, Any] = {"parameters": len(group["params"])}
    for key, value in settings_of(group).items():
        parts = list(value) if isinstance(value, (list, tuple)) else [value]
        plain = [_plain(part) for part in parts]
        if None not in plain:
            settings[key] = plain if isinstance(value, (list, tuple)) else plain[0]
    return settings


def _plain(value: Any) -> Any:
    """As JSON has it; None for what it has not."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, (bool, int, float, str)) else None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _listing(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _named(what: str, names: set[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return [f"{what}: {', '.join(sorted(names)[:10])}{more}"]
