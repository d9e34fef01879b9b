"""Shell completion of drivers and settings: `drivetrain --install-completion`."""

from __future__ import annotations

from dataclasses import fields

__all__ = ["backends", "keys"]


def backends(incomplete: str) -> list[str]:
    """Return the names of drivers that begin with the text."""
    from ...registry import known_backends

    return [name for name in ("auto", *known_backends()) if name.startswith(incomplete)]


def keys(incomplete: str) -> list[str]:
    """Return the settings and options of all drivers that begin with the text, each with `=`."""
    from ...registry import find_driver, known_backends
    from ...trainer.setting_values import flatten
    from ...trainer.settings import Settings

    known = dict.fromkeys(flatten(Settings()))
    if incomplete.startswith("backend"):  # or drivers would be imported in vain
        for name in known_backends():
            known |= dict.fromkeys(
                f"backend.{f.name}" for f in fields(find_driver(name).options_type)
            )
    return [f"{key}=" for key in known if key.startswith(incomplete)]
