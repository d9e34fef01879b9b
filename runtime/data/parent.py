"""Ends a process when its parent is gone, even if the parent was killed.

A thread looks for the parent: a parent that is killed cannot notify its children, and the signal
that Linux has for it comes when the parent's thread ends.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time

__all__ = ["LAUNCHER", "end_with_launcher", "end_with_parent"]

LAUNCHER = "DRIVETRAIN_LAUNCHER"
"""Environment: the process that `drivetrain train` starts ranks from."""
_LOOK_SECONDS = 0.5
_watching: set[int] = set()
"""Of this process, its number: a fork is another."""


def end_with_launcher() -> None:
    """In a rank that torchrun, or `drivetrain train`, has started; elsewhere nothing. Without it
    ranks would train and save on, beside those of the next start."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent, launcher = os.getppid(), int(os.environ.get(LAUNCHER, "0"))
    if launcher and parent != launcher and not _runs(launcher):
        parent = launcher  # it was gone before this rank had begun
    end_with_parent(f"rank {os.environ.get('RANK', '?')}: its launcher", parent)


def end_with_parent(what: str, parent: int) -> None:
    """Once a process: it ends when its parent is not that process any more."""
    if os.getpid() in _watching:
        return
    _watching.clear()
    _watching.add(os.getpid())

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_SECONDS)
        with contextlib.suppress(OSError):
            os.write(2, f"{what} (process {parent}) is gone: it ends, too\n".encode())
        os._exit(1)

    threading.Thread(target=watch, name="drivetrain-parent", daemon=True).start()


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
