"""Selects the values of a `config.json` that a page shows; unknown or invalid values are left
out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["VERSIONS", "ShownConfig", "differing_settings"]

VERSIONS = ("torch", "drivetrain", "python", "platform")
"""The versions in a `config.json`."""

_MAX_LENGTH = 2000
_MAX_ENTRIES = 2000


@dataclass
class ShownConfig:
    """The shown values, and the number of values left out."""

    name: str = "run"
    backend: str = "?"
    torch: str = "?"
    drivetrain: str = "?"
    python: str = "?"
    platform: str = "?"
    recipe: str = ""
    started_by: str = ""
    world_size: int = 1
    command: list[str] = field(default_factory=list)
    settings: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Value and source, by key."""
    skipped: int = 0

    @property
    def best(self) -> tuple[str, str]:
        """The metric that decides which checkpoint is best, and `min` or `max`."""
        metric, mode = (
            self.settings.get(f"checkpoint.best_{key}", ("", ""))[0] for key in ("metric", "mode")
        )
        return metric, mode

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ShownConfig:
        """Read the content of a `config.json`; values may be missing or null."""
        shown = cls()
        for name in ("name", "backend", *VERSIONS, "recipe", "started_by"):
            shown._take(config, name, _is_text)
        shown._take(config, "world_size", lambda value: type(value) is int and 0 < value < 1 << 31)
        shown._take(config, "command", _are_texts)
        settings = config.get("settings")
        if settings is not None and not isinstance(settings, dict):
            shown.skipped += 1
        elif settings:
            for key, entry in list(settings.items())[:_MAX_ENTRIES]:
                shown._take_setting(key, entry)
            shown.skipped += max(0, len(settings) - _MAX_ENTRIES)
        return shown

    def _take(self, config: Mapping[str, Any], name: str, fits: Any) -> None:
        value = config.get(name)
        if value is None:
            return
        if fits(value):
            setattr(self, name, value)
        else:
            self.skipped += 1

    def _take_setting(self, key: str, entry: Any) -> None:
        if isinstance(entry, dict) and "value" in entry and _is_text(entry.get("source")):
            self.settings[key[:_MAX_LENGTH]] = f"{entry['value']!s:.{_MAX_LENGTH}}", entry["source"]
        else:
            self.skipped += 1


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_LENGTH


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= _MAX_ENTRIES and all(map(_is_text, value))


def differing_settings(configs: Sequence[ShownConfig]) -> list[list[str]]:
    """Return the settings whose values differ: the key, and the value in each run."""
    settings = [{key: v for key, (v, _) in config.settings.items()} for config in configs]
    keys = list(dict.fromkeys(key for each in settings for key in each))
    rows = [[key, *(each.get(key, "") for each in settings)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]
