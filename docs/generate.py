"""Regenerates what is made from the code or from recorded figures, and says what changed.

    python docs/generate.py              all that takes seconds
    python docs/generate.py NAME ...     these alone, also the long ones
    python docs/generate.py --list       the names, their files, and how long the long ones take

A test holds each file to what it is made from, and names this command when they differ.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Generated:
    """Files, the arguments to Python that write them, and how long it takes if not seconds."""

    files: tuple[str, ...]
    command: tuple[str, ...]
    takes: str = ""


PAGES = (
    "docs/conformance/index.html",
    "docs/conformance/matrix.html",
    "docs/conformance/layouts.html",
)

GENERATED = {
    "settings": Generated(("docs/settings.md",), ("docs/settings.py",)),
    "arguments": Generated(("docs/arguments.md",), ("docs/arguments.py",)),
    "compat-arguments": Generated(("docs/compat-arguments.md",), ("docs/compat_arguments.py",)),
    "compat-matrix": Generated(("docs/compat-matrix.md",), ("docs/compat_matrix.py",)),
    "private-interfaces": Generated(
        ("docs/private-interfaces.md",), ("docs/private_interfaces.py",)
    ),
    "packages": Generated(("pyproject.toml", ".typing/drivetrain"), ("docs/packages.py",)),
    "compatibility-page": Generated(
        ("docs/compatibility.md",), ("docs/compatibility.py", "--page")
    ),
    "conformance-pages": Generated(PAGES, ("docs/conformance.py", "--pages")),
    "performance-page": Generated(("docs/performance.md",), ("-m", "benchmarks", "page")),
    "budget": Generated(("benchmarks/budget.json",), ("-m", "benchmarks.budget", "--update")),
    "locks": Generated(
        ("pyproject.toml", "locks/requirements.txt"),
        ("locks/refresh.py", "--keep"),
        "a minute, and the package registry",
    ),
    "compatibility": Generated(
        ("docs/compatibility.json", "docs/compatibility.md"),
        ("docs/compatibility.py",),
        "half an hour, and each Python",
    ),
    "conformance": Generated(("docs/conformance",), ("docs/conformance.py",), "an hour"),
}


def contents(root: Path, files: Iterable[str]) -> dict[Path, bytes]:
    """Return what is in the files, and in all files of the folders; a link is where it leads."""
    found: dict[Path, bytes] = {}
    for path in (root / name for name in files):
        inside = sorted(path.iterdir()) if path.is_dir() else [path]
        for each in inside:
            if each.is_symlink():
                found[each] = str(each.readlink()).encode()
            elif each.is_file():
                found[each] = each.read_bytes()
    return found


def regenerate(root: Path, chosen: Mapping[str, Generated]) -> int:
    """Run each command, print a line about it, and return how many failed."""
    failed = 0
    for name, generated in chosen.items():
        before = contents(root, generated.files)
        began = time.monotonic()
        command = [sys.executable, *generated.command]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        after = contents(root, generated.files)
        paths = [
            path for path in before.keys() | after.keys() if before.get(path) != after.get(path)
        ]
        changed = ", ".join(sorted(path.relative_to(root).as_posix() for path in paths))
        outcome = "failed" if done.returncode else f"changed {changed}" if changed else "as before"
        print(f"{time.monotonic() - began:6.1f} s  {name:<20}{outcome}", flush=True)
        if done.returncode:
            failed += 1
            print(done.stdout + done.stderr, file=sys.stderr)
    return failed


def main(words: Sequence[str] | None = None) -> int:
    """Regenerate what is asked for; 1 if a command failed."""
    summary, _, usage = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=usage, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", choices=[[], *GENERATED], metavar="NAME")
    parser.add_argument("--list", action="store_true", help="print the names, and do nothing")
    options = parser.parse_args(words)
    if options.list:
        for name, each in GENERATED.items():
            print(f"{name:<20}{' '.join(each.files)}" + (f"  ({each.takes})" if each.takes else ""))
        return 0
    names = options.names or [name for name, each in GENERATED.items() if not each.takes]
    return int(regenerate(ROOT, {name: GENERATED[name] for name in names}) > 0)


if __name__ == "__main__":
    sys.exit(main())
