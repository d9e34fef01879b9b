"""A run's record of its optimizer: to refuse one that cannot be saved, and to report what has
changed when another run resumes."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from ..checkpoint import CheckpointReader, WithoutOptimizer
from ..checkpoint.optimizer_entries import beside_state, settings_of, unsaved, unstorable
from ..kernel.errors import CheckpointMismatch, RecipeError

__all__ = ["OptimizerRecord", "estimated_state_bytes"]

_LOG = logging.getLogger(__name__)

_Build = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


def estimated_state_bytes(build: _Build, named: Iterable[tuple[str, nn.Parameter]]) -> int:
    """Estimate the state that a first step on these parameters will make on this rank, by a step on
    parameters of at most 8 elements in each dimension. 0 if that fails, or there is nothing to
    train."""
    per_element: dict[Any, float] = {}
    total = 0.0
    with suppress(Exception):  # code of the user's, called with other parameters
        for name, parameter in named:
            if not parameter.requires_grad:
                continue
            key = tuple(min(size, 8) for size in parameter.shape), parameter.dtype
            if key not in per_element:
                twin = nn.Parameter(torch.zeros(key[0], dtype=key[1]))
                twin.grad = torch.zeros_like(twin)
                trial = build([(name, twin)])
                trial.step()
                kept = (v for v in trial.state[twin].values() if isinstance(v, torch.Tensor))
                num_bytes = sum(v.nbytes for v in kept if v.shape == twin.shape)
                per_element[key] = num_bytes / twin.numel()
            held: Any = parameter
            held = held.to_local() if hasattr(held, "to_local") else held
            total += per_element[key] * held.numel()
    return int(total)


class OptimizerRecord:
    """A wrapper of a recipe's `optimizer` that remembers the optimizer it built. `of_recipe`: the
    optimizer is the recipe's own, whose settings are recorded nowhere else. `saved`: the run saves
    checkpoints."""

    def __init__(self, build: _Build, of_recipe: bool, saved: bool) -> None:
        self._build, self._of_recipe, self._saved = build, of_recipe, saved
        self._bases: set[str] = set()
        self._unstorable: list[dict[str, Any]] = []
        self._attributes: dict[str, float] = {}
        self._warned = False
        self._left_out: dict[str, nn.Parameter] = {}
        self.optimizer: torch.optim.Optimizer | None = None
        self._name = ""
        self._named: list[tuple[str, nn.Parameter]] = []
        self.not_learning: frozenset[str] = frozenset()
        """FQNs of parameters that the optimizer was not given, or that required no gradient when it
        was built."""

    def __call__(self, named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """Build the recipe's optimizer. One that cannot be saved is refused here or in the first
        step."""
        pairs = list(named)
        self.optimizer = optimizer = self._build(pairs)
        if not hasattr(optimizer, "param_groups"):
            return optimizer  # the driver raises the error for it
        if not hasattr(optimizer, "_optimizer_step_post_hooks"):
            raise RecipeError(
                f"recipe.optimizer built {type(optimizer).__name__}, whose __init__ does not call "
                "that of torch.optim.Optimizer, so that it lacks what torch keeps there: call "
                "super().__init__(params, defaults). For several optimizers in one, name each "
                "in optimizer.groups of the settings"
            )
        self._unstorable = [unstorable(group) for group in optimizer.param_groups]
        self._attributes = _attributes(optimizer)
        self._named = pairs
        kinds = getattr(optimizer, "optimizers", {"": optimizer}).values()
        self._bases = {base.__qualname__ for base in type(optimizer).__mro__}
        self._name = " and ".join(type(kind).__qualname__ for kind in kinds)
        frozen = {*self.noted["frozen"]}
        self._left_out = {n: p for n, p in pairs if n in frozen and not p.requires_grad}
        without_gradient = {name for name, parameter in pairs if not parameter.requires_grad}
        self.not_learning = frozenset(frozen) | without_gradient

        def after_first_step(*_: Any) -> None:
            handle.remove()
            self.refuse_unsaved()

        handle = optimizer.register_step_post_hook(after_first_step)
        self.refuse_unsaved()
        return optimizer

    def refuse_thawed(self) -> None:
        """Raises `RecipeError` with the names of parameters that were frozen and not given to the
        optimizer, but now require a gradient."""
        now = [name for name, p in self._left_out.items() if p.requires_grad]
        if now and (thawed := set(now) & {*self.noted["frozen"]}):
            raise RecipeError(
                f"requires_grad was set for {', '.join(sorted(thawed)[:10])} during the run, and "
                "they are in no group of the optimizer: they would not learn. Give them to it from "
                "the start, frozen, as by Recipe(optimizer=lambda named: torch.optim.AdamW([p for "
                "_, p in named], lr=1e-3)); the optimizer of the settings takes what is trained "
                "when the run begins"
            )

    @property
    def left_out(self) -> list[str]:
        """The names of parameters that a recipe's own optimizer was not given, and that require a
        gradient."""
        untrained = {*self.noted.get("frozen", ())} if self._of_recipe else set()
        return [name for name, p in self._named if p.requires_grad and name in untrained]

    @property
    def noted(self) -> dict[str, Any]:
        """Return the optimizer's name, the settings of its groups, and the parameters that it does
        not train, as JSON types. Groups may have been added since it was built."""
        if not self._name or self.optimizer is None:
            return {}
        groups = self.optimizer.param_groups
        trained = {id(p) for group in groups for p in group["params"]}
        return {
            "name": self._name,
            "groups": [_settings(group) for group in groups],
            "frozen": sorted(name for name, p in self._named if id(p) not in trained),
        }

    def estimated_state_bytes(self) -> int:
        """Estimate the state that a first step will make on this rank."""
        return estimated_state_bytes(self._build, self._named)

    def refuse_unsaved(self) -> None:
        """Raises `RecipeError` with the name of any state that no checkpoint of this run can hold.
        Warns once about counters that the optimizer keeps in its own attributes, which no
        checkpoint holds."""
        if not self._saved or self.optimizer is None:
            return
        if names := unsaved(self.optimizer, self._unstorable):
            raise RecipeError(
                f"the optimizer {type(self.optimizer).__name__} keeps {', '.join(names)}, which no "
                "checkpoint can hold: a resumed run would not continue exactly. Tensors, numbers "
                "and None of a parameter can be saved, and lists and tuples of these. Take another "
                "optimizer, or train without a run folder (out)"
            )
        before, now = self._attributes, _attributes(self.optimizer)
        saved = beside_state(self.optimizer)
        aside = [name for name in now if now[name] != before.get(name) and name not in saved]
        if not self._warned and aside:
            self._warned = True
            _LOG.warning(
                "the optimizer %s counts in %s, attributes of its own, which no checkpoint holds: "
                "a run that is resumed begins with those of a new one. What it keeps in its state "
                "or its parameter groups is saved",
                type(self.optimizer).__name__,
                ", ".join(aside),
            )

    def is_another(self, stored: Any) -> bool:
        """True if the optimizer differs from the one whose `noted` record a checkpoint holds."""
        return bool(_mapping(stored)) and stored.get("name") != self.noted.get("name")

    def refuse_another(self, stored: Any) -> None:
        """Raises `CheckpointMismatch` for an optimizer of another name, if only the name shows the
        difference: drivers check the state of torch's own optimizers."""
        own = isinstance(self.optimizer, torch.optim.Optimizer) and (
            getattr(torch.optim, type(self.optimizer).__name__, None) is type(self.optimizer)
        )
        if self.is_another(stored) and not own and stored.get("name") not in self._bases:
            raise CheckpointMismatch(
                f"the checkpoint's optimizer is {stored.get('name')!r:.80}, this run's "
                f"{self.noted.get('name')!r}: take that one, or start this one over with "
                "resume.optimizer=fresh"
            )

    def taken_from(
        self, reader: CheckpointReader, keep: bool
    ) -> tuple[CheckpointReader, tuple[str, ...]]:
        """Return the reader of a checkpoint and notes of what has changed. The reader has no
        optimizer state unless the state is kept (`keep`). The optimizer is reset once: a run that
        is resumed again keeps its state. Raises `CheckpointMismatch`."""
        manifest = reader.manifest
        stored = manifest.state.get("optimizer")
        notes = tuple(self.differences(stored))
        began_so = manifest.settings.get("resume.optimizer") == "fresh"
        if keep or (began_so and not self.is_another(stored)):
            self.refuse_another(stored)
            return reader, notes
        note = "the optimizer starts over (resume.optimizer=fresh)"
        return WithoutOptimizer(reader.folder), (*notes, note)

    def differences(self, stored: Any) -> list[str]:
        """Describe the changes since the run that saved this `noted` record."""
        then, now = _mapping(stored), self.noted
        if not then or not now:
            return []
        lines = []
        if self._of_recipe and then.get("name") != now["name"]:
            lines.append(f"the optimizer was {then.get('name')!r:.80}, is {now['name']!r}")
        frozen = {str(name) for name in _listing(then.get("frozen"))}
        lines += _named("frozen now", set(now["frozen"]) - frozen)
        lines += _named("trained now", frozen - set(now["frozen"]))
        groups = [_mapping(group) for group in _listing(then.get("groups"))]
        if len(groups) != len(now["groups"]):
            return [*lines, f"the optimizer had {len(groups)} groups, has {len(now['groups'])}"]
        for number, (before, after) in enumerate(zip(groups, now["groups"], strict=True)):
            lines += [
                f"{key} of the optimizer's group {number} was {before.get(key)!r:.80}, is {value}"
                for key, value in after.items()
                if (self._of_recipe or key == "parameters") and before.get(key, value) != value
            ]
        return lines


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return the numbers in the optimizer's public attributes; torch's own counters are private."""
    numbers = {k: v for k, v in vars(optimizer).items() if type(v) in (int, float)}
    return {name: value for name, value in numbers.items() if not name.startswith("_")}


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's numbers and strings, and its number of parameters."""
    settings: dict[str, Any] = {"parameters": len(group["params"])}
    for key, value in settings_of(group).items():
        parts = list(value) if isinstance(value, (list, tuple)) else [value]
        plain = [_plain(part) for part in parts]
        if None not in plain:
            settings[key] = plain if isinstance(value, (list, tuple)) else plain[0]
    return settings


def _plain(value: Any) -> Any:
    """Convert a value to JSON types; None if JSON has no such type."""
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
