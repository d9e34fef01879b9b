"""The account of a run's memory, as tables of a page."""

from __future__ import annotations

from ..trainer.memory_parts import PARTS, size_of
from .html_parts import html_table, preformatted
from .record_file import Record

__all__ = ["memory_tables"]


def memory_tables(record: Record | None) -> str:
    """Return the parts and the modules as HTML; empty without a record."""
    if record is None:
        return ""
    parts = {part: record["parts"].get(part) or 0.0 for part in PARTS}
    total, remedies = sum(parts.values()), record["remedies"]
    if total <= 0:
        return ""
    rows = []
    for part in sorted(parts, key=lambda part: -parts[part]):
        if num_bytes := parts[part]:
            title = PARTS[part] + (" (estimated)" if part in record["estimated"] else "")
            share = f"{num_bytes / total:.0%}"
            rows.append([title, size_of(num_bytes), share, remedies.get(part, "")])
    peak = record.get("device_peak_bytes")
    note = f"rank {record['rank']} after step {record['step']}"
    note += "" if peak is None else f"; the device's peak was {size_of(peak)}"
    tables = preformatted(note) + html_table(["", "size", "share", "is smaller with"], rows)
    modules = [[name, size_of(size)] for name, size in record["modules"].items() if size]
    if modules:
        tables += html_table(["module", "activations"], modules)
    return tables
