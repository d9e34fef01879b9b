"""Formats errors of the user's code without drivetrain's own frames."""

from __future__ import annotations

import linecache
import sysconfig
import traceback
from itertools import compress
from pathlib import Path
from types import FrameType

__all__ = ["is_of_user", "last_line", "raised_at", "user_frames", "user_line"]

_PACKAGE = __name__.partition(".")[0]
_LIBRARIES = ("<", *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib")))


def last_line(error: BaseException) -> str:
    """Return the last line that Python prints for an error: its type and message."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def is_of_user(frame: FrameType) -> bool | None:
    """True for a frame of the user's code, False for one of drivetrain's; None for a library's."""
    if _is_ours(frame):
        return False
    return None if _is_library(frame) else True


def user_line(frame: FrameType | None) -> str:
    """Return the innermost line of the user's code from `frame` on, such as `model.py:41`. Empty
    without one, and where drivetrain's own code lies between."""
    while frame is not None:
        kind = is_of_user(frame)
        if kind is not None:
            name = Path(frame.f_code.co_filename).name
            return f"{name}:{frame.f_lineno}" if kind else ""
        frame = frame.f_back
    return ""


def raised_at(error: BaseException) -> str:
    """Return the innermost line of the user's code that raised an error, and its text, such as
    "train.py:41, `return sums / count`". Empty without one."""
    for frame, number in reversed([*traceback.walk_tb(error.__traceback__)]):
        if is_of_user(frame):
            path = frame.f_code.co_filename
            text = linecache.getline(path, number, frame.f_globals).strip()
            return f"{Path(path).name}:{number}" + (f", `{text}`" if text else "")
    return ""


def user_frames(error: BaseException) -> str:
    """Return the traceback that Python prints above that line, from the user's first frame on and
    without drivetrain's frames, also for the errors that caused it. Empty for an error without user
    frames."""
    shown = traceback.TracebackException.from_exception(error)
    _strip(shown, error)
    if not (shown.stack or shown.__cause__ or shown.__context__ or isinstance(error, SyntaxError)):
        return ""
    lines = list(shown.format())
    if getattr(shown, "exceptions", None) is None:  # a group prints its own last line
        last = list(shown.format_exception_only())
        lines[-len(last) :] = [line for line in last if line.startswith(" ")]
    return "".join(lines).rstrip()


def _strip(shown: traceback.TracebackException, error: BaseException) -> None:
    shown.stack[:] = compress(
        shown.stack, _kept([f for f, _ in traceback.walk_tb(error.__traceback__)])
    )
    for name in ("__cause__", "__context__"):
        earlier, cause = getattr(shown, name), getattr(error, name)
        if earlier is not None and cause is not None:
            _strip(earlier, cause)


def _kept(frames: list[FrameType]) -> list[bool]:
    """Mark the frames to show: from the user's first frame on, or after drivetrain's last frame if
    a library raised."""
    ours = [_is_ours(frame) for frame in frames]
    users = [not (own or _is_library(frame)) for frame, own in zip(frames, ours, strict=True)]
    after_ours = len(ours) - ours[::-1].index(True) if True in ours else 0
    first = users.index(True) if True in users else after_ours
    return [number >= first and not own for number, own in enumerate(ours)]


def _is_ours(frame: FrameType) -> bool:
    """True for frames of drivetrain, and of Python's import system, which Python leaves out,
    too."""
    module = str(frame.f_globals.get("__name__"))
    return module.partition(".")[0] in (_PACKAGE, "importlib")


def _is_library(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return "site-packages" in path or path.startswith(_LIBRARIES)
