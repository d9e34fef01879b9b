"""`drivetrain compare`: where two runs part, and what differs in their settings and versions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..kernel.errors import SettingError
from .parting import Difference, Tolerance, conditions, first_difference, tolerance_between
from .recorded_steps import RecordedStep, RecordedSteps, read_steps
from .run_folder import read_config
from .shown_config import VERSIONS, ShownConfig, differing_settings

__all__ = ["Comparison", "Side", "compare_runs", "compare_sides", "read_side"]

_MOST_SHOWN = 20


@dataclass(frozen=True)
class Side:
    """The records of one of two runs."""

    name: str
    recorded: RecordedSteps
    config: ShownConfig

    def up_to(self, last: int | None) -> dict[int, RecordedStep]:
        """Return the steps by number, up to a step. Raises `SettingError` if none has digests."""
        steps = {n: s for n, s in self.recorded.steps.items() if last is None or n <= last}
        if not steps:
            raise SettingError(
                f"{self.name} has no step with digests{'' if last is None else f' up to {last}'} "
                f"({len(self.recorded.logged)} steps are logged): train it with digests=weights, "
                "the default, and a log_every that is reached"
            )
        return steps


@dataclass(frozen=True)
class Comparison:
    """The result of comparing two runs."""

    names: tuple[str, str]
    steps: list[int]
    """Steps that both recorded."""
    tolerance: Tolerance
    differences: list[Difference]
    """The differences in the first record that differs."""
    conditions: list[list[str]]
    """Settings and versions that differ: the name, and the value in each run."""
    notes: list[str] = field(default_factory=list)
    draws_others: bool = False
    """True if training draws random numbers, and the second run cannot draw the same."""

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON types."""
        return {
            "runs": list(self.names),
            "equal": not self.differences,
            "exact": self.tolerance.exact,
            "compared_steps": self.steps,
            "first": asdict(self.differences[0]) if self.differences else None,
            "differences": [asdict(each) for each in self.differences],
            "texts": [str(each) for each in self.differences],
            "conditions": [
                {"name": name, "first": first, "second": second}
                for name, first, second in self.conditions
            ],
            "notes": self.notes,
            "draws_others": self.draws_others,
        }

    def lines(self) -> list[str]:
        """Describe the result in lines of text."""
        first, second = self.names
        how = "bit for bit" if self.tolerance.exact else "within rounding"
        if not self.differences:
            span = f"logged steps {self.steps[0]} to {self.steps[-1]} ({len(self.steps)})"
            lines = [f"equal {how}: {span} of {first} and {second}"]
        else:
            lines = [f"{first} and {second} part at {self.differences[0]}"]
            lines += [f"  {each}" for each in self.differences[1:_MOST_SHOWN]]
            if len(self.differences) > _MOST_SHOWN:
                lines.append(f"  and {len(self.differences) - _MOST_SHOWN} more")
        lines += [f"{name}: {a or 'none'} and {b or 'none'}" for name, a, b in self.conditions]
        return [*lines, *self.notes]


def read_side(folder: Path) -> Side:
    """Read the records of a run folder. Raises `CheckpointNotFound` and `OutputError`."""
    return Side(str(folder), read_steps(folder), ShownConfig.of(read_config(folder)))


def compare_runs(first: Path, second: Path, last: int | None = None) -> Comparison:
    """Compare the records of two run folders, up to a step. Raises `UsageError`."""
    return compare_sides(read_side(first), read_side(second), last)


def compare_sides(first: Side, second: Side, last: int | None = None, since: int = 0) -> Comparison:
    """Compare the steps that both recorded. `since`: the step from which they were computed apart.
    Raises `SettingError` if there is none."""
    ours, theirs = first.up_to(last), second.up_to(last)
    common = sorted(ours.keys() & theirs.keys())
    if not common:
        raise SettingError(
            f"{first.name} and {second.name} have no step with digests in common: the first "
            f"has {_some(ours)}, the second {_some(theirs)}. Train both with the same log_every"
        )
    versions = first.config.torch, second.config.torch
    tolerance = tolerance_between(ours[common[0]], theirs[common[0]], versions)
    differences = first_difference(ours, theirs, tolerance, since)
    at = common[0] if not differences else min(s for s in common if s >= differences[0].step)
    differing = _conditions(first, second, ours[at].start, theirs[at].start)
    notes = []
    if not tolerance.exact:
        notes.append(
            "computed in different ways, so losses and gradient norms are compared within "
            f"{tolerance.relative(1):.2g} of their size for each step"
        )
    draws_others = (
        not tolerance.exact and _draws(ours) and not _same_generators(ours[at], theirs[at])
    )
    if draws_others:
        notes.append(
            "the training draws random numbers (dropout, say), which are others on another number "
            "of ranks or kind of device: losses may differ by more than rounding"
        )
    names = first.name, second.name
    return Comparison(names, common, tolerance, differences, differing, notes, draws_others)


def _conditions(
    first: Side, second: Side, ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> list[list[str]]:
    rows = [
        [name, str(ours.get(name)), str(theirs.get(name))]
        for name in ("backend", "world", "num_samples", "num_parameters")
    ]
    for row, start in ((1, ours), (2, theirs)):
        world = start.get("world")
        size, device = (
            (world.get("size"), world.get("device")) if isinstance(world, dict) else ("?", "?")
        )
        rows[1][row] = f"{size} ranks, the first on {device}"
    rows += [
        [name, getattr(first.config, name), getattr(second.config, name)]
        for name in ("recipe", *VERSIONS)
    ]
    settings = differing_settings([first.config, second.config])
    if rows[0][1] != rows[0][2]:  # options of two drivers
        settings = [row for row in settings if not row[0].startswith("backend.")]
    return [row for row in rows if row[1] != row[2]] + settings


def _draws(steps: Mapping[int, RecordedStep]) -> bool:
    """True if the random state changes during training."""
    return len({step.digests["random"] for step in steps.values()}) > 1


def _same_generators(ours: RecordedStep, theirs: RecordedStep) -> bool:
    found = [conditions(step, None) for step in (ours, theirs)]
    return all(found[0][name] == found[1][name] for name in ("world size", "device"))


def _some(steps: Mapping[int, RecordedStep]) -> str:
    numbers = sorted(steps)
    shown = ", ".join(map(str, numbers[:5]))
    return f"{shown}{', ...' if len(numbers) > 5 else ''}"
