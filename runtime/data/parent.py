"""Ends a process when its parent is gone, even if the parent was killed.

A thread checks for the parent: a killed parent cannot notify its children, and Linux's signal for
this case is sent when the parent's thread ends, not its process.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time

__all__ = ["LAUNCHER", "end_with_launcher", "end_with_parent"]

LAUNCHER = "DRIVETRAIN_LAUNCHER"
"""Environment variable with the number of the process from which `drivetrain train` starts
ranks."""
_LOOK_SECONDS = 0.5
_watching: set[int] = set()
"""The number of this process once it watches its launcher; a fork has another number."""


def end_with_launcher() -> None:
    """End this process when its launcher is gone, if torchrun or `drivetrain train` started it.
    Otherwise such ranks would continue to train and save at the same time as the ranks of the next
    start."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent, launcher = os.getppid(), int(os.environ.get(LAUNCHER, "0"))
    if launcher and parent != launcher and not _is_running(launcher):
        parent = launcher  # the launcher was gone before this rank started
    end_with_parent(f"rank {os.environ.get('RANK', '?')}: its launcher", parent)


def end_with_parent(what: str, parent: int) -> None:
    """End this process when its parent is no longer the process `parent`. Call it once per
    process."""
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


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
