"""`drivetrain backends`: which drivers there are, and what they can do here."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ..kernel.contract import Plan
from ..kernel.errors import DrivetrainError
from ..kernel.registry import find_driver, known_backends

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
    """A table for people."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("backend", "here", "runs on, or why not", "devices", "can"):
        table.add_column(title, overflow="fold")
    for record in records:
        usable = record["usable"]
        why = [record["reason"]]
        if versions := record.get("versions"):
            why.append(", ".join(f"{name} {version}" for name, version in versions.items()))
        if record.get("install") and not usable:
            why.append(f"[bold]{_plain(record['install'])}[/]")
        table.add_row(
            f"[bold]{record['name']}[/]",
            "[green]yes[/]" if usable else "[red]no[/]",
            "\n".join([_plain(why[0]), *why[1:]]),
            ", ".join(record.get("devices", ())),
            ", ".join(_abilities(record.get("capabilities", {}))),
        )
    console.print(table)


def _abilities(capabilities: Record) -> list[str]:
    """The names of what is true, and the precisions."""
    words = list(capabilities.get("precisions", ()))
    return words + [name.replace("_", " ") for name, able in capabilities.items() if able is True]


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)
