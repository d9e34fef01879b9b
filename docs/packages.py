"""Writes the list of packages in pyproject.toml, and the links in .typing/drivetrain by which type
checkers find the folders.

    python docs/packages.py

The table `package-dir` of pyproject.toml says which folder is which package.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:  # goes when Python 3.10 does; mypy brings tomli
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]


def packages(root: Path, folders: Mapping[str, str]) -> list[str]:
    """Return the dotted names of the folders, and of all folders in them that are packages."""
    found = set()
    for name, folder in folders.items():
        inits = [path.parent for path in (root / folder).rglob("__init__.py")]
        found |= {".".join((name, *path.relative_to(root / folder).parts)) for path in inits}
    return sorted(found)


def links(root: Path, folders: Mapping[str, str]) -> dict[str, Path]:
    """Return what the package holds: name -> the file or the folder."""
    inside = list((root / folders["drivetrain"]).iterdir())
    held = {path.name: path for path in inside if path.is_file() or (path / "__init__.py").exists()}
    return held | {
        name.partition(".")[2]: root / folder for name, folder in folders.items() if "." in name
    }


def main() -> None:
    """Write both."""
    pyproject = ROOT / "pyproject.toml"
    before = pyproject.read_text()
    folders: dict[str, str] = tomllib.loads(before)["tool"]["setuptools"]["package-dir"]
    listed = "".join(f'    "{name}",\n' for name in packages(ROOT, folders))
    text, found = re.subn(
        r"(?m)^packages = \[\n(?: {4}.*\n)*\]", f"packages = [\n{listed}]", before
    )
    if found != 1:
        sys.exit(f"{pyproject}: no list `packages`")
    if text != before:  # uv reinstalls what is newer
        pyproject.write_text(text)

    folder = ROOT / ".typing" / "drivetrain"
    for old in folder.iterdir():
        old.unlink()
    for name, leads_to in links(ROOT, folders).items():
        (folder / name).symlink_to(os.path.relpath(leads_to, folder))


if __name__ == "__main__":
    main()
