"""Writes docs/private-interfaces.md from tests/house/private_interfaces.json.

python docs/private_interfaces.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests" / "house" / "private_interfaces.json"
PAGE = Path(__file__).with_name("private-interfaces.md")

HEAD = """# Private interfaces

Names of other libraries that begin with an underscore and that drivetrain uses. A new version of a
library may rename them. *Since* is the oldest version that was looked at and has the names; *until*
says what lets drivetrain do without them.

No import of drivetrain ends because a name is missing. Where a name has a substitute, *why*
says so. Data workers and the checks of `mesh` have none: without their names they raise
`LibraryUnsupported`, which gives the installed torch and the versions that were
[tried](compatibility.md).

`python docs/private_interfaces.py` writes this page from
[private_interfaces.json](../tests/house/private_interfaces.json). A test compares that list with
the code, both ways.
"""


def row(entry: dict[str, Any]) -> str:
    """Return the row of an entry of the list."""
    names, files = (", ".join(f"`{each}`" for each in entry[key]) for key in ("names", "files"))
    cells = [f"`{entry['of']}`", names, entry["why"], files, entry["since"], entry["until"]]
    return f"| {' | '.join(cells)} |"


def page() -> str:
    """Return the text of docs/private-interfaces.md."""
    head = ["| of | names | why | files | since | until |", "|---|---|---|---|---|---|"]
    entries = json.loads(LIST.read_text(encoding="utf-8"))
    return "\n".join([HEAD, *head, *map(row, entries)]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
