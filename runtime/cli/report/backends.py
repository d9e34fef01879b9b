"""`drivetrain backends`: the known drivers, and what they can do on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape

from ...kernel.errors import DrivetrainError
from ...kernel.plan import Plan
from ...registry import find_driver, install_hint, known_backends
from ...run.tables import table

__all__ = ["backend_records", "show_backends"]

Record = dict[str, Any]


def backend_records() -> list[Record]:
    """One record for each known driver; one that cannot be imported says why."""
    records = []
    for name in known_backends():
        try:
            driver = find_driver(name)
            probe = driver.probe()
            capabilities = asdict(driver.capabilities(Plan(options=driver.options_type())))
        except DrivetrainError as error:
            records.append({"name": name, "usable": False, "reason": str(error)})
            continue
        capabilities["precisions"] = sorted(capabilities["precisions"])
        records.append({"name": name, **asdict(probe), "capabilities": capabilities})
    return records


def show_backends(records: list[Record], console: Console) -> None:
    """Print the records as a table."""
    shown = table("backend", "here", "runs on, or why not; what it can")
    for record in records:
        usable = record["usable"]
        shown.add_row(
            f"[bold]{escape(record['name'])}[/]",
            "[green]yes[/]" if usable else "[red]no[/]",
            "\n".join(_about(record)),
        )
    console.print(shown)


def _about(record: Record) -> Iterator[str]:
    """Yield lines of markup: the reason, versions, devices and abilities of a driver."""
    yield escape(record["reason"])
    if record.get("install") and not record["usable"]:
        yield f"[bold]{escape(install_hint(record['install']))}[/]"
    if versions := record.get("versions"):
        yield escape(", ".join(f"{name} {version}" for name, version in versions.items()))
    if devices := record.get("devices"):
        yield escape(f"devices: {', '.join(devices)}")
    if abilities := _abilities(record.get("capabilities", {})):
        yield f"[dim]can: {escape(', '.join(abilities))}[/]"


def _abilities(capabilities: Record) -> list[str]:
    """Return the names of the precisions, and of the capabilities that are True."""
    words = list(capabilities.get("precisions", ()))
    return words + [name.replace("_", " ") for name, able in capabilities.items() if able is True]
