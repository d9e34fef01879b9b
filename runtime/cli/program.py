"""The way in which this command was started, so that commands that it prints can be pasted."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

__all__ = ["pass_on", "program"]

_PROGRAM = "DRIVETRAIN_PROGRAM"
"""Environment: what the launcher was started as, for its ranks."""


def program() -> list[str]:
    """The words before `train` and so on: `drivetrain`, `uv run drivetrain`, or the like."""
    if _PROGRAM in os.environ:
        return shlex.split(os.environ[_PROGRAM])
    return _by_uv() or _by_module() or _by_script()


def pass_on() -> None:
    """Let the processes that this one starts know."""
    os.environ[_PROGRAM] = shlex.join(program())


def _by_uv() -> list[str]:
    """uv is the parent; with its own arguments, such as extras and the project's folder."""
    try:
        raw = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:  # no Linux: all that is known is that uv was there
        if "UV_RUN_RECURSION_DEPTH" not in os.environ:
            return []
        return ["uv", "run", *(_by_module() or ["drivetrain"])]
    words = os.fsdecode(raw).split("\0")[:-1]
    if not words or Path(words[0]).name not in ("uv", "uvx"):
        return []
    return _without_arguments([Path(words[0]).name, *words[1:]])


def _by_module() -> list[str]:
    """`python -m drivetrain.cli`."""
    started_so = Path(sys.argv[0]) == Path(__file__).with_name("__main__.py")
    return _without_arguments(sys.orig_argv) if started_so else []


def _by_script() -> list[str]:
    script, found = Path(sys.argv[0]), shutil.which("drivetrain")
    if found is not None and (not script.is_file() or script.samefile(found)):
        return ["drivetrain"]
    if script.is_file() and os.access(script, os.X_OK):
        return [str(script)]
    return [sys.executable, "-m", str(__package__)]


def _without_arguments(words: list[str]) -> list[str]:
    """A command line up to what is ours; nothing if it does not end with that."""
    count = len(words) - len(sys.argv[1:])
    if words[count:] != sys.argv[1:] or count < 1:
        return []
    return words[:count]
