"""How this command was started, so that the commands that it prints can be pasted."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

__all__ = ["pass_on", "program"]

_PROGRAM = "DRIVETRAIN_PROGRAM"
"""Environment: how the launcher was started, for its ranks."""


def program() -> list[str]:
    """Return the words before `train` and so on: `drivetrain`, or `uv run drivetrain`, say."""
    if _PROGRAM in os.environ:
        return shlex.split(os.environ[_PROGRAM])
    return _by_uv() or _by_module() or _by_script()


def pass_on() -> None:
    """Pass the words on to the processes that this one starts."""
    os.environ[_PROGRAM] = shlex.join(program())


def _by_uv() -> list[str]:
    """Return the words where uv is the parent, with uv's arguments, such as extras; else none."""
    try:
        raw = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:  # not Linux: uv's arguments are not known
        if "UV_RUN_RECURSION_DEPTH" not in os.environ:
            return []
        return ["uv", "run", *(_by_module() or ["drivetrain"])]
    words = os.fsdecode(raw).split("\0")[:-1]
    if not words or Path(words[0]).name not in ("uv", "uvx"):
        return []
    return _without_arguments([Path(words[0]).name, *words[1:]])


def _by_module() -> list[str]:
    """Return `python -m drivetrain.cli` where Python was started so; else nothing."""
    started_so = Path(sys.argv[0]) == Path(__file__).parents[1] / "__main__.py"
    return _without_arguments(sys.orig_argv) if started_so else []


def _by_script() -> list[str]:
    script, found = Path(sys.argv[0]), shutil.which("drivetrain")
    if found is not None and (not script.is_file() or script.samefile(found)):
        return ["drivetrain"]
    if script.is_file() and os.access(script, os.X_OK):
        return [str(script)]
    return [sys.executable, "-m", "drivetrain.cli"]


def _without_arguments(words: list[str]) -> list[str]:
    """Remove our own arguments from the end of a command line; empty if it ends otherwise."""
    count = len(words) - len(sys.argv[1:])
    if words[count:] != sys.argv[1:] or count < 1:
        return []
    return words[:count]
